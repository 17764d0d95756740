"""The plan is reproducible, links can be broken, and every kind of broken promise is detected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import httpx2
import pytest

from tests.chaos.judge import End
from tests.fleet import judge
from tests.fleet.defects import PLANTS, PROMISES, REVEALED_BY
from tests.fleet.judge import Facts, Outage, Outcome, Trouble, violations
from tests.fleet.launcher import use_clock, write_clock
from tests.fleet.plan import DECK, Kind, events
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.link_proxy import Link, LinkState

GOOD = Outcome("x", 0, 0, True, 10.0, 11.0, End.COMPLETE, "a mill")
LOST = replace(GOOD, end=End.REFUSED, code="x", text="")
BROKEN = replace(GOOD, end=End.BROKEN, text="")
QUIET = Facts(["a mill"])


def _facts(**more: object) -> Facts:
    return replace(QUIET, **more)  # type: ignore[arg-type]


def test_same_seed_gives_the_same_plan() -> None:
    found = events(3, 80, 1.0, 4, 3)
    assert found == events(3, 80, 1.0, 4, 3)
    assert {event.kind for event in found} == set(Kind) == set(DECK)
    assert all(0 < len(event.gateways) < 3 for event in found)
    assert {event.kind for event in events(1, 9, 1.0, 4, 3, [Kind.LIMITS])} == {Kind.LIMITS}


@pytest.mark.parametrize(
    ("outcome", "facts", "promise"),
    [
        (GOOD, QUIET, None),
        (replace(GOOD, text="a mi"), QUIET, judge.WHOLE_ANSWER),
        (replace(GOOD, text="", prompt=judge.NEW), QUIET, judge.WHOLE_ANSWER),
        (replace(GOOD, text="a mi", prompt=judge.NEW), QUIET, None),
        (LOST, QUIET, judge.NOT_LOST),
        (replace(LOST, end=End.ERROR_FRAME), QUIET, judge.NOT_LOST),
        (LOST, _facts(isolated=[Outage(0, 5.0, 10.5)]), None),
        (LOST, _facts(isolated=[Outage(1, 5.0, 10.5)]), judge.NOT_LOST),
        (LOST, _facts(troubles=[Trouble("n", 5.0, 12.0)] * 2), judge.NOT_LOST),
        (LOST, _facts(troubles=[Trouble(name, 5.0, 12.0) for name in "nm"]), None),
        (LOST, _facts(troubles=[Trouble(name, 5.0, 12.0, 1) for name in "nm"]), judge.NOT_LOST),
        (replace(LOST, code=None), _facts(isolated=[Outage(0, 5.0, 10.5)]), judge.HAS_CODE),
        (BROKEN, QUIET, judge.CONNECTED),
        (BROKEN, _facts(outages=[Outage(0, 10.5, 12.0)]), None),
        (BROKEN, _facts(outages=[Outage(0, 10.5, 12.0, drains=True)]), judge.CONNECTED),
        (BROKEN, _facts(outages=[Outage(0, 9.0, 12.0, drains=True)]), None),
        (BROKEN, _facts(outages=[Outage(0, 20.0, 22.0)]), judge.CONNECTED),
        (replace(GOOD, end=End.CUT), QUIET, judge.NOT_CUT),
        (replace(GOOD, end=End.SILENT), QUIET, judge.ENDS),
        (replace(GOOD, end=None), QUIET, judge.ENDS),
        (replace(GOOD, end=End.STRANGE), QUIET, judge.PROTOCOL),
    ],
)
def test_requests_are_judged(outcome: Outcome, facts: Facts, promise: str | None) -> None:
    assert [one.promise for one in violations([outcome], facts)] == ([] if promise is None else [promise])


def test_probes_at_the_same_time_are_counted() -> None:
    assert judge.max_at_once([]) == 0
    assert judge.max_at_once([(0, 1), (1, 2), (3, 4)]) == 1
    assert judge.max_at_once([(0, 2), (1, 3), (1.5, 1.7)]) == 3


def test_limits_allow_one_part_more_without_the_store() -> None:
    assert judge.max_admitted(12, 0.0, 3, is_alone=False) == 12
    assert judge.max_admitted(12, 6.0, 3, is_alone=False) == 13
    assert judge.max_admitted(12, 0.0, 3, is_alone=True) == 16


def test_every_defect_has_a_promise_and_a_fault_that_reveals_it() -> None:
    assert set(PLANTS) == set(PROMISES) == set(REVEALED_BY)


def test_wall_clock_moves_while_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    real, real_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", real)
    monkeypatch.setattr(time, "time_ns", real_ns)
    clock = tmp_path / "clock"
    write_clock(clock, 0.0)
    use_clock(clock)
    assert abs(time.time() - real()) < 1
    write_clock(clock, -30.0)
    assert abs(time.time() - real() + 30) < 1
    assert abs(time.time_ns() - real_ns() + 30e9) < 1e9


async def test_links_break_fail_and_wait() -> None:
    """A refused connection, an error of the proxy, and an answer that arrives when the link is open again."""
    with canned_service({"GET /x": Canned({"ok": 1}), "POST /x": Canned({"ok": 2})}) as service:
        link = await Link(int(service.url.rpartition(":")[2])).start()
        url = f"http://127.0.0.1:{link.port}/x"
        async with httpx2.AsyncClient() as http:
            assert (await http.get(url)).json() == {"ok": 1}
            with link.being(LinkState.SILENT):
                with pytest.raises(httpx2.TimeoutException):
                    await http.get(url, timeout=0.1)
                with link.being(LinkState.CUT), pytest.raises(httpx2.TransportError):
                    await http.get(url)
                assert link.state is LinkState.SILENT
            link.failing, link.hold = (b"POST /x ",), 0.05
            answer = await http.post(url, json={})
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
            assert len(link.failed) == 1
            assert link.failed[0][1] - link.failed[0][0] >= 0.05
            assert (await http.get(url)).json() == {"ok": 1}
        await link.close()
    assert [one.method for one in service.requests] == ["GET", "GET"]
