"""Finds the connections of a process to a loopback port, in what Linux says of sockets; touches none of them."""

from __future__ import annotations

import contextlib
import socket
import sys
from pathlib import Path

_TABLE = Path("/proc/net/tcp")
_LOCAL, _REMOTE, _INODE = 1, 2, 9
"""Columns, see proc_net_tcp."""


def ports_of(pid: int, port: int) -> frozenset[int]:
    """The ports at its own end of the connections that a process has to 127.0.0.1:`port`; empty for one that is gone.

    Raises ValueError where the system does not tell.
    """
    if sys.platform != "linux":
        raise ValueError("whose a connection is can be told on Linux only")
    mine = _sockets_of(pid)
    there = f"{int.from_bytes(socket.inet_aton('127.0.0.1'), sys.byteorder):08X}:{port:04X}"
    rows = (line.split() for line in _TABLE.read_text().splitlines()[1:])
    return frozenset(
        int(row[_LOCAL].partition(":")[2], 16) for row in rows if row[_REMOTE] == there and row[_INODE] in mine
    )


def _sockets_of(pid: int) -> set[str]:
    """Inodes of the sockets it has open."""
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                kind, _, inode = str(entry.readlink()).partition(":")
                if kind == "socket":
                    found.add(inode.strip("[]"))
    except FileNotFoundError:
        return set()
    except PermissionError:
        raise ValueError(f"the system does not tell which connections process {pid} has") from None
    return found
