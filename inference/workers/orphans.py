"""Ends processes that a killed service left running.

The kernel ends the children of a service with it. A child can survive when the service ended before the child had
requested that, or when the child hung in a driver. Therefore all children inherit a random token in their
environment, and the state directory contains the token and start time of the last services. A process is ended only if
it has the token of an ended service and is younger than that service; a pid alone is not enough.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import signal
import time
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file

log = logging.getLogger(__name__)

FAMILY_ENV = "HEADGATE_FAMILY"
KILL_SECONDS = 5.0
"""How long killed processes may take to end. One that hangs in a driver stays, and its memory counts as foreign."""
MAX_FAMILIES = 8
_FILE = "family.json"
_START_FIELD = 22
"""Field of /proc/PID/stat (proc(5)) with the start time of the process in clock ticks since boot."""


@dataclass(frozen=True, slots=True)
class Family:
    """A service and its descendants: their token, the pid of the service, and its start time."""

    token: str
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class _Member:
    pid: int
    start_ticks: int


def end_orphans(state: StateDir, environ: MutableMapping[str, str], proc: Path = Path("/proc")) -> list[int]:
    """Ends the orphans of earlier services with this state directory, and puts a new token into `environ`.

    Returns the pids of ended processes. Finds none without /proc. Blocks for at most KILL_SECONDS per earlier service.
    """
    ended: list[int] = []
    stay: list[Family] = []
    for family in load_state_file(state.root / _FILE, _families, "orphans of a killed service are not found") or []:
        if start_ticks(family.pid, proc) == family.start_ticks:
            stay.append(family)  # it still runs: another service with a lock of its own
            continue
        members = list(_members(family, proc))
        left = _end(members, proc)
        ended += [member.pid for member in members if member not in left]
        if left:
            stay.append(family)
            log.error(
                "cannot end orphaned processes of a killed service (%s): their memory counts as foreign until they "
                "end; end them or restart the machine",
                _named(left),
            )
    if ended:
        log.warning("ended orphaned processes of a killed service: %s", ", ".join(f"pid {pid}" for pid in ended))
    own = Family(secrets.token_hex(16), os.getpid(), start_ticks(os.getpid(), proc) or 0)
    environ[FAMILY_ENV] = own.token
    families = [{"token": family.token, "pid": family.pid, "began": family.start_ticks} for family in (*stay, own)][
        -MAX_FAMILIES:
    ]
    StateFileWriter("the token of child processes").write(state.root / _FILE, families)
    return ended


def start_ticks(pid: int, proc: Path = Path("/proc")) -> int | None:
    """The start time of a process in clock ticks since boot; None when it does not exist or has ended."""
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
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if mark not in (entry / "environ").read_bytes().split(b"\0"):
                continue
            start = start_ticks(int(entry.name), proc)
            if start is not None and start >= family.start_ticks:
                yield _Member(int(entry.name), start)


def _end(members: Sequence[_Member], proc: Path) -> list[_Member]:
    """Kills the processes and returns those that still run. A pidfd protects against reuse of the pid."""
    with contextlib.ExitStack() as open_descriptors:
        waits = []
        for member in members:
            with contextlib.suppress(
                OSError
            ):  # it has ended; or pidfds are not supported, and it is reported as running
                descriptor = os.pidfd_open(member.pid)
                open_descriptors.callback(os.close, descriptor)
                if start_ticks(member.pid, proc) == member.start_ticks:
                    signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                    waits.append(descriptor)
        deadline = time.monotonic() + KILL_SECONDS
        for descriptor in waits:
            select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))
    return [member for member in members if start_ticks(member.pid, proc) == member.start_ticks]


def _named(members: Sequence[_Member]) -> str:
    return ", ".join(f"pid {member.pid}" for member in members)
