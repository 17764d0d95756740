"""Keeps the last log lines of llama.cpp and parses the allocated buffers.

llama.cpp reports its allocations only in its log: `load_tensors:  CUDA0 model buffer size =  123.45 MiB`.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable

from headgate.shared.units import MIB
from inference.worker_link import Buffer

KEPT_LINES = 50
MOST_LINE_CHARS = 4096
"""Lines are cut to this length, because they may contain names from a model file, which have no limit."""
_LEVEL_WARN = 3
_LEVEL_CONT = 5
_LEVEL_DEBUG = 1

_BUFFER = re.compile(
    r"(?P<where>\S+)\s+(?P<what>model|KV|RS|output|compute|LoRA)\s+buffer size\s*=\s*(?P<size>[\d.]+)\s*MiB"
)
_KINDS = {"model": "weights", "LoRA": "weights", "KV": "kv", "RS": "kv", "compute": "compute", "output": "other"}


class LogTail:
    """Collects log lines; warnings and errors also go to `echo`, for the crash record."""

    def __init__(self, echo: Callable[[str], None]) -> None:
        self._echo = echo
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._buffers: dict[tuple[str, str], int] = {}
        self._partial = ""
        self._level = 0

    def feed(self, level: int, text: str, *, counts: bool = True) -> None:
        """Handles one log callback: a line with its newline, or a part of a line (level CONT).

        `counts` is False for the log of another library, whose buffers do not belong to the model.
        """
        if level != _LEVEL_CONT:
            self._level = level
        *lines, partial = (self._partial + text).split("\n")
        self._partial = partial[:MOST_LINE_CHARS]
        for line in lines:
            self._line(line[:MOST_LINE_CHARS], counts=counts)

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

    def forget_context(self) -> None:
        """Removes all buffers except the weights, because the context was freed."""
        self._buffers = {key: size for key, size in self._buffers.items() if key[1] == "weights"}

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

    def buffers(self, names: dict[str, str]) -> tuple[Buffer, ...]:
        """The allocated buffers. `names` maps device names of ggml to device ids; other buffers are host memory.

        A buffer type such as `CUDA_Host` or `CPU_REPACK` belongs to the host; `CUDA0_Split` or `RPC0[host:port]`
        belongs to its device.
        """
        found: dict[tuple[str, str], int] = {}
        for (where, kind), size in self._buffers.items():
            owner = next((ours for ggml, ours in names.items() if _belongs(where, ggml)), "cpu")
            found[owner, kind] = found.get((owner, kind), 0) + size
        return tuple(Buffer(device, kind, size) for (device, kind), size in sorted(found.items()))


def _belongs(where: str, device: str) -> bool:
    return where == device or where.startswith((device + "_", device + "["))
