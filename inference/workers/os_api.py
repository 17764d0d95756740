"""Operating system calls for the supervision of workers: exit descriptors, anonymous memory, socket directory."""

from __future__ import annotations

import contextlib
import hashlib
import os
import select
import tempfile
from pathlib import Path

from headgate.shared.errors import HeadgateError
from headgate.shared.state_directory import StateDir

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


def private_bytes(pid: int) -> int | None:
    """Host memory of `pid` in bytes: anonymous and shared anonymous pages in use, without mapped files.

    None without /proc and for an ended process. Reads two counters, so it is cheap for large processes.
    """
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
        fields = dict(line.split(":", 1) for line in lines if line.startswith("Rss"))
        return sum(int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))
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
            f"{path} belongs to another user or is not private; remove it, or set HEADGATE_STATE_DIR to a shorter path"
        )
    return path
