"""A service that was suspended with its machine told all who waited that their time was over, when it woke up; and it
took a step that had been suspended as well for one that hangs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.protocol import ModelState
from tests.rigs.authority_rig import Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_who_slept_ends_nobodys_wait_and_no_worker(start: Start) -> None:
    service = await start({"a": {}, "b": {}}, WORKER_SILENCE_SECONDS="0.7")
    authority = service.authority
    await authority.load(authority.resolve("b"))
    loaded = authority.resolve("b").running
    service.estimator.gate = asyncio.Event()
    ticket = authority.ask(authority.resolve("a"), seconds=1.2)
    time.sleep(1.8)  # the whole process sleeps: that is the case
    await asyncio.sleep(0)
    assert ticket.pending
    service.estimator.gate.set()
    assert await ticket.wait(10) is not None
    ticket.close()
    await authority.reached(lambda: loaded is not None and loaded.worker.beat is not None)
    assert authority.resolve("b").running == loaded
    assert authority.resolve("b").state is ModelState.READY
