"""How often NVML is asked for by a fresh child, and when no child is expected to help, with a helper on paper."""

from __future__ import annotations

from typing import Any

import pytest

from inference.devices.nvml_reader import NvmlReader
from inference.devices.reopen_policy import BEYOND_AFTER
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError, ServingHelper

ONE, TWO = "0:1:0.0", "0:41:0.0"


class PaperHelper(ServingHelper):
    """Answers `answer`; `starts` counts the processes it would have started."""

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
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def card(index: int, pci: str, **more: Any) -> dict[str, Any]:
    return {"index": index, "uuid": f"GPU-{index}", "name": "card", "pci": pci, "total_bytes": 10, "free_bytes": 9,
            "used_bytes": 1, "action": None, **more}  # fmt: skip


def reading(**first: Any) -> dict[str, Any]:
    """Two cards, `first` is what is different about the first one."""
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


async def test_a_library_that_fails_is_asked_ever_less_often(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """Each question costs a process: a fresh one at once, then after 1 s, 2 s, 4 s ..."""
    await read(reader, helper, reading())
    starts: list[int] = []
    for _ in range(9):
        assert await read(reader, helper, failure(9)) == 0
        assert reader.sign is Sign.DEAD
        starts.append(helper.starts)
        clock.now += 1.0
    assert starts == [1, 2, 3, 3, 4, 4, 4, 4, 5]
    assert await read(reader, helper, reading()) == 0
    await reader.renew()
    assert await read(reader, helper, reading()) == 2
    assert reader.sign is Sign.FINE
    assert await read(reader, helper, failure(9)) == 0
    assert await read(reader, helper, reading()) == 2


async def test_a_lost_card_does_not_cost_a_process_per_reading(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """The others are read by the child there is; the return of the lost one is seen by the next."""
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
    assert (cards[ONE].sign, cards[TWO].sign) == (Sign.FINE, Sign.FINE)


@pytest.mark.parametrize("code", [999, 18, 17])
async def test_what_fresh_children_are_refused_in_a_row_is_beyond_their_help(
    reader: NvmlReader, helper: PaperHelper, clock: Clock, code: int
) -> None:
    """As in a container that lost its devices. What the old child is told counts for nothing."""
    await read(reader, helper, reading())
    signs: list[Sign] = []
    for _ in range(BEYOND_AFTER + 1):
        await read(reader, helper, failure(code))
        signs.append(reader.sign)
        clock.now += 15.0
    assert Sign.BEYOND not in signs[:-1]
    assert signs[-1] is Sign.BEYOND
    await read(reader, helper, reading())
    assert reader.sign is Sign.FINE


@pytest.mark.parametrize("answer", [failure(9), HelperError("late")])
async def test_other_failures_are_never_beyond_help(
    reader: NvmlReader, helper: PaperHelper, clock: Clock, answer: dict[str, Any] | HelperError
) -> None:
    """A driver that is not loaded will be; a call that does not return says nothing."""
    await read(reader, helper, reading())
    for _ in range(BEYOND_AFTER + 2):
        await read(reader, helper, answer)
        clock.now += 15.0
    assert reader.sign is (Sign.UNSURE if isinstance(answer, HelperError) else Sign.DEAD)


async def test_a_machine_whose_nvml_never_worked_is_not_beyond_help(
    reader: NvmlReader, helper: PaperHelper, clock: Clock
) -> None:
    """A restart would find the same, and the one after it again."""
    for _ in range(BEYOND_AFTER + 2):
        await read(reader, helper, failure(999))
        clock.now += 15.0
    assert reader.sign is Sign.UNSURE


async def test_a_card_that_was_never_read_is_not_known(reader: NvmlReader, helper: PaperHelper) -> None:
    """Its absence is no loss."""
    await read(reader, helper, reading(index=0, error="no", code=3))
    assert (reader.knows(ONE), reader.knows(TWO)) == (False, True)
