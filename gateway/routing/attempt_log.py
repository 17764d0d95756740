"""Keeps what became of each candidate of one request, for its record and for a refusal to tell; decides nothing."""

from __future__ import annotations

from collections.abc import Callable

from gateway.routing.chain import Candidate, Dropped
from gateway.routing.explain_record import Record
from gateway.routing.refusal import Outcome


class Outcomes:
    """One request's, in the order of their coming."""

    __slots__ = ("_all", "_put_off", "_record")

    def __init__(self, record: Record) -> None:
        self._record = record
        self._all: list[Outcome] = []
        self._put_off: set[Candidate] = set()

    def drop(self, dropped: Dropped) -> None:
        """A candidate is not asked."""
        self._record.dropped[dropped.candidate.name] = f"{dropped.drop}: {dropped.said}"
        self._all.append(
            Outcome(
                dropped.candidate,
                str(dropped.drop),
                dropped.said,
                dropped.retry_in,
                dropped.drop,
                param=dropped.param,
                details=dropped.details,
            )
        )

    def put_behind(self, dropped: Dropped) -> None:
        """A candidate waits behind the others: it is told like one that was dropped, until its turn comes."""
        self._put_off.add(dropped.candidate)
        self.drop(dropped)

    def was_put_behind(self, candidate: Candidate) -> bool:
        """Whether it waited, or waits, behind the others."""
        return candidate in self._put_off

    def take_up(self, candidate: Candidate) -> None:
        """A candidate is asked: what had put it behind the others is no outcome any more."""
        if self._put_off and candidate in self._put_off:  # of nothing nobody need know its hash
            self._all = [outcome for outcome in self._all if outcome.candidate != candidate]

    def fail(self, outcome: Outcome) -> None:
        """A candidate was asked and did not answer."""
        self._all.append(outcome)

    @property
    def first(self) -> Outcome:
        """What became of the one that was most wanted; there is one where somebody else answered."""
        return min(self._all, key=lambda outcome: outcome.candidate.position)

    def waiting(self, ready_in: Callable[[Outcome], float]) -> list[Outcome]:
        """All of them as the chain has them, each with the seconds until its tier may take a request now."""
        ordered = sorted(self._all, key=lambda outcome: outcome.candidate.position)
        return [outcome.waiting(ready_in(outcome)) for outcome in ordered]
