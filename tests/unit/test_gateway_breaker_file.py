"""The snapshot of open breakers in a file: damaged files, limits, clocks and writing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gateway.breaker import breaker_file
from gateway.breaker.breaker_file import MAX_BYTES, NAME, BreakerFile
from gateway.breaker.breakers import MAX_BREAKERS, Breakers, Lease
from gateway.breaker.outcome import Failure, Scope
from gateway.breaker.permits import Rule
from headgate.shared.state_directory import StateDir
from tests.rigs.stack import until


class World:
    """A directory, a wall clock and a monotonic clock; gateways start one after another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.now = 500.0
        self.wall = 1_700_000_000.0

    async def gateway(self) -> tuple[Breakers, BreakerFile]:
        """The breakers and the file of a gateway that just started."""
        file = BreakerFile(StateDir(self.root), lambda: self.now, lambda: self.wall)
        await file.load(("local", "cloud"))
        breakers = Breakers(Rule(), lambda: self.now, store=file)
        breakers.restore()
        return breakers, file

    def pass_time(self, seconds: float) -> None:
        """Moves the wall clock; the next process has another monotonic clock."""
        self.wall += seconds
        self.now = 3.0


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def _open(breakers: Breakers, model: str, provider: str = "local", pause: float | None = None) -> None:
    for _ in range(5):
        lease = breakers.acquire(provider, model, 1e9)
        assert isinstance(lease, Lease)
        lease.settle(Failure(Scope.PAIR, pause, reached=True), "a secret")


async def test_file_has_no_failure_messages(world: World) -> None:
    breakers, file = await world.gateway()
    _open(breakers, "m")
    await file.close()
    assert "secret" not in (world.root / NAME).read_text()


async def test_expired_open_period_is_not_restored(world: World) -> None:
    breakers, file = await world.gateway()
    _open(breakers, "m")
    await file.close()
    world.pass_time(731.0)
    later, _ = await world.gateway()
    assert later.states() == {}


async def test_wall_clock_set_back_does_not_extend_open_period(world: World) -> None:
    breakers, file = await world.gateway()
    _open(breakers, "m")
    await file.close()
    world.pass_time(-86400.0)
    again, _ = await world.gateway()
    assert again.open_for("local", "m") == pytest.approx(30.0, abs=0.01)


@pytest.mark.parametrize("written", ["", '"written": NaN, '], ids=["a former version", "no time"])
async def test_file_without_time_of_writing_opens_for_at_most_an_hour(world: World, written: str) -> None:
    (world.root / NAME).write_text(f'{{"format": 1, {written}"breakers": [["local", "m", 1e12]]}}')
    breakers, _ = await world.gateway()
    assert breakers.open_for("local", "m") == 3600.0


BAD = [
    ("nothing", b""),
    ("no JSON", b"{"),
    ("no object", b"[]"),
    ("another version", b'{"format": 2, "breakers": []}'),
    ("no breakers", b'{"format": 1}'),
    ("no list", b'{"format": 1, "breakers": {}}'),
    ("a number for a name", b'{"format": 1, "breakers": [[1, "m", 2.0]]}'),
    ("no moment", b'{"format": 1, "written": "now", "breakers": []}'),
    ("no time", b'{"format": 1, "breakers": [["local", "m", "soon"]]}'),
    ("no end", b'{"format": 1, "breakers": [["local", "m", NaN]]}'),
    ("not text", b"\xff\xfe\x00"),
    ("nested", b"[" * 100_000),
    ("too large", b" " * (MAX_BYTES + 1)),
    ("an end beyond every float", b'{"format": 1, "breakers": [["local", "m", %s]]}' % (b"9" * 400)),
    ("half a character", rb'{"format": 1, "breakers": [["local", "\ud800", 1700000030]]}'),
]


@pytest.mark.parametrize("content", [case[1] for case in BAD], ids=[case[0] for case in BAD])
async def test_damaged_file_gives_one_log_line_and_closed_breakers(
    world: World, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    (world.root / NAME).write_bytes(content)
    breakers, _ = await world.gateway()
    assert breakers.states() == {}
    (line,) = caplog.messages
    assert line.startswith(f"{world.root / NAME} is damaged (")
    assert "): breakers start closed; " in line


async def test_directory_in_place_of_file_is_logged_once(world: World, caplog: pytest.LogCaptureFixture) -> None:
    (world.root / NAME).mkdir()
    breakers, file = await world.gateway()
    _open(breakers, "m")
    await file.close()
    await file.close()
    assert [line.partition(" (")[0] for line in caplog.messages if "cannot save" in line] == [
        "cannot save open breakers"
    ]


async def test_load_ignores_unknown_providers_and_limits_the_number_of_breakers(world: World) -> None:
    entries = [["gone", "m", world.wall + 20]] + [["local", f"m{index}", world.wall + 20] for index in range(1000)]
    (world.root / NAME).write_text(json.dumps({"format": 1, "breakers": entries}))
    breakers, _ = await world.gateway()
    assert len(breakers.states()) == MAX_BREAKERS - 1
    assert "gone" not in {name.partition("/")[0] for name in breakers.states()}


async def test_changes_are_written_while_gateway_runs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(breaker_file, "SETTLE_SECONDS", 0.0)
    breakers, file = await world.gateway()
    writing = asyncio.create_task(file.run())
    path = world.root / NAME
    _open(breakers, "m")
    await until("it is written", lambda: path.exists() and b"local" in path.read_bytes())
    breakers.reset("local/m")
    await until("it is forgotten", lambda: b"local" not in path.read_bytes())
    assert path.stat().st_mode & 0o077 == 0
    writing.cancel()
    await asyncio.wait({writing})
