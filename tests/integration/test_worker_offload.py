"""A worker leaves its device and returns, in the same process or another one, with its saved sequences."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"
PLENTY = 2**30
STORY = "hello world, " * 60
TIERS = worker_link.KvTiers(ram_bytes=PLENTY)


@pytest.fixture
def keep() -> Iterator[int]:
    """A memory file that outlives workers, as the authority creates it."""
    handle = os.memfd_create("test-keep")
    yield handle
    os.close(handle)


def ask(rig: WorkerRig, text: str, tenant: str = "alice") -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 16}
    status, response = rig.post(CHAT, body, {"x-headgate-tenant": tenant})
    assert status == 200, response
    return response


def text_of(response: dict[str, Any]) -> str:
    return str(response["choices"][0]["message"]["content"])


def cached(response: dict[str, Any]) -> int:
    return int(response["usage"]["prompt_tokens_details"]["cached_tokens"])


def offloaded(rig: WorkerRig, *, stays: bool) -> worker_link.Offloaded:
    rig.send(worker_link.Offload(stays))
    return rig.expect(worker_link.Offloaded)


def anonymous_bytes(rig: WorkerRig) -> int:
    lines = Path(f"/proc/{rig.process.pid}/status").read_text().splitlines()
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon", "RssShmem")))


def test_offloaded_worker_releases_its_context_and_restores_it(tmp_path: Path, keep: int) -> None:
    """The same process gives the same answer with a reused prompt, several times; it uses less memory in between."""
    grant = grant_for(tiny_gguf.generative(), context_length=8192, parallel=1, kv=TIERS)
    with WorkerRig(tmp_path, grant, keep=keep) as rig:
        context_bytes = sum(buffer.bytes for buffer in rig.ready().buffers if buffer.kind != "weights")
        first = ask(rig, 3 * STORY)
        for _ in range(2):
            before = anonymous_bytes(rig)
            saved = offloaded(rig, stays=True)
            assert saved.sequences >= 1
            assert saved.tokens > 0
            assert anonymous_bytes(rig) < before - context_bytes // 2
            rig.send(grant)
            ready = rig.ready()
            assert ready.stored_tokens == saved.tokens
            assert sum(buffer.bytes for buffer in ready.buffers if buffer.kind != "weights") == context_bytes
            again = ask(rig, 3 * STORY)
            assert text_of(again) == text_of(first)
            assert cached(again) == again["usage"]["prompt_tokens"] - 1


@pytest.mark.parametrize("in_parts", [False, True], ids=["one file", "parts"])
def test_another_process_restores_the_saved_sequences(tmp_path: Path, keep: int, in_parts: bool) -> None:
    """It inherits the file, waits without a model, and then answers like the first one; tenants stay separate."""
    (tmp_path / "a").mkdir()
    files = tiny_gguf.in_parts(tmp_path) if in_parts else [tiny_gguf.generative()]
    grant = grant_for(files[0], kv=TIERS)
    with WorkerRig(tmp_path / "a", grant, keep=keep) as rig:
        rig.ready()
        first = ask(rig, STORY)
        ask(rig, "and a second one, from another tenant", tenant="bob")
        saved = offloaded(rig, stays=False)
        assert rig.wait() == 0
    assert saved.sequences == 2
    with WorkerRig(tmp_path, keep=keep) as rig:
        rig.send(worker_link.Hold(grant.path))
        held = rig.expect(worker_link.Held)
        assert held.count_bytes == sum(file.stat().st_size for file in files)
        assert (held.locked_bytes == held.count_bytes) is ("not locked in RAM" not in rig.log)
        assert rig.fresh_beat().active == 0
        rig.send(grant)
        assert rig.ready().stored_tokens == saved.tokens
        assert cached(ask(rig, STORY, tenant="carol")) <= 2
        again = ask(rig, STORY)
        assert text_of(again) == text_of(first)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1


def test_sequences_are_stored_within_the_limit_and_restored_only_if_they_match(tmp_path: Path, keep: int) -> None:
    """Without room nothing is stored; a cache of another form starts empty."""
    grant = grant_for(tiny_gguf.generative(), kv=TIERS)
    (tmp_path / "a").mkdir()
    with WorkerRig(tmp_path / "a", grant, keep=keep) as rig:
        rig.ready()
        ask(rig, STORY)
        rig.send(worker_link.KvBudget(0))
        assert offloaded(rig, stays=True) == worker_link.Offloaded(0, 0, 0)
        rig.send(grant)
        assert rig.ready().stored_tokens == 0
        ask(rig, STORY)
        assert offloaded(rig, stays=False).sequences == 1
        rig.wait()
    with WorkerRig(tmp_path, keep=keep) as rig:
        rig.send(worker_link.Hold(grant.path))
        rig.send(replace(grant, flash_attention=False))
        assert rig.ready().stored_tokens == 0
        assert "made with another file or other settings of the model" in rig.log
        assert text_of(ask(rig, STORY)) != ""


@pytest.mark.parametrize("drains", [True, False])
def test_ending_worker_leaves_its_sequences_to_the_next_one(tmp_path: Path, keep: int, drains: bool) -> None:
    """Although it had no idle moment to store them before."""
    grant = grant_for(tiny_gguf.generative(), kv=TIERS)
    (tmp_path / "a").mkdir()
    with WorkerRig(tmp_path / "a", grant, keep=keep) as rig:
        rig.ready()
        first = ask(rig, STORY)
        if drains:
            rig.process.send_signal(signal.SIGTERM)
        else:
            rig.send(worker_link.Stop())
        assert rig.wait() == 0
    with WorkerRig(tmp_path, grant, keep=keep) as rig:
        rig.ready()
        again = ask(rig, STORY)
        assert text_of(again) == text_of(first)
        assert cached(again) == again["usage"]["prompt_tokens"] - 1


def test_missing_file_fails_the_load(tmp_path: Path) -> None:
    """The authority gets the reason, and the process ends."""
    with WorkerRig(tmp_path) as rig:
        rig.send(worker_link.Hold(str(tmp_path / "none.gguf")))
        assert "cannot copy" in rig.expect(worker_link.Failed).message
        assert rig.wait() == 1


def test_pooling_model_can_be_offloaded_and_restored(tmp_path: Path) -> None:
    """It has no sequences to save; its vectors are the same."""
    grant = grant_for(tiny_gguf.generative(), capabilities=("embeddings",))
    with WorkerRig(tmp_path, grant) as rig:
        rig.ready()
        first = rig.post("/v1/embeddings", {"input": "hello"})
        assert offloaded(rig, stays=True) == worker_link.Offloaded(0, 0, 0)
        rig.send(grant)
        rig.ready()
        assert rig.post("/v1/embeddings", {"input": "hello"}) == first
