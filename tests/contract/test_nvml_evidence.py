"""What NVML tells of the health of devices, through its child: events at once, errors as signs."""

from __future__ import annotations

import asyncio
import sys

import pytest

from inference.devices.ggml_devices import GgmlProbe
from inference.devices.nvml_reader import NvmlReader
from inference.devices.signs import Sign
from inference.workers.helper_client import HelperError
from tests.rigs.nvml_stub import NvmlStub
from tests.rigs.nvml_stub.two_cards import FIRST, SECOND, listing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVML stub is a Linux library")

ONE, TWO = "0:1:0.0", "0:41:0.0"


async def test_an_xid_is_noticed_unasked_and_told_by_the_next_reading_alone(stub: NvmlStub, reader: NvmlReader) -> None:
    """Of the device that had it; what a killed worker leaves behind (45) is no evidence."""
    noticed = asyncio.Event()
    reader.listen(noticed.set)
    await reader.read()
    stub.xids = [(FIRST, 79), (FIRST, 45)]
    stub.write()
    await asyncio.wait_for(noticed.wait(), 10)
    told: list[tuple[Sign, str]] = []
    async with asyncio.timeout(10):
        while not told or told[-1][0] is Sign.FINE:  # the notice may come between two events
            cards = await reader.read()
            told.append((cards[ONE].sign, cards[ONE].note))
            assert cards[TWO].sign is Sign.FINE
    assert told[-1] == (Sign.DEAD, "Xid 79 (fallen off the bus)")
    assert (await reader.read())[ONE].sign is Sign.FINE


async def test_no_event_is_lost_between_two_readings(stub: NvmlStub, reader: NvmlReader) -> None:
    """Each of several, though a driver keeps only the newest for those who do not wait."""
    count, noticed = 0, asyncio.Event()

    def notice() -> None:
        nonlocal count
        count += 1
        if count == 3:
            noticed.set()

    reader.listen(notice)
    await reader.read()
    stub.xids = [(SECOND, 63), (SECOND, 64), (SECOND, 154)]
    stub.write()
    await asyncio.wait_for(noticed.wait(), 10)
    card = (await reader.read())[TWO]
    assert card.sign is Sign.ILL
    assert card.note == "Xid 64 (memory cannot be remapped); Xid 154 (another recovery action is needed)"


async def test_the_recovery_action_is_told_for_as_long_as_the_driver_asks_for_it(
    stub: NvmlStub, reader: NvmlReader
) -> None:
    """Unlike an event, which a child that started later never hears of; 0 asks for nothing."""
    signs: list[Sign] = []
    for action in (0, 4, 4, 1, 0):
        stub.actions = {FIRST: action}
        stub.write()
        cards = await reader.read()
        signs.append(cards[ONE].sign)
        assert (cards[TWO].sign, cards[TWO].note) == (Sign.FINE, "")
        assert ("recovery action" in cards[ONE].note) is (action != 0)
    assert signs == [Sign.FINE, Sign.ILL, Sign.ILL, Sign.DEAD, Sign.FINE]


async def test_devices_without_events_are_read_all_the_same(stub: NvmlStub, reader: NvmlReader) -> None:
    stub.errors = [("nvmlDeviceRegisterEvents", 3, FIRST), ("nvmlEventSetCreate", 3, "")]
    stub.write()
    assert {card.sign for card in (await reader.read()).values()} == {Sign.FINE}


@pytest.mark.parametrize(("code", "sign"), [(15, Sign.DEAD), (18, Sign.ILL)])
async def test_the_codes_of_one_card_and_of_the_library(
    stub: NvmlStub, reader: NvmlReader, code: int, sign: Sign
) -> None:
    """One card's error is that card's alone; the library's is everybody's."""
    await reader.read()
    stub.errors = [("nvmlDeviceGetMemoryInfo_v2", code, FIRST)]
    stub.write()
    cards = await reader.read()
    assert (cards[ONE].sign, cards[TWO].sign, reader.sign) == (sign, Sign.FINE, Sign.FINE)
    stub.errors = [("all", code, "")]
    stub.write()
    assert await reader.read() == {}
    assert reader.sign is sign


async def test_a_library_that_vanished_is_waited_for(
    stub: NvmlStub, reader: NvmlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while a driver is being replaced."""
    assert len(await reader.read()) == 2
    await reader.close()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub.root))
    await reader.read()
    assert reader.sign is Sign.UNSURE
    monkeypatch.setenv("LD_LIBRARY_PATH", stub.env["LD_LIBRARY_PATH"])
    assert len(await reader.read()) == 2


# --- as the devices of the machine show it ----------------------------------------------------------------------------
async def test_readings_carry_the_sign_and_its_reason(stub: NvmlStub) -> None:
    """Our order is llama.cpp's: the second device is the first card."""
    probe = GgmlProbe({}, probe=listing)
    await probe.start()
    found: list[list[Sign]] = []
    for errors, actions, gpus in (
        ([], {SECOND: 4}, stub.gpus),
        ([("nvmlDeviceGetMemoryInfo_v2", 16, FIRST)], {}, stub.gpus),
        ([], {}, stub.gpus[1:]),
        ([], {}, stub.gpus),
    ):
        kept = stub.gpus
        stub.errors, stub.actions, stub.gpus = errors, actions, gpus
        stub.write()
        await probe.refresh()
        found.append([reading.sign for reading in probe.readings()])
        stub.gpus = kept
    fine = Sign.FINE
    assert found == [[Sign.ILL, fine], [fine, Sign.DEAD], [fine, Sign.GONE], [fine, fine]]
    assert [reading.note for reading in probe.readings()] == ["", ""]
    await probe.close()


async def test_a_trial_of_a_device_that_this_machine_does_not_have_says_so(stub: NvmlStub) -> None:
    """The real helper, which looks for the device that the listing promised."""
    probe = GgmlProbe({}, probe=listing)
    await probe.start()
    with pytest.raises(HelperError, match=r"trial of gpu-1 failed: device gpu-1 \(CUDA0\) is not visible"):
        await probe.trial("gpu-1")
    await probe.close()
