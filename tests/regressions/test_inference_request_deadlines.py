"""The deadline header and numbers out of range in requests to the inference service."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.stack import Stack, chat_body

MODELS = "models:\n  demo: {path: 'bundled:demo', context_length: 2048, parallel: 1}\n"


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("deadline"), models=MODELS)
    try:
        stack.inference.start(wait_for="/readyz")
        stack.ask("/v1/chat/completions", chat_body("Hello!"), direct=True)
        yield stack
    finally:
        stack.kill()


def _open(stack: Stack, body: dict[str, Any], **headers: str) -> Any:
    request = urllib.request.Request(
        stack.inference.url + "/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {stack.state.read_secret('inference.token')}", **headers},
    )
    return urllib.request.urlopen(request, timeout=30)


def _text_of(line: bytes) -> str:
    """The text of a line of a stream; fails at the end of the stream."""
    assert line, "the stream ended without a text"
    if not line.startswith(b"data: "):
        return ""
    return str(json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"].get("content") or "")


def _refusal(stack: Stack, body: dict[str, Any], **headers: str) -> tuple[int | None, dict[str, Any]]:
    """Status and error of a refusal; the status is None for an error frame within a stream."""
    try:
        with _open(stack, body, **headers) as answer:
            frames = [frame for frame in answer.read().split(b"\n\n") if frame.startswith(b"data: ")]
        return None, json.loads(frames[-1].removeprefix(b"data: "))["error"]
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)["error"]


@pytest.mark.parametrize("stream", [False, True])
def test_deadline_ends_the_wait_for_a_slot_of_a_ready_model(stack: Stack, stream: bool) -> None:
    long = chat_body("Tell me a long story about a water mill.", logit_bias={"2": -100}, max_tokens=1500, stream=True)
    with _open(stack, long) as busy:
        while not _text_of(busy.readline()):
            continue  # the first text shows that the story has the only slot
        status, error = _refusal(stack, chat_body("Hello!", stream=stream), **{"x-headgate-deadline-ms": "200"})
        assert busy.readline(), "the story ended too early"
    assert status in ((504, None) if stream else (504,))
    assert error["code"] == "deadline_exceeded"


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens", "n", "top_k", "seed"])
@pytest.mark.parametrize("value", [10**30, -(10**30), 1e300])
def test_numbers_out_of_range_are_a_400_with_the_field(stack: Stack, field: str, value: float) -> None:
    status, error = _refusal(stack, chat_body("Hello!", **{field: value}))
    assert status == 400
    assert (error["param"], error["code"]) == (field, "invalid_request")
