"""Keeps a process that aborts from writing its memory to disk before it is gone; never changes why or how it ends.

A process that dumps its core still counts as alive, and with a model in memory that takes many seconds: it would be
taken for one that hangs, and whoever waits for its end would wait as long.
"""

from __future__ import annotations

import contextlib
import resource

LEAST_BYTES = 1
"""No core is as small as this, and Linux starts no collector of cores (`core_pattern` with a pipe) for it either, as it
would where the limit is 0; see core(5) and the kernel's do_coredump."""


def forbid() -> None:
    """From now on this process and what it starts leave no core. The hard limit stays: `prlimit --core` allows one."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if hard != 0:
        with contextlib.suppress(ValueError, OSError):  # a system that takes no such limit dumps as it did
            resource.setrlimit(resource.RLIMIT_CORE, (LEAST_BYTES, hard))
