"""Which replica of a model gets a request, and when a model needs more or fewer replicas.

A request goes to the replica that last served its conversation, because that one may still have its prefix, unless
another replica would begin much earlier; else to the replica with the least expected wait. While none is loaded or
loading, all requests go to the one that is loaded first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

AFFINITY_FACTOR = 2.0
AFFINITY_SECONDS = 0.5
"""A request stays with the replica of its conversation while its wait there is at most AFFINITY_FACTOR times the
shortest one, or AFFINITY_SECONDS longer."""
CROWDED_SECONDS = 2.0
"""A further replica is loaded when as many requests as it takes at once have waited for this time."""
SPARE_SECONDS = 60.0
"""A replica leaves when the others had room for twice the requests for this time."""
UNKNOWN_ANSWER_SECONDS = 1.0
"""The time between two answers of a replica before it was measured."""


@dataclass(frozen=True, slots=True)
class Replica:
    """One replica. `load_seconds`: until it takes requests, 0 if it is loaded. `answer_seconds`: between two answers.

    `is_up`: it is loaded or loading, and does not leave. `can_load`: it could be loaded now. `is_failed`: its worker
    crashed or its load failed.
    """

    id: str
    is_up: bool
    load_seconds: float
    active: int
    """requests that it computes, and that wait for it"""
    parallel: int
    answer_seconds: float | None = None
    can_load: bool = False
    is_failed: bool = False

    @property
    def waiting(self) -> int:
        """The requests that wait until others end."""
        return max(0, self.active - self.parallel)

    @property
    def wait_seconds(self) -> float:
        """The expected time until a new request begins."""
        ahead = max(0, self.active - self.parallel + 1)
        answer_seconds = UNKNOWN_ANSWER_SECONDS if self.answer_seconds is None else self.answer_seconds
        return self.load_seconds + ahead * answer_seconds


def choose(replicas: Sequence[Replica], last: str | None = None) -> str:
    """The replica for a new request; `last` is the one that served its conversation before."""
    up = [replica for replica in replicas if replica.is_up]
    if not up:  # one is loaded for all requests
        return min(replicas, key=lambda item: (item.is_failed, not item.active, item.load_seconds)).id
    best = min(up, key=lambda replica: (replica.wait_seconds, replica.active / replica.parallel))
    known = next((replica for replica in up if replica.id == last), best)
    most = max(AFFINITY_FACTOR * best.wait_seconds, best.wait_seconds + AFFINITY_SECONDS)
    return known.id if known.wait_seconds <= most else best.id


def choose_alone(replicas: Sequence[Replica], max_load_seconds: float) -> str:
    """The replica for a request that must run alone, because it may end its worker.

    Preferred is a replica whose worker has ended, if it can be loaded within `max_load_seconds`: the others continue.
    """
    ended = [item for item in replicas if item.is_failed and item.load_seconds <= max_load_seconds]
    up = [item for item in replicas if item.is_up]
    return min(ended or up or replicas, key=lambda item: (item.active, item.load_seconds)).id


def to_load(replicas: Sequence[Replica], least: int, *, is_used: bool, crowded_seconds: float) -> str | None:
    """The replica that is loaded next, or None. `crowded_seconds`: how long the model has been crowded.

    While a replica loads, another one is loaded only up to `least`. A model without a loaded or loading replica gets
    none: its next request loads it.
    """
    up = [replica for replica in replicas if replica.is_up]
    free = [replica for replica in replicas if replica.can_load]
    fills_up = len(up) < least and is_used
    grows = crowded_seconds >= CROWDED_SECONDS and all(not replica.load_seconds for replica in up)
    if not up or not free or not (fills_up or grows):
        return None
    return min(free, key=lambda replica: replica.load_seconds).id


def is_crowded(replicas: Sequence[Replica]) -> bool:
    """Whether as many requests wait as a further replica takes at once."""
    up = [replica for replica in replicas if replica.is_up]
    return bool(up) and sum(replica.waiting for replica in up) >= up[0].parallel


def to_drop(replicas: Sequence[Replica], least: int, *, spare_seconds: float) -> str | None:
    """The replica that leaves next, or None. `spare_seconds`: how long `has_spare` has been true."""
    up = [replica for replica in replicas if replica.is_up]
    if len(up) <= least or spare_seconds < SPARE_SECONDS:
        return None
    return min(reversed(up), key=lambda replica: replica.active).id


def has_spare(replicas: Sequence[Replica], least: int) -> bool:
    """Whether there are more replicas than `least`, and twice the requests would fit into the slots of one less."""
    up = [replica for replica in replicas if replica.is_up]
    slots = sum(replica.parallel for replica in up[1:])
    return len(up) > least and 2 * sum(replica.active for replica in up) <= slots
