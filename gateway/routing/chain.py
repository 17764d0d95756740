"""Folds the candidates of a request to those worth an attempt, each drop with its reason; never asks or waits.

The facts may be stale: they only spare attempts. What gates an attempt is the breaker's permit, taken when it starts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from gateway.breaker.outcome import LOCAL, Ignore, Next, Reason
from gateway.providers.local.candidate_facts import Facts
from inference.protocol import ModelState, Tier

_FAILED = ModelState.FAILED


@dataclass(frozen=True)
class Candidate:
    """One PROVIDER/MODEL of a chain; `position` 0 is the first choice. `named` is False when `*` stood for it.

    One serves all requests of its route, so what follows from it is found once.
    """

    provider: str
    model: str
    position: int
    named: bool = True

    @functools.cached_property
    def name(self) -> str:
        """PROVIDER/MODEL."""
        return f"{self.provider}/{self.model}"

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether the inference service answers."""
        return self.provider == LOCAL

    @functools.cached_property
    def tier(self) -> Tier:
        """What `x-headgate-tier` says when this candidate answers."""
        if not self.is_local:
            return Tier.CLOUD
        return Tier.LOCAL if self.position == 0 else Tier.LOCAL_FALLBACK


class Wants(NamedTuple):
    """What the request needs: capabilities, whether clouds are allowed, whether models that cannot fit are left out."""

    capabilities: frozenset[str] = frozenset()
    cloud_allowed: bool = True
    fit_check: bool = True


class Drop(StrEnum):
    """Why a candidate is not tried."""

    ABSENT = "provider_absent"
    POLICY = "policy"
    CAPABILITY = "capability"
    VECTORS = "other_vectors"
    """what another model computes cannot be compared with what the caller has"""
    VOCABULARY = "other_vocabulary"
    """the request holds token ids of the first choice's model"""
    CONTEXT = "context_too_small"
    BREAKER = "breaker_open"
    HELD = "held"
    NO_FIT = "cannot_fit"
    BUDGET = "budget_spent"
    AILING = "ailing"
    """put behind the others: it would likely fail"""
    SILENT = "silent"
    """put behind the others: several wait there in vain"""
    RECOVERING = "recovering"
    """put behind the others: it was away and takes only some requests yet"""
    ROOM = "little_room"
    """put behind the others: the answer would have less room than it asks for"""
    TOO_SLOW = "predicted_too_slow"
    """put behind the others: one of them is expected to answer sooner"""


PUT_OFF = frozenset((Drop.AILING, Drop.RECOVERING, Drop.SILENT, Drop.ROOM, Drop.TOO_SLOW))
"""Reasons to ask the others first; a candidate that has one is asked all the same when they have failed."""

_ENDPOINTS = frozenset(("chat", "completions"))
"""Capabilities that are a matter of which model is asked, not of what is asked of it."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that is not tried; `said` explains it to people, `retry_in` (seconds) is when that may change.

    `param` is the parameter of the request that this candidate cannot do, `details` the numbers behind `said`.
    """

    candidate: Candidate
    drop: Drop
    said: str
    retry_in: float | None = None
    param: str | None = None
    details: Mapping[str, int | None] | None = None


class Chain(NamedTuple):
    """What is left to try, in order, and what was dropped. `put_off` says of some that are left why they come last."""

    kept: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    put_off: tuple[Dropped, ...] = ()


class RouteMatch(NamedTuple):
    """The route that serves a model: its key in the configuration and the model's own name."""

    route: str
    model: str


def find_route(
    asked: str, routes: Sequence[str] | Mapping[str, object], aliases: Mapping[str, str]
) -> RouteMatch | None:
    """The route for the model `asked`: by its name, by the model it is an alias of, else `*`; None without any."""
    if asked in routes and asked != "*":
        return RouteMatch(asked, asked)
    model = aliases.get(asked, asked)
    if model in routes and model != "*":
        return RouteMatch(model, model)
    return RouteMatch("*", model) if "*" in routes else None


def expand(entries: tuple[str, ...], model: str, aliases: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The candidates that `PROVIDER/MODEL` entries name, `*` standing for `model`; a repeated one counts once.

    Those of the inference service go by their own names from here on, whichever of the `aliases` (id by alias) the
    route's author wrote: facts, breakers and counts are kept under them.
    """
    found = _expand(entries, model)
    if aliases and any(candidate.is_local and candidate.model in aliases for candidate in found):
        return _without_repeats(
            (name.provider, aliases.get(name.model, name.model) if name.is_local else name.model, name.named)
            for name in found
        )
    return found


@functools.lru_cache(maxsize=256)
def _expand(entries: tuple[str, ...], model: str) -> tuple[Candidate, ...]:
    parts = (entry.partition("/") for entry in entries)
    return _without_repeats(
        (provider, model if wanted == "*" else wanted, wanted != "*") for provider, _, wanted in parts
    )


def _without_repeats(found: Iterable[tuple[str, str, bool]]) -> tuple[Candidate, ...]:
    names: dict[tuple[str, str], bool] = {}
    for provider, model, named in found:
        names.setdefault((provider, model), named)
    return tuple(
        Candidate(provider, model, position, named) for position, ((provider, model), named) in enumerate(names.items())
    )


def fold(candidates: Sequence[Candidate], facts: Callable[[Candidate], Facts], wants: Wants) -> Chain:
    """`candidates` in order without those that `facts` or policy rule out, those that ail behind the others."""
    kept: list[Candidate] = []
    dropped: list[Dropped] = []
    ailing: list[Dropped] = []
    for candidate in candidates:
        known = facts(candidate)
        if verdict := _drop(candidate, known, wants):
            dropped.append(verdict)
        elif known.ailment is not None:
            ailing.append(Dropped(candidate, Drop.AILING, known.ailment.said, known.ailment.retry_in))
        else:
            kept.append(candidate)
    last = tuple(item.candidate for item in ailing)
    return Chain((*kept, *last), tuple(dropped), tuple(ailing) if kept else ())


def _drop(candidate: Candidate, known: Facts, wants: Wants) -> Dropped | None:
    # what can never change for this request comes first: it is the truer reason
    if not candidate.is_local and not wants.cloud_allowed:
        return Dropped(candidate, Drop.POLICY, "policy keeps this request local")
    if not known.present:
        return Dropped(candidate, Drop.ABSENT, f"provider {candidate.provider} has no API key")
    if known.capabilities is not None and (lacks := wants.capabilities - known.capabilities):
        param = "model" if lacks & _ENDPOINTS else None
        return Dropped(candidate, Drop.CAPABILITY, f"cannot do {', '.join(sorted(lacks))}", param=param)
    if known.unsupported:
        said = "; ".join(known.unsupported.values())
        return Dropped(candidate, Drop.CAPABILITY, said, param=next(iter(known.unsupported)))
    if not known.same_vectors:
        said = "another model's vectors or scores cannot be compared with the first choice's (same_vectors is not set)"
        return Dropped(candidate, Drop.VECTORS, said)
    if known.foreign_ids is not None:
        said = f"the token ids in {known.foreign_ids} are those of another model's vocabulary"
        return Dropped(candidate, Drop.VOCABULARY, said, param=known.foreign_ids)
    if known.closed_for is not None:
        return Dropped(
            candidate, Drop.BREAKER, f"breaker open for another {_seconds(known.closed_for)}", known.closed_for
        )
    if known.held_for is not None:
        return Dropped(candidate, Drop.HELD, f"asked to be left for {_seconds(known.held_for)}", known.held_for)
    if candidate.is_local and wants.fit_check and known.fits is False:
        why = f"cannot fit now: {known.fit_reason or 'not enough memory'}"
        return Dropped(candidate, Drop.NO_FIT, why, known.fit_in)
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.0f} s" if amount >= 1 else "a moment"


def passes_on(verdict: Ignore, candidate: Candidate, *, wider_left: bool = False) -> bool:
    """Whether the caller gets the tier's own 4xx instead of another tier's answer.

    A prompt that only a fallback finds too long, or one that a tier still to come may hold (`wider_left`), or a model
    name that the route's author wrote, is not the caller's fault.
    """
    if verdict.reason is Reason.CONTEXT_LENGTH:
        return candidate.position == 0 and not wider_left
    if verdict.reason is Reason.NOT_FOUND:
        return not candidate.named
    return verdict.next is Next.PASS_ON
