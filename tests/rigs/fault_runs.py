"""What the suites of faults under load share: their command, users, and planned faults that start at their times."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shutil
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Self

from benchmarks.figures import Bar
from tests.chaos.judge import Violation
from tests.rigs.stack import REPOSITORY

Figures = dict[str, Any]
NO_ERROR = "the suite itself has no error"


@dataclass(frozen=True)
class Settings:
    """One run. `kinds` None: all kinds; `plants` are names of defects. No fault begins after `max_seconds`.

    With `settles` false, the final checks are left out.
    """

    seed: int
    events: int
    gap_seconds: float
    plants: tuple[str, ...] = ()
    kinds: tuple[Any, ...] | None = None
    max_seconds: float = math.inf
    settles: bool = True


@dataclass(frozen=True)
class Suite:
    """`make GOAL` with its help `about`. `run` returns the figures of a run below an empty folder.

    `planted` gives the short run, by defect and seed, that must report a violation of `promises[defect]`.
    """

    name: str
    goal: str
    about: str | None
    events: int
    kinds: type[StrEnum]
    settings: type[Settings]
    planted: Callable[[str, int], Settings]
    promises: Mapping[str, str]
    run: Callable[[Path, Any], Coroutine[Any, Any, Figures]]
    lines: Callable[[Figures], Iterable[str]]
    bars: Callable[[Figures, int], Iterable[Bar]]


def _arguments(suite: Suite) -> argparse.Namespace:
    results = REPOSITORY / "benchmarks" / "results" / f"{suite.goal.replace('-', '_')}.json"
    parser = argparse.ArgumentParser(prog=f"make {suite.goal}", description=suite.about)
    parser.add_argument("--events", type=int, default=suite.events)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--gap", type=float, default=1.2)
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault begins after this number of minutes")
    parser.add_argument("--plants", default="all", help="all, none, or names of defects")
    parser.add_argument("--kinds", default="", help="only these, comma-separated")
    parser.add_argument("--results", type=Path, default=results)
    return parser.parse_args()


def main(suite: Suite) -> int:
    """A long run, then a short one per planted defect; prints and saves. Returns 1 if a bar is missed."""
    given = _arguments(suite)
    kinds = tuple(suite.kinds(name) for name in given.kinds.split(",")) if given.kinds else None
    bars: list[Bar] = []
    runs: dict[str, Figures] = {}
    if given.events:
        most = 60 * given.minutes
        settings = suite.settings(given.seed, given.events, given.gap, kinds=kinds, max_seconds=most)
        runs["run"] = _one(suite, settings)
        bars += suite.bars(runs["run"], given.events)
    for name in {"all": list(suite.promises), "none": []}.get(given.plants, given.plants.split(",")):
        runs[name] = _one(suite, suite.planted(name, given.seed))
        violated = [one["promise"] for one in runs[name]["violations"]]
        found = 0 if NO_ERROR in violated else violated.count(suite.promises[name])
        bars.append(Bar(f"{suite.name}_finds_{name}", found, "violations", ">=", 1))
    given.results.parent.mkdir(parents=True, exist_ok=True)
    given.results.write_text(json.dumps(runs, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    _print(bar.line() for bar in bars)
    return 0 if all(bar.reached for bar in bars) else 1


def _one(suite: Suite, settings: Settings) -> Figures:
    root = Path(tempfile.mkdtemp(prefix=f"hg-{suite.name}-"))
    result = asyncio.run(suite.run(root / "x", settings))
    _print(suite.lines(result))
    if result["violations"] and not settings.plants:
        _print([f"  logs: {root}"])
    else:
        shutil.rmtree(root)
    return result


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


def report(name: str, result: Figures, details: Iterable[str]) -> Iterator[str]:
    """The text about a run, with `details` before the violations."""
    plants = f", with {', '.join(result['plants'])}" if result["plants"] else ""
    yield (
        f"{name}, seed {result['seed']}{plants}: {result['events']} of {result['planned']} events took effect in "
        f"{result['seconds']:.0f} s, under {result['requests']} requests"
    )
    yield from details
    for one in result["violations"][:60]:
        yield f"  VIOLATION at {one['at']:.1f} s: {one['promise']}: {one['seen']}"


def listed(result: Figures, *names: str) -> Iterator[str]:
    """A line for each of these figures that have several values."""
    for name in names:
        yield f"  {name}: {', '.join(f'{key} {value}' for key, value in result[name].items())}"


class Users:
    """Tasks that send requests until `end`. A context manager, which cancels those that are left."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._stopping = asyncio.Event()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def end(self) -> None:
        """No user sends a new request; returns when the last answer is over."""
        self._stopping.set()
        while self._tasks:
            await asyncio.wait(set(self._tasks))

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _pause(self, seconds: float) -> None:
        """Waits, but not longer than until `end`."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)


def stopwatch() -> Callable[[], float]:
    """A function that returns the seconds since this call."""
    time = asyncio.get_running_loop().time
    began = time()
    return lambda: time() - began


async def inject(
    planned: Sequence[Any],
    one: Callable[[Any], Awaitable[None]],
    clock: Callable[[], float],
    max_at_once: int,
    max_seconds: float,
) -> None:
    """Starts every event at its time, or later when fewer than `max_at_once` run; returns when the last one is over.

    None starts after `max_seconds`.
    """
    start = clock()
    room = asyncio.Semaphore(max_at_once)

    async def run(event: Any) -> None:
        try:
            await one(event)
        finally:
            room.release()

    async with asyncio.TaskGroup() as under_way:
        for event in sorted(planned, key=lambda item: item.at_seconds):
            await asyncio.sleep(max(0.0, start + event.at_seconds - clock()))
            await room.acquire()
            if clock() - start > max_seconds:
                break
            under_way.create_task(run(event), name=f"{event.number} {event.kind}")


@contextlib.contextmanager
def reported_errors(violations: list[Violation], clock: Callable[[], float]) -> Iterator[None]:
    """Turns an error of the suite into a violation, so that the figures up to it are reported."""
    try:
        yield
    except Exception as error:
        violations.append(Violation(NO_ERROR, clock(), "".join(traceback.format_exception(error)).rstrip()))


@contextlib.asynccontextmanager
async def during(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Runs `work`, which does not end by itself, during the block."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
