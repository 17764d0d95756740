"""Ties the life of a child process to that of its parent, however the parent ends; never ends the parent.

Linux lets the kernel send SIGKILL at the parent's death; elsewhere a thread waits for the parent's exit with kqueue.
The kernel's signal fires when the parent's *thread* that started the child ends, so parents start children from
their main thread.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping

PARENT_ENV = "HEADGATE_PARENT"
"""Process id of the parent, set by a parent whose children must not outlive it."""

_PR_SET_PDEATHSIG = 1


def hold(environ: Mapping[str, str]) -> None:
    """Makes this process die with the parent named in HEADGATE_PARENT; without that variable nothing happens.

    A parent that is already gone ends this process at once with status 1. Raises OSError when the kernel refuses.
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
        threading.Thread(target=_die_with, args=(parent,), name="tether", daemon=True).start()
    if os.getppid() != parent:
        raise SystemExit(1)


def _die_with(parent: int) -> None:
    """Blocks until `parent` exits, then kills this process; macOS and the BSDs."""
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
