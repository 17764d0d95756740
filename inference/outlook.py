"""What would be: dry runs, and whether each model could be loaded now; books, starts and evicts nothing.

Whoever lists models asks for all of them at once and often, so the answers are kept until something about models or
memory changed, at most FRESH_SECONDS. They advise; a load is always decided on the ledger itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from inference import views
from inference.authority.placement.plan import Placement, Policy, Refusal, Scene, plan, prospect
from inference.devices.device import Reading
from inference.estimate.estimator import Estimate
from inference.estimate.file_stamp import changed
from inference.model import Model
from inference.wishes import candidates, held_models, placement_key, request_for

if TYPE_CHECKING:
    from inference.authority.shell import Authority

FRESH_SECONDS = 1.0
MOST_DIVISIONS = 2
"""How often a dry run measures a model that needs several devices."""


@dataclass(slots=True)
class _Moment:
    """The state all answers of one moment share. `said` is what was answered, by model id."""

    until: float
    scene: Scene
    policy: Policy
    readings: tuple[Reading, ...]
    said: dict[str, Refusal | bool | None] = field(default_factory=dict)


class Outlook:
    """Answers from one look at the ledger, taken anew when it is old or `forget` was called."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._moment: _Moment | None = None

    def forget(self) -> None:
        """Something changed: the next question looks again."""
        self._moment = None

    def of(self, model: Model) -> Refusal | bool | None:
        """True when the model could be loaded now (evictions included), the refusal when not, None while unknown."""
        moment = self._now()
        if model.id not in moment.said:
            moment.said[model.id] = self._ask(model, moment)
        return moment.said[model.id]

    def _now(self) -> _Moment:
        authority = self._authority
        now = authority.loop.time()
        if self._moment is None or now > self._moment.until:
            readings = authority.observe()
            held = held_models(authority.models.values(), authority.ledger, now)
            policy = views.policy(authority.settings, now)
            self._moment = _Moment(now + FRESH_SECONDS, Scene.of(authority.ledger, held), policy, readings)
        return self._moment

    def _ask(self, model: Model, moment: _Moment) -> Refusal | bool | None:
        devices = candidates(model.effective, moment.readings, self._authority.settings)
        allowed = self._authority.governor.open_to(model, devices)
        if isinstance(allowed, Refusal):
            return allowed
        request = request_for(model, allowed)
        if request is None:
            return None
        refusal = prospect(request, moment.scene, moment.policy)
        if refusal is not None and self._authority.shortages.may_bend(model, refusal):
            return None  # with less of it, it may; that is measured when somebody asks
        return refusal or True

    async def dry_run(self, model: Model, changes: Mapping[str, Any]) -> tuple[Placement | Refusal, Estimate | None]:
        """What a load with `changes` to the model's settings would come to; measures, and does nothing else.

        Raises ModelFailed when the file cannot be used.
        """
        authority = self._authority
        other = Model(replace(model.spec, **changes))
        anew = bool(changes) and other.spec != model.effective
        if not anew:  # a copy: a reload meanwhile takes back what was measured for the model itself
            await authority.background.measure(model)
            other = Model(model.effective, estimates=dict(model.estimates))
        await authority.background.measure(other)
        devices = candidates(other.effective, authority.observe(), authority.settings)
        allowed = authority.governor.open_to(other, devices)
        if isinstance(allowed, Refusal):
            return allowed, next(iter(other.estimates.values()), None)
        request = request_for(other, allowed)
        assert request is not None
        now = authority.loop.time()
        ledger, held = authority.ledger, held_models(authority.models.values(), authority.ledger, now)
        its_own = [item for item in held if item.model == model.id]
        if anew:  # with other settings it has to leave first
            ledger = ledger.without({item.holding for item in its_own})
            held = [item for item in held if item.model != model.id]
        decision = plan(request, ledger, held, views.policy(authority.settings, now))
        for _ in range(MOST_DIVISIONS):
            if isinstance(decision, Refusal) or decision.measured:
                break
            await authority.background.measure_division(other, decision)
            request = request_for(other, allowed)
            assert request is not None
            decision = plan(request, ledger, held, views.policy(authority.settings, now))
        if isinstance(decision, Refusal) and not decision.waits_for:
            decision = await authority.fixes.check(other, decision)
        if not anew and model.running is not None and (found := changed(model.running.files, model.effective.files)):
            line = f"the file of {model.id} changed since it was loaded: {found}; the next load reads the new file"
            decision = replace(decision, trace=(line, *decision.trace))
        if anew and its_own:
            line = f"{model.id} is on {its_own[0].device} with other settings, and would be loaded anew"
            decision = replace(decision, trace=(line, *decision.trace))
        first = next(iter(other.estimates.values()), None)
        if isinstance(decision, Placement):
            return decision, other.estimates.get(placement_key(decision.devices, decision.tensor_split), first)
        return decision, first
