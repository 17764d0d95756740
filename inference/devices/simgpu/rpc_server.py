"""ggml's RPC server on the CPU for one connection of a simulated device.

`python -m inference.devices.simgpu.rpc_server` prints its port and serves until it is killed or its parent ends. ggml's
server accepts one client at a time, so each connection has its own. Lines on stdin move unused buffers out of the
device's memory and back; the answers on stdout are `{"bytes": moved}` or `{"error": message}`:

    {"do": "suspend", "buffers": [[pointer, bytes], ...]}   {"do": "resume"}
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import mmap
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.shared import child_process
from headgate.shared.units import format_bytes
from inference.worker import ggml_backends

LISTEN_SECONDS = 20.0
THREADS = 1
"""More threads spin while they wait for each other, and workers need the cores: with two threads on two busy cores a
token of a 135 M model took 0.8 s instead of 0.014 s.
"""
_MAX_DESCRIPTORS = 64
PIECE_BYTES = 4 * 2**20
"""Two huge pages: pieces are aligned to huge pages, so that none is split."""

Span = tuple[int, int]
"""Address and bytes."""


def package() -> Path | None:
    """The folder of llama-cpp-python, found without importing it; None when it is not installed."""
    found = importlib.util.find_spec("llama_cpp")
    return Path(found.origin).parent if found is not None and found.origin is not None else None


def main() -> int:
    """Serves. Returns only when ggml's server does not start."""
    child_process.die_with_parent(os.environ)
    child_process.disable_core_dumps()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # ggml's server prints there
    before = set(_listening())
    threading.Thread(target=_serve_for_ever, daemon=True).start()
    deadline = time.monotonic() + LISTEN_SECONDS
    while not (ports := [port for port in _listening() if port not in before]):
        if time.monotonic() > deadline:
            sys.stderr.write("ggml's RPC server does not listen\n")
            return 1
        time.sleep(0.001)
    answers.write(f"{ports[0]}\n")
    answers.flush()
    swap = Swap()
    for line in sys.stdin:
        answers.write(json.dumps(_moved(swap, json.loads(line))) + "\n")
        answers.flush()
    threading.Event().wait()
    return 1


def _moved(swap: Swap, command: dict[str, Any]) -> dict[str, Any]:
    """Runs one command."""
    try:
        if command["do"] == "resume":
            return {"bytes": swap.swap_in()}
        base = library().ggml_backend_buffer_get_base
        base.restype, base.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        return {"bytes": swap.swap_out([(base(pointer), size) for pointer, size in command["buffers"] if size])}
    except SwapError as error:
        return {"error": str(error)}


@functools.cache
def library() -> ctypes.CDLL:
    """ggml with its backends, without importing llama-cpp-python; raises OSError where there is none."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ggml_backends.load(ctypes.CDLL(str(_folder() / f"libggml.{suffix}")), _folder())


def rpc_library() -> ctypes.CDLL:
    """The library with the functions of ggml's RPC backend; raises OSError where there is none."""
    return ggml_backends.rpc(library(), _folder())


def _folder() -> Path:
    found = package()
    if found is None:
        raise OSError("llama-cpp-python is not installed")
    return found / "lib"


def _serve_for_ever() -> None:
    try:
        _serve()
    except OSError as error:
        sys.stderr.write(f"{error}\n")
    finally:
        os._exit(1)


def _serve() -> None:
    lib = library()
    lib.ggml_backend_dev_by_name.restype = ctypes.c_void_p
    lib.ggml_backend_dev_by_name.argtypes = [ctypes.c_char_p]
    start = rpc_library().ggml_backend_rpc_start_server
    start.restype = None
    start.argtypes = [
        ctypes.c_char_p,
        ctypes.c_char_p,
        ctypes.c_size_t,
        ctypes.c_size_t,
        ctypes.POINTER(ctypes.c_void_p),
    ]
    cpu = (ctypes.c_void_p * 1)(lib.ggml_backend_dev_by_name(b"CPU"))
    start(b"127.0.0.1:0", None, THREADS, 1, cpu)


def _listening() -> list[int]:
    """Ports of the TCP sockets on which this process listens: ggml's server does not report its port."""
    ports: list[int] = []
    for number in range(3, _MAX_DESCRIPTORS):
        with contextlib.suppress(OSError):  # no such descriptor
            if not stat.S_ISSOCK(os.fstat(number).st_mode):
                continue
            sock = socket.socket(fileno=os.dup(number))
            try:
                if sock.family == socket.AF_INET and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    ports.append(sock.getsockname()[1])
            finally:
                sock.close()
    return ports


# --- suspended memory -------------------------------------------------------------------------------------------------
class SwapError(Exception):
    """Nothing was copied."""


@dataclass(frozen=True, slots=True)
class _Copy:
    spans: tuple[Span, ...]
    memory: mmap.mmap


class Swap:
    """Moves memory of this process to a copy and back, and frees its pages in between.

    The addresses stay valid, like those of a device whose driver suspended a process. Memory is moved piece by piece,
    so that only one piece exists twice at a time. It must not be used until it was moved back.
    """

    def __init__(self) -> None:
        self._copy: _Copy | None = None

    def swap_out(self, spans: Sequence[Span]) -> int:
        """Copies `spans` and frees their pages; returns bytes. After SwapError nothing has changed.

        Pages that are only partly in a span are kept, because they may contain other objects of the heap.
        """
        if sys.platform != "linux":
            raise SwapError("memory can be moved on Linux only")
        if self._copy is not None:
            raise SwapError("the memory has already been moved")
        spans = tuple((address, size) for address, size in spans if size)
        total = sum(size for _address, size in spans)
        try:
            memory = mmap.mmap(-1, max(1, total), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise SwapError(f"the host does not have {format_bytes(total)} of free memory ({error})") from None
        with _addressed(memory) as copy:
            for address, offset, size in _pieces(spans):
                ctypes.memmove(copy + offset, address, size)
                _free(address, size)
        self._copy = _Copy(spans, memory)
        return total

    def swap_in(self) -> int:
        """Copies everything back and frees the copy; returns bytes. Raises SwapError if nothing was moved out."""
        if self._copy is None:
            raise SwapError("no memory was moved out")
        spans, memory = self._copy.spans, self._copy.memory
        with _addressed(memory) as copy:
            for address, offset, size in _pieces(spans):
                ctypes.memmove(address, copy + offset, size)
                _free(copy + offset, size)
        memory.close()
        self._copy = None
        return sum(size for _address, size in spans)


@contextlib.contextmanager
def _addressed(memory: mmap.mmap) -> Iterator[int]:
    """The address of a mapping, which cannot be closed within the context."""
    view = ctypes.c_char.from_buffer(memory)
    try:
        yield ctypes.addressof(view)
    finally:
        del view


def _pieces(spans: Sequence[Span]) -> Iterator[tuple[int, int, int]]:
    """(address, offset in the copy, bytes), each within one multiple of PIECE_BYTES."""
    offset = 0
    for address, size in spans:
        end = address + size
        while address < end:
            count = min(end, (address // PIECE_BYTES + 1) * PIECE_BYTES) - address
            yield address, offset, count
            address, offset = address + count, offset + count


def _free(address: int, size: int) -> None:
    """Frees the complete pages of private anonymous memory; they read as zeros afterwards."""
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (address + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if first < last and _libc.madvise(first, last - first, mmap.MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


if __name__ == "__main__":
    sys.exit(main())
