"""Going on with an answer kept others from a service that had spoken, and rested longer than its caller listened."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from inference.protocol import Code
from tests.rigs.breaker_rig import open_breaker
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

ALONE = """
routes:
  demo: {chain: [local/demo]}
"""
WORDS = ("one", " two")


async def test_a_probe_that_goes_on_with_an_answer_proves_the_service_by_its_first_word(
    tmp_path: Path, fake: FakeInference
) -> None:
    """Everybody was refused until the model had loaded, which may take minutes."""
    first, second = asyncio.Event(), asyncio.Event()
    fake.queue["demo"] = [Answer(words=WORDS, cut=True, hold=first), Answer(words=WORDS, comments=1, hold=second)]
    async with Gateway(tmp_path, fake.url, ALONE) as gateway:
        next(task for task in asyncio.all_tasks() if task.get_name() == "prober").cancel()
        asked = asyncio.create_task(gateway.chat(stream=True))
        await until("it was asked", lambda: len(fake.seen) == 1)
        open_breaker(gateway.runtime.breakers, "local", "", 0.0)
        first.set()
        await until("it is asked to go on", lambda: len(fake.seen) == 2)
        await until("the service is proven", lambda: str(gateway.runtime.breakers.states()["local"].label) == "closed")
        second.set()
        assert (await asked).text.endswith("data: [DONE]\n\n")


async def test_no_rest_is_longer_than_the_caller_listens(tmp_path: Path, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(words=WORDS, cut=True), Answer(refuse=Code.MODEL_FAILED, retry_after=3.0)]
    async with Gateway(tmp_path, fake.url, ALONE) as gateway:
        answer = await gateway.chat(stream=True, headers={"x-stainless-read-timeout": "2"})
    assert '"error"' in answer.text and "[DONE]" not in answer.text
    assert len(fake.seen) == 2
