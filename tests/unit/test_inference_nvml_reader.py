"""Restarts of the NVML child, and detection of devices that no child can reach."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.devices.nvml_reader import NvmlReader
from inference.devices.reopen_policy import EXHAUSTED_AFTER, MAX_SECONDS, Reopening
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError, ServingHelper

ONE, TWO = "0:1:0.0", "0:41:0.0"


class PaperHelper(ServingHelper):
    """Answers with `answer`; `starts` counts the processes that it would have started."""

    def __init__(self) -> None:
        super().__init__("nvml")
        self.answer: dict[str, Any] | HelperError = reading()
        self.starts = 0
        self._runs = False

    @property
    def is_running(self) -> bool:
        return self._runs

    async def ask(self, *, seconds: float) -> dict[str, Any]:
        self.starts += not self._runs
        self._runs = True
        if isinstance(self.answer, HelperError):
            await self.close()
            raise self.answer
        return self.answer

    async def close(self) -> None:
        self._runs = False


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def card(index: int, pci: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-{index}", "name": "card", "pci": pci, "total_bytes": 10, "free_bytes": 9,
            "used_bytes": 1, "action": None, **more}  # fmt: skip


def reading(**first: Any) -> dict[str, Any]:
    """Two cards; `first` changes the first one."""
    devices = [first if "error" in first else card(0, "00000000:01:00.0", **first), card(1, "00000000:41:00.0")]
    return {"driver": "570", "devices": devices, "xids": []}


def failure(code: int) -> dict[str, Any]:
    return {"error": "no", "code": code}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def helper() -> PaperHelper:
    return PaperHelper()


@pytest.fixture
def reader(helper: PaperHelper, clock: Clock) -> NvmlReader:
    return NvmlReader(clock=clock, helper=helper)


async def read(reader: NvmlReader, helper: PaperHelper, answer: dict[str, Any] | HelperError) -> int:
    helper.answer = answer
    return len(await reader.read())


async def test_failing_library_is_tried_at_growing_intervals(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """Each attempt is a new process: at once, then after 1 s, 2 s, 4 s ..."""
    await read(reader, helper, reading())
    starts: list[int] = []
    for _ in range(9):
        assert await read(reader, helper, failure(9)) == 0
        assert reader.sign is Sign.FAILED
        starts.append(helper.starts)
        clock.now += 1.0
    assert starts == [1, 2, 3, 3, 4, 4, 4, 4, 5]
    assert await read(reader, helper, reading()) == 0
    await reader.renew()
    assert await read(reader, helper, reading()) == 2
    assert reader.sign is Sign.HEALTHY
    assert await read(reader, helper, failure(9)) == 0
    assert await read(reader, helper, reading()) == 2


async def test_lost_card_does_not_restart_the_child_at_each_reading(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """The running child reads the others; the next child detects the return of the lost one."""
    await read(reader, helper, reading())
    lost = {"index": 0, "error": "lost", "code": 15}
    starts: list[int] = []
    for _ in range(8):
        assert await read(reader, helper, reading(**lost)) == 2
        starts.append(helper.starts)
        clock.now += 0.5
    assert starts == [1, 2, 3, 3, 4, 4, 4, 4]
    helper.answer = reading()
    cards = await reader.read()
    assert (cards[ONE].sign, cards[TWO].sign) == (Sign.HEALTHY, Sign.HEALTHY)


@pytest.mark.parametrize("code", [999, 18, 17])
async def test_device_that_several_new_processes_cannot_reach_is_unreachable(
    reader: NvmlReader, helper: PaperHelper, clock: Clock, code: int
) -> None:
    """As in a container that lost its devices. Failures of the old child do not count."""
    await read(reader, helper, reading())
    signs: list[Sign] = []
    for _ in range(EXHAUSTED_AFTER + 1):
        await read(reader, helper, failure(code))
        signs.append(reader.sign)
        clock.now += 15.0
    assert Sign.UNREACHABLE not in signs[:-1]
    assert signs[-1] is Sign.UNREACHABLE
    await read(reader, helper, reading())
    assert reader.sign is Sign.HEALTHY


async def test_renewed_reader_waits_as_long_for_a_driver_that_is_replaced(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """An operator's test of a device begins with a new process. It must not request a restart earlier."""
    await read(reader, helper, reading())
    await reader.renew()
    began = clock.now
    while reader.sign is not Sign.UNREACHABLE:
        await read(reader, helper, failure(18))
        clock.now += 1.0
    assert clock.now - began > 15.0
    await reader.renew()
    assert await read(reader, helper, reading()) == 2, "the first new process is started at once"


@pytest.mark.parametrize("answer", [failure(9), HelperError("late")])
async def test_other_failures_do_not_make_devices_unreachable(
    reader: NvmlReader, helper: PaperHelper, clock: Clock, answer: dict[str, Any] | HelperError
) -> None:
    """A missing driver may be loaded later; a timeout proves nothing."""
    await read(reader, helper, reading())
    for _ in range(EXHAUSTED_AFTER + 2):
        await read(reader, helper, answer)
        clock.now += 15.0
    assert reader.sign is (Sign.UNCERTAIN if isinstance(answer, HelperError) else Sign.FAILED)


async def test_nvml_that_never_worked_does_not_make_devices_unreachable(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """A restart would not help."""
    for _ in range(EXHAUSTED_AFTER + 2):
        await read(reader, helper, failure(999))
        clock.now += 15.0
    assert reader.sign is Sign.UNCERTAIN


async def test_card_that_was_never_read_is_unknown(reader: NvmlReader, helper: PaperHelper) -> None:
    await read(reader, helper, reading(index=0, error="no", code=3))
    assert (reader.knows(ONE), reader.knows(TWO)) == (False, True)


def test_pauses_between_restarts_grow_to_a_limit() -> None:
    state, pauses = Reopening(), []
    assert state.is_due(0.0)
    for _ in range(8):
        state = state.failed(100.0)
        pauses.append(state.due_at - 100.0)
        assert state.is_due(state.due_at)
        assert state.is_due(100.0) is (pauses[-1] == 0)
    assert pauses == [0, 1, 2, 4, 8, 8, 8, 8]
    assert pauses[-1] == MAX_SECONDS


def test_several_rejected_new_processes_exhaust_the_restarts() -> None:
    """Failures of an old process do not count; another failure in between restarts the count."""
    state = Reopening().failed(0.0)
    for _ in range(EXHAUSTED_AFTER - 1):
        state = state.failed(0.0, is_refused=True)
    assert not state.is_exhausted
    assert not state.failed(0.0).failed(0.0, is_refused=True).is_exhausted
    assert state.failed(0.0, is_refused=True).is_exhausted


def test_device_is_unreachable_after_fifteen_seconds() -> None:
    """An old process fails, then new ones, each as soon as it is due."""
    state, now = Reopening().failed(0.0), 0.0
    while not state.is_exhausted:
        now = state.due_at
        state = state.failed(now, is_refused=True)
    assert now == 15.0


@given(st.lists(st.tuples(st.floats(0, 1e6), st.booleans()), max_size=12))
def test_pauses_never_exceed_the_limit(failures: list[tuple[float, bool]]) -> None:
    state = Reopening()
    for now, is_refused in failures:
        before = state
        state = state.failed(now, is_refused=is_refused)
        assert now <= state.due_at <= now + MAX_SECONDS
        assert state.failures == before.failures + 1
        assert state.refused <= state.failures
