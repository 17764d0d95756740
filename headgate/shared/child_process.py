"""Lets a child process end with its parent and leave no core dump, and describes exit statuses."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Mapping

PARENT_ENV = "HEADGATE_PARENT"
"""Variable with the process id of the parent, set by a parent whose children must not outlive it."""

MIN_CORE_BYTES = 1
"""The core size limit. With 1, Linux writes no core and starts no collector (`core_pattern` with a pipe); with 0 it
starts the collector. See core(5) and the kernel's do_coredump.
"""

_PR_SET_PDEATHSIG = 1


def die_with_parent(environ: Mapping[str, str]) -> None:
    """Makes this process end when the parent named in HEADGATE_PARENT ends. Does nothing without the id of a
    process in that variable.

    Linux sends SIGKILL at the parent's death; on other systems a thread waits for the parent's exit with kqueue. The
    kernel's signal fires when the *thread* that started the child ends, so parents start children from their main
    thread.

    Raises SystemExit(1) when the parent has already ended, OSError when the kernel refuses.
    """
    named = environ.get(PARENT_ENV, "")
    if not named.isdigit():
        return
    parent = int(named)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    elif hasattr(select, "kqueue"):
        threading.Thread(target=_kill_after_exit_of, args=(parent,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent:
        raise SystemExit(1)


def _kill_after_exit_of(parent: int) -> None:
    """Blocks until `parent` exits, then kills this process (macOS and the BSDs)."""
    queue = select.kqueue()  # type: ignore[attr-defined, unused-ignore]
    watch = select.kevent(  # type: ignore[attr-defined, unused-ignore]
        parent,
        filter=select.KQ_FILTER_PROC,  # type: ignore[attr-defined, unused-ignore]
        flags=select.KQ_EV_ADD,  # type: ignore[attr-defined, unused-ignore]
        fflags=select.KQ_NOTE_EXIT,  # type: ignore[attr-defined, unused-ignore]
    )
    try:
        queue.control([watch], 1, None)
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


def disable_core_dumps() -> None:
    """Makes this process and its children leave no core dump. `prlimit --core` can allow one: the hard limit stays.

    A process that dumps its core still counts as alive. With a model in memory the dump takes many seconds, and the
    process would be taken for a hanging one.
    """
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != 0:
        with contextlib.suppress(ValueError, OSError):  # a system without this limit
            resource.setrlimit(resource.RLIMIT_CORE, (MIN_CORE_BYTES, hard))


def exit_text(status: int) -> str:
    """How a process ended, from its exit status or minus the signal number: `status 3`, `signal SIGKILL`."""
    if status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
