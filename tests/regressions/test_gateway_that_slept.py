"""A gateway that was stopped and continued once called the provider silent, though its bytes lay unread."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from gateway.routing.stream_reader import LATE_SECONDS
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway
from tests.rigs.stack import until

CONFIG_SHORT = CONFIG + "deadlines: {first_token: 200ms, inter_token: 200ms}\n"


async def test_who_slept_does_not_blame_the_provider(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with FakeInference("token") as fake:
        fake.answers["demo"] = Answer(hold=gate)
        async with Gateway(tmp_path, fake.url, CONFIG_SHORT) as gateway:
            asking = asyncio.create_task(gateway.chat())
            await until("the provider was asked", lambda: fake.seen)
            gate.set()
            time.sleep(LATE_SECONDS + 0.4)  # the whole process sleeps: that is the case
            answer = await asking
            assert answer.status_code == 200
            assert answer.headers["x-headgate-model"] == "local/demo"
            assert (await gateway.breaker("local/demo"))["failures"] == 0
