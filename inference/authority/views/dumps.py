"""Dumps of everything about memory, and differences between two dumps.

A dump consists of nested mappings, so that two dumps are compared by path. The last MAX_DUMPS are kept in memory.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from headgate.shared.units import mib
from inference.authority.state import ModelRecord, State
from inference.authority.views import figures
from inference.errors import InvalidRequestError
from inference.protocol import Code, ModelState, Priority
from inference.workers.crash_records import CrashStore
from inference.workers.os_api import private_bytes

MAX_DUMPS = 16
_ABSENT = object()
_CRASH_FIELDS = ("time", "cause", "message", "requests", "last_lines")


class Source(Protocol):
    """The part of the authority that dumps read."""

    @property
    def state(self) -> State:
        """The current state."""
        ...

    @property
    def now(self) -> float:
        """The time of the loop's clock."""
        ...


class Dumps:
    """Creates dumps of one authority and keeps the last ones."""

    def __init__(self, authority: Source, crashes: CrashStore) -> None:
        self._authority = authority
        self._crashes = crashes
        self._numbers = itertools.count(1)
        self._kept: dict[str, dict[str, Any]] = {}

    async def make(self, large_objects: int = 0) -> dict[str, Any]:
        """A dump; includes the `large_objects` Python types that use most of the service's memory.

        They are counted in a thread, because there are hundreds of thousands of objects.
        """
        dump = self._now()
        if large_objects:
            dump["large_objects"] = await asyncio.to_thread(_largest, large_objects)
        self._kept[dump["id"]] = dump
        while len(self._kept) > MAX_DUMPS:
            del self._kept[next(iter(self._kept))]
        return dump

    def compare(self, before: str, after: str) -> dict[str, Any]:
        """The differences between two stored dumps; raises InvalidRequestError for an unknown id."""
        old, new = self._get(before, "before"), self._get(after, "after")
        return {
            "before": before,
            "after": after,
            "seconds": round(new["timestamp"] - old["timestamp"], 3),
            "changed": differences(old, new),
        }

    def _get(self, id: str, param: str) -> dict[str, Any]:
        if (dump := self._kept.get(id)) is None:
            there = ", ".join(self._kept) or "none; make one with POST /memory/dump"
            raise InvalidRequestError(
                f"unknown dump {id[:100]!r}; stored dumps: {there}", code=Code.NOT_FOUND, param=param
            )
        return dump

    def _now(self) -> dict[str, Any]:
        state, now = self._authority.state, self._authority.now
        models = state.models
        return {
            "id": f"dump-{next(self._numbers)}",
            "timestamp": round(time.time(), 3),
            "devices": figures.per_device(state, now),
            "ledger": _ledger(state),
            "models": {name: _model(state, model, now) for name, model in models.items()},
            "queues": {
                name: {str(priority): model.queue.count(priority) for priority in Priority}
                for name, model in models.items()
            },
            "workers": {name: _worker(state, model, now) for name, model in models.items() if model.worker},
            "recovery": {name: self._recovery(model, now) for name, model in models.items()},
            "python": _python(),
        }

    def _recovery(self, model: ModelRecord, now: float) -> dict[str, Any]:
        rest = model.retry_at - now if model.state is ModelState.FAILED else 0.0
        crashes = self._crashes.of(model.id)
        return {
            "failures": model.backoff.failures,
            "retry_after_seconds": round(max(0.0, rest), 3),
            "failure": model.failure,
            "crashes": len(crashes),
            "last_crash": {name: crashes[0][name] for name in _CRASH_FIELDS} if crashes else None,
        }


def _ledger(state: State) -> dict[str, Any]:
    ledger = state.ledger
    return {
        "limit_mb": None if ledger.limit_bytes is None else mib(ledger.limit_bytes),
        "holdings": {
            holding.id: {
                "owner": holding.owner,
                "phase": str(holding.phase),
                "devices_mb": {device: mib(count) for device, count in holding.bytes.items()},
            }
            for holding in ledger.holdings.values()
        },
    }


def _model(state: State, model: ModelRecord, now: float) -> dict[str, Any]:
    known = figures.model(state, model, now)
    shown = ("state", "location", "memory_mb", "idle_seconds", "use_count", "ref_count")
    return {name: known[name] for name in shown} | {"loads": model.loads}


def _worker(state: State, model: ModelRecord, now: float) -> dict[str, Any]:
    worker = state.worker_of(model)
    assert worker is not None
    host = None if worker.pid is None else private_bytes(worker.pid)
    return {
        "pid": worker.pid,
        "holding": worker.holding,
        "device": worker.device.id,
        "seconds": round(now - worker.began_at, 3),
        "ready": worker.ready is not None,
        "leaves": str(worker.departure.reason) if worker.departure else None,
        "process_mb": None if host is None else mib(host),
        "beat": asdict(worker.beat) if worker.beat else None,
    }


def _python() -> dict[str, Any]:
    """The process of the service: counters of the garbage collector, tasks, memory."""
    own = private_bytes(os.getpid())
    return {
        "gc_counts": dict(zip(("young", "middle", "old"), gc.get_count(), strict=True)),
        "gc_collections": {str(index): stats["collections"] for index, stats in enumerate(gc.get_stats())},
        "gc_uncollectable": sum(stats["uncollectable"] for stats in gc.get_stats()),
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
        "open_files": sum(1 for _ in Path("/proc/self/fd").iterdir()) if sys.platform == "linux" else None,
        "process_mb": None if own is None else mib(own),
    }


def _largest(most: int) -> dict[str, dict[str, Any]]:
    """The `most` types whose objects use most bytes in total, containers without their contents."""
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for item in gc.get_objects():
        name = f"{type(item).__module__}.{type(item).__qualname__}"
        counts[name] += 1
        sizes[name] += sys.getsizeof(item, 0)
    return {name: {"count": counts[name], "mb": mib(size)} for name, size in sizes.most_common(most)}


def differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Every path whose values differ, with `before`, `after` and, for numbers, `difference`."""
    old, new = dict(_flat(before)), dict(_flat(after))
    found: dict[str, dict[str, Any]] = {}
    for path in sorted({*old, *new} - {"id", "timestamp"}):
        left, right = old.get(path, _ABSENT), new.get(path, _ABSENT)
        if left == right:
            continue
        found[path] = {"before": None if left is _ABSENT else left, "after": None if right is _ABSENT else right}
        if _is_number(left) and _is_number(right):
            found[path]["difference"] = round(right - left, 3)
    return found


def _flat(value: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for name, inner in value.items():
        here = f"{path}/{name}" if path else str(name)
        if isinstance(inner, Mapping) and inner:
            yield from _flat(inner, here)
        else:
            yield here, inner


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
