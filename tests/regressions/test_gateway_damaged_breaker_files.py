"""Three damaged breakers.json kept a gateway from starting or from telling its breakers; each is a line in the log."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.breaker.breaker_file import NAME, BreakerFile
from gateway.breaker.breakers import Breakers
from gateway.breaker.permits import Rule
from headgate.shared.state import StateDir

DAMAGED = {
    "an end beyond every float": b'{"format": 1, "breakers": [["local", "m", %s]]}' % (b"9" * 400),
    "half a character": rb'{"format": 1, "breakers": [["local", "\ud800", 1700000030]]}',
}


async def _restored(root: Path) -> Breakers:
    file = BreakerFile(StateDir(root), lambda: ("local",), lambda: 500.0, lambda: 1_700_000_000.0)
    await file.load()
    breakers = Breakers(Rule(), lambda: 500.0, store=file)
    breakers.restore()
    return breakers


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED.keys())
async def test_it_is_ignored(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / NAME).write_bytes(content)

    breakers = await _restored(tmp_path)

    assert breakers.describe() == []
    assert f"{tmp_path / NAME} is damaged" in caplog.text
