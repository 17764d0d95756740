"""A thread that serves is run soon after it wakes, and nothing that it starts is."""

from __future__ import annotations

import asyncio
import ctypes
import os
import platform
import subprocess
import sys
import threading
from typing import Any

import pytest

from headgate.shared import loops, timeslice

SHORTEST = int(timeslice.SECONDS * 1e9)

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux is asked")
as_usual = pytest.mark.skipif(
    hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) != 0,
    reason="somebody chose how nice this is",
)


def granted() -> int:
    """The slice of the calling thread in nanoseconds, 0 before Linux 6.12."""
    attributes = timeslice._Attributes()
    number = timeslice._NUMBERS[platform.machine()][1]
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) == 0
    return int(attributes.sched_runtime)


def on_a_thread(work: Any) -> Any:
    """What `work` returns on a thread of its own, whose slices end with it."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


@linux
@as_usual
def test_the_thread_that_makes_a_loop_has_short_slices_and_those_it_starts_have_not() -> None:
    usual = granted()

    def serve() -> tuple[int, int, int]:
        loops.new_event_loop().close()
        code = "from tests.unit.test_timeslice import granted; print(granted())"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        return granted(), on_a_thread(granted), int(child.stdout)

    mine, threads, childs = on_a_thread(serve)
    assert mine == (SHORTEST if usual else 0), "a Linux before 6.12 knows no slices of a thread"
    assert (threads, childs) == (usual, usual)
    assert granted() == usual


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
@as_usual
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="takes root, which may choose a niceness")
def test_who_may_has_a_larger_share_and_what_it_starts_has_not() -> None:
    def serve() -> tuple[bool, int, int, int]:
        taken = timeslice.shorten()
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return taken, _niceness(), on_a_thread(_niceness), int(child.stdout)

    assert on_a_thread(serve) == (True, timeslice.NICE, 0, 0)


@linux
@as_usual
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="takes root, which may become somebody else")
def test_who_may_not_has_short_slices_all_the_same() -> None:
    code = (
        "import os; from tests.unit.test_timeslice import _niceness, granted; from headgate.shared import timeslice;"
        "usual = granted(); os.setuid(65534); print(timeslice.shorten(), _niceness(), granted() < usual or not usual)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.split() == ["True", "0", "True"]


@linux
def test_a_thread_whose_policy_or_priority_somebody_chose_keeps_everything() -> None:
    """Its children would lose a priority above the usual one."""
    usual = granted()

    def batch() -> tuple[bool, int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return timeslice.shorten(), granted(), os.sched_getscheduler(0)

    def nice() -> tuple[bool, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)
        return timeslice.shorten(), granted()

    assert on_a_thread(batch) == (False, usual, os.SCHED_BATCH)
    assert on_a_thread(nice) == (False, usual)


@pytest.mark.parametrize("machine", ["x86_64", "riscv64"])
def test_a_kernel_that_knows_no_such_call_serves_all_the_same(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(timeslice, "_NUMBERS", {"x86_64": (100_000, 100_001)})
    assert on_a_thread(timeslice.shorten) is False
    loop = on_a_thread(loops.new_event_loop)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()
