"""Promises of the contract about every stream."""

from __future__ import annotations

import json
from typing import Any

import pytest

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

pytestmark = pytest.mark.timeout(30)

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "Hello"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 50},
    "/v1/responses": {"input": "Hello"},
}
ENDS = {
    "/v1/chat/completions": ('data: {"error":', "[DONE]"),
    "/v1/completions": ('data: {"error":', "[DONE]"),
    "/v1/messages": ("event: error\n", "message_stop"),
    "/v1/responses": ("event: error\n", "response.completed"),
}
"""For each API: the beginning of the last frame of a broken stream, and what the stream must not contain."""
WITHOUT_FINISH = [Answer(finish=None), Answer(finish=None, done=False), Answer(cut=True)]


async def streamed(gateway: Gateway, path: str = "/v1/chat/completions", model: str = "demo", **more: Any) -> str:
    """The body of a streamed answer."""
    body = {"model": model, "stream": True, **BODIES[path], **more}
    answer = await gateway.client.post(path, content=json.dumps(body))
    assert answer.status_code == 200, answer.text
    return answer.text


def chunks(text: str) -> list[dict[str, Any]]:
    """The JSON of every data frame except `[DONE]`."""
    frames = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(frame) for frame in frames if frame != "[DONE]"]


def words(text: str) -> str:
    """The text of a chat stream."""
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks(text) if chunk.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.parametrize("answer", WITHOUT_FINISH, ids=["with-done", "without-done", "cut"])
@pytest.mark.parametrize("path", BODIES)
async def test_stream_without_finish_reason_never_ends_in_done(
    gateway: Gateway, fake: FakeInference, path: str, answer: Answer
) -> None:
    """It ends in an error frame, even if the tier sends `[DONE]`."""
    fake.answers["demo"] = answer
    text = await streamed(gateway, path)
    error, done = ENDS[path]
    assert "Hello" in text
    assert done not in text
    assert text.rstrip("\n").rpartition("\n\n")[2].startswith(error)


async def test_all_chunks_share_one_id_and_created(gateway: Gateway, fake: FakeInference) -> None:
    """Including chunks of another tier after a resume."""
    choice = {"index": 0, "delta": {"role": "assistant", "content": " Bye."}, "finish_reason": "stop"}
    other = {"id": "other", "object": "chat.completion.chunk", "created": 2, "model": "demo-mini", "choices": [choice]}
    fake.answers["demo"] = Answer(cut=True)
    fake.answers["demo-mini"] = Answer(raw=b"data: " + json.dumps(other).encode() + b"\n\ndata: [DONE]\n\n")
    text = await streamed(gateway, model="resumed")
    assert words(text) == "Hello there! Bye."
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks(text)}) == 1


@pytest.mark.parametrize("model", ["demo", "resumed"])
async def test_role_is_in_the_first_delta_only(gateway: Gateway, fake: FakeInference, model: str) -> None:
    """A resume begins no second message."""
    if model == "resumed":
        fake.queue["demo"] = [Answer(cut=True)]
        fake.answers["demo"] = Answer(words=("Hello", " there", "!", " Bye."))
    deltas = [
        chunk["choices"][0]["delta"] for chunk in chunks(await streamed(gateway, model=model)) if chunk["choices"]
    ]
    assert deltas[0]["role"] == "assistant"
    assert all("role" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_usage_is_sent_only_if_requested_last_and_without_choices(gateway: Gateway, path: str) -> None:
    """The tier always sends it."""
    plain = chunks(await streamed(gateway, path))
    assert all(not chunk.get("usage") and chunk["choices"] for chunk in plain)
    *others, last = chunks(await streamed(gateway, path, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    assert all(not chunk.get("usage") for chunk in others)


@pytest.mark.parametrize("path", BODIES)
async def test_streams_have_no_id_and_no_retry_lines(gateway: Gateway, fake: FakeInference, path: str) -> None:
    """Clients would reconnect with them; those of a tier are removed."""
    fake.answers["demo"] = Answer(garbage=b"retry: 5\nid: 7\n\n")
    fields = {line.partition(":")[0] for line in (await streamed(gateway, path)).splitlines() if line}
    assert fields <= {"", "data", "event"}


async def test_reasoning_delta_is_content(gateway: Gateway, fake: FakeInference) -> None:
    """It commits the answer: later breaks do not restart it on another tier."""
    fake.answers["demo"] = Answer(thoughts=("Hm.",), words=(), cut=True)
    text = await streamed(gateway, model="both")
    assert "Hm." in text
    assert chunks(text)[-1]["error"]
    assert fake.seen_for("demo-mini") == []


async def test_empty_answer_with_a_finish_reason_is_an_answer(gateway: Gateway, fake: FakeInference) -> None:
    """No other tier is tried."""
    fake.answers["demo"] = Answer(words=())
    text = await streamed(gateway, model="both")
    assert text.endswith("data: [DONE]\n\n")
    whole = await gateway.chat("both")
    assert (whole.status_code, whole.json()["choices"][0]["message"]["content"]) == (200, "")
    assert fake.seen_for("demo-mini") == []


async def test_progress_comments_of_a_tier_that_is_not_the_last_are_not_forwarded(
    gateway: Gateway, fake: FakeInference
) -> None:
    """They would commit the answer to it. With a timeout of 0.9 s those of the last tier are forwarded after 0.3 s."""
    fake.answers["demo"] = Answer(comments=6, pause=0.1, words=(), error=Code.DEVICE_LOST)
    body = {"model": "both", "stream": True, **BODIES["/v1/chat/completions"]}
    headers = {"x-stainless-read-timeout": "0.9"}
    text = (await gateway.client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)).text
    assert ": headgate loading" not in text
    assert words(text) == "Hello there!"


async def test_status_and_headers_are_sent_with_the_first_content_delta(gateway: Gateway, fake: FakeInference) -> None:
    """An earlier error is a status, even after the role and an empty delta."""
    fake.answers["demo"] = Answer(words=("", ""), pause=0.1, error=Code.DEVICE_LOST)
    body = {"model": "demo", "stream": True, "messages": MESSAGES}
    answer = await gateway.client.post("/v1/chat/completions", content=json.dumps(body))
    assert answer.status_code == 503
    assert answer.json()["error"]["code"]


@pytest.mark.parametrize("stream", [False, True])
async def test_model_in_the_body_is_the_one_that_answers(
    gateway: Gateway, fake: FakeInference, *, stream: bool
) -> None:
    """The headers agree; the tier header says that it is not the first one."""
    fake.answers["demo"] = Answer(refuse=Code.DEVICE_LOST)
    answer = await gateway.chat("both", stream=stream)
    names = {chunk["model"] for chunk in chunks(answer.text)} if stream else {answer.json()["model"]}
    assert names == {"demo-mini"}
    assert answer.headers["x-headgate-model"] == "local/demo-mini"
    assert answer.headers["x-headgate-tier"] == "local-fallback"
    assert answer.headers["x-headgate-attempts"] == "2"


async def test_local_requests_are_always_streamed_on_the_inference_hop(gateway: Gateway, fake: FakeInference) -> None:
    """For streams and whole answers."""
    for stream in (False, True):
        assert (await gateway.chat("demo", stream=stream)).status_code == 200
    assert [seen.body["stream"] for seen in fake.seen_for("demo")] == [True, True]
