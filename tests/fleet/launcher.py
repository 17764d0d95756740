"""Runs `headgate` with planted defects and with a wall clock that the suite can move.

`python -m tests.fleet.launcher PLANTS gateway ...`: PLANTS is a comma-separated list (or `none`). The file named in
FLEET_CLOCK holds the offset of the wall clock in seconds; the monotonic clock stays as it is.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from pathlib import Path

from headgate.shared import child_process

CLOCK_ENV = "FLEET_CLOCK"
_OFFSET = struct.Struct("d")


def write_clock(path: Path, offset_seconds: float) -> None:
    """Moves the wall clock of the processes that use this file."""
    if not path.exists():
        path.write_bytes(_OFFSET.pack(0.0))
    with path.open("r+b") as file:
        file.write(_OFFSET.pack(offset_seconds))


def use_clock(path: Path) -> None:
    """Replaces `time.time` and `time.time_ns`; must run before other modules import them."""
    with path.open("rb") as file:
        shared = mmap.mmap(file.fileno(), _OFFSET.size, prot=mmap.PROT_READ)
    real, unpack = time.time, _OFFSET.unpack_from
    time.time = lambda: real() + unpack(shared)[0]
    time.time_ns = lambda: int(time.time() * 1e9)


def main(argv: list[str]) -> int:
    names, *words = argv
    child_process.die_with_parent(os.environ)
    if clock := os.environ.get(CLOCK_ENV):
        use_clock(Path(clock))
    from tests.fleet.defects import PLANTS

    for name in names.split(","):
        if name != "none":
            PLANTS[name]()
    from headgate.cli.main import main as headgate

    return headgate(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
