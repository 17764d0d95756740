"""Ends what a service that was killed left running, and marks what this one starts; starts nothing itself.

Children die with the service that started them, by the kernel. One may escape: its tie was cut before it held, or it
hung in a driver while its parent died. So every child, and what it starts, inherits a random token in its environment,
and the state directory says which token the last service gave out and since when. A process is ended only if it has
that token and began after that service; its pid alone says nothing.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headgate.shared.state import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file

log = logging.getLogger(__name__)

FAMILY_ENV = "HEADGATE_FAMILY"
PATIENCE_SECONDS = 5.0
"""For the ended to be gone. Who is still there holds on to a driver, and its memory counts as somebody else's."""
MOST_FAMILIES = 8
_FILE = "family.json"
_START_FIELD = 22
"""Of /proc/PID/stat, as proc(5) counts: when the process began, in clock ticks since the machine did."""


@dataclass(frozen=True, slots=True)
class Family:
    """One service and what it starts: its token, its own pid, and when it began, in clock ticks."""

    token: str
    pid: int
    began: int


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    began: int


def take_over(state: StateDir, environ: MutableMapping[str, str], proc: Path = Path("/proc")) -> list[int]:
    """Ends what earlier services with this state directory left, and gives this one's token to `environ`.

    Returns the pids it ended. Where there is no /proc, nothing is found. Blocks for PATIENCE_SECONDS at most.
    """
    ended: list[int] = []
    stay: list[Family] = []
    for family in (
        load_state_file(state.root / _FILE, _families, "processes that a killed service left are not found") or []
    ):
        if began(family.pid, proc) == family.began:
            continue  # it lives: another service, with a lock of its own
        members = list(_members(family, proc))
        left = _end(members, proc)
        ended += [member.pid for member in members if member not in left]
        if left:
            stay.append(family)
            log.error("left by a service that was killed, and cannot be ended: %s", _named(left))
    if ended:
        log.warning("ended what a service that was killed had left: %s", ", ".join(f"pid {pid}" for pid in ended))
    own = Family(secrets.token_hex(16), os.getpid(), began(os.getpid(), proc) or 0)
    environ[FAMILY_ENV] = own.token
    families = [asdict(family) for family in (*stay, own)][-MOST_FAMILIES:]
    StateFileWriter("what children are marked with").write(lambda: state.file(_FILE), json.dumps(families).encode())
    return ended


def began(pid: int, proc: Path = Path("/proc")) -> int | None:
    """When a process began, in clock ticks since the machine did; None for none, and for one that has ended."""
    try:
        fields = (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].split()
        return None if fields[0] in (b"Z", b"X") else int(fields[_START_FIELD - 3])
    except (OSError, ValueError, IndexError):
        return None


def _families(data: Any) -> list[Family]:
    """The services in the file's content."""
    return [Family(str(one["token"]), int(one["pid"]), int(one["began"])) for one in data if one["token"]]


def _members(family: Family, proc: Path) -> Iterator[_Member]:
    mark = f"{FAMILY_ENV}={family.token}".encode()
    for entry in proc.iterdir() if proc.is_dir() else ():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            start = began(int(entry.name), proc)
            if start is not None and start >= family.began:
                yield _Member(int(entry.name), start)


def _end(members: Sequence[_Member], proc: Path) -> list[_Member]:
    """Kills them; returns who is still there. A descriptor holds each pid, so that it cannot become somebody else's."""
    with contextlib.ExitStack() as open_descriptors:
        waits = []
        for member in members:
            with contextlib.suppress(OSError):  # it ended; or a sandbox, and it is told as one that stays
                descriptor = os.pidfd_open(member.pid)
                open_descriptors.callback(os.close, descriptor)
                if began(member.pid, proc) == member.began:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    waits.append(descriptor)
        deadline = time.monotonic() + PATIENCE_SECONDS
        for descriptor in waits:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    return [member for member in members if began(member.pid, proc) == member.began]


def _named(members: Sequence[_Member]) -> str:
    return ", ".join(f"pid {member.pid}" for member in members)
