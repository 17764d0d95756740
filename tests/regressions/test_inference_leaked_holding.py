"""A device that could not be read while a worker left kept that worker's memory on the books for ever."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.authority.state import Timing
from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, services


async def test_memory_of_a_gone_worker_comes_off_the_books_although_its_device_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    accelerator = FakeAccelerator()
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}}, accelerator=accelerator, parts={"timing": Timing(return_seconds=0.6)})
        authority, model = service.authority, service.authority.resolve("a")
        await authority.load(model)
        accelerator.failure = OSError("no such device")
        await authority.unload(model)
        assert model.state is ModelState.COLD
        await authority.emptied(seconds=10)
        assert "did not get back all memory of a; it counts as foreign" in caplog.text
        assert caplog.text.count("no such device") == 1, "said once, however often it is tried"
        accelerator.failure = None
        await authority.load(model)
        await authority.unload(model)
        await authority.emptied(seconds=10)
        assert authority.ledger.accounts["gpu-0"].foreign_bytes == 0
