"""Reconciliation: decides for every wanted model, and acts on the decision.

Models for which others are already leaving come first, then the models that have waited longest. If a condition changes
only with time, a timer is set.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.placing import decision
from inference.authority.handlers.placing.decision import NeedsCheck, NeedsEstimate, NeedsReading
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import fit_of, refusal_error
from inference.authority.handlers.running import (
    departure,
    device_incidents,
    keeping,
    load_devices,
    oom_recovery,
    replicas,
    tickets,
    warm_pool,
    worker_lifecycle,
)
from inference.authority.handlers.watching import advisor, governor
from inference.authority.lifecycle import ACCEPTING, Action, Departure, ModelEvent, Reason
from inference.authority.placement.plan import EvictionState, Placement, Refusal, Result
from inference.authority.placement.stage import EVICTABLE
from inference.authority.placement.turns import Decision
from inference.authority.retention import Mechanism
from inference.authority.state import FixCheck, FixKey, Purpose, TimerKind
from inference.devices.device import CPU
from inference.errors import InferenceError, MemoryLimitExceededError, ModelFailed
from inference.file_stamp import changed
from inference.protocol import ModelState
from inference.settings import ModelSpec

MAX_BACKOFF_SECONDS = 2.0
"""Requests wait for a backoff of at most this time; a longer one is an error."""
ALONE_BACKOFF_SECONDS = 10.0
"""The same limit if the first request must run alone, because it was in flight when a worker ended."""
FIX_SECONDS = 30.0
"""A suggestion is verified again after this time, because foreign use changes."""
MAX_FIXES = 256
_CHECK_AGAIN_SECONDS = 1.0
_FITS = (Result.FREE, Result.DEPLOYED)
_S = ModelState


def reconcile(draft: Draft) -> None:
    """Decides for all wanted models; the readings are current."""
    draft.set(unplanned=False)
    if draft.state.closing or not draft.state.started:
        return
    draft.set(claims=())
    draft.cancel(TimerKind.PLAN, 0)
    for model in draft.state.models.values():
        if not model.queue.waiters and model.eviction_began_at != math.inf:
            draft.set_model(model.id, eviction_began_at=math.inf)
    wanted = [model for model in draft.state.models.values() if model.queue.waiters]
    all_decided = True
    for model in sorted(wanted, key=decision.rank):
        if draft.model(model.id).queue.waiters:
            all_decided = _advance(draft, model.id) and all_decided
    if all_decided:
        _end_needless_draining(draft)


def _advance(draft: Draft, id: str) -> bool:
    """Decides for a model; returns whether nothing is left to decide."""
    model, worker = draft.model(id), draft.worker_of(id)
    if not replicas.is_up(draft.state, model):
        tickets.move_to_others(draft, id)
        model = draft.model(id)
    if not model.queue.waiters or (worker is not None and worker.ending):
        return True
    if model.state is _S.FAILED and model.checking_build:
        return False
    if model.state is _S.FAILED:
        rest = model.retry_at - draft.now
        is_alone = model.queue.waiters[0].alone
        if rest > (ALONE_BACKOFF_SECONDS if is_alone else MAX_BACKOFF_SECONDS):
            tickets.fail(draft, id, worker_lifecycle.failed_error(model, draft.now))
            return True
        if rest > 0:
            draft.wake_in(rest)
            return False
        draft.advance(id, ModelEvent.RETRY)
        model = draft.model(id)
    if model.state in ACCEPTING:
        tickets.serve(draft, id)
        return True
    if model.state not in (_S.COLD, _S.WARM):
        return True
    found = _decide(draft, id)
    if found is None:
        return not draft.model(id).queue.waiters  # its requests may have failed
    if isinstance(found.outcome, Refusal):
        is_decided = _refuse(draft, id, found)
    else:
        is_decided = True
        _place(draft, id, found.outcome)
    if found.claim is not None:
        draft.set(claims=(*draft.state.claims, found.claim))
    return is_decided


def _decide(draft: Draft, id: str) -> Decision | None:
    """The decision; None while a measurement, reading, check, cleanup or drop is pending, or if the requests failed."""
    model = draft.model(id)
    if model.cleaning:
        return None
    found = decision.consider(draft.state, id, draft.now)
    if _drops_stale(draft, id):
        return None
    if isinstance(found, NeedsEstimate):
        if found.divides and not draft.state.is_estimating(model):
            draft.set_model(id, divisions=model.divisions + 1)
        if not estimates.request(draft, found.key):
            tickets.fail(draft, id, estimates.devices_are_missing(model))
        return None
    if isinstance(found, NeedsReading):
        device_view.read(draft)
        return None
    outcome = found.refusal if isinstance(found, NeedsCheck) else found.outcome
    if _is_optional(draft, id) and not _fits_beside(draft, id, outcome):
        tickets.fail(draft, id, _no_room_beside(draft, id, outcome))
        return None
    if model.divisions:
        draft.set_model(id, divisions=0)
    if isinstance(found, NeedsCheck):
        if not _drops_warm_copy(draft, id, found.refusal):
            key = (found.check.spec, found.check.kinds)
            draft.set(checks={key: found.check, **draft.state.checks})
        return None
    if isinstance(found.outcome, Refusal) and _drops_warm_copy(draft, id, found.outcome):
        return None
    return found


def _no_room_beside(draft: Draft, id: str, outcome: Placement | Refusal) -> InferenceError:
    """The error of an optional load: for a client with the numbers."""
    if Purpose.CLIENT not in _purposes(draft, id):
        reason = f": {outcome.reason}" if isinstance(outcome, Refusal) else ""
        return ModelFailed(f"it does not fit without the eviction of other models{reason}")
    model = draft.model(id)
    if isinstance(outcome, Refusal):
        return refusal_error(draft.state, model.effective, outcome, draft.now)
    reason = f"it would fit after the eviction of {', '.join(outcome.evict)}"
    lacks = draft.state.ledger.lacks(outcome.need)
    return MemoryLimitExceededError(model.id, lacks, reason=reason)


def _purposes(draft: Draft, id: str) -> set[Purpose]:
    return {draft.state.tickets[waiter.id].purpose for waiter in draft.model(id).queue.waiters}


def _is_optional(draft: Draft, id: str) -> bool:
    """Whether the model is wanted only because of the start, as a further replica, or by clients that evict nothing: no
    model in use leaves for it.
    """
    found = [draft.state.tickets[waiter.id] for waiter in draft.model(id).queue.waiters]
    return all(ticket.purpose in (Purpose.STARTUP, Purpose.REPLICA) or not ticket.evicts for ticket in found)


def _fits_beside(draft: Draft, id: str, outcome: Placement | Refusal) -> bool:
    """Whether an optional load has room, perhaps with a change that its configuration allows.

    At the start no model is evicted for it. For a replica, idle models may be, but no replica of the same model. The
    load for a replica or a client waits for memory that is being released.
    """
    if outcome.result in _FITS or (isinstance(outcome, Refusal) and fit_of(draft.model(id).spec).allows(outcome.fix)):
        return True
    purposes = _purposes(draft, id)
    if not purposes & {Purpose.REPLICA, Purpose.CLIENT}:
        return False
    if isinstance(outcome, Placement):
        if Purpose.REPLICA not in purposes:
            return False
        leaving = [draft.model(name) for name in outcome.evict]
        others = replicas.replicas_of(draft.state, draft.model(id))
        return all(
            draft.state.eviction_state(model, draft.now) in EVICTABLE and model not in others for model in leaving
        )
    is_left = [
        name not in draft.state.models or draft.model(name).state not in replicas.UP for name in outcome.waits_for
    ]
    return bool(is_left) and all(is_left)  # their memory is being released


def _drops_stale(draft: Draft, id: str) -> bool:
    """Drops a warm model that no longer matches a load: its file changed, or its only device is closed to it."""
    model, worker = draft.model(id), draft.worker_of(id)
    if model.state is not _S.WARM or worker is None:
        return False
    home = keeping.only_device_of(model)
    devices = load_devices.possible(draft.state, model, draft.now)
    is_stranded = home is not None and all(item.id != home for item in devices)
    is_changed = worker.files != model.seen_files
    if not is_stranded and not is_changed:
        return False
    why = keeping.why_not_restorable(draft.state, model, draft.now) if is_stranded else None
    if why is None:
        files = changed(worker.files, model.seen_files)
        what = f"its file changed: {files}" if is_changed else f"it cannot be loaded on {home} now"
        warm_pool.drop(draft, id, Departure(Reason.CHANGED, Action.UNLOAD, (what,)))
    else:
        warm_pool.drop(draft, id, Departure(Reason.DEVICE, Action.UNLOAD, (why,)))
    return True


def _drops_warm_copy(draft: Draft, id: str, refusal: Refusal) -> bool:
    """Drops the warm copy of a model that does not fit, because its memory may make room for the load."""
    model = draft.model(id)
    if model.state is not _S.WARM or refusal.waits_for:
        return False
    is_bound = keeping.mechanism(draft.state, model) is Mechanism.CHECKPOINT
    if not is_bound and all(lack.device != CPU for lack in refusal.lacks):
        return False
    warm_pool.drop(draft, id, Departure(Reason.MEMORY_WANTED, Action.UNLOAD, (refusal.reason,)))
    return True


# --- what was decided ------------------------------------------------------------------------------------------------
def _place(draft: Draft, id: str, placement: Placement) -> None:
    draft.info("plan for %s: %s (%s)", id, placement.result, "; ".join(placement.trace))
    if placement.result is Result.FULL:
        draft.count("placements", Result.FULL.lower(), "eviction")
        draft.set_model(id, eviction_began_at=min(draft.model(id).eviction_began_at, draft.now))
        _make_room(draft, id, placement)
        return
    draft.count("placements", placement.result.lower(), "fits")
    draft.set_model(id, eviction_began_at=math.inf)
    if draft.model(id).state is _S.WARM:
        warm_pool.restore(draft, id, placement)
    else:
        worker_lifecycle.begin(draft, id, placement)
    governor.accept_foreign_use(draft)


def _make_room(draft: Draft, id: str, placement: Placement) -> None:
    kept = keeping.kept_for(draft.state, placement, draft.now)
    wanted_at = draft.model(id).wanted_at
    for name in placement.evict:
        worker = draft.worker_of(name)
        if worker is None:
            continue
        why = [f"room for {id}"]
        if worker.leases:
            why.append(f"requests for {id} have waited {draft.now - wanted_at:.1f} s: the turn of {name} is over")
        action = Action.OFFLOAD if name in kept else Action.UNLOAD
        departure.leave(draft, name, Reason.MEMORY_WANTED, action, (*why, *placement.trace), wanted_by=id)


def _refuse(draft: Draft, id: str, found: Decision) -> bool:
    refusal = found.outcome
    assert isinstance(refusal, Refusal)
    governor.request_check(draft)
    if refusal.waits_for:
        _wait(draft, id, refusal, found)
        return True
    if _awaits_verdict(draft, id):
        return False
    model = draft.model(id)
    trace = refusal.trace or (refusal.reason,)
    draft.info("plan for %s: %s (%s)", id, refusal.result, "; ".join(trace))
    error = refusal_error(draft.state, model.effective, refusal, draft.now)
    if worker_lifecycle.return_from_move(draft, id, error):
        return False
    if oom_recovery.refused(draft, id, refusal):
        return False
    advisor.note_refusal(draft, id)
    reason = "memory" if refusal.lacks else "limit"
    draft.count("placements", refusal.result.lower(), reason, amount=len(model.queue))
    tickets.fail(draft, id, error)
    draft.changed()
    return True


def _awaits_verdict(draft: Draft, id: str) -> bool:
    """Whether a device for the model is being tried; its verdict or a timer repeats the decision."""
    readings = device_view.readings(draft.state, draft.now)
    closed = device_view.closed_to(draft.model(id).effective, readings)
    awaits = any(device_incidents.is_verdict_awaited(draft.state, item.id, draft.now) for item in closed)
    if awaits:
        draft.wake_in(_CHECK_AGAIN_SECONDS)
    return awaits


def _wait(draft: Draft, id: str, refusal: Refusal, found: Decision) -> None:
    for name in found.give_up:
        explanation = (f"room for {id}", *refusal.trace)
        departure.leave(draft, name, Reason.MEMORY_WANTED, explanation=explanation, wanted_by=id)
        draft.set_model(id, eviction_began_at=min(draft.model(id).eviction_began_at, draft.now))
    models: Mapping[str, object] = draft.state.models
    times = []
    for name in refusal.waits_for:
        if name in models:
            other = draft.model(name)
            if draft.state.eviction_state(other, draft.now) is EvictionState.YOUNG:
                times.append(other.last_used_at + other.spec.min_residency - draft.now)
    if found.again_at is not None:
        times.append(found.again_at - draft.now)
    draft.set_model(id, room_at=max(draft.now, found.again_at or draft.now))
    draft.wake_in(max(0.05, min(times, default=_CHECK_AGAIN_SECONDS)))


def _end_needless_draining(draft: Draft) -> None:
    """Ends the draining of models that no request needs the memory of any more, or whose move has ended: they stay.

    A replica whose place another one has taken meanwhile leaves.
    """
    needed = {name for claim in draft.state.claims for name in claim.victims}
    for model in list(draft.state.models.values()):
        worker = draft.worker_of(model.id)
        if model.state is not _S.DRAINING or worker is None or worker.departure is None or worker.ending:
            continue
        reason = worker.departure.reason
        may_stay = reason is Reason.MEMORY_WANTED or (reason is Reason.MOVED and model.target is None)
        is_replaced = not replicas.taken_devices(draft.state, model).isdisjoint(worker.placement.devices)
        if may_stay and model.id not in needed and not is_replaced:
            departure.stay(draft, model.id)


def checks(draft: Draft) -> None:
    """Continues the checks of suggestions."""
    for key, check in list(draft.state.checks.items()):
        while check.fix:
            found = decision.verify(draft.state, check, draft.now)
            if isinstance(found, NeedsEstimate):
                if found.divides and not draft.state.is_measuring(found.key.spec):
                    check = replace(check, divisions=check.divisions + 1)
                if estimates.request(draft, found.key):
                    draft.set(checks={**draft.state.checks, key: check})
                    break
                check = decision.next_try(check)
            elif found:
                _checked(draft, key, check)
                break
            else:
                check = decision.next_try(check)
        else:
            _checked(draft, key, check)


def _checked(draft: Draft, key: FixKey, check: FixCheck) -> None:
    until = draft.now + FIX_SECONDS
    fixes = {other: known for other, known in draft.state.fixes.items() if other != key and known[0] > draft.now}
    kept = dict([*fixes.items()][-(MAX_FIXES - 1) :])
    draft.set(
        checks={other: item for other, item in draft.state.checks.items() if other != key},
        fixes={**kept, key: (until, check.fix)},
    )
    draft.plan()


def cannot_measure(draft: Draft, spec: ModelSpec) -> None:
    """A suggestion cannot be measured, so the next smaller one is tried."""
    for key, check in list(draft.state.checks.items()):
        if check.fix and replace(check.spec, **check.fix) == spec:
            draft.set(checks={**draft.state.checks, key: decision.next_try(check)})
