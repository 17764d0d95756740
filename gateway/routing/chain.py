"""Selects the candidates of a request that are tried, and gives a reason for each of the others.

The facts may be stale: they only save attempts. The permit of the breaker, taken when an attempt starts, decides.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from gateway.breaker.outcome import LOCAL, Ignore, Next, Reason, provider_key
from gateway.providers.local.candidate_facts import Facts
from inference.protocol import Tier

SMALLER = "smaller"
"""In the chain entry `local/smaller`: the model is chosen when the turn of the candidate comes."""


MAX_NODES = 4096
"""Nodes for which a candidate is kept."""


@dataclass(frozen=True)
class Candidate:
    """One PROVIDER/MODEL of a chain; `position` 0 is the first choice. `named` is False when `*` stands for the model.

    `is_rule`: it stands for a model that is chosen when its turn comes (`local/smaller`). `node`: where the inference
    service runs that an attempt uses; empty where there is only one, or while it is not chosen. A candidate on one node
    equals the same candidate on another.
    All requests of a route share the objects, so derived values are cached.
    """

    provider: str
    model: str
    position: int
    named: bool = True
    is_rule: bool = False
    node: str = field(default="", compare=False)

    @functools.cached_property
    def provider_key(self) -> str:
        """The key of its provider and breakers."""
        return provider_key(self.node) if self.node else self.provider

    def on(self, node: str) -> Candidate:
        """The same candidate on `node`."""
        known = self._on_nodes
        if (found := known.get(node)) is None:
            if len(known) >= MAX_NODES:
                known.clear()  # names of nodes that are addresses change
            found = known[node] = replace(self, node=node)
            found.__dict__["_on_nodes"] = known  # one dictionary for all: requests go from node to node
        return found

    @functools.cached_property
    def _on_nodes(self) -> dict[str, Candidate]:
        return {}

    @property
    def place(self) -> str:
        """PROVIDER/MODEL, and the node if there are several."""
        return f"{self.name} on {self.node}" if self.node else self.name

    @functools.cached_property
    def name(self) -> str:
        """PROVIDER/MODEL."""
        return f"{self.provider}/{self.model}"

    @functools.cached_property
    def is_local(self) -> bool:
        """Whether its provider is the inference service."""
        return self.provider == LOCAL

    @functools.cached_property
    def tier(self) -> Tier:
        """The value of `x-headgate-tier` when this candidate answers."""
        if not self.is_local:
            return Tier.CLOUD
        return Tier.LOCAL if self.position == 0 else Tier.LOCAL_FALLBACK


class Requirements(NamedTuple):
    """What the request needs: capabilities, whether clouds are allowed, whether models that do not fit are dropped."""

    capabilities: frozenset[str] = frozenset()
    cloud_allowed: bool = True
    fit_check: bool = True


class Drop(StrEnum):
    """Why a candidate is not tried."""

    ABSENT = "provider_absent"
    POLICY = "policy"
    CAPABILITY = "capability"
    VECTORS = "other_vectors"
    """its embeddings or scores cannot be compared with those of the first choice"""
    VOCABULARY = "other_vocabulary"
    """the request holds token ids of the first choice's model"""
    CONTEXT = "context_too_small"
    BREAKER = "breaker_open"
    HELD = "held"
    NO_CHOICE = "no_smaller"
    """no model that `local/smaller` may stand for can answer now"""
    NO_NODE = "no_node"
    """none of several inference services can take it now"""
    NO_FIT = "cannot_fit"
    BUDGET = "budget_spent"
    UNHEALTHY = "unhealthy"
    """deferred: it would likely fail"""
    SILENT = "silent"
    """deferred: several attempts at it get no bytes"""
    RECOVERING = "recovering"
    """deferred: it recovers from a failure and takes few requests"""
    ROOM = "little_room"
    """deferred: its context holds the prompt, but not all of `max_tokens`"""
    TOO_SLOW = "predicted_too_slow"
    """deferred: a later candidate is expected to answer sooner"""


DEFERRING = frozenset((Drop.UNHEALTHY, Drop.RECOVERING, Drop.SILENT, Drop.ROOM, Drop.TOO_SLOW))
"""Reasons to try the other candidates first. A deferred candidate is tried when they have failed."""

_ENDPOINTS = frozenset(("chat", "completions"))
"""Capabilities that depend on the chosen model, not on a parameter of the request."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """A candidate that is not tried. `message` is for people, `retry_in` (seconds) is when that may change.

    `param` is the parameter of the request that the candidate does not support, `details` the numbers in `message`.
    """

    candidate: Candidate
    drop: Drop
    message: str
    retry_in: float | None = None
    param: str | None = None
    details: Mapping[str, int | None] | None = None


class Selection(NamedTuple):
    """The candidates to try in order, and those that are dropped. `deferred` are those among `kept` that come last."""

    kept: tuple[Candidate, ...]
    dropped: tuple[Dropped, ...]
    deferred: tuple[Dropped, ...] = ()


class RouteMatch(NamedTuple):
    """The route that serves a model: its key in the configuration, and the name of the model."""

    route: str
    model: str


def find_route(
    requested: str, routes: Sequence[str] | Mapping[str, object], aliases: Mapping[str, str]
) -> RouteMatch | None:
    """The route for the model `requested`: by its name, by the model it is an alias of, else `*`; None without any."""
    if requested in routes and requested != "*":
        return RouteMatch(requested, requested)
    model = aliases.get(requested, requested)
    if model in routes and model != "*":
        return RouteMatch(model, model)
    return RouteMatch("*", model) if "*" in routes else None


def expand(entries: tuple[str, ...], model: str, aliases: Mapping[str, str]) -> tuple[Candidate, ...]:
    """The candidates of `PROVIDER/MODEL` entries, where `*` stands for `model`; repetitions are left out.

    `aliases` (id by alias) of local models are replaced by the id, because facts, breakers and counts use the id.
    """
    found = _expand(entries, model)
    if aliases and any(one.is_local and not one.is_rule and one.model in aliases for one in found):
        return _without_repeats(
            replace(one, model=aliases.get(one.model, one.model)) if one.is_local and not one.is_rule else one
            for one in found
        )
    return found


@functools.lru_cache(maxsize=256)
def _expand(entries: tuple[str, ...], model: str) -> tuple[Candidate, ...]:
    parts = (entry.partition("/") for entry in entries)
    return _without_repeats(
        Candidate(provider, model if wanted == "*" else wanted, 0, wanted != "*", is_rule(provider, wanted))
        for provider, _, wanted in parts
    )


def is_rule(provider: str, model: str) -> bool:
    """Whether the chain entry `provider`/`model` stands for a model that is chosen later."""
    return provider == LOCAL and model == SMALLER


def _without_repeats(found: Iterable[Candidate]) -> tuple[Candidate, ...]:
    first: dict[tuple[str, str, bool], Candidate] = {}
    for candidate in found:
        first.setdefault((candidate.provider, candidate.model, candidate.is_rule), candidate)
    return tuple(replace(candidate, position=position) for position, candidate in enumerate(first.values()))


def select(
    candidates: Sequence[Candidate], facts: Callable[[Candidate], Facts], requirements: Requirements
) -> Selection:
    """`candidates` in order without those that `facts` or policy rule out; unhealthy ones come last."""
    kept: list[Candidate] = []
    dropped: list[Dropped] = []
    unhealthy: list[Dropped] = []
    for candidate in candidates:
        known = facts(candidate)
        if verdict := _drop(candidate, known, requirements):
            dropped.append(verdict)
        elif known.likely_failure is not None:
            unhealthy.append(
                Dropped(candidate, Drop.UNHEALTHY, known.likely_failure.message, known.likely_failure.retry_in)
            )
        else:
            kept.append(candidate)
    deferred = tuple(unhealthy) if kept else ()
    kept += [item.candidate for item in unhealthy]
    return Selection(tuple(kept), tuple(dropped), deferred)


def _drop(candidate: Candidate, known: Facts, requirements: Requirements) -> Dropped | None:
    # reasons that cannot change for this request come first
    if not candidate.is_local and not requirements.cloud_allowed:
        return Dropped(candidate, Drop.POLICY, "policy keeps this request local")
    if not known.present:
        return Dropped(candidate, Drop.ABSENT, f"provider {candidate.provider} has no API key")
    if known.capabilities is not None and (lacks := requirements.capabilities.difference(known.capabilities)):
        if candidate.is_rule:
            return Dropped(candidate, Drop.CAPABILITY, f"no other local model can do {', '.join(sorted(lacks))}")
        param = "model" if lacks & _ENDPOINTS else None
        return Dropped(candidate, Drop.CAPABILITY, f"cannot do {', '.join(sorted(lacks))}", param=param)
    if known.unsupported:
        message = "; ".join(known.unsupported.values())
        return Dropped(candidate, Drop.CAPABILITY, message, param=next(iter(known.unsupported)))
    if not known.same_vectors:
        message = (
            "another model's vectors or scores cannot be compared with the first choice's (same_vectors is not set)"
        )
        return Dropped(candidate, Drop.VECTORS, message)
    if known.foreign_ids is not None:
        message = f"the token ids in {known.foreign_ids} are those of another model's vocabulary"
        return Dropped(candidate, Drop.VOCABULARY, message, param=known.foreign_ids)
    if known.breaker_open_for is not None:
        return Dropped(
            candidate,
            Drop.BREAKER,
            f"its breaker is open; retry in {_seconds(known.breaker_open_for)}",
            known.breaker_open_for,
        )
    if known.queue_full_for is not None:
        return Dropped(
            candidate,
            Drop.HELD,
            f"its queue is full; retry in {_seconds(known.queue_full_for)}",
            known.queue_full_for,
        )
    if candidate.is_local and requirements.fit_check and known.fits is False:
        why = f"cannot fit now: {known.fit_reason or 'not enough memory'}"
        return Dropped(candidate, Drop.NO_FIT, why, known.fit_in)
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.0f} s" if amount >= 1 else "a moment"


def passes_on(verdict: Ignore, candidate: Candidate, *, larger_context_left: bool = False) -> bool:
    """Whether the client gets the provider's own 4xx instead of an answer of the next candidate.

    The client is not at fault when only a fallback finds the prompt too long, when a remaining candidate may hold it
    (`larger_context_left`), or when the unknown model name is in the configuration.
    """
    if verdict.reason is Reason.CONTEXT_LENGTH:
        return candidate.position == 0 and not larger_context_left
    if verdict.reason is Reason.NOT_FOUND:
        return not candidate.named
    return verdict.next is Next.PASS_ON
