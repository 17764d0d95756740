"""A real worker continues interrupted answers, from each of their tokens: text, limits and counts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference import demo
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MILL = {"messages": [{"role": "user", "content": "Tell me about a mill."}], "temperature": 0, "max_tokens": 20}
WATER = {"prompt": "The water", "temperature": 0, "max_tokens": 20}


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    root: Path = tmp_path_factory.mktemp("worker")
    with WorkerRig(root, grant_for(demo.bundled_path("demo"), context_length=256, parallel=2)) as opened:
        opened.ready()
        yield opened


def ask(rig: WorkerRig, path: str, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Text and the whole response."""
    status, response = rig.post(path, body)
    assert status == 200, response
    choice = response["choices"][0]
    return choice["text"] if path == COMPLETIONS else choice["message"]["content"], response


@pytest.mark.parametrize(
    ("path", "body", "more"),
    [
        (CHAT, MILL, {}),
        (CHAT, MILL, {"frequency_penalty": 1.5, "presence_penalty": 0.5}),
        (CHAT, MILL, {"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_base": 2.0}),
        (CHAT, MILL, {"min_tokens": 18, "logit_bias": {"0": 1}}),
        (CHAT, MILL, {"stop": ["wheel in", "The water turns"]}),
        (COMPLETIONS, WATER, {}),
    ],
)
def test_resumed_answer_is_the_same_from_each_of_its_tokens(
    rig: WorkerRig, path: str, body: dict[str, Any], more: dict[str, Any]
) -> None:
    """With the same bytes, finish reason and counts."""
    body = {**body, **more}
    text, whole = ask(rig, path, body)
    cuts = shown(rig, path, body)[:-1]
    assert len(cuts) > 3
    for cut in cuts:
        assert text.startswith(cut)
        rest, response = ask(rig, path, {**body, "answer_so_far": {"content": cut}})
        assert cut + rest == text
        assert response["choices"][0]["finish_reason"] == whole["choices"][0]["finish_reason"]
        counts = ("prompt_tokens", "completion_tokens", "total_tokens")
        assert [response["usage"][name] for name in counts] == [whole["usage"][name] for name in counts]


def shown(rig: WorkerRig, path: str, body: dict[str, Any]) -> list[str]:
    """The text that a stream has shown after each of its frames."""
    choices = [choice for chunk in rig.chunks(path, body) for choice in chunk["choices"]]
    texts = [choice["text"] if path == COMPLETIONS else choice["delta"].get("content") for choice in choices]
    return [*itertools.accumulate(text for text in texts if text)]


def test_resumed_answer_longer_than_the_context_is_refused(rig: WorkerRig) -> None:
    """An answer that has `max_tokens` already ends at once."""
    status, response = rig.post(CHAT, {**MILL, "answer_so_far": {"content": "water " * 400}})
    assert (status, response["error"]["code"], response["error"]["param"]) == (
        400,
        "context_length_exceeded",
        "answer_so_far",
    )
    rest, response = ask(rig, CHAT, {**MILL, "max_tokens": 3, "answer_so_far": {"content": "A water mill is a house"}})
    assert (rest, response["choices"][0]["finish_reason"]) == ("", "length")
