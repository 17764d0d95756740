"""Streams that break off are resumed by the next candidate."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.protocol import Code
from tests.rigs.breaker_rig import open_breaker
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.fake_provider import KEY, FakeProvider
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

ALONE = """
routes:
  demo: {chain: [local/demo]}
"""
WORDS = ("one", " two")


async def test_first_comment_of_a_resumed_answer_closes_the_breaker(tmp_path: Path, fake: FakeInference) -> None:
    """Other requests pass before the model is loaded, which may take minutes."""
    first, second = asyncio.Event(), asyncio.Event()
    fake.queue["demo"] = [Answer(words=WORDS, cut=True, hold=first), Answer(words=WORDS, comments=1, hold=second)]
    async with Gateway(tmp_path, fake.url, ALONE) as gateway:
        next(task for task in asyncio.all_tasks() if task.get_name() == "prober").cancel()
        chat = asyncio.create_task(gateway.chat(stream=True))
        await until("the request arrived", lambda: len(fake.seen) == 1)
        open_breaker(gateway.runtime.breakers, "local", "", 0.0)
        first.set()
        await until("the answer is resumed", lambda: len(fake.seen) == 2)
        await until("the breaker closes", lambda: str(gateway.runtime.breakers.states()["local"].label) == "closed")
        second.set()
        assert (await chat).text.endswith("data: [DONE]\n\n")


async def test_retry_after_longer_than_the_client_timeout_ends_the_answer(tmp_path: Path, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(words=WORDS, cut=True), Answer(refuse=Code.MODEL_FAILED, retry_after=3.0)]
    async with Gateway(tmp_path, fake.url, ALONE) as gateway:
        answer = await gateway.chat(stream=True, headers={"x-stainless-read-timeout": "2"})
    assert '"error"' in answer.text and "[DONE]" not in answer.text
    assert len(fake.seen) == 2


CONFIG = """
providers: {{cloud: {{kind: {kind}, api_key: {key}, base_url: "{url}"}}}}
routes: {{demo: {{chain: [local/demo, cloud/m]}}}}
"""


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
async def test_answer_of_only_white_space_is_restarted_with_the_original_messages(tmp_path: Path, kind: str) -> None:
    async with FakeInference() as fake, FakeProvider() as cloud:
        url = cloud.openai_url if kind == "openai" else cloud.url
        async with Gateway(tmp_path, fake.url, CONFIG.format(kind=kind, key=KEY, url=url)) as gateway:
            fake.queue["demo"] = [Answer(words=("\n\n",), cut=True), Answer(status=500)]
            answer = await gateway.chat(stream=True)
    (message,) = (await cloud.record()).body["messages"]
    assert message["role"] == "user"
    assert "cut off" not in str(message)
    assert "headgate resumed on cloud/m after 2 characters" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n")
