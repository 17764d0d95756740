"""Decides whose turn on a device is over and for whom room is being made; starts, drains and ends nothing.

A model in use keeps its room for one turn from the moment it became ready. After that, and once another model has been
wanted for the resident's `min_residency`, the planner may count it among those who can leave: the shell drains it, so
that nothing under way is cut. Whoever waits has a claim on the room that will be there first; those who are behind it
may load only what leaves that room alone. Without claims small models that swap with each other would keep a large one
waiting for ever, because it needs several turns to be over at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from inference.authority.lifecycle.wait_queue import Waiter
from inference.authority.placement.ledger import Holding, Ledger, Phase
from inference.authority.placement.plan import Held, Placement, Policy, Refusal, Request, Result, Standing, plan
from inference.protocol import Priority

MOST_SWAP_SECONDS = 30.0
"""Slow loads lengthen a turn up to this: beyond, waiting weighs more than time lost to swapping."""
DELAY_SECONDS: Mapping[Priority, float] = {Priority.HIGH: 0.0, Priority.NORMAL: 10.0, Priority.LOW: 60.0}
"""How much younger than it is a waiter counts when models are put in order."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is ready or in use. Times are seconds of one clock; `reload_seconds` is what its load took."""

    ready_at: float
    min_residency: float
    reload_seconds: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Room that is or will be made for `model`, on the devices of `need`, once `victims` have left."""

    model: str
    need: Mapping[str, int]
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wish:
    """A model that is wanted and not there: since when somebody waited without a gap, and what its load takes."""

    since: float
    reload_seconds: float


@dataclass(frozen=True, slots=True)
class Scenery:
    """Everybody who holds memory, at one moment. `residents` are those who are ready or in use; `abandoned` are loading
    although nobody waits for them any more.
    """

    ledger: Ledger
    models: tuple[Held, ...]
    residents: Mapping[str, Resident]
    policy: Policy
    abandoned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """What to do for a wish now, what those behind it must leave alone, which abandoned loads are in its way, and when
    its victims will have had their turns (None: not known, or not what it waits for).
    """

    outcome: Placement | Refusal
    claim: Claim | None = None
    give_up: tuple[str, ...] = ()
    again_at: float | None = None


def age_rank(waiters: Iterable[Waiter]) -> float:
    """What models are put in order by, least first: the oldest arrival, moved by the delay of its priority."""
    return min(waiter.asked_at + DELAY_SECONDS[waiter.priority] for waiter in waiters)


def turn_ends_at(resident: Resident, wish: Wish) -> float:
    """From when on `resident` takes nothing new because of `wish`."""
    swap_seconds = min(MOST_SWAP_SECONDS, resident.reload_seconds + wish.reload_seconds)
    turn_seconds = max(resident.min_residency, swap_seconds)
    return max(resident.ready_at + turn_seconds, wish.since + resident.min_residency)


def decide(request: Request, wish: Wish, scenery: Scenery, ahead: Sequence[Claim]) -> Decision:
    """Where `request` goes now; `evict` of the outcome may name models in use, whose turn is over.

    `ahead` are the claims of those who come before it. A refusal is final (`waits_for` is empty) only when it would be
    one without claims, and when nothing is on its way in or out on a device that lacks room.
    """
    ends = _ends(scenery, wish)
    spent = [name for name, end in ends if end <= scenery.policy.now and name in scenery.residents]
    outcome = _keeping(request, scenery.ledger, _movable(scenery.models, spent), ahead, scenery.policy)
    if isinstance(outcome, Placement):
        claim = Claim(request.model, outcome.need, outcome.evict) if outcome.result is Result.FULL else None
        return Decision(outcome, claim)
    if not outcome.waits_for:
        return Decision(_patient(outcome, scenery.ledger))
    leaving = tuple(item.model for item in scenery.models if item.standing is Standing.LEAVING)

    def without(names: Sequence[str]) -> Placement | Refusal:
        loading = {item.model for item in scenery.models if item.standing is Standing.LOADING}
        gone = {item.holding for item in scenery.models if item.model in leaving or item.model in loading & {*names}}
        stay = [item for item in scenery.models if item.holding not in gone]
        return _keeping(request, scenery.ledger.without(gone), _movable(stay, names), ahead, scenery.policy)

    names = [name for name, _ in ends]
    fewest, enough = 0, len(names)
    if isinstance(without(names), Refusal):
        return Decision(outcome)
    while fewest < enough:  # the earliest moment at which enough of them will have had their turns
        middle = (fewest + enough) // 2
        fewest, enough = (fewest, middle) if isinstance(without(names[:middle]), Placement) else (middle + 1, enough)
    needed = names[:enough]
    for name in [name for name in needed if name in scenery.abandoned]:
        if isinstance(without([other for other in needed if other != name]), Placement):
            needed.remove(name)
    found = without(needed)
    assert isinstance(found, Placement)
    given_up = tuple(name for name in needed if name in scenery.abandoned)
    loading = tuple(item.model for item in scenery.models if item.standing is Standing.LOADING and item.model in needed)
    due = max((end for name, end in ends if name in needed), default=-math.inf)
    claim = Claim(request.model, found.need, (*leaving, *loading, *found.evict))
    return Decision(outcome, claim, given_up, due if scenery.policy.now < due < math.inf else None)


def _ends(scenery: Scenery, wish: Wish) -> list[tuple[str, float]]:
    """Who will have had its turn, and when, the first one first; what loads for somebody has its turn to come."""
    now = scenery.policy.now
    ends = [
        (item.model, turn_ends_at(scenery.residents[item.model], wish))
        for item in scenery.models
        if item.standing in (Standing.BUSY, Standing.YOUNG) and item.model in scenery.residents
    ]
    loading = [
        (item.model, now if item.model in scenery.abandoned else math.inf)
        for item in scenery.models
        if item.standing is Standing.LOADING
    ]
    return sorted([*ends, *loading], key=lambda end: end[1])


def _movable(models: Sequence[Held], names: Sequence[str]) -> list[Held]:
    return [replace(item, standing=Standing.IDLE) if item.model in names else item for item in models]


def _keeping(
    request: Request, ledger: Ledger, models: Sequence[Held], claims: Sequence[Claim], policy: Policy
) -> Placement | Refusal:
    """The plan among the options that leave all claims possible."""
    waits: tuple[str, ...] = ()
    while True:
        decision = plan(request, ledger, models, policy)
        if isinstance(decision, Refusal):
            return replace(decision, waits_for=(*decision.waits_for, *waits))
        if decision.result is Result.DEPLOYED or not (broken := _broken(decision, ledger, models, claims)):
            return decision
        waits = (*waits, *(name for name in broken if name not in waits))
        left = tuple(option for option in request.options if option.need != decision.need)
        if not left:
            reason = "room is being made for " + ", ".join(waits)
            return Refusal((), reason, waits, trace=(*decision.trace, reason))
        divided = len(left) == len(request.options)
        request = replace(request, options=left, spread=None if divided else request.spread)


def _patient(refusal: Refusal, ledger: Ledger) -> Refusal:
    """Bytes that come or go can look like somebody else's: where that is what is lacking, the answer is to wait."""
    accounts = ledger.accounts
    if any(
        lack.need_bytes > min(accounts[lack.device].capacity_bytes, accounts[lack.device].budget_bytes)
        for lack in refusal.lacks
    ):
        return refusal
    moving = [holding for holding in ledger.holdings.values() if holding.phase is not Phase.RESIDENT]
    names = [item.owner for item in moving for lack in refusal.lacks if item.bytes.get(lack.device)]
    return replace(refusal, waits_for=tuple(dict.fromkeys(names)))


def _broken(placement: Placement, ledger: Ledger, models: Sequence[Held], claims: Sequence[Claim]) -> tuple[str, ...]:
    """For whom there would be no room left with `placement`, once everybody has gone who has to go for any of them."""
    if not claims:
        return ()
    leaving = {*placement.evict, *(name for claim in claims for name in claim.victims)}
    later = ledger.without({item.holding for item in models if item.model in leaving})
    later = _taken(later, "placement", "", placement.need)
    broken = []
    for claim in claims:
        if later.lacks(claim.need):
            broken.append(claim.model)
        else:
            later = _taken(later, f"claim of {claim.model}", claim.model, claim.need)
    return tuple(broken)


def _taken(ledger: Ledger, id: str, owner: str, need: Mapping[str, int]) -> Ledger:
    taken = Holding(id, owner, Phase.RESERVED, MappingProxyType(dict(need)))
    return replace(ledger, holdings={**ledger.holdings, id: taken}, sums={})
