"""Turns of models in use, and claims of models that wait for room.

A model in use keeps its memory for one turn after it became ready. The planner may evict it when the turn is over and
requests for another model have waited for the `min_residency` of the model in use; running requests complete first. The
model that has waited longest has a claim on the memory that becomes free; other models may load only beside the claim.
Without claims, small models that swap with each other would keep a large one waiting forever, because it needs several
turns to end at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from inference.authority.placement.ledger import Ledger, Phase
from inference.authority.placement.plan import EvictionState, Held, Placement, Policy, Refusal, Request, Result, plan
from inference.authority.wait_queue import Waiter
from inference.protocol import Priority

MAX_SWAP_SECONDS = 30.0
"""Maximum swap time that lengthens a turn; with slower loads, waiting counts more than time lost to swapping."""
DELAY_SECONDS: Mapping[Priority, float] = {Priority.HIGH: 0.0, Priority.NORMAL: 10.0, Priority.LOW: 60.0}
"""Seconds by which a request counts as younger than it is, by priority."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A model that is ready or in use. Times are monotonic seconds; `reload_seconds` is the duration of its load."""

    ready_at: float
    min_residency: float
    reload_seconds: float


@dataclass(frozen=True, slots=True)
class Claim:
    """Room for `model` on the devices of `need`, which is there when `victims` have left."""

    model: str
    need: Mapping[str, int]
    victims: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Demand:
    """A wanted model that is not loaded. `since`: since when requests have waited without a gap."""

    since: float
    reload_seconds: float


@dataclass(frozen=True, slots=True)
class Occupancy:
    """All models that hold memory. `residents` are ready or in use; `abandoned` are loading although no request
    waits.
    """

    ledger: Ledger
    models: tuple[Held, ...]
    residents: Mapping[str, Resident]
    policy: Policy
    abandoned: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision for a demand: `claim` is the room that later demands must leave, `give_up` are abandoned loads in
    its way, `again_at` is when the turns of its victims are over (None: unknown, or it does not wait for turns).
    """

    outcome: Placement | Refusal
    claim: Claim | None = None
    give_up: tuple[str, ...] = ()
    again_at: float | None = None


def age_rank(waiters: Iterable[Waiter]) -> float:
    """The sort key of waiting models, lowest first: the least sum of arrival and delay among the requests."""
    return min(waiter.arrived_at + DELAY_SECONDS[waiter.priority] for waiter in waiters)


def turn_ends_at(resident: Resident, demand: Demand) -> float:
    """When the turn of `resident` is over because of `demand`."""
    swap_seconds = min(MAX_SWAP_SECONDS, resident.reload_seconds + demand.reload_seconds)
    turn_seconds = max(resident.min_residency, swap_seconds)
    return max(resident.ready_at + turn_seconds, demand.since + resident.min_residency)


def decide(request: Request, demand: Demand, occupancy: Occupancy, ahead: Sequence[Claim]) -> Decision:
    """The decision for `request`; `evict` of the outcome may name models in use whose turn is over.

    `ahead` are the claims of earlier demands. A refusal is final (`waits_for` is empty) only if no claim contributes to
    it, and either a device is too small or nothing is loading or leaving on the devices that lack room.
    """
    ends = _ends(occupancy, demand)
    spent = [name for name, end in ends if end <= occupancy.policy.now and name in occupancy.residents]
    outcome = _keeping(request, occupancy.ledger, _movable(occupancy.models, spent), ahead, occupancy.policy)
    if isinstance(outcome, Placement):
        claim = Claim(request.model, outcome.need, outcome.evict) if outcome.result is Result.FULL else None
        return Decision(outcome, claim)
    if not outcome.waits_for:
        return Decision(_or_wait(outcome, occupancy.ledger))
    leaving = tuple(item.model for item in occupancy.models if item.eviction_state is EvictionState.LEAVING)

    def without(names: Sequence[str]) -> Placement | Refusal:
        loading = {item.model for item in occupancy.models if item.eviction_state is EvictionState.LOADING}
        gone = {item.holding for item in occupancy.models if item.model in leaving or item.model in loading & {*names}}
        stay = [item for item in occupancy.models if item.holding not in gone]
        return _keeping(request, occupancy.ledger.without(gone), _movable(stay, names), ahead, occupancy.policy)

    names = [name for name, _ in ends]
    fewest, enough = 0, len(names)
    if isinstance(without(names), Refusal):
        return Decision(outcome)
    while fewest < enough:  # the earliest time at which enough turns are over
        middle = (fewest + enough) // 2
        fewest, enough = (fewest, middle) if isinstance(without(names[:middle]), Placement) else (middle + 1, enough)
    needed = names[:enough]
    for name in [name for name in needed if name in occupancy.abandoned]:
        if isinstance(without([other for other in needed if other != name]), Placement):
            needed.remove(name)
    found = without(needed)
    assert isinstance(found, Placement)
    given_up = tuple(name for name in needed if name in occupancy.abandoned)
    loading = tuple(
        item.model for item in occupancy.models if item.eviction_state is EvictionState.LOADING and item.model in needed
    )
    due = max((end for name, end in ends if name in needed), default=-math.inf)
    claim = Claim(request.model, found.need, (*leaving, *loading, *found.evict))
    return Decision(outcome, claim, given_up, due if occupancy.policy.now < due < math.inf else None)


def _ends(occupancy: Occupancy, demand: Demand) -> list[tuple[str, float]]:
    """The models with the ends of their turns, earliest first; loading models that are wanted have no end yet."""
    now = occupancy.policy.now
    ends = [
        (item.model, turn_ends_at(occupancy.residents[item.model], demand))
        for item in occupancy.models
        if item.eviction_state in (EvictionState.BUSY, EvictionState.YOUNG) and item.model in occupancy.residents
    ]
    loading = [
        (item.model, now if item.model in occupancy.abandoned else math.inf)
        for item in occupancy.models
        if item.eviction_state is EvictionState.LOADING
    ]
    return sorted([*ends, *loading], key=lambda end: end[1])


def _movable(models: Sequence[Held], names: Sequence[str]) -> list[Held]:
    moving = frozenset(names)
    return [replace(item, eviction_state=EvictionState.IDLE) if item.model in moving else item for item in models]


def _keeping(
    request: Request, ledger: Ledger, models: Sequence[Held], claims: Sequence[Claim], policy: Policy
) -> Placement | Refusal:
    """The plan with only the options that keep all claims possible."""
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


def _or_wait(refusal: Refusal, ledger: Ledger) -> Refusal:
    """A refusal that waits for models that load or leave, because meanwhile less memory may look free than there is."""
    accounts = ledger.accounts
    if any(
        lack.need_bytes > min(accounts[lack.device].capacity_bytes, accounts[lack.device].budget_bytes)
        for lack in refusal.lacks
    ):
        return refusal
    moving = [item for item in ledger.holdings.values() if item.phase in (Phase.RESERVED, Phase.RELEASING)]
    names = [item.owner for item in moving for lack in refusal.lacks if item.bytes.get(lack.device)]
    return replace(refusal, waits_for=tuple(dict.fromkeys(names)))


def _broken(placement: Placement, ledger: Ledger, models: Sequence[Held], claims: Sequence[Claim]) -> tuple[str, ...]:
    """The models whose claims would not fit beside `placement`, after all evictions for it and for the claims."""
    if not claims:
        return ()
    leaving = {*placement.evict, *(name for claim in claims for name in claim.victims)}
    later = ledger.without({item.holding for item in models if item.model in leaving})
    later = later.assume("placement", "", placement.need)
    broken = []
    for claim in claims:
        if later.lacks(claim.need):
            broken.append(claim.model)
        else:
            later = later.assume(f"claim of {claim.model}", claim.model, claim.need)
    return tuple(broken)
