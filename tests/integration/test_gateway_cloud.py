"""With the local tier down, clouds answer in the order of the chain, then the request is a 503."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import KEY as CLOUD_KEY
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

CONFIG = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  google: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1beta/openai/}}
  anthropic: {{kind: anthropic, api_key: "${{env:CLOUD}}", base_url: {url}}}
  itself: {{kind: openai, flavor: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
  azure: {{kind: openai, flavor: openai, api_key: "${{env:CLOUD}}", base_url: {url}/openai/v1}}
routes:
  demo: {{chain: [local/demo, openai/gpt]}}
  a: {{chain: [local/demo, anthropic/claude]}}
  g: {{chain: [local/demo, google/gemini]}}
  az: {{chain: [local/demo, azure/gpt-4o]}}
  home: {{chain: [local/demo, openai/gpt], cloud: never}}
  throttled: {{chain: [openai/fault-429=9, anthropic/claude]}}
  away: {{chain: [openai/fault-503=9, openai/gpt]}}
  cut: {{chain: [openai/fault-cut=2, anthropic/claude]}}
  context: {{chain: [openai/fault-context, anthropic/claude]}}
  thinks: {{chain: [local/demo, itself/gpt-5-mini, anthropic/claude]}}
  unknown: {{chain: [openai/gpt-5-mini, anthropic/claude]}}
  whole: {{chain: [openai/gpt, anthropic/claude], whole_answers: whole}}
  whole-busy: {{chain: [openai/fault-503=9, anthropic/claude], whole_answers: whole}}
  whole-silent: {{chain: [openai/fault-silence], whole_answers: whole}}
  stops: {{chain: [itself/gpt-4.1, google/gemini, anthropic/claude]}}
breaker: {{open: 60s}}
"""


@pytest.fixture
async def gateway(tmp_path: Path, cloud: FakeProvider) -> AsyncIterator[Gateway]:
    """A gateway whose inference service is down."""
    fake = FakeInference()
    await fake.start()
    await fake.stop()
    async with Gateway(tmp_path, fake.url, CONFIG.format(url=cloud.url), {"CLOUD": CLOUD_KEY}) as gateway:
        yield gateway


@pytest.mark.parametrize(
    ("route", "answered"),
    [("demo", "openai/gpt"), ("a", "anthropic/claude"), ("g", "google/gemini"), ("az", "azure/gpt-4o")],
)
async def test_cloud_answers_whole_and_streamed_when_the_local_tier_is_down(
    gateway: Gateway, route: str, answered: str
) -> None:
    whole = await gateway.chat(route)
    assert (whole.status_code, whole.headers["x-headgate-tier"]) == (200, "cloud")
    assert (whole.headers["x-headgate-model"], whole.headers["x-headgate-reason"]) == (answered, "connect")
    assert whole.json()["object"] == "chat.completion"
    assert whole.json()["choices"][0]["message"]["content"].endswith("Hello!")
    streamed = await gateway.chat(route, stream=True)
    assert streamed.text.endswith("data: [DONE]\n\n")
    chunks = [json.loads(line[6:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
    streamed_text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    assert streamed_text == whole.json()["choices"][0]["message"]["content"]


async def test_stream_whose_first_chunk_has_no_model_gets_the_model_that_answers(gateway: Gateway) -> None:
    """Azure's content filter sends a first chunk without a model."""
    body = {"model": "az", "input": "Hello!", "stream": True}
    events = (await gateway.client.post("/v1/responses", json=body)).text
    created = json.loads(events.partition("data: ")[2].partition("\n")[0])
    assert (created["type"], created["response"]["model"]) == ("response.created", "gpt-4o")
    body = {"model": "az", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello!"}], "stream": True}
    events = (await gateway.client.post("/v1/messages", json=body)).text
    start = json.loads(events.partition("data: ")[2].partition("\n")[0])["message"]
    assert (start["model"], len(start["id"]) > len("msg_")) == ("gpt-4o", True)


@pytest.mark.parametrize(("route", "headers"), [("demo", {"x-headgate-policy": "local-only"}), ("home", {})])
async def test_local_only_request_is_not_sent_to_a_cloud_when_local_models_are_down(
    gateway: Gateway, cloud: FakeProvider, route: str, headers: dict[str, str]
) -> None:
    answer = await gateway.chat(route, headers=headers)
    assert answer.status_code == 503
    assert "policy keeps this request local" in answer.json()["error"]["message"]
    assert cloud.records == []


async def test_throttled_cloud_is_skipped_until_its_retry_after(gateway: Gateway) -> None:
    first = await gateway.chat("throttled")
    assert (first.headers["x-headgate-model"], first.headers["x-headgate-reason"]) == ("anthropic/claude", "status_429")
    entry = await gateway.breaker("openai/fault-429=9")
    assert entry["state"] == "open"
    assert 8 < entry["retry_after"] <= 9
    assert (await gateway.chat("throttled")).headers["x-headgate-reason"] == "breaker_open"


async def test_unavailable_cloud_is_skipped_until_its_retry_after(gateway: Gateway) -> None:
    first = await gateway.chat("away")
    assert (first.headers["x-headgate-model"], first.headers["x-headgate-reason"]) == ("openai/gpt", "status_503")
    entry = await gateway.breaker("openai/fault-503=9")
    assert entry["state"] == "open"
    assert 8 < entry["retry_after"] <= 9
    assert (await gateway.chat("away")).headers["x-headgate-reason"] == "breaker_open"
    assert (await gateway.breaker("openai"))["state"] == "closed"


async def test_cut_cloud_stream_ends_in_an_error_and_a_whole_answer_is_repeated_elsewhere(gateway: Gateway) -> None:
    streamed = await gateway.chat("cut", stream=True)
    assert '"error"' in streamed.text.rstrip().rpartition("data: ")[2]
    assert "[DONE]" not in streamed.text
    assert (await gateway.chat("cut")).headers["x-headgate-model"] == "anthropic/claude"


async def test_field_that_a_cloud_does_not_support_skips_it_without_an_attempt(
    gateway: Gateway, cloud: FakeProvider
) -> None:
    gateway.write(
        (gateway.root / "gateway.yaml").read_text().replace("[openai/fault-context, ", "[google/gemini, openai/gpt, ")
        + "attempts: {max: 1}\n"
    )
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    answer = await gateway.chat("context", seed=7)
    assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "openai/gpt")
    assert (answer.headers["x-headgate-attempts"], answer.headers["x-headgate-reason"]) == ("1", "capability")
    record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    assert record["dropped"] == {
        f"{name}/{model}": f"capability: seed is not supported by this provider: {why}"
        for name, model, why in (
            ("google", "gemini", "its OpenAI-compatible API has no seed"),
            ("anthropic", "claude", "it has no seed"),
        )
    }
    refused = await gateway.chat("a", seed=7)
    assert (
        "anthropic/claude: seed is not supported by this provider: it has no seed" in refused.json()["error"]["message"]
    )
    assert len(cloud.records) == 1


async def test_option_that_a_reasoning_model_refuses_is_removed_or_the_model_is_skipped(
    gateway: Gateway, cloud: FakeProvider
) -> None:
    """Sampling options are removed from the request; an option that changes the answer drops the model."""
    tuned = await gateway.chat("thinks", temperature=0, top_p=0.5, presence_penalty=0, logprobs=False)
    assert (tuned.status_code, tuned.headers["x-headgate-model"]) == (200, "itself/gpt-5-mini"), tuned.text
    assert {"temperature", "top_p", "presence_penalty", "logprobs"}.isdisjoint(cloud.records[0].body)
    missed = await gateway.chat("thinks", stop="END")
    assert missed.headers["x-headgate-model"] == "anthropic/claude"
    record = (await gateway.admin("GET", f"/admin/requests/{missed.headers['x-request-id']}")).json()
    assert record["dropped"]["itself/gpt-5-mini"] == (
        "capability: stop is not supported by this provider: gpt-5-mini is a reasoning model and does not accept it"
    )


async def test_value_that_a_cloud_refuses_goes_to_the_next_tier_without_a_failure(gateway: Gateway) -> None:
    answer = await gateway.chat("unknown", temperature=0)
    assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "anthropic/claude"), answer.text
    assert answer.headers["x-headgate-reason"] == "unsupported_parameter"
    assert (await gateway.breaker("openai/gpt-5-mini"))["failures"] == 0


async def test_cloud_is_skipped_for_more_stop_strings_than_it_supports(gateway: Gateway, cloud: FakeProvider) -> None:
    answer = await gateway.chat("stops", stop=list("abcde"))
    assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "anthropic/claude"), answer.text
    assert len(cloud.records) == 1


async def test_prompt_too_long_for_a_cloud_is_a_client_error(gateway: Gateway) -> None:
    answer = await gateway.chat("context")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_route_can_request_whole_answers_without_a_stream(gateway: Gateway, cloud: FakeProvider) -> None:
    answer = await gateway.chat("whole")
    assert (answer.status_code, answer.headers["x-headgate-model"]) == (200, "openai/gpt")
    assert answer.json()["choices"][0]["message"]["content"].endswith("Hello!")
    record = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    assert record["completion_tokens"] == answer.json()["usage"]["completion_tokens"]
    await gateway.chat("whole", stream=True)
    assert [bool(one.body.get("stream")) for one in cloud.records] == [False, True]
    body = {"model": "whole", "max_tokens": 9, "messages": [{"role": "user", "content": "Hello!"}]}
    message = (await gateway.client.post("/v1/messages", json=body)).json()
    assert message["content"][0]["text"].endswith("Hello!")
    assert not cloud.records[-1].body.get("stream")
    assert (await gateway.chat("whole-busy")).headers["x-headgate-model"] == "anthropic/claude"


async def test_request_for_a_whole_answer_without_a_stream_ends_at_its_deadline(gateway: Gateway) -> None:
    gateway.write((gateway.root / "gateway.yaml").read_text() + "deadlines: {total: 1s, connect: 1s}\n")
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 200
    answer = await gateway.chat("whole-silent")
    assert answer.status_code in (503, 504)


async def test_endless_stream_for_a_whole_answer_ends_at_a_bound(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.routing.resume_runner.MAX_STREAM_BYTES", 200)
    answer = await gateway.chat("demo")
    assert answer.status_code == 503
    assert "a malformed stream: it is longer than" in answer.json()["error"]["message"]
    assert (await gateway.chat("demo", stream=True)).text.endswith("data: [DONE]\n\n"), "only whole answers are held"
