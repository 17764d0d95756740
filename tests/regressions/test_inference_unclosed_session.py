"""A service that ended right after a worker did gave up closing that worker's HTTP client."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.evictions import Reason
from inference.protocol import ModelState
from tests.rigs.authority_rig import services


async def test_the_client_of_a_worker_is_closed_although_the_service_ends_in_the_same_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with services(tmp_path, monkeypatch) as start:
        authority = (await start({"a": {}})).authority
        model = authority.resolve("a")
        await authority.load(model)
        assert model.running is not None
        running = model.running
        running.worker.exited.add_done_callback(lambda _: authority.background.cancel())
        authority.loads.leave(model, Reason.BY_HAND)
        await running.worker.exited
    assert model.state is ModelState.COLD
    assert running.session is not None
    assert running.session.closed
