"""Creates the event loop of a service process and asks the kernel to run its thread without delay.

A loop that shares its cores with computing threads waits for up to a whole time slice (1.4 ms on two cores) at each
wake-up, in every process that a token passes. Linux runs threads with short slices earlier, within their share of the
core. In about 2 % of the wake-ups of a small model the loop has used up its share and waits for a tick (4 ms), so it
also asks for a larger share, which needs the right to lower its niceness.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import logging
import os
import platform
import sys

log = logging.getLogger(__name__)

SLICE_SECONDS = 0.0001
"""The shortest slice that Linux grants (`sched_setattr(2)`: a `sched_runtime` of 0.1 to 100 ms, since Linux 6.12)."""

NICENESS = -3
"""About twice the usual share. Needs CAP_SYS_NICE, or RLIMIT_NICE of 23 or more."""

_SYSCALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}
"""Numbers of `sched_setattr` and `sched_getattr`, for which not every C library has a function."""

_RESET_ON_FORK = 1
"""Threads and processes that this thread starts get the default slice and niceness."""


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop for the calling thread, with short time slices: uvloop's where uvloop is installed, else asyncio's."""
    request_short_slices()
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Attributes(ctypes.Structure):
    """`struct sched_attr`, first version; times in nanoseconds."""

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


def request_short_slices() -> bool:
    """Asks for short slices and for NICENESS for the calling thread. Returns whether the kernel accepted the slices.

    Changes nothing on other systems than Linux, on other processors than x86-64 and ARM64, and for a thread whose
    policy or niceness is not the default. Linux before 6.12 accepts the request for slices without effect.
    """
    if sys.platform != "linux" or (numbers := _SYSCALLS.get(platform.machine())) is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    attributes = _Attributes()
    size = ctypes.sizeof(attributes)
    is_read: bool = libc.syscall(numbers[1], 0, ctypes.byref(attributes), size, 0) == 0
    if not is_read or attributes.sched_policy != os.SCHED_OTHER or attributes.sched_nice:
        return False
    attributes.sched_runtime = int(SLICE_SECONDS * 1e9)
    attributes.sched_flags |= _RESET_ON_FORK
    for niceness in (NICENESS, 0):
        attributes.sched_nice = niceness
        if libc.syscall(numbers[0], 0, ctypes.byref(attributes), 0) == 0:
            return True
        reason = errno.errorcode.get(ctypes.get_errno(), "unknown")
        log.debug("the kernel refuses short time slices with niceness %d (%s)", niceness, reason)
    return False
