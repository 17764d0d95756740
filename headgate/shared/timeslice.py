"""Asks the kernel to let a thread run as soon as it has something to do; decides nothing about how much it may run.

An event loop that shares its cores with threads that compute waits behind them whenever it wakes: up to a whole slice
of theirs, 1.4 ms on two cores, in every process that a token passes. Linux's scheduler runs what is due first, and what
asks for short slices is due sooner and may interrupt a longer one, as long as it has had no more than its share of the
core lately. A loop that wakes for every token of a small model has had more two times in a hundred, and then waits up
to a tick (4 ms). So it asks for a somewhat larger share as well, which the kernel grants to who may choose a niceness.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import sys

log = logging.getLogger("headgate.timeslice")

SECONDS = 0.0001
"""The shortest slice that Linux grants (`sched_setattr(2)`: a `sched_runtime` of 0.1 to 100 ms, since Linux 6.12)."""

NICE = -3
"""The niceness of a thread that may choose it (CAP_SYS_NICE, or RLIMIT_NICE of 23 and more): twice the usual share."""

_NUMBERS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""System calls `sched_setattr` and `sched_getattr`, for which not every C library has a function."""

_RESET_ON_FORK = 1
"""Threads and processes that this thread starts get the usual slice and niceness again."""


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, as of its first version; times in nanoseconds."""

    _fields_ = (
        ("size", ctypes.c_uint32),
        ("sched_policy", ctypes.c_uint32),
        ("sched_flags", ctypes.c_uint64),
        ("sched_nice", ctypes.c_int32),
        ("sched_priority", ctypes.c_uint32),
        ("sched_runtime", ctypes.c_uint64),
        ("sched_deadline", ctypes.c_uint64),
        ("sched_period", ctypes.c_uint64),
    )


def shorten() -> bool:
    """Asks for short slices for the calling thread and no other, and for NICE; whether the kernel took the slices now.

    Elsewhere than on Linux, and for a thread whose policy or priority somebody chose already, nothing is changed. A
    Linux before 6.12 takes it without effect.
    """
    if sys.platform != "linux" or (numbers := _NUMBERS.get(platform.machine())) is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    taken: bool = libc.syscall(numbers[1], 0, ctypes.byref(attributes), size, 0) == 0
    if not taken or attributes.sched_policy != os.SCHED_OTHER or attributes.sched_nice:
        return False
    attributes.sched_runtime = int(SECONDS * 1e9)
    attributes.sched_flags |= _RESET_ON_FORK
    for niceness in (NICE, 0):
        attributes.sched_nice = niceness
        if libc.syscall(numbers[0], 0, ctypes.byref(attributes), 0) == 0:
            return True
        refused = errno.errorcode.get(ctypes.get_errno(), "unknown")
        log.debug("the kernel grants no short slices with a niceness of %d (%s)", niceness, refused)
    return False
