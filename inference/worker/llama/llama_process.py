"""Initializes llama.cpp in this process, handles its log and abort messages, and binds its short functions."""

from __future__ import annotations

import ctypes
import functools
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from headgate.shared.units import MIB
from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib
from inference.worker.llama.split_modes import META, ROWS
from inference.worker_link import Buffer

KEPT_LINES = 50
MAX_LINE_CHARS = 4096
"""Lines are cut to this length, because they may contain names from a model file, which have no limit."""
_LEVEL_WARN = 3
_LEVEL_CONT = 5
_LEVEL_DEBUG = 1

_BUFFER = re.compile(
    r"(?P<where>\S+)\s+(?P<what>model|KV|RS|output|compute|LoRA)\s+buffer size\s*=\s*(?P<size>[\d.]+)\s*MiB"
)
_KINDS = {"model": "weights", "LoRA": "weights", "KV": "kv", "RS": "kv", "compute": "compute", "output": "other"}

_keep_alive: list[object] = []
"""Callbacks that C may call until the process ends."""
_library_callbacks: list[Any] = []


class LogTail:
    """Keeps the last log lines and the allocated buffers; warnings and errors also go to `echo`, for the crash record.

    llama.cpp reports its allocations only in its log: `load_tensors:  CUDA0 model buffer size =  123.45 MiB`.
    """

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._buffers: dict[tuple[str, str], int] = {}
        self._earlier: Counter[tuple[str, str]] = Counter()
        self._partial = ""
        self._level = 0

    def feed(self, level: int, text: str, *, counts: bool = True) -> None:
        """Handles one log callback: a line with its newline, or a part of a line (level CONT).

        `counts` is False for the log of another library, whose buffers do not belong to the model.
        """
        if level != _LEVEL_CONT:
            self._level = level
        *lines, partial = (self._partial + text).split("\n")
        self._partial = partial[:MAX_LINE_CHARS]
        for line in lines:
            self._line(line[:MAX_LINE_CHARS], counts=counts)

    def _line(self, line: str, *, counts: bool) -> None:
        if self._level <= _LEVEL_DEBUG or not line.strip(" ."):
            return
        self._lines.append(line)
        if counts and (match := _BUFFER.search(line)):
            # A device has several buffers of a kind, and their sizes add up. Compute and output buffers are reported
            # again on each reserve.
            key = (match["where"], _KINDS[match["what"]])
            size = round(float(match["size"]) * MIB)
            replaces = match["what"] in ("compute", "output")
            self._buffers[key] = size if replaces else self._buffers.get(key, 0) + size
        if self._level >= _LEVEL_WARN:
            self._echo(line)

    def keep_buffers(self) -> None:
        """Keeps the buffers so far: later ones belong to another model, and are added instead of replacing them."""
        self._earlier.update(self._buffers)
        self._buffers = {}

    def forget_context(self) -> None:
        """Removes all buffers except the weights, because the contexts were freed."""
        self.keep_buffers()
        self._earlier = Counter({key: size for key, size in self._earlier.items() if key[1] == "weights"})

    @property
    def lines(self) -> tuple[str, ...]:
        """The last lines, oldest first."""
        return tuple(self._lines)

    def complaints(self) -> str:
        """The last lines that contain the reason of a failure, for an error message."""
        telling = [
            line for line in self._lines if re.search(r"error|fail|unable|invalid|unsupported|cannot", line, re.I)
        ]
        return "; ".join(line.strip() for line in telling[-3:])

    def buffers(
        self, names: dict[str, str], shared: Mapping[str, Sequence[float]] = MappingProxyType({})
    ) -> tuple[Buffer, ...]:
        """The allocated buffers. `names` maps device names of ggml to device ids; other buffers are host memory.

        `shared`: per kind, the part of each device, in the order of `names`, of a buffer that all of them share.

        A buffer type such as `CUDA_Host` or `CPU_REPACK` belongs to the host; `CUDA0_Split` or `RPC0[host:port]`
        belongs to its device.
        """
        found: dict[tuple[str, str], int] = {}
        for (where, kind), size in (self._earlier + Counter(self._buffers)).items():
            owner = next((ours for ggml, ours in names.items() if _belongs(where, ggml)), "cpu")
            parts = {owner: 1.0}
            if owner == "cpu" and kind in shared and (where.startswith(META) or where.endswith(ROWS)):
                parts = dict(zip(names.values(), shared[kind], strict=True))
            for device, part in parts.items():
                found[device, kind] = found.get((device, kind), 0) + math.ceil(size * part)
        return tuple(Buffer(device, kind, size) for (device, kind), size in sorted(found.items()))


def _belongs(where: str, device: str) -> bool:
    return where == device or where.startswith((device + "_", device + "["))


def start(tail: LogTail) -> None:
    """Initializes llama.cpp and sends its log to `tail`. Call it once per process."""

    def on_log(level: int, text: bytes | None, _data: object) -> None:
        tail.feed(level, _decoded(text))

    callback = lib.llama_log_callback(on_log)
    _keep_alive.append(callback)
    beside = lib.llama_log_callback(lambda level, text, _data: tail.feed(level, _decoded(text), counts=False))
    _library_callbacks.append(beside)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    ggml_library.library()
    lib.llama_backend_init()


def library_log_callback() -> Any:
    """The log callback for other libraries, such as mtmd. Call it after `start`."""
    return _library_callbacks[-1]


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def on_abort(write: Callable[[str], None]) -> None:
    """Calls `write` with the message of ggml when it aborts the process, if the build supports it."""
    setter = getattr(ggml_library.library(), "ggml_set_abort_callback", None)
    if setter is None:
        return
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: write((text or b"").decode("utf-8", "replace")))
    setter.restype = ctypes.c_void_p
    _keep_alive.append(callback)
    setter(callback)


def without_gil_release(name: str) -> Callable[..., Any]:
    """The function `name` of llama.cpp, called without releasing the GIL; for calls of microseconds only.

    If the GIL were released, another thread could hold it for longer than the call takes. Loading, decoding,
    synchronizing and tokenizing release it.
    """
    described = getattr(lib._lib, name)
    function = getattr(_library_holding_gil(), name)
    function.argtypes = described.argtypes
    function.restype = described.restype
    return function  # type: ignore[no-any-return]


@functools.cache
def _library_holding_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(lib._lib._name)
