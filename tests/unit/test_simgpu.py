"""Simulated GPUs: INFERENCE_DEVICES, commands of the simulator, memory that is swapped out, the RPC relay."""

from __future__ import annotations

import ctypes
import math
import mmap
import random
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.faults import COMMANDS, ParsedCommand, parse
from inference.devices.simgpu.rpc_server import PIECE_BYTES, Swap, SwapError
from inference.devices.simgpu.rpc_wire import Command, Conversation, WireError, reply, request
from inference.environment_settings import parse_choice

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("auto", None),
        (" cpu ", None),
        ("sim:2x600MiB", (600 * MIB, 600 * MIB)),
        ("sim:600MiB,1GiB", (600 * MIB, 1024 * MIB)),
        ("SIM: 2 x 1.5GiB , 600mib", (1536 * MIB, 1536 * MIB, 600 * MIB)),
        ("sim:16x1MiB", (MIB,) * 16),
    ],
)
def test_device_settings_are_parsed(text: str, sizes: tuple[int, ...] | None) -> None:
    assert parse_choice(text) == sizes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", "; did you mean cpu?"),
        ("Auto", "; did you mean auto?"),
        ("simm:2x600MiB", "; did you mean sim:2x600MiB?"),
        ("sim", "; did you mean sim:2x600MiB?"),
        ("2x600MiB", "such as sim:2x600MiB"),
        ("sim:", "need a size"),
        ("sim:1GiB,,", "need a size"),
        ("sim:0x5MiB", "write cpu"),
        ("sim:2x600", "did you mean 600MiB?"),
        ("sim:1KiB", "too small"),
        ("sim:abc", "'abc' is not a size"),
        ("sim:17x1GiB", "there can be at most 16"),
    ],
)
def test_invalid_device_setting_is_rejected_with_what_is_wrong_with_it(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_choice(text)


@pytest.mark.parametrize(
    ("given", "command"),
    [
        ({"do": "status"}, ParsedCommand("status")),
        ({"do": "cut", "device": "gpu-1"}, ParsedCommand("cut", "gpu-1")),
        ({"do": "refuse"}, ParsedCommand("refuse", None, math.inf)),
        ({"do": "refuse", "count": 2}, ParsedCommand("refuse", None, 2)),
        ({"do": "refuse_after", "count": 1}, ParsedCommand("refuse_after", None, 1)),
        ({"do": "slow", "device": None, "seconds": 0.5}, ParsedCommand("slow", None, 0.5)),
        ({"do": "shrink", "bytes": 0}, ParsedCommand("shrink", None, 0)),
        ({"do": "suspend", "device": "gpu-0", "pid": 7}, ParsedCommand("suspend", "gpu-0", 7)),
    ],
)
def test_valid_commands_are_parsed(given: Any, command: ParsedCommand) -> None:
    assert parse(given, ["gpu-0", "gpu-1"]) == command


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([], "an object"),
        ({}, "None is not a command"),
        ({"do": "stal"}, "did you mean stall?"),
        ({"do": "cut", "bytes": 1}, "cut does not accept bytes"),
        ({"do": "cut", "device": "gpu-2"}, "there are gpu-0, gpu-1"),
        ({"do": "shrink"}, "shrink needs the parameter bytes"),
        ({"do": "refuse_after"}, "refuse_after needs the parameter count"),
        ({"do": "suspend", "pid": 7}, "suspend needs the parameter device"),
        ({"do": "resume", "device": "gpu-0"}, "resume needs the parameter pid"),
        ({"do": "shrink", "bytes": 1.5}, "bytes must be a whole number"),
        ({"do": "slow", "seconds": -1}, "seconds must be a number"),
        ({"do": "slow", "seconds": math.nan}, "seconds must be a number"),
        ({"do": "foreign", "bytes": True}, "bytes must be a whole number"),
    ],
)
def test_invalid_commands_are_rejected_with_a_reason(given: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(given, ["gpu-0", "gpu-1"])


def test_commands_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name, (parameter, what) in COMMANDS.items():
        assert f"| `{name}` | {f'`{parameter}`' if parameter else ''} | {what} |" in page


on_linux = pytest.mark.skipif(sys.platform != "linux", reason="memory is swapped out on Linux only")
SIZE = 3 * PIECE_BYTES
CONTENT = random.Random(3).randbytes(SIZE)


@pytest.fixture
def memory() -> Iterator[mmap.mmap]:
    made = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    made[:] = CONTENT
    yield made
    made.close()


def address(memory: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pages_of(memory: mmap.mmap) -> int:
    """The number of pages in memory (mincore)."""
    pages = (ctypes.c_ubyte * (SIZE // mmap.PAGESIZE))()
    at = ctypes.c_void_p(address(memory))
    assert ctypes.CDLL(None).mincore(at, ctypes.c_size_t(SIZE), pages) == 0
    return sum(byte & 1 for byte in pages)


@on_linux
def test_swapped_memory_is_released_and_restored(memory: mmap.mmap) -> None:
    swap = Swap()
    for _ in range(2):
        assert swap.swap_out([(address(memory), SIZE)]) == SIZE
        assert pages_of(memory) == 0
        assert swap.swap_in() == SIZE
        assert memory[:] == CONTENT


@on_linux
@pytest.mark.parametrize(("first", "size"), [(100, PIECE_BYTES + 5000), (4096, 4096), (5, 4000), (PIECE_BYTES - 1, 2)])
def test_other_bytes_on_the_same_pages_are_kept(memory: mmap.mmap, first: int, size: int) -> None:
    swap = Swap()
    swap.swap_out([(address(memory) + first, size)])
    assert memory[:first] == CONTENT[:first]
    assert memory[first + size :] == CONTENT[first + size :]
    whole = max(0, (first + size) // mmap.PAGESIZE - -(-first // mmap.PAGESIZE))
    assert pages_of(memory) <= SIZE // mmap.PAGESIZE  # reading maps zero pages
    assert memory[first : first + size].count(0) >= whole * mmap.PAGESIZE
    memory[first : first + size] = bytes(size)
    swap.swap_in()
    assert memory[:] == CONTENT


@on_linux
def test_swap_accepts_several_spans_and_none(memory: mmap.mmap) -> None:
    start = address(memory)
    swap = Swap()
    assert swap.swap_out([(start, 0), (start + 8192, 4096), (start, 4096)]) == 8192
    assert memory[:4096] == memory[8192:12288] == bytes(4096)
    assert swap.swap_in() == 8192
    assert memory[:] == CONTENT
    assert swap.swap_out([]) == swap.swap_in() == 0


@on_linux
def test_invalid_moves_are_rejected_without_effect(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    swap, span = Swap(), (address(memory), SIZE)
    with pytest.raises(SwapError, match="no memory was moved out"):
        swap.swap_in()
    with pytest.raises(SwapError, match="the host does not have"):
        swap.swap_out([(span[0], 2**62)])
    swap.swap_out([span])
    with pytest.raises(SwapError, match="already been moved"):
        swap.swap_out([span])
    swap.swap_in()
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SwapError, match="Linux only"):
        swap.swap_out([span])
    assert memory[:] == CONTENT


class Full:
    """An account that grants nothing."""

    def request(self, size_bytes: int) -> bool:
        return size_bytes < 0

    def created(self, pointer: int, requested_bytes: int, size_bytes: int) -> None:
        raise AssertionError("nothing was granted")

    def creation_failed(self, requested_bytes: int) -> None:
        raise AssertionError("nothing was granted")

    def free(self, pointer: int) -> None:
        raise AssertionError("there is nothing to give back")

    def computed(self) -> None:
        raise AssertionError("nothing is computed")

    def memory(self) -> tuple[int, int]:
        return 0, 100


def test_allocation_without_free_memory_does_not_reach_the_server() -> None:
    """The relay answers it, and requests for the free memory, like a server without memory."""
    talk = Conversation(Full())
    flow = talk.from_client(request(Command.ALLOC_BUFFER, struct.pack("<IQ", 0, 10)))
    assert (b"".join(flow.to_server), b"".join(flow.to_client)) == (b"", reply(struct.pack("<QQ", 0, 0)))
    flow = talk.from_client(request(Command.GET_DEVICE_MEMORY, bytes(4)))
    assert (b"".join(flow.to_server), b"".join(flow.to_client)) == (b"", reply(struct.pack("<QQ", 0, 100)))


def test_answer_to_a_mark_is_not_relayed() -> None:
    """Also between requests of the client; the relay is quiet when nothing is in flight."""
    talk = Conversation(Full())
    assert talk.is_quiet
    sent = talk.mark()
    assert (b"".join(sent.to_server), sent.to_client, sent.requests) == (request(Command.DEVICE_COUNT), [], 0)
    assert not talk.is_quiet
    assert talk.from_client(request(Command.GET_TENSOR, b"x")[:4]).to_client == []
    flow = talk.from_server(reply(bytes(4)))
    assert (flow.to_client, talk.is_quiet) == ([], False)  # half of a request has arrived
    talk.from_client(request(Command.GET_TENSOR, b"x")[4:])
    assert not talk.is_quiet  # its answer is missing
    flow = talk.from_server(reply(b"tensor"))
    assert (b"".join(flow.to_client), talk.is_quiet) == (reply(b"tensor"), True)
    assert talk.from_client(request(Command.SET_TENSOR, b"abc")).to_client == []
    assert talk.is_quiet
    talk.from_client(request(Command.SET_TENSOR, b"abc")[:-1])
    assert not talk.is_quiet


def test_wrong_answer_to_a_mark_is_an_error() -> None:
    talk = Conversation(Full())
    talk.mark()
    with pytest.raises(WireError, match="the reply to DEVICE_COUNT has 9 bytes instead of 4"):
        talk.from_server(reply(bytes(9)))
