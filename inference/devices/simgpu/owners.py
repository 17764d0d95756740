"""Finds the connections of a process to a loopback port in /proc/net/tcp."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns, see proc_net_tcp."""


def ports_of(pid: int, port: int) -> frozenset[int]:
    """The client ports of the connections of `pid` to 127.0.0.1:`port`; empty for an ended process.

    Raises ValueError when the system does not show them.
    """
    if sys.platform != "linux":
        raise ValueError("the owner of a connection can be found on Linux only")
    mine = _sockets_of(pid)
    there = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}:{port:04X}"
    rows = (line.split() for line in _TABLE.read_text().splitlines()[1:])
    return frozenset(
        int(row[_LOCAL].partition(":")[2], 16) for row in rows if row[_REMOTE] == there and row[_INODE] in mine
    )


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the open sockets of a process."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime
                kind, _, inode = str(entry.readlink()).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    except FileNotFoundError:
        return set()
    except PermissionError:
        raise ValueError(f"the system does not show the connections of process {pid}") from None
    return found
