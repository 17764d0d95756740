"""Of several choices one had its finish reason, and the answer passed for whole: `[DONE]` behind half a sentence."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway

pytestmark = pytest.mark.timeout(60)

CLOUD = """
providers:
  openai: {{kind: openai, api_key: "${{env:CLOUD}}", base_url: {url}/v1}}
routes:
  demo: {{chain: [openai/gpt, local/demo]}}
"""


def frame(index: int, finish: str | None = None, **said: Any) -> bytes:
    chunk = {"id": "c", "created": 1, "model": "demo", "choices": [{"index": index, **said, "finish_reason": finish}]}
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"


HALF_A_CHAT = Answer(
    raw=frame(0, delta={"content": "done"}) + frame(1, delta={"content": "half of"}) + frame(0, "stop", delta={})
)
HALF_A_TEXT = Answer(raw=frame(0, text="done") + frame(1, text="half of") + frame(0, "stop", text=""))


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


@pytest.mark.parametrize("end", [b"", b"data: [DONE]\n\n"])
async def test_a_stream_of_which_a_choice_was_cut_ends_in_an_error_frame(
    gateway: Gateway, fake: FakeInference, end: bytes
) -> None:
    assert HALF_A_CHAT.raw is not None
    fake.answers["demo"] = Answer(raw=HALF_A_CHAT.raw + end)
    got = await gateway.chat(stream=True, n=2)
    assert "[DONE]" not in got.text
    assert json.loads(got.text.split("data: ")[-1])["error"]["code"] == "model_failed"


async def test_a_whole_answer_of_which_a_choice_was_cut_is_the_next_tiers(
    gateway: Gateway, fake: FakeInference
) -> None:
    fake.answers["demo"] = HALF_A_CHAT
    got = await gateway.chat(n=2)
    assert got.headers["x-headgate-model"] == "local/demo-mini"
    assert [choice["finish_reason"] for choice in got.json()["choices"]] == ["stop", "stop"]


async def test_every_prompt_has_an_answer_of_its_own(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = HALF_A_TEXT
    body = {"model": "demo", "prompt": ["a", "b"]}
    got = await gateway.client.post("/v1/completions", json=body)
    assert got.headers["x-headgate-model"] == "local/demo-mini"
    assert [choice["index"] for choice in got.json()["choices"]] == [0, 1]


async def test_a_cloud_that_answered_one_prompt_of_two_did_not_answer(tmp_path: Path, fake: FakeInference) -> None:
    """Its body ends properly behind the first answer; without `[DONE]` the second was cut off before it began."""
    half = Canned(headers={"content-type": "text/event-stream"}, frames=[frame(0, "stop", text="done")])
    with canned_service({"POST /v1/completions": half}) as cloud:
        async with Gateway(tmp_path, fake.url, CLOUD.format(url=cloud.url), {"CLOUD": "k"}) as gateway:
            got = await gateway.client.post("/v1/completions", json={"model": "demo", "prompt": ["a", "b"]})
    assert got.headers["x-headgate-model"] == "local/demo"
    assert [choice["finish_reason"] for choice in got.json()["choices"]] == ["stop", "stop"]
