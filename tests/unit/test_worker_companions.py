"""Threads that compute together are told to stay off each other's core for a step after a rest, and no other thread."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.protocol import Code
from inference.worker.backend import OK, BatchRow, Decode
from inference.worker.cores import thread_names
from inference.worker.cores.core_sparing_context import CrewedBackend
from inference.worker.cores.thread_names import name_thread
from inference.worker.cores.thread_placement import REST_SECONDS, Companions
from inference.worker.engine.embedder import Embedder, Vector
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.steps import Row
from inference.worker.worker_errors import WorkerError
from tests.rigs.fake_backend import FakeBackend

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


def test_a_companion_keeps_the_cores_that_somebody_gave_it() -> None:
    def compute() -> tuple[set[int], set[int], set[int]]:
        name_thread(NAME)
        together = Companions()
        with asleep() as thread:
            only = {min(os.sched_getaffinity(0))}
            os.sched_setaffinity(thread, only)
            together.begin(100.0)
            during = os.sched_getaffinity(thread)
            together.end(100.2)
            return only, during, os.sched_getaffinity(thread)

    only, during, after = on_a_thread(compute)
    assert during == after == only


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
    monkeypatch.setattr(thread_names, "_TASKS", Path("/proc/self/nowhere"))
    assert on_a_thread(compute)


class Recorded(Companions):
    """Notes when it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    def begin(self, now: float) -> None:
        self.asked.append("begin")

    def end(self, now: float) -> None:
        self.asked.append("end")


def test_every_step_of_the_engine_tells_its_companions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with prompts, steps that only decode, and one that raises."""
    together, fake = Recorded(), FakeBackend()

    def decode(rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        together.asked.append("step")
        if rows[0].start == 7:
            raise RuntimeError("a defect")
        return OK, [0]

    monkeypatch.setattr(fake, "decode", decode)
    backend = CrewedBackend(fake, lambda _count: None, companions=together)
    backend.decode([Row(1, 0, 0, [1, 2, 3], True)])
    backend.decode([Row(1, 0, 3, [1], True)])
    with pytest.raises(RuntimeError):
        backend.decode([Row(1, 0, 7, [1], True)])
    assert together.asked == ["begin", "step", "end"] * 3


class Pooling:
    """Pools whatever comes."""

    n_slots, pool_tokens = 1, 10

    def __init__(self, asked: list[str]) -> None:
        self.asked = asked

    def pool(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[np.ndarray]]:
        self.asked.append("step")
        return OK, [np.ones(2, np.float32) for _row in rows]


async def test_every_step_of_the_embedder_does() -> None:
    together = Recorded()
    loop = asyncio.get_running_loop()
    embedder = Embedder(Pooling(together.asked), 4, OutputDispatcher(loop).deliver, print, companions=together)
    embedder.start()
    ticket: Ticket[Vector] = Ticket(loop)
    embedder.submit([[1, 2]], ticket)
    assert await ticket.take(10)
    assert embedder.stop(WorkerError(Code.MODEL_FAILED, "over"))
    assert together.asked == ["begin", "step", "end"]
