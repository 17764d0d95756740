"""A model that was loading for the first time was shown as idle since the machine was switched on."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from inference.authority.views import figures
from inference.protocol import ModelState
from tests.rigs.authority_rig import Start, services


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_what_was_never_used_is_not_idle(start: Start) -> None:
    service = await start({"a": {}})
    authority, model = service.authority, service.authority.resolve("a")
    with authority.ask(model, seconds=30) as ticket:
        await model.becomes(ModelState.LOADING)
        assert authority.status(model).idle_seconds is None
        assert figures.model(authority.state, model.record, authority.now)["idle_seconds"] is None
        (await ticket.wait()).release(completed=True)
    idle = authority.status(model).idle_seconds
    assert idle is not None
    assert idle < 5
