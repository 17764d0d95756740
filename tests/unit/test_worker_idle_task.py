"""A task runs once after an idle period."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from inference.worker.engine.idle_work import IDLE_SECONDS, IdleTask


class Timers:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.set: list[tuple[float, Callable[[], object]]] = []
        self.cancelled = 0

    def later(self, seconds: float, call: Callable[[], object]) -> Timers:
        self.set.append((seconds, call))
        return self

    def cancel(self) -> None:
        self.cancelled += 1
        self.set.pop()

    def pass_by(self) -> None:
        while self.set:
            seconds, call = self.set.pop()
            assert seconds == IDLE_SECONDS
            call()


class AtOnce(Executor):
    """Runs each job in `submit`."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        job: Future[Any] = Future()
        try:
            job.set_result(fn(*args, **kwargs))
        except BaseException as error:
            job.set_exception(error)
        return job


def test_task_runs_once_in_the_first_idle_period() -> None:
    done: list[str] = []
    timers = Timers()
    task = IdleTask(lambda: done.append("read"), AtOnce(), timers.later)
    task.busy()
    timers.pass_by()
    assert done == []
    task.idle()
    assert done == []
    timers.pass_by()
    assert done == ["read"]
    task.busy()
    task.idle()
    timers.pass_by()
    assert done == ["read"]


def test_new_request_postpones_the_task() -> None:
    done: list[str] = []
    timers = Timers()
    task = IdleTask(lambda: done.append("read"), AtOnce(), timers.later)
    for _ in range(3):
        task.idle()
        task.busy()
    timers.pass_by()
    assert (done, timers.cancelled) == ([], 3)
    task.idle()
    task.idle()
    timers.pass_by()
    assert done == ["read"]


def test_task_that_returns_true_runs_again_in_a_later_idle_period() -> None:
    done: list[str] = []
    timers = Timers()

    def work() -> bool:
        done.append("a part")
        return len(done) < 3

    task = IdleTask(work, AtOnce(), timers.later)
    for parts in (1, 2, 3, 3):
        task.busy()
        task.idle()
        timers.pass_by()
        assert len(done) == parts


def test_failed_or_cancelled_task_is_not_repeated() -> None:
    done: list[str] = []
    timers = Timers()

    def work() -> bool:
        done.append("tried")
        raise ArithmeticError

    class Counting(AtOnce):
        submits = 0

        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.submits += 1
            return super().submit(fn, *args, **kwargs)

    class Never(Counting):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
            self.submits += 1
            job: Future[Any] = Future()
            job.cancel()
            job.set_running_or_notify_cancel()
            return job

    for executor, worked in ((Counting(), work), (Never(), work), (Counting(), lambda: "done")):
        task = IdleTask(worked, executor, timers.later)
        for _ in range(2):
            task.idle()
            timers.pass_by()
        assert executor.submits == 1
    assert done == ["tried"]
