"""Answers that break off are resumed by the same model, another one or a cloud, or end in an error."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from inference.protocol import Code
from tests.rigs.breaker_rig import open_breaker
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

CONFIG = """
routes:
  demo: {chain: [local/demo, local/demo-mini]}
  alone: {chain: [local/demo]}
  "*": {chain: ["local/*"]}
deadlines: {connect: 2s, first_token: 2s, inter_token: 1500ms, total: 12s}
"""
CLOUDS = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
routes:
  demo: {{chain: [local/demo, openai/gpt]}}
  near: {{chain: [local/demo, openai/gpt], resume: local}}
  claude: {{chain: [local/demo, anthropic/claude-3-5-haiku-latest]}}
  kept: {{chain: [local/demo, openai/gpt], cloud: never}}
"""
WORDS = ("one ", "two ", "three ", "four")
WHOLE = Answer(words=WORDS)
BREAKS = {
    "cut": Answer(words=WORDS[:2], cut=True),
    "stall": Answer(words=WORDS[:2], stall=True),
    "error frame": Answer(words=WORDS[:2], error=Code.MODEL_FAILED),
    "no finish": Answer(words=WORDS[:2], finish=None),
    "garbage": Answer(words=WORDS[:2], garbage=b"data: oops\n\n"),
}


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CONFIG) as gateway:
        yield gateway


def chunks_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]


def text_of(stream: str, name: str = "content") -> str:
    choices = [choice for chunk in chunks_of(stream) for choice in chunk.get("choices", [])]
    return "".join((choice["delta"].get(name) if "delta" in choice else choice["text"]) or "" for choice in choices)


def resumed(gateway: Gateway) -> dict[str, float]:
    """`gateway_resume_total` by result."""
    samples = [s for metric in gateway.runtime.telemetry.resume.collect() for s in metric.samples]
    return {sample.labels["result"]: sample.value for sample in samples}


@pytest.mark.parametrize("kind", BREAKS)
async def test_same_model_resumes_as_one_answer(gateway: Gateway, fake: FakeInference, kind: str) -> None:
    """One id, one role, one finish reason and correct usage; only a comment shows the resume."""
    fake.queue["demo"] = [BREAKS[kind], WHOLE]
    got = await gateway.chat(stream=True, stream_options={"include_usage": True}, max_tokens=9)
    assert text_of(got.text) == "one two three four"
    assert got.text.endswith("data: [DONE]\n\n")
    assert got.text.count(": headgate resumed on local/demo after 8 characters") == 1
    chunks = chunks_of(got.text)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert {(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks} == {("chatcmpl-fake", 1, "demo")}
    assert sum("role" in choice["delta"] for choice in choices) == 1
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    assert [chunk["usage"] for chunk in chunks if chunk.get("usage")] == [
        {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}
    ]
    again = fake.seen_for("demo")[1].body
    assert (again["answer_so_far"], again["max_tokens"], again["messages"]) == ({"content": "one two "}, 9, MESSAGES)
    assert resumed(gateway) == {"resumed": 1}
    record = (await gateway.admin("GET", f"/admin/requests/{got.headers['x-request-id']}")).json()
    assert record["outcome"] == "success"
    assert [hop.split(":")[0] for hop in record["hops"]] == ["local/demo after 8 characters"]
    assert [attempt["outcome"] == "success" for attempt in record["attempts"]] == [False, True]


async def test_text_completion_is_resumed(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [BREAKS["cut"], WHOLE]
    body = {"model": "demo", "prompt": "Count.", "stream": True}
    got = await gateway.client.post("/v1/completions", json=body)
    assert text_of(got.text) == "one two three four"
    assert got.text.endswith("data: [DONE]\n\n")


async def test_reasoning_is_resumed_as_reasoning(gateway: Gateway, fake: FakeInference) -> None:
    """Without repetition or loss."""
    fake.queue["demo"] = [
        Answer(words=(), thoughts=("hm ",), cut=True),
        Answer(words=WORDS[:1], thoughts=("hm ", "yes"), cut=True),
        Answer(words=WORDS, thoughts=("hm ", "yes")),
    ]
    got = await gateway.chat(stream=True)
    assert (text_of(got.text, "reasoning_content"), text_of(got.text)) == ("hm yes", "one two three four")
    assert [seen.body.get("answer_so_far") for seen in fake.seen] == [
        None,
        {"reasoning_content": "hm "},
        {"content": "one ", "reasoning_content": "hm yes"},
    ]


async def test_another_local_model_resumes_when_the_same_one_cannot(gateway: Gateway, fake: FakeInference) -> None:
    """Its chunks have its model; the answer keeps its id."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    fake.answers["demo-mini"] = WHOLE
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "one two three four"
    assert {(chunk["id"], chunk["model"]) for chunk in chunks_of(got.text)} == {
        ("chatcmpl-fake", "demo"),
        ("chatcmpl-fake", "demo-mini"),
    }
    assert resumed(gateway) == {"resumed": 1}


@pytest.mark.parametrize(
    "more",
    [
        {"response_format": {"type": "json_object"}},
        {"n": 2},
        {"logprobs": True},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
        {"messages": [*MESSAGES, {"role": "assistant", "content": "x"}], "continue_final_message": True},
    ],
    ids=["json", "n", "logprobs", "tools", "continued"],
)
async def test_broken_answer_of_a_request_that_excludes_a_resume_ends_in_an_error_frame(
    gateway: Gateway, fake: FakeInference, more: dict[str, Any]
) -> None:
    fake.models["demo"] = replace(fake.models["demo"], capabilities=())
    await gateway.look()
    fake.answers["demo"] = BREAKS["cut"]
    got = await gateway.chat(stream=True, **more)
    assert chunks_of(got.text)[-1]["error"]["code"] == "model_failed"
    assert "[DONE]" not in got.text
    assert len(fake.seen) == 1
    assert resumed(gateway) == {"shape": 1}


async def test_answer_is_resumed_twice_at_most(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(words=WORDS[:count], cut=True) for count in (1, 2, 3)] + [WHOLE]
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "one two three "
    assert chunks_of(got.text)[-1]["error"]["code"] == "model_failed"
    assert "[DONE]" not in got.text
    assert resumed(gateway) == {"failed": 1}


async def test_answer_that_cannot_be_resumed_ends_in_an_error_frame(gateway: Gateway, fake: FakeInference) -> None:
    """Each candidate is tried once."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    fake.answers["demo-mini"] = Answer(refuse=Code.QUEUE_FULL)
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "one two "
    assert "local/demo was interrupted" in chunks_of(got.text)[-1]["error"]["message"]
    assert "[DONE]" not in got.text
    assert [seen.model for seen in fake.seen] == ["demo", "demo", "demo-mini"]
    assert resumed(gateway) == {"failed": 1}


async def test_model_without_the_needed_capabilities_does_not_resume(gateway: Gateway, fake: FakeInference) -> None:
    fake.models["demo-mini"] = replace(fake.models["demo-mini"], capabilities=("completions",))
    await gateway.look()
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "one two "
    assert chunks_of(got.text)[-1]["error"]["code"] == "model_failed"
    assert [seen.model for seen in fake.seen] == ["demo", "demo"]


async def test_resume_waits_for_the_same_model_with_a_short_retry_after(gateway: Gateway, fake: FakeInference) -> None:
    """The end of a worker is reported a moment before its backoff ends."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED, retry_after=0.1), WHOLE]
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "one two three four"
    assert [seen.model for seen in fake.seen] == ["demo"] * 3


async def test_stream_that_breaks_after_its_finish_reason_is_complete(gateway: Gateway, fake: FakeInference) -> None:
    """The client has the whole answer."""
    whole = (await gateway.chat(stream=True)).text
    fake.answers["demo"] = Answer(raw=whole.replace("data: [DONE]", "data: oops").encode())
    got = await gateway.chat(stream=True)
    assert text_of(got.text) == "Hello there!"
    assert got.text.endswith("data: [DONE]\n\n")
    assert resumed(gateway) == {"complete": 1}


async def test_client_disconnect_during_a_resume_releases_everything(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(words=WORDS, hold=asyncio.Event())]
    body = {"model": "demo", "messages": MESSAGES, "stream": True}
    async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
        await until("the second attempt arrived", lambda: len(fake.seen) == 2)
        await stream.aclose()
    async with asyncio.timeout(5):
        await fake.seen[1].closed.wait()
    await until("no request is open", lambda: not len(gateway.runtime.open_requests))


async def test_comments_of_a_restarting_worker_reach_the_client(gateway: Gateway, fake: FakeInference) -> None:
    """The model loads for longer than the allowed silence."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(words=WORDS, comments=8, pause=0.25)]
    got = await gateway.chat("alone", stream=True)
    assert text_of(got.text) == "one two three four"
    assert got.text.count(": headgate loading") == 8


async def test_whole_answer_is_resumed_by_the_same_model(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [BREAKS["cut"], WHOLE]
    got = await gateway.chat()
    assert got.json()["choices"][0]["message"]["content"] == "one two three four"
    assert got.headers["x-headgate-model"] == "local/demo"
    assert fake.seen[1].body["answer_so_far"] == {"content": "one two "}


async def test_whole_answer_is_restarted_elsewhere(gateway: Gateway, fake: FakeInference) -> None:
    """The client has no part of it, so another model answers from the start."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await gateway.chat()
    assert got.json()["choices"][0]["message"]["content"] == "Hello there!"
    assert got.headers["x-headgate-model"] == "local/demo-mini"
    assert "answer_so_far" not in fake.seen[-1].body


# --- on record --------------------------------------------------------------------------------------------------------
async def breaks_of(gateway: Gateway, **more: Any) -> list[dict[str, Any]]:
    """The breaks in the explain record of a request."""
    return await breaks_in(gateway, await gateway.chat(**more))


async def breaks_in(gateway: Gateway, got: httpx2.Response) -> list[dict[str, Any]]:
    """The breaks in the explain record of an answer."""
    record = (await gateway.admin("GET", f"/admin/requests/{got.headers['x-request-id']}")).json()
    found: list[dict[str, Any]] = record["breaks"]
    return found


async def test_record_has_the_reason_why_an_answer_was_not_resumed(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = BREAKS["error frame"]
    (shaped,) = await breaks_of(gateway, stream=True, n=2)
    assert shaped == {
        "name": "local/demo", "message": "model_failed: the fake refuses", "outcome": "shape", "dropped": {},
    }  # fmt: skip


async def test_record_has_the_candidates_that_did_not_resume(gateway: Gateway, fake: FakeInference) -> None:
    """Candidates behind an open breaker; tried candidates are among the attempts."""
    fake.queue["demo"] = [BREAKS["error frame"], Answer(refuse=Code.MODEL_FAILED)]
    open_breaker(gateway.runtime.breakers, "local", "demo-mini", 60.0)
    (broke,) = await breaks_of(gateway, stream=True)
    assert broke["outcome"] == "failed"
    assert list(broke["dropped"]) == ["local/demo-mini"]
    assert broke["dropped"]["local/demo-mini"].startswith("breaker_open")


async def test_record_has_each_resume(gateway: Gateway, fake: FakeInference) -> None:
    """A whole answer is resumed by the same local model only."""
    fake.queue["demo"] = [BREAKS["cut"], WHOLE]
    (broke,) = await breaks_of(gateway)
    assert broke["outcome"] == "resumed"
    assert list(broke["dropped"]) == ["local/demo-mini"]
    fake.queue["demo"] = [Answer(words=WORDS[:count], cut=True) for count in (1, 2, 3)] + [WHOLE]
    found = await breaks_of(gateway, stream=True)
    assert [each["outcome"] for each in found] == ["resumed", "resumed", "failed"]


async def test_metric_and_record_agree_on_a_second_break(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(words=(*WORDS[:2], *["x" * 2**18] * 5), cut=True)]
    found = await breaks_of(gateway, stream=True)
    assert [each["outcome"] for each in found] == ["resumed", "too_long"]
    assert resumed(gateway) == {"too_long": 1}


async def test_record_has_a_client_disconnect_during_a_resume(tmp_path: Path, fake: FakeInference) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(stall_before_headers=True)]
    body = {"model": "demo", "messages": MESSAGES, "stream": True}
    async with Gateway(tmp_path, fake.url, CONFIG.partition("deadlines:")[0]) as gateway:
        async with gateway.client.stream("POST", "/v1/chat/completions", json=body) as stream:
            await until("the second attempt arrived", lambda: len(fake.seen) == 2)
            (broke,) = await breaks_in(gateway, stream)
            assert broke["outcome"] == "running"
            await stream.aclose()
        await until("no request is open", lambda: not len(gateway.runtime.open_requests))
        (broke,) = await breaks_in(gateway, stream)
        assert broke["outcome"] == "cancelled"


async def test_record_has_a_breaker_that_opened_during_the_answer(tmp_path: Path, fake: FakeInference) -> None:
    """The second failure opens the breaker of the service."""
    fake.queue["demo"] = [BREAKS["cut"], Answer(status=500)]
    async with Gateway(tmp_path, fake.url, CONFIG + "breaker: {failures: 2}\n") as gateway:
        (broke,) = await breaks_of(gateway, stream=True)
    assert broke["dropped"]["local/demo-mini"].startswith("breaker local is open; retry in ")


# --- clouds -----------------------------------------------------------------------------------------------------------


@pytest.fixture
async def cloudy(tmp_path: Path, fake: FakeInference, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url, CLOUDS.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway:
        yield gateway


async def test_cloud_gets_an_instruction_to_continue(cloudy: Gateway, fake: FakeInference, cloud: FakeProvider) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await cloudy.chat(stream=True, max_tokens=20)
    assert text_of(got.text).startswith("one two ")
    assert len(text_of(got.text)) > len("one two ")
    assert got.text.endswith("data: [DONE]\n\n")
    sent = cloud.records[-1].body
    assert [message["role"] for message in sent["messages"]] == ["user", "assistant", "user"]
    assert sent["messages"][1]["content"] == "one two "
    assert sent["max_tokens"] == 18
    assert resumed(cloudy) == {"resumed": 1}


async def test_model_with_prefill_support_gets_a_prefill(
    cloudy: Gateway, fake: FakeInference, cloud: FakeProvider
) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await cloudy.chat("claude", stream=True)
    assert text_of(got.text).startswith("one two ")
    assert got.text.endswith("data: [DONE]\n\n")
    roles = [message["role"] for message in cloud.records[-1].body["messages"]]
    assert roles == ["user", "assistant"]


async def test_route_can_restrict_resumes_to_local_models(
    cloudy: Gateway, fake: FakeInference, cloud: FakeProvider
) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await cloudy.chat("near", stream=True)
    assert chunks_of(got.text)[-1]["error"]["code"] == "model_failed"
    assert cloud.records == []


@pytest.mark.parametrize(("route", "policy"), [("kept", "any"), ("demo", "local-only")])
async def test_local_only_answer_is_not_resumed_by_a_cloud(
    cloudy: Gateway, fake: FakeInference, cloud: FakeProvider, route: str, policy: str
) -> None:
    fake.queue["demo"] = [BREAKS["cut"], Answer(refuse=Code.MODEL_FAILED)]
    got = await cloudy.chat(route, stream=True, headers={"x-headgate-policy": policy})
    assert text_of(got.text) == "one two "
    assert chunks_of(got.text)[-1]["error"]["code"] == "model_failed"
    assert "[DONE]" not in got.text
    assert cloud.records == []
