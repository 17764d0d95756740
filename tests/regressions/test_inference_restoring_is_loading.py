"""Whose deadline passed while the model came back from the warm pool was told a 504 without a time to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.errors import ModelLoading
from inference.protocol import ModelState
from tests.rigs.authority_rig import Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_it_is_loading_and_tells_when_it_is_there(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"restore": "hang"}})
    authority, model = service.authority, service.authority.resolve("a")
    await authority.load(model)
    await authority.offload(model)
    assert model.state is ModelState.WARM
    with authority.ask(model, seconds=30) as ticket:
        assert model.state is ModelState.RESTORING
        await service.clock.advance(30)
        with pytest.raises(ModelLoading) as caught:
            await asyncio.wait_for(ticket.wait(), 5)
    assert caught.value.retry_after is not None
    assert caught.value.retry_after >= 1
