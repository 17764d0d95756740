"""Signs of device health from NVML through its child: events at once, and errors."""

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


async def test_xid_triggers_a_notice_and_is_part_of_the_next_reading_only(stub: NvmlStub, reader: NvmlReader) -> None:
    """For the device that had it; Xid 45, which a killed worker causes, is no evidence."""
    noticed = asyncio.Event()
    reader.listen(noticed.set)
    await reader.read()
    stub.xids = [(FIRST, 79), (FIRST, 45)]
    stub.write()
    await asyncio.wait_for(noticed.wait(), 10)
    seen: list[tuple[Sign, str]] = []
    async with asyncio.timeout(10):
        while not seen or seen[-1][0] is Sign.HEALTHY:  # the notice may arrive between two events
            cards = await reader.read()
            seen.append((cards[ONE].sign, cards[ONE].note))
            assert cards[TWO].sign is Sign.HEALTHY
    assert seen[-1] == (Sign.FAILED, "Xid 79 (fallen off the bus)")
    assert (await reader.read())[ONE].sign is Sign.HEALTHY


async def test_no_event_is_lost_between_two_readings(stub: NvmlStub, reader: NvmlReader) -> None:
    """All of several, although a driver keeps only the newest without a waiting listener."""
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
    assert card.sign is Sign.DEGRADED
    assert card.note == "Xid 64 (memory cannot be remapped); Xid 154 (another recovery action is needed)"


async def test_recovery_action_is_reported_while_the_driver_requires_it(stub: NvmlStub, reader: NvmlReader) -> None:
    """Unlike an event, a child that started later sees it as well; 0 means no action."""
    signs: list[Sign] = []
    for action in (0, 4, 4, 1, 0):
        stub.actions = {FIRST: action}
        stub.write()
        cards = await reader.read()
        signs.append(cards[ONE].sign)
        assert (cards[TWO].sign, cards[TWO].note) == (Sign.HEALTHY, "")
        assert ("recovery action" in cards[ONE].note) is (action != 0)
    assert signs == [Sign.HEALTHY, Sign.DEGRADED, Sign.DEGRADED, Sign.FAILED, Sign.HEALTHY]


async def test_devices_without_events_are_read(stub: NvmlStub, reader: NvmlReader) -> None:
    stub.errors = [("nvmlDeviceRegisterEvents", 3, FIRST), ("nvmlEventSetCreate", 3, "")]
    stub.write()
    assert {card.sign for card in (await reader.read()).values()} == {Sign.HEALTHY}


@pytest.mark.parametrize(("code", "sign"), [(15, Sign.FAILED), (18, Sign.DEGRADED)])
async def test_error_codes_apply_to_a_card_or_to_the_library(
    stub: NvmlStub, reader: NvmlReader, code: int, sign: Sign
) -> None:
    """The error of a card affects that card; an error of the library affects all."""
    await reader.read()
    stub.errors = [("nvmlDeviceGetMemoryInfo_v2", code, FIRST)]
    stub.write()
    cards = await reader.read()
    assert (cards[ONE].sign, cards[TWO].sign, reader.sign) == (sign, Sign.HEALTHY, Sign.HEALTHY)
    stub.errors = [("all", code, "")]
    stub.write()
    assert await reader.read() == {}
    assert reader.sign is sign


async def test_missing_library_is_tried_again(
    stub: NvmlStub, reader: NvmlReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example while a driver is being replaced."""
    assert len(await reader.read()) == 2
    await reader.close()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(stub.root))
    await reader.read()
    assert reader.sign is Sign.UNCERTAIN
    monkeypatch.setenv("LD_LIBRARY_PATH", stub.env["LD_LIBRARY_PATH"])
    assert len(await reader.read()) == 2


# --- as the devices of the machine show it ----------------------------------------------------------------------------
async def test_readings_say_how_healthy_the_device_is_and_why(stub: NvmlStub) -> None:
    """The order is that of llama.cpp: the second device is the first card."""
    probe = GgmlProbe({}, listing=listing)
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
    fine = Sign.HEALTHY
    assert found == [[Sign.DEGRADED, fine], [fine, Sign.FAILED], [fine, Sign.MISSING], [fine, fine]]
    assert [reading.note for reading in probe.readings()] == ["", ""]
    await probe.close()


async def test_trial_of_a_missing_device_is_reported(stub: NvmlStub) -> None:
    """The real helper looks for the listed device."""
    probe = GgmlProbe({}, listing=listing)
    await probe.start()
    with pytest.raises(HelperError, match=r"trial of gpu-1 failed: device gpu-1 \(CUDA0\) is not visible"):
        await probe.trial("gpu-1")
    await probe.close()
