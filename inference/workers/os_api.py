"""Operating system calls for the supervision of workers: exits, memory, the socket directory."""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import select
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import StateDir

LATELY_SECONDS = 5.0
"""An exit within this time after an out-of-memory kill is attributed to it."""
_SHORT_PATH = 90
"""Longest directory for sockets, in bytes: the path of a Unix socket has at most 108 (104 on macOS)."""


def exit_descriptor(pid: int) -> int | None:
    """A descriptor that becomes readable at the exit of `pid` (a pidfd or a kqueue); None where there is neither."""
    if hasattr(os, "pidfd_open"):
        with contextlib.suppress(OSError):  # not supported here: the end of the link shows the exit
            return os.pidfd_open(pid)
    if hasattr(select, "kqueue"):
        return _kqueue(pid)
    return None


def _kqueue(pid: int) -> int | None:
    queue = select.kqueue()  # type: ignore[attr-defined, unused-ignore]
    event = select.kevent(  # type: ignore[attr-defined, unused-ignore]
        pid,
        filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined, unused-ignore]
        flags=select.KQ_EV_ADD,  # type: ignore[attr-defined, unused-ignore]
        fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined, unused-ignore]
    )
    try:
        queue.control([event], 0)
        return os.dup(queue.fileno())
    except OSError:  # it has already ended: the end of the link shows it
        return None
    finally:
        queue.close()


def anonymous_memory() -> int | None:
    """A descriptor of an anonymous memory file, freed with its last descriptor; None when not supported."""
    if not hasattr(os, "memfd_create"):
        return None
    with contextlib.suppress(OSError):  # a sandbox that forbids it
        return os.memfd_create("headgate-sequences", os.MFD_CLOEXEC)
    return None


def private_bytes(pid: int, arena_bytes: int = 0) -> int | None:
    """Host memory of `pid` in bytes: anonymous and shared anonymous pages in use, without mapped files.

    `arena_bytes` of the shared pages belong to an arena and do not count.

    None without /proc and for an ended process. Reads two counters, so it is cheap for large processes.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        own, shared = (int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
        return own + max(0, shared - arena_bytes)
    except (OSError, KeyError, ValueError, IndexError):
        return None


def socket_directory(state: StateDir) -> Path:
    """The private directory for sockets of a state directory, with a short enough path."""
    own = state.root / "run"
    if len(os.fsencode(own)) <= _SHORT_PATH:
        return state.directory("run")
    digest = hashlib.sha256(os.fsencode(state.root)).hexdigest()[:16]
    path = Path(tempfile.gettempdir()) / f"headgate-{os.getuid()}-{digest}"
    try:
        path.mkdir(mode=0o700, exist_ok=True)
        status = path.lstat()
    except OSError as error:
        raise HeadgateError(f"cannot use {path} for sockets ({error.strerror})") from error
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or path.is_symlink():
        raise HeadgateError(
            f"{path}, which is used because {own} is too long for sockets, belongs to another user or is not private; "
            f"remove it, or set HEADGATE_STATE_DIR to a path of at most {_SHORT_PATH - len('/run')} bytes"
        )
    return path


class KernelOomKills:
    """The kernel's counter of out-of-memory kills and the time of its last rise. Times are seconds of one clock.

    The signal alone does not show whether the out-of-memory killer or another process ended a worker. The counter
    `oom_kill` does, because it rises before the signal is sent: in `memory.events` (control groups v2) or
    `memory.oom_control` (v1) of the group, else in `/proc/vmstat` for the whole machine.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._files = [path for path in _files(root) if _count(path) is not None][:1]
        self._seen = self._read()
        self._rose_at = -math.inf

    def update(self, now: float) -> None:
        """Reads the counter. Must be called often; it is cheap."""
        count = self._read()
        if count is not None and self._seen is not None and count > self._seen:
            self._rose_at = now
        self._seen = count

    def is_recent(self, now: float) -> bool:
        """Whether the counter rose within LATELY_SECONDS."""
        self.update(now)
        return now - self._rose_at <= LATELY_SECONDS

    def _read(self) -> int | None:
        return _count(self._files[0]) if self._files else None


def _files(root: Path) -> Iterator[Path]:
    """Files that may contain the counter, the group of this process first."""
    for base, here, is_v2 in cgroup_folders(root):
        name = "memory.events" if is_v2 else "memory.oom_control"
        yield from (here / name, base / name)
    yield root / "proc/vmstat"


def cgroup_folders(root: Path = Path("/")) -> Iterator[tuple[Path, Path, bool]]:
    """(root folder, folder of this process, whether it is v2) of each hierarchy of control groups for memory."""
    try:
        memberships = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in memberships:
        number, controllers, path = line.split(":", 2)
        is_v2 = number == "0" and not controllers
        if is_v2 or "memory" in controllers.split(","):
            base = root / ("sys/fs/cgroup" if is_v2 else "sys/fs/cgroup/memory")
            yield base, base / path.lstrip("/"), is_v2


def _count(path: Path) -> int | None:
    try:
        pairs = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return next((int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] == "oom_kill"), None)
    except (OSError, ValueError):
        return None
