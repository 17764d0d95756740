"""A worker once held many times what was reserved for it, and nobody looked."""

from __future__ import annotations

from pathlib import Path

import pytest

from inference.authority.state import Timing
from inference.protocol import ModelState
from inference.workers.os_api import private_bytes
from tests.rigs.authority_rig import MIB, services


async def test_a_worker_that_outgrows_its_reservation_reserves_more_or_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Two of 100 MiB that become over 400: with 614 allowed, one may and the other must go.

    Whenever they are looked at while they grow, at least 319 MiB are booked in the end: 64 and a tenth may be missing.
    """
    caplog.set_level("INFO")
    async with services(tmp_path, monkeypatch) as start:
        service = await start(
            {"small": {}, "a": {}, "b": {}},
            {name: {"grow": 400 * MIB} for name in "ab"},
            parts={"timing": Timing(watch_seconds=0.1)},
            MEMORY_LIMIT_GB="0.6",
        )
        authority = service.authority
        small, a, b = (authority.resolve(name) for name in ("small", "a", "b"))
        await authority.load(small)
        await authority.load(a)
        await authority.reached(lambda: authority.ledger.owned_by("a")["cpu"] > 310 * MIB)
        assert a.running is not None
        seen = private_bytes(a.running.worker.pid)
        if seen is None:
            pytest.skip("reads a process's memory from /proc, which Linux has")
        assert authority.ledger.owned_by("a")["cpu"] <= seen + MIB
        assert "a grew by" in caplog.text
        assert authority.ledger.owned_by("small")["cpu"] == 100 * MIB, "who keeps to it pays nothing"
        await authority.unload(small)
        lease = await authority.ask(b).wait(10)
        assert lease is not None
        await b.becomes(ModelState.DRAINING)
        assert a.state is ModelState.READY
        lease.release(completed=True)
        await b.becomes(ModelState.COLD)
        assert not authority.ledger.owned_by("b")
        await authority.unload(a)
        await authority.emptied()


def test_memory_of_a_process_that_is_gone_is_unknown() -> None:
    assert private_bytes(2**22 + 1) is None
