"""The child process for NVML against a real library: errors end the child, without hangs or wrong figures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.devices.ggml_devices import GgmlProbe
from inference.devices.nvml_job import pid_here
from inference.devices.nvml_reader import NvmlReader
from inference.devices.signs import Sign
from tests.rigs.nvml_stub import GIB, NvmlStub
from tests.rigs.nvml_stub.two_cards import FIRST, SECOND, listing
from tests.rigs.processes import command_of, descendants_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the NVML stub is a Linux library")


def nvml_children() -> set[int]:
    mine = descendants_of(os.getpid())
    return {pid for pid in mine if "inference.helper nvml" in command_of(pid)}


async def test_child_reads_every_card(reader: NvmlReader) -> None:
    """The total excludes memory that the driver reserves, so that total = free + used."""
    cards = await reader.read()
    assert list(cards) == ["0:1:0.0", "0:41:0.0"]
    first = cards["0:1:0.0"]
    assert (first.uuid, first.name, first.driver) == (FIRST, "NVIDIA First", "570.86.15")
    assert first.total_bytes == 24 * GIB - GIB // 2 == first.free_bytes + first.used_bytes
    assert first.used_bytes == GIB
    assert reader.error is None


async def test_child_reads_new_figures_for_each_request(stub: NvmlStub, reader: NvmlReader) -> None:
    """At the request, not after the previous answer."""
    await reader.read()
    before = nvml_children()
    stub.gpus[0].used_bytes = 3 * GIB
    stub.write()
    assert (await reader.read())["0:1:0.0"].used_bytes == 3 * GIB
    assert nvml_children() == before
    assert len(before) == 1


async def test_child_reads_the_bytes_of_each_process(stub: NvmlStub, reader: NvmlReader) -> None:
    """A process with several contexts counts once; one without a known number, as on WSL, is left out."""
    stub.processes = [(FIRST, 41, GIB), (FIRST, 41, 2 * GIB), (FIRST, 42, -1), (SECOND, 43, 5)]
    stub.write()
    cards = await reader.read()
    assert [card.process_bytes for card in cards.values()] == [{41: 3 * GIB}, {43: 5}]
    stub.errors = [("nvmlDeviceGetComputeRunningProcesses_v3", 3, "")]
    stub.write()
    assert [card.process_bytes for card in (await reader.read()).values()] == [{}, {}]
    assert reader.error is None


def test_process_ids_of_an_outer_namespace_are_mapped(tmp_path: Path) -> None:
    """/proc of the host in a container: its own processes have two ids, and others are left out."""

    def process(name: str, ids: str, namespace: str) -> None:
        (tmp_path / name / "ns").mkdir(parents=True)
        (tmp_path / name / "status").write_text(f"Name:\tx\nNSpid:\t{ids}\n")
        (tmp_path / name / "ns/pid").symlink_to(namespace)

    process("self", "900\t7", "pid:[1]")
    process("901", "901\t8", "pid:[1]")
    process("902", "902\t8", "pid:[2]")
    process("903", "903", "pid:[0]")
    assert [pid_here(pid, tmp_path) for pid in (901, 902, 903, 904)] == [8, None, None, None]
    (tmp_path / "self/status").write_text("NSpid:\t7\n")
    assert pid_here(901, tmp_path) == 901
    (tmp_path / "self/status").unlink()
    assert pid_here(901, tmp_path) == 901


async def test_drivers_without_the_second_memory_query_are_supported(stub: NvmlStub, reader: NvmlReader) -> None:
    """The first version counts reserved bytes as used."""
    stub.errors = [("nvmlDeviceGetMemoryInfo_v2", 13, "")]
    stub.write()
    first = (await reader.read())["0:1:0.0"]
    assert (first.total_bytes, first.used_bytes) == (24 * GIB, GIB + GIB // 2)


@pytest.mark.parametrize("code", [15, 16, 9, 18, 999])
async def test_library_error_ends_the_child_and_the_next_reading_has_a_new_one(
    stub: NvmlStub, reader: NvmlReader, code: int
) -> None:
    """A process keeps such an error; only a new process can read the recovered machine."""
    await reader.read()
    before = nvml_children()
    stub.errors = [("nvmlDeviceGetCount_v2", code, "")]
    stub.write()
    assert await reader.read() == {}
    assert f"({code})" in str(reader.error)
    assert not nvml_children() & before
    stub.errors = []
    stub.write()
    assert len(await reader.read()) == 2
    assert reader.error is None
    assert nvml_children() != before


async def test_error_at_initialization_is_reported(stub: NvmlStub, reader: NvmlReader) -> None:
    """A driver that is being replaced is not a machine without a driver."""
    stub.errors = [("nvmlInitWithFlags", 18, "")]
    stub.write()
    assert await reader.read() == {}
    assert "mismatch. (18)" in str(reader.error)
    assert not reader.answered
    stub.errors = []
    stub.write()
    assert len(await reader.read()) == 2


@pytest.mark.parametrize("function", ["nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetMemoryInfo_v2"])
async def test_lost_card_is_reported_and_the_other_is_read(stub: NvmlStub, reader: NvmlReader, function: str) -> None:
    await reader.read()
    before = nvml_children()
    stub.errors = [(function, 15, FIRST)]
    stub.gpus[1].used_bytes = 5 * GIB
    stub.write()
    cards = await reader.read()
    assert "lost (15)" in cards["0:1:0.0"].note
    assert cards["0:1:0.0"].used_bytes == GIB
    assert (cards["0:41:0.0"].note, cards["0:41:0.0"].used_bytes) == ("", 5 * GIB)
    stub.errors = []
    stub.write()
    assert not (await reader.read())["0:1:0.0"].note
    assert not nvml_children() & before


async def test_hanging_call_ends_at_the_deadline(stub: NvmlStub) -> None:
    reader = NvmlReader(next_seconds=0.3)
    await reader.read()
    before = nvml_children()
    stub.hangs = ["nvmlDeviceGetMemoryInfo_v2"]
    stub.write()
    assert await reader.read() == {}
    assert "no answer in time" in str(reader.error)
    assert not nvml_children() & before
    stub.hangs = []
    stub.write()
    assert len(await reader.read()) == 2
    await reader.close()
    assert not nvml_children()


async def test_machine_without_nvml_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVML is not tried again."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    reader = NvmlReader()
    assert await reader.read() == {}
    if (error := reader.error) is not None:  # a machine whose real driver does not work
        pytest.skip(f"this machine has NVML: {error}")
    assert not nvml_children()
    assert await reader.read() == {}
    await reader.close()


# --- the devices that llama.cpp and NVML describe together ------------------------------------------------------------
@pytest.mark.parametrize(
    ("outer", "pinned"),
    [({}, [SECOND, FIRST]), ({"CUDA_VISIBLE_DEVICES": "5,7"}, ["5", "7"])],
)
async def test_devices_have_names_uuids_and_figures_of_nvml(
    stub: NvmlStub, outer: dict[str, str], pinned: list[str]
) -> None:
    """The order is that of llama.cpp, figures and UUIDs are those of NVML, a configured selection is narrowed."""
    probe = GgmlProbe(outer, listing=listing)
    await probe.start()
    first, second = probe.readings()
    assert (first.id, first.uuid, first.free_bytes, first.ggml_name) == ("gpu-0", SECOND, 16 * GIB - GIB // 4, "CUDA0")
    assert (second.ggml_name, second.driver) == ("CUDA0", stub.driver)
    assert [reading.environment["CUDA_VISIBLE_DEVICES"] for reading in probe.readings()] == pinned
    stub.gpus[0].used_bytes = 10 * GIB
    stub.write()
    await probe.refresh()
    assert probe.readings()[1].used_bytes == 10 * GIB
    await probe.close()
    assert not nvml_children()


async def test_unreadable_device_has_a_reason_until_it_is_readable(stub: NvmlStub) -> None:
    probe = GgmlProbe({}, listing=listing)
    await probe.start()
    signs: list[list[Sign]] = []
    notes: list[str] = []
    for errors, gpus in (
        ([("all", 999, "")], stub.gpus),
        ([("nvmlDeviceGetMemoryInfo_v2", 15, FIRST)], stub.gpus),
        ([], stub.gpus[1:]),
        ([], stub.gpus),
    ):
        stub.errors, kept, stub.gpus = errors, stub.gpus, gpus
        stub.write()
        await probe.refresh()
        signs.append([reading.sign for reading in probe.readings()])
        notes.append(probe.readings()[1].note)
        stub.gpus = kept
    fine = Sign.HEALTHY
    assert signs == [[Sign.UNCERTAIN, Sign.UNCERTAIN], [fine, Sign.FAILED], [fine, Sign.MISSING], [fine, fine]]
    assert "(999)" in notes[0]
    assert "(15)" in notes[1]
    assert notes[2:] == ["NVML no longer lists it", ""]
    assert probe.readings()[1].used_bytes == GIB
    await probe.close()


async def test_probe_child_measures_without_a_working_nvml(stub: NvmlStub) -> None:
    """Containers often have the driver without NVML: the devices are usable."""
    stub.errors = [("all", 9, "")]
    stub.write()
    probe = GgmlProbe({}, listing=listing)
    await probe.start()
    await probe.refresh()
    assert [(reading.free_bytes, reading.sign) for reading in probe.readings()] == [(9, Sign.HEALTHY)] * 2
    assert probe.readings()[1].environment == {"CUDA_VISIBLE_DEVICES": "1"}
    await probe.close()


# --- the library itself -----------------------------------------------------------------------------------------------
XIDS = """
import sys, pynvml
pynvml.nvmlInit()
event_set = pynvml.nvmlEventSetCreate()
for index in range(pynvml.nvmlDeviceGetCount()):
    card = pynvml.nvmlDeviceGetHandleByIndex(index)
    assert pynvml.nvmlDeviceGetSupportedEventTypes(card) & pynvml.nvmlEventTypeXidCriticalError
    pynvml.nvmlDeviceRegisterEvents(card, pynvml.nvmlEventTypeXidCriticalError, event_set)
try:
    pynvml.nvmlEventSetWait(event_set, 0)
except pynvml.NVMLError_Timeout:
    print("nothing", flush=True)
sys.stdin.readline()
for _ in range(2):
    event = pynvml.nvmlEventSetWait(event_set, 10000)
    print(pynvml.nvmlDeviceGetUUID(event.device), event.eventData, flush=True)
pynvml.nvmlEventSetFree(event_set)
pynvml.nvmlShutdown()
"""


def test_xid_events_reach_earlier_registrations(stub: NvmlStub) -> None:
    """Earlier events are not repeated, and each is reported once."""
    stub.xids = [(FIRST, 13)]
    stub.write()
    with subprocess.Popen(
        [sys.executable, "-c", XIDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listener:
        assert listener.stdout is not None
        assert listener.stdout.readline() == "nothing\n"
        stub.xids += [(FIRST, 79), (SECOND, 48)]
        stub.write()
        out, _err = listener.communicate("\n", timeout=20)
    assert out.splitlines() == [f"{FIRST} 79", f"{SECOND} 48"]
    assert listener.returncode == 0
