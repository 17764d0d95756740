"""Scheduling attributes of event loop threads: short time slices for the thread, defaults for its children."""

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

from headgate.shared import event_loop

SHORTEST = int(event_loop.SLICE_SECONDS * 1e9)

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
as_usual = pytest.mark.skipif(
    hasattr(os, "getpriority") and os.getpriority(os.PRIO_PROCESS, 0) != 0, reason="this process has another niceness"
)


def granted() -> int:
    """The slice of the calling thread in nanoseconds, 0 before Linux 6.12."""
    attributes = event_loop._Attributes()
    number = event_loop._SYSCALLS[platform.machine()][1]
    assert ctypes.CDLL(None).syscall(number, 0, ctypes.byref(attributes), ctypes.sizeof(attributes), 0) == 0
    return int(attributes.sched_runtime)


def on_a_thread(work: Any) -> Any:
    """The result of `work` on a new thread."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(work()))
    thread.start()
    thread.join(10)
    return found[0]


@linux
@as_usual
def test_loop_thread_has_short_slices_and_its_children_do_not() -> None:
    usual = granted()

    def measure() -> tuple[int, int, int]:
        event_loop.new_event_loop().close()
        code = "from tests.unit.test_event_loop import granted; print(granted())"
        child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        return granted(), on_a_thread(granted), int(child.stdout)

    mine, threads, childs = on_a_thread(measure)
    assert mine == (SHORTEST if usual else 0), "Linux before 6.12 has no slices per thread"
    assert (threads, childs) == (usual, usual)
    assert granted() == usual


def _niceness() -> int:
    return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())


@linux
@as_usual
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="needs root to lower the niceness")
def test_privileged_thread_has_larger_share_and_its_children_do_not() -> None:
    def measure() -> tuple[bool, int, int, int]:
        taken = event_loop.request_short_slices()
        child = subprocess.run(
            [sys.executable, "-c", "import os; print(os.getpriority(os.PRIO_PROCESS, 0))"],
            capture_output=True, text=True, check=True, timeout=60,
        )  # fmt: skip
        return taken, _niceness(), on_a_thread(_niceness), int(child.stdout)

    assert on_a_thread(measure) == (True, event_loop.NICENESS, 0, 0)


@linux
@as_usual
@pytest.mark.skipif(hasattr(os, "geteuid") and os.geteuid() != 0, reason="needs root to change the user")
def test_unprivileged_thread_has_short_slices() -> None:
    code = (
        "import os; from tests.unit.test_event_loop import _niceness, granted; from headgate.shared import event_loop;"
        "usual = granted(); os.setuid(65534); "
        "print(event_loop.request_short_slices(), _niceness(), granted() < usual or not usual)"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert child.stdout.split() == ["True", "0", "True"]


@linux
def test_thread_with_its_own_policy_or_niceness_is_unchanged() -> None:
    """Otherwise its children would lose that priority."""
    usual = granted()

    def batch() -> tuple[bool, int, int]:
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
        return event_loop.request_short_slices(), granted(), os.sched_getscheduler(0)

    def nice() -> tuple[bool, int]:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 5)
        return event_loop.request_short_slices(), granted()

    assert on_a_thread(batch) == (False, usual, os.SCHED_BATCH)
    assert on_a_thread(nice) == (False, usual)


@pytest.mark.parametrize("machine", ["x86_64", "riscv64"])
def test_loop_works_without_sched_setattr(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(event_loop, "_SYSCALLS", {"x86_64": (100_000, 100_001)})
    assert on_a_thread(event_loop.request_short_slices) is False
    loop = on_a_thread(event_loop.new_event_loop)
    assert isinstance(loop, asyncio.AbstractEventLoop)
    loop.close()
