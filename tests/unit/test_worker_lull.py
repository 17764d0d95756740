"""Work that disturbs is done once, when nobody has been served for a while."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from inference.worker.lull import LULL_SECONDS, Lull


class Timers:
    """A clock that a test turns."""

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
            assert seconds == LULL_SECONDS
            call()


class AtOnce(Executor):
    """Runs what it is given."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        fn(*args, **kwargs)
        return Future()


def test_it_is_done_in_the_first_lull_and_never_again() -> None:
    done: list[str] = []
    timers = Timers()
    lull = Lull(lambda: done.append("read"), AtOnce(), timers.later)
    lull.busy()
    timers.pass_by()
    assert done == []
    lull.quiet()
    assert done == []
    timers.pass_by()
    assert done == ["read"]
    lull.busy()
    lull.quiet()
    timers.pass_by()
    assert done == ["read"]


def test_who_asks_again_in_time_puts_it_off() -> None:
    done: list[str] = []
    timers = Timers()
    lull = Lull(lambda: done.append("read"), AtOnce(), timers.later)
    for _ in range(3):
        lull.quiet()
        lull.busy()
    timers.pass_by()
    assert (done, timers.cancelled) == ([], 3)
    lull.quiet()
    lull.quiet()
    timers.pass_by()
    assert done == ["read"]
