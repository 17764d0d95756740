"""Stored sequences from the client to the worker: hints, restores, and the operations of operators."""

from __future__ import annotations

import json
import os
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import INFERENCE_TOKEN
from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body

TEXT = "The river runs past the mill and the gate of water opens in the morning. " * 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("kv"), inference_env={"INFERENCE_KV_RAM_GB": "0.25"}).start()
    yield stack
    stack.kill()


@pytest.fixture
def cleared(stack: Stack) -> Stack:
    """The stack without sequences."""
    stack.ask("/memory/kv/clear", {}, direct=True)
    return stack


def cached(stack: Stack, text: str, hint: str | None = None) -> int:
    """Asks once; prompt tokens that were not computed."""
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    if hint is not None:
        headers["x-headgate-kv"] = hint
    body = json.dumps(chat_body(text, max_tokens=2)).encode()
    request = urllib.request.Request(stack.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        details = json.load(answer)["usage"].get("prompt_tokens_details") or {}
    return int(details.get("cached_tokens", 0))


def rows(stack: Stack) -> list[dict[str, Any]]:
    """The sequences of the loaded models."""
    return list(stack.ask("/memory/kv/sequences", direct=True)["sequences"])


def test_hint_to_drop_keeps_no_sequence(cleared: Stack) -> None:
    assert cached(cleared, TEXT, "drop") == 0
    assert rows(cleared) == []
    assert cached(cleared, TEXT) == 0
    assert cached(cleared, TEXT) > 100


def test_hint_pins_the_sequence_in_host_memory(cleared: Stack) -> None:
    cached(cleared, TEXT, "pin:60s")
    (row,) = wait_until("it is pinned", lambda: [row for row in rows(cleared) if row["pinned_until"]])
    assert "ram" in row["tiers"]
    assert row["tokens"] > 100


def test_pinned_sequence_is_continued_by_a_new_worker_until_it_is_cleared(cleared: Stack) -> None:
    cached(cleared, TEXT)
    (row,) = rows(cleared)
    assert (row["model_name"], row["tiers"][0], row["pinned_until"]) == ("demo", "hot", None)
    assert len(row["tenant"]) == 32
    wish = {"ids": [row["id"]], "seconds": 60}
    assert cleared.ask("/memory/kv/pin", wish, direct=True)["pinned"] == 1
    cleared.ask("/models/demo/restart", {}, direct=True, seconds=60)
    (stored,) = wait_until("the new worker has read them", lambda: rows(cleared))
    assert (stored["id"], stored["tiers"], stored["tokens"]) == (row["id"], ["ram"], row["tokens"])
    assert stored["pinned_until"] is not None
    assert cached(cleared, TEXT) > 100
    assert cleared.ask("/memory/kv/clear", {"tenant": "other"}, direct=True)["cleared"] == 0
    assert cleared.ask("/memory/kv/clear", {"tenant": row["tenant"]}, direct=True)["cleared"] > 0
    assert rows(cleared) == []
    assert cached(cleared, TEXT) == 0


def labels(stack: Stack) -> list[str]:
    """The labels of prompts of the model `demo`."""
    (model,) = stack.ask("/memory/kv/labels?model=demo", direct=True)["models"]
    return list(model["labels"])


def test_labels_of_a_prompt_outlive_the_worker_and_end_with_the_sequence(cleared: Stack) -> None:
    assert labels(cleared) == []
    wanted = ["00000000000000aa", "00000000000000bb"]
    secret = cleared.state.read_secret(INFERENCE_TOKEN)
    headers = {"Authorization": f"Bearer {secret}", "x-headgate-prefix": ",".join(wanted)}
    body = json.dumps({**chat_body(TEXT, max_tokens=2), "model": "demo"}).encode()
    request = urllib.request.Request(cleared.inference.url + "/v1/chat/completions", body, headers)
    urllib.request.urlopen(request, timeout=60).close()
    wait_until("they are reported", lambda: labels(cleared) == wanted)
    cleared.ask("/models/demo/restart", {}, direct=True, seconds=60)
    wait_until("the new worker reports them", lambda: labels(cleared) == wanted)
    assert rows(cleared)[0]["tiers"] == ["ram"]
    cleared.ask("/memory/kv/clear", {}, direct=True)
    wait_until("they are removed", lambda: labels(cleared) == [])


def restored(stack: Stack, text: str, **more: Any) -> list[dict[str, Any]]:
    """Asks once; the rows of its explain record about tokens that were not computed."""
    headers = {"Authorization": f"Bearer {stack.key}", "Content-Type": "application/json"}
    body = json.dumps(chat_body(text, max_tokens=2, **more)).encode()
    request = urllib.request.Request(stack.base_url + "/chat/completions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        id, body = answer.headers["x-request-id"], answer.read()
    assert b"restored" not in body
    (attempt,) = stack.ask(f"/admin/requests/{id}")["attempts"]
    return list(attempt["restored"])


@pytest.mark.parametrize("stream", [False, True])
def test_explain_record_says_where_restored_tokens_were(cleared: Stack, stream: bool) -> None:
    """A prompt that is computed has no row."""
    assert restored(cleared, TEXT, stream=stream) == []
    (hot,) = restored(cleared, TEXT, stream=stream)
    assert (hot["tier"], hot["choice"], hot["milliseconds"]) == ("hot", 0, 0)
    assert hot["tokens"] > 100
    cleared.ask("/models/demo/restart", {}, direct=True, seconds=60)
    wait_until("the new worker has read them", lambda: rows(cleared))
    (stored,) = restored(cleared, TEXT, stream=stream)
    assert (stored["tier"], stored["tokens"]) == ("ram", hot["tokens"])
    assert 0 < stored["milliseconds"] < 10_000


def test_explain_record_has_a_row_for_each_choice(cleared: Stack) -> None:
    cached(cleared, TEXT)
    rows = restored(cleared, TEXT, n=3)
    assert [row["choice"] for row in rows] == [0, 1, 2]
    assert {row["tier"] for row in rows} == {"hot"}


def test_sequence_returns_from_disk_unless_its_file_is_damaged(tmp_path: Path) -> None:
    """A damaged one costs a prefill and a line in the log of the service; the worker's own output is not shown."""
    stack = Stack(tmp_path, inference_env={"INFERENCE_KV_DISK_GB": "1", "INFERENCE_KV_RAM_GB": "0"})
    directory = tmp_path / "state" / "kv"
    try:
        stack.start()
        cached(stack, TEXT)
        wait_until("it is on disk", lambda: list(directory.rglob("*.kv")))
        stack.ask("/models/demo/restart", {}, direct=True, seconds=60)
        wait_until("the new worker has read the file", lambda: rows(stack))
        (row,) = restored(stack, TEXT)
        assert row["tier"] == "disk"
        assert row["tokens"] > 100
        assert row["milliseconds"] > 0
        stack.ask("/models/demo/unload", {}, direct=True, seconds=60)
        paths = list(directory.rglob("*.kv"))
        for path in paths:
            os.truncate(path, 1000)
        assert cached(stack, TEXT) == 0
        for path in paths:
            seen = f"{path} removed"
            wait_until("the service logs it", lambda seen=seen: seen in stack.inference.log)  # type: ignore[misc]
        lines = [line for line in stack.inference.log.splitlines() if " removed: " in line]
        assert len(lines) == len(paths)
        assert all("warning" in line and "demo: stored sequence" in line for line in lines)
    finally:
        stack.kill()
