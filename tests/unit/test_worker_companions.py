"""Threads that compute together are told to stay off each other's core for a step after a rest, and no other thread."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from inference.worker import companions
from inference.worker.companions import REST_SECONDS, Companions, name_thread

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or len(os.sched_getaffinity(0)) < 2, reason="takes Linux and two cores"
)
NAME = "computing"


def on_a_thread(work: Callable[[], Any]) -> Any:
    """What `work` returns on a thread of its own; raises what it raises."""
    found: list[Any] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(20)
    if errors:
        raise errors[0]
    return found[0]


@contextmanager
def asleep() -> Iterator[int]:
    """A thread that the calling one made, as OpenMP makes its own: it has the same name."""
    leave, ids = threading.Event(), []
    here = threading.Event()

    def sleep() -> None:
        ids.append(threading.get_native_id())
        here.set()
        leave.wait(20)

    thread = threading.Thread(target=sleep)
    thread.start()
    assert here.wait(10)
    yield ids[0]
    leave.set()
    thread.join(10)


def test_companions_stay_off_the_core_of_the_first_until_the_step_is_over() -> None:
    def compute() -> tuple[set[int], set[int], set[int]]:
        name_thread(NAME)
        together = Companions()
        cores = os.sched_getaffinity(0)
        with asleep() as thread:
            together.begin(100.0)
            parted = os.sched_getaffinity(thread)
            together.end(100.2)
            return cores, parted, os.sched_getaffinity(thread)

    cores, parted, after = on_a_thread(compute)
    assert len(parted) == len(cores) - 1
    assert parted < cores
    assert after == cores


def test_steps_in_a_row_cost_no_look() -> None:
    def compute() -> set[int]:
        name_thread(NAME)
        together = Companions()
        together.end(100.0)
        with asleep() as thread:
            together.begin(100.0 + REST_SECONDS / 2)
            return os.sched_getaffinity(thread)

    assert on_a_thread(compute) == os.sched_getaffinity(0)


def test_threads_of_another_name_run_where_they_did() -> None:
    """Also where nobody has a name of its own: then all of the process would be companions."""

    def compute(name: str) -> set[int]:
        with asleep() as thread:
            if name:
                name_thread(name)
            Companions().begin(100.0)
            return os.sched_getaffinity(thread)

    cores = os.sched_getaffinity(0)
    assert on_a_thread(lambda: compute(NAME)) == cores
    assert on_a_thread(lambda: compute("")) == cores


def test_one_core_is_for_all() -> None:
    def compute() -> set[int]:
        name_thread(NAME)
        with asleep() as thread:
            before = os.sched_getaffinity(0)
            os.sched_setaffinity(0, {min(before)})
            Companions().begin(100.0)
            return os.sched_getaffinity(thread)

    assert on_a_thread(compute) == os.sched_getaffinity(0)


@pytest.mark.parametrize("refused", ["sched_getaffinity", "sched_setaffinity"])
def test_a_kernel_that_refuses_computes_all_the_same(refused: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> set[int]:
        raise PermissionError(refused)

    def compute() -> bool:
        name_thread(NAME)
        together = Companions()
        with asleep():
            monkeypatch.setattr(os, refused, refuse)
            together.begin(100.0)
            together.end(100.2)
        return True

    assert on_a_thread(compute)


def test_a_thread_that_ended_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def compute() -> bool:
        name_thread(NAME)
        together = Companions()
        with asleep():
            together.begin(100.0)
        together.end(100.2)
        return True

    assert on_a_thread(compute)
    monkeypatch.setattr(companions, "_TASKS", Path("/proc/self/nowhere"))
    assert on_a_thread(compute)
