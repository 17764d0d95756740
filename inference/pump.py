"""Looks at every model that is wanted and does what can be done for it now; the deciding is the core's.

Everything it does is synchronous, so nothing can change between a decision and its booking. Whatever happens to models,
memory or waiters ends in a call of `run`; what only time changes wakes it up by itself.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from typing import TYPE_CHECKING

from inference import views
from inference.authority.lifecycle.transitions import Event
from inference.authority.placement.plan import Placement, Refusal, Request, Result, Standing
from inference.authority.placement.turns import Claim, Decision, Scenery, Wish, age_rank, decide
from inference.devices.host import CPU
from inference.evictions import Action, Reason
from inference.model import Model
from inference.protocol import ModelState
from inference.wishes import candidates, closed_to, error_of, held_models, request_for, residents

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

PATIENT_BACKOFF_SECONDS = 2.0
"""A rest this short is waited out by those who ask; a longer one is told to them."""
TRIAL_BACKOFF_SECONDS = 10.0
"""And one this short if a request is there that was in flight when the worker ended."""
FRESH_SECONDS = 1.0
MOST_DIVISIONS = 2
"""How often a model that needs several devices is measured before it is decided on what is known."""
_LOOK_AGAIN_SECONDS = 1.0
_S, _E = ModelState, Event


class Pump:
    """One per authority, on its loop. `claims` is the room that is being made, as the last run left it."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._running = False
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0.0
        self._all_decided = True
        self.claims: list[Claim] = []

    def close(self) -> None:
        """Wakes up no more."""
        if self._timer is not None:
            self._timer.cancel()

    def run(self) -> None:
        """Looks at everybody who is wanted: those first for whom others leave already, then who has waited longest."""
        authority = self._authority
        if self._running or authority.closing or not authority.started:
            return
        self._running = self._all_decided = True
        self.claims = []
        try:
            for model in authority.models.values():
                if not model.queue.waiters:
                    model.called_at = math.inf
            wanted = [model for model in authority.models.values() if model.queue.waiters]
            for model in sorted(wanted, key=lambda item: (item.called_at, age_rank(item.queue.waiters))):
                self._advance(model)
            if self._all_decided:
                self._keep_whom_nobody_needs_gone()
        finally:
            self._running = False

    # --- one model -------------------------------------------------------------------------------------------------
    def _advance(self, model: Model) -> None:
        authority = self._authority
        if model.state is _S.FAILED:
            rest = model.retry_at - authority.loop.time()
            is_tried = model.queue.waiters[0].alone
            if rest > (TRIAL_BACKOFF_SECONDS if is_tried else PATIENT_BACKOFF_SECONDS):
                authority.waiting.fail(model, authority.loads.resting(model))
                return
            if rest > 0:
                self._all_decided = False
                self.wake_in(rest)
                return
            authority.move(model, _E.RETRY)
        if model.state in (_S.READY, _S.BUSY):
            authority.waiting.serve(model)
        elif model.state in (_S.COLD, _S.WARM):
            decision = self._decide(model)
            if decision is None:
                self._all_decided = False
                return
            if isinstance(decision.outcome, Refusal):
                self._refuse(model, decision)
            else:
                self._place(model, decision.outcome)
            if decision.claim is not None:
                self.claims.append(decision.claim)

    def _decide(self, model: Model) -> Decision | None:
        """None while something has to be measured or read first; the run that follows is under way then."""
        authority = self._authority
        authority.background.look(model)
        readings = authority.observe()
        open_devices = authority.shortages.options(model, candidates(model.effective, readings, authority.settings))
        devices = authority.moving.options(model, open_devices)
        options = authority.governor.open_to(model, devices)
        if isinstance(options, Refusal):
            return Decision(options)
        if model.state is _S.WARM and authority.warm.drops_stale(model, options):
            return None
        if any(device.id not in model.estimates for device in options):
            authority.background.estimate(model)
            return None
        age = authority.loop.time() - authority.background.refreshed_at
        if age > FRESH_SECONDS and any(device.id != CPU for device in options):
            authority.background.refresh()
            return None
        request = request_for(model, options, divide=model.divisions < MOST_DIVISIONS)
        assert request is not None
        decision = self._look(model, request)
        if isinstance(decision.outcome, Placement) and not decision.outcome.measured:
            authority.background.divide(model, decision.outcome)
            return None
        model.divisions = 0
        if isinstance(decision.outcome, Refusal):
            if authority.warm.gives_up(model, decision.outcome):
                return None
            if not decision.outcome.waits_for:
                checked = authority.fixes.known(model, decision.outcome)
                if checked is None:
                    authority.background.check(model, decision.outcome)
                    return None
                return replace(decision, outcome=checked)
        return decision

    def _look(self, model: Model, request: Request) -> Decision:
        authority = self._authority
        now = authority.loop.time()
        models = authority.models.values()
        ledger = authority.ledger
        held = held_models(models, ledger, now)
        if model.state is _S.WARM:
            request, ledger = authority.warm.adapted(model, request), authority.warm.counted(model)
            held = [item for item in held if item.model != model.id or item.standing is Standing.LEAVING]
        scenery = Scenery(
            ledger,
            tuple(held),
            residents(models),
            views.policy(authority.settings, now),
            frozenset(item.id for item in models if item.state is _S.LOADING and not item.queue.waiters),
        )
        return decide(request, Wish(model.wanted_at, model.reload_seconds), scenery, self.claims)

    # --- what was decided ------------------------------------------------------------------------------------------
    def _place(self, model: Model, placement: Placement) -> None:
        authority = self._authority
        self._log(placement.result, model, placement.trace)
        if placement.result is Result.FULL:
            authority.metrics.placements.labels(Result.FULL.lower(), "eviction").inc()
            model.called_at = min(model.called_at, authority.loop.time())
            self._make_room(model, placement)
        else:
            authority.metrics.placements.labels(placement.result.lower(), "fits").inc()
            model.called_at = math.inf
            if model.state is _S.WARM:
                authority.warm.restore(model, placement)
            else:
                authority.loads.begin(model, placement)

    def _make_room(self, model: Model, placement: Placement) -> None:
        authority = self._authority
        kept = authority.warm.kept_of(placement)
        for name in placement.evict:
            victim = authority.models[name]
            if victim.running is not None:
                victim.running.leaves_free = placement.need.get(CPU, 0)
            why = f"room for {model.id}"
            if victim.in_flight:
                why += f", wanted for {authority.loop.time() - model.wanted_at:.1f} s: the turn of {name} is over"
            action = Action.OFFLOAD if name in kept else Action.UNLOAD
            authority.loads.leave(victim, Reason.MEMORY_WANTED, action, (why, *placement.trace))

    def _refuse(self, model: Model, decision: Decision) -> None:
        authority, refusal = self._authority, decision.outcome
        assert isinstance(refusal, Refusal)
        authority.governor.refused()
        if refusal.waits_for:
            self._wait(model, refusal, decision)
            return
        if self._awaits_verdict(model):
            self._all_decided = False
            return
        self._log(refusal.result, model, refusal.trace or (refusal.reason,))
        error = error_of(model, refusal, authority.inventory.readings(), authority.settings)
        if authority.moving.turns_back(model, error):
            self._all_decided = False
            return
        if authority.shortages.refused(model, refusal):
            self._all_decided = False
            return
        authority.governor.adviser.refused(model.id)
        count = authority.metrics.placements.labels(refusal.result.lower(), "memory" if refusal.lacks else "limit")
        count.inc(len(model.queue))
        authority.waiting.fail(model, error)
        authority.teller.changed()

    def _awaits_verdict(self, model: Model) -> bool:
        """Whether a device it might be loaded onto is being tried; the verdict ends in a run, and so does the clock."""
        authority = self._authority
        readings = authority.inventory.readings()
        awaits = any(authority.health.is_in_doubt(reading.id) for reading in closed_to(model.effective, readings))
        if awaits:
            self.wake_in(_LOOK_AGAIN_SECONDS)
        return awaits

    def _wait(self, model: Model, refusal: Refusal, decision: Decision) -> None:
        authority = self._authority
        for name in decision.give_up:
            explanation = (f"room for {model.id}", *refusal.trace)
            authority.loads.leave(authority.models[name], Reason.MEMORY_WANTED, explanation=explanation)
            model.called_at = min(model.called_at, authority.loop.time())
        now = authority.loop.time()
        waits = [authority.models[name] for name in refusal.waits_for if name in authority.models]
        times = [
            item.last_used_at + item.spec.min_residency - now for item in waits if item.standing(now) is Standing.YOUNG
        ]
        if decision.again_at is not None:
            times.append(decision.again_at - now)
        model.room_at = max([now, *([decision.again_at] if decision.again_at is not None else [])])
        self.wake_in(max(0.05, min(times, default=_LOOK_AGAIN_SECONDS)))

    def _keep_whom_nobody_needs_gone(self) -> None:
        """Who only drains to make room stays when everybody left who wanted the room."""
        needed = {name for claim in self.claims for name in claim.victims}
        for model in self._authority.models.values():
            running = model.running
            if model.state is not _S.DRAINING or running is None or running.departure is None:
                continue
            if running.departure.reason is Reason.MEMORY_WANTED and model.id not in needed:
                self._authority.loads.stay(model)

    # --- time and telling ------------------------------------------------------------------------------------------
    def wake_in(self, seconds: float) -> None:
        """Runs again in `seconds` at the latest."""
        loop = self._authority.loop
        due = loop.time() + seconds
        if self._timer is not None:
            if self._wake_at <= due:
                return
            self._timer.cancel()
        self._wake_at = due
        self._timer = loop.call_at(due, self._awake)

    def _awake(self) -> None:
        self._timer = None
        self.run()

    @staticmethod
    def _log(result: Result, model: Model, trace: tuple[str, ...]) -> None:
        log.info("plan for %s: %s (%s)", model.id, result, "; ".join(trace))
