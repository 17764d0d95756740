"""The records that the page shows (types in `static/core/types.js`), and which of them have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from gateway.routing.explain_record import Record
from inference.protocol import ModelState

RATE_SECONDS = 5.0
"""Period over which the tokens per second of a model are measured."""
MAX_FINISHED = 200
"""Finished requests that a page gets in its first snapshot, at most."""
MAX_NEW = 100
"""Of the requests that began and ended between two updates of the pages, at most this many (the last) are sent."""


_LOADING = (ModelState.LOADING, ModelState.RESTORING)
_AWAY = (ModelState.COLD, ModelState.WARM, ModelState.FAILED)


# --- figures of the inference service --------------------------------------------------------------------------------
class LiveFigures:
    """The last figures of one inference service. Times are seconds on the caller's clock."""

    def __init__(self) -> None:
        self.devices: list[dict[str, Any]] = []
        self._models: Mapping[str, Mapping[str, Any]] = {}
        self._totals: dict[str, deque[tuple[float, int]]] = {}
        """By model: when its number of generated tokens changed, and the number."""

    def take(self, data: Mapping[str, Any], now: float) -> None:
        """Takes the data of an event; raises KeyError or TypeError for a malformed one."""
        totals = {name: int(found["generated_tokens"]) for name, found in data["models"].items()}
        self.devices, self._models = [dict(device) for device in data["devices"]], data["models"]
        self._totals = {name: self._totals.get(name) or deque() for name in totals}
        for name, total in totals.items():
            known = self._totals[name]
            if known and total < known[-1][1]:
                known.clear()  # its worker has been replaced
            if not known or total != known[-1][1]:
                known.append((now, total))
            while len(known) > 1 and known[1][0] <= now - RATE_SECONDS:
                known.popleft()

    def of(self, model: str) -> Mapping[str, Any]:
        """The figures of a model; empty when the service has none."""
        return self._models.get(model, {})

    def tokens_per_second(self, model: str, now: float) -> float | None:
        """The rate of all sequences of a model together over RATE_SECONDS; None for a model without figures."""
        known = self._totals.get(model)
        if not known:
            return None
        since, before = known[0]
        for at, total in known:
            if at <= now - RATE_SECONDS:
                since, before = now - RATE_SECONDS, total
        seconds = now - since
        return round((known[-1][1] - before) / seconds, 1) if seconds > 0 else 0.0


def model_json(
    status: Mapping[str, Any],
    figures: Mapping[str, Any],
    rate: float | None,
    times: tuple[float | None, float | None],
    now_unix: float,
) -> dict[str, Any]:
    """The `Model` record of a model. `status` is its object in `/v1/models`; `figures` may be older.

    `rate` is in tokens per second, `times` are its median and 99th percentile of the time to first token.
    """
    state = status["headgate"]["state"]
    deadline = figures.get("idle_deadline") if state == ModelState.READY else None
    in_flight = figures.get("in_flight", status["headgate"]["in_flight"])
    return {
        **status,
        "headgate": {**status["headgate"], "in_flight": in_flight},
        "progress": figures.get("progress") if state in _LOADING else None,
        "figures": {
            "tokens_per_second": rate,
            "ttft_p50": times[0],
            "ttft_p99": times[1],
            "prefix_hit_ratio": figures.get("prefix_hit_ratio"),
            "kv": figures.get("kv_hits"),
            "idle_deadline_seconds": None if deadline is None else round(max(0.0, deadline - now_unix), 1),
        },
        "blocks": {} if state in _AWAY else figures.get("blocks", {}),
    }


_DRIFTS = ("idle_seconds", "retry_after_seconds")


def is_news(model: Mapping[str, Any], shown: Mapping[str, Any] | None) -> bool:
    """Whether a page with the record `shown` needs the new one: not for values that only follow the clock."""
    return shown is None or _steady(model) != _steady(shown)


def _steady(model: Mapping[str, Any]) -> dict[str, Any]:
    status, figures = model["headgate"], model["figures"]
    is_counting = figures["idle_deadline_seconds"] is not None
    replicas = [{**item, "idle_seconds": None} for item in status.get("replicas") or ()]
    return {
        **model,
        "headgate": {**status, **dict.fromkeys(_DRIFTS), "replicas": replicas},
        "figures": {**figures, "idle_deadline_seconds": is_counting},
    }


# --- requests --------------------------------------------------------------------------------------------------------
def request_json(record: Record) -> dict[str, Any]:
    """The `RequestRow` record."""
    done, total = record.progress or (None, None)
    is_running = record.phase != "done"
    return {
        "id": record.id,
        "started": round(record.started, 3),
        "endpoint": record.endpoint,
        "route": record.route,
        "model": record.model,
        "key": record.key,
        "stream": record.stream,
        "phase": record.phase,
        "done": done,
        "total": total,
        "tier": record.tier,
        "answered_by": record.answered_by,
        "attempts": len(record.attempts),
        "reason": record.reason,
        "outcome": None if is_running else record.outcome,
        "status": record.status,
        "ttft_seconds": _rounded(record.first_token_seconds),
        "total_seconds": _rounded(record.total_seconds),
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
        "tokens_per_second": tokens_per_second(record),
    }


def tokens_per_second(record: Record) -> float | None:
    """The decode rate of a finished answer; None where it is not known."""
    first, total, tokens = record.first_token_seconds, record.total_seconds, record.completion_tokens
    if first is None or total is None or tokens is None or tokens < 2 or total <= first:
        return None
    return round((tokens - 1) / (total - first), 1)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


Mark = tuple[object, ...]
"""The values of a running request whose changes are sent; `_DONE` for a finished one."""


class ShownRequests:
    """Which state of each request the pages have."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[Record, Mark]] = {}

    def changed(self, records: Iterable[Record]) -> list[Record]:
        """The records that are new or have changed since the last call, oldest first.

        Of the requests that began and ended since then, only the last MAX_NEW are returned. A running request is
        followed to its end even when it is no longer among `records`.
        """
        before, self._marks = self._marks, {}
        running = [record for record, mark in before.values() if mark is not _DONE]
        changed: list[Record] = []
        new: list[Record] = []
        for record in chain(records, running):
            if record.id in self._marks:
                continue
            shown, before_mark = before.get(record.id, (None, None))
            self._marks[record.id] = (record, mark := _mark(record))
            if shown is not record and mark is _DONE:
                new.append(record)
            elif shown is not record or mark != before_mark:
                changed.append(record)
        new = sorted(new, key=_started)[-MAX_NEW:]
        return sorted(changed + new, key=_started)


_DONE: Mark = ("done",)


def _started(record: Record) -> float:
    return record.started


def _mark(record: Record) -> Mark:
    if record.phase == "done":
        return _DONE
    return (record.phase, record.progress, len(record.attempts), record.answered_by, record.stream, record.model)


def first_requests(records: Iterable[Record], key: str | None) -> list[dict[str, Any]]:
    """All running and the last MAX_FINISHED finished requests, oldest first; those of `key` only unless it is None."""
    found = sorted((record for record in records if key in (None, record.key)), key=_started)
    finished = [record for record in found if record.phase == "done"][-MAX_FINISHED:]
    oldest = finished[0].started if len(finished) == MAX_FINISHED else float("-inf")
    kept = (record for record in found if record.phase != "done" or record.started >= oldest)
    return [request_json(record) for record in kept]
