"""Remembers how each of the last requests was decided, for `/admin/requests/{id}`; holds no prompts and no answers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import asdict, dataclass, field
from typing import Any

KEPT = 1000
"""Records kept; the oldest leave first."""


@dataclass(slots=True)
class Tried:
    """One attempt: what was asked, how it ended, how long it took (seconds)."""

    name: str
    outcome: str
    said: str
    seconds: float


@dataclass(slots=True)
class Record:
    """How one request went. Times are seconds; `started` is wall-clock."""

    id: str
    started: float
    endpoint: str
    asked: str = ""
    stream: bool = False
    route: str = ""
    key: str = ""
    priority: str = ""
    chain: list[str] = field(default_factory=list)
    dropped: dict[str, str] = field(default_factory=dict)
    attempts: list[Tried] = field(default_factory=list)
    answered_by: str | None = None
    tier: str = "none"
    reason: str = "none"
    outcome: str = "running"
    status: int | None = None
    first_token_seconds: float | None = None
    overhead_seconds: float | None = None
    total_seconds: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return asdict(self)


class Ring:
    """The records of the last KEPT requests by request id."""

    def __init__(self, kept: int = KEPT) -> None:
        self._kept = kept
        self._records: OrderedDict[str, Record] = OrderedDict()

    def add(self, record: Record) -> None:
        """Keeps `record`; the same id again replaces the older one."""
        self._records.pop(record.id, None)
        self._records[record.id] = record
        while len(self._records) > self._kept:
            self._records.popitem(last=False)

    def get(self, request_id: str) -> Record | None:
        """The record of a request, or None when it is unknown or forgotten."""
        return self._records.get(request_id)
