"""Checks that a suggested setting would really fit, with exact figures, before anybody is told of it; applies none.

The planner derives a suggestion from what its layers take; here it is measured as a load with it would be. One that is
a little too large is made smaller, twice at most; then nothing is suggested.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from inference import views
from inference.authority.placement.fix import smaller
from inference.authority.placement.plan import Placement, Refusal, Scene, plan
from inference.errors import InferenceError
from inference.estimate.file_stamp import Fingerprint
from inference.model import Model
from inference.settings import ModelSpec
from inference.wishes import candidates, held_models, request_for

if TYPE_CHECKING:
    from inference.authority.shell import Authority

MOST_TRIES = 3
FRESH_SECONDS = 30.0
"""A suggestion is checked again after this: what others use of a device changes."""
_MOST_KEPT = 256

Key = tuple[ModelSpec, Fingerprint | None, tuple[str, ...]]


class Fixes:
    """Suggestions that were checked, for a while."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._known: dict[Key, tuple[float, Mapping[str, Any]]] = {}

    def known(self, model: Model, refusal: Refusal) -> Refusal | None:
        """The refusal with its suggestion as it was checked; None while it was not."""
        if not refusal.fix:
            return refusal
        until, fix = self._known.get(_key(model, refusal), (0.0, {}))
        return replace(refusal, fix=fix) if self._authority.loop.time() < until else None

    async def check(self, model: Model, refusal: Refusal) -> Refusal:
        """The refusal with a suggestion that is true, or with none."""
        known = self.known(model, refusal)
        if known is not None:
            return known
        fix: Mapping[str, Any] = refusal.fix
        for _ in range(MOST_TRIES):
            if not fix or await self._is_true(model, fix):
                break
            fix = smaller(fix)
        else:
            fix = {}
        while len(self._known) >= _MOST_KEPT:
            self._known.pop(next(iter(self._known)))
        self._known[_key(model, refusal)] = (self._authority.loop.time() + FRESH_SECONDS, fix)
        return replace(refusal, fix=fix)

    async def _is_true(self, model: Model, fix: Mapping[str, Any]) -> bool:
        """Whether the model would be placed with these settings once everybody left who ever leaves by himself."""
        authority = self._authority
        other = Model(replace(model.effective, **fix))
        try:
            await authority.background.measure(other)
            decision = self._decide(other)
            if isinstance(decision, Placement) and not decision.measured:
                await authority.background.measure_division(other, decision)
                await authority.background.measure(other)
                decision = self._decide(other)
        except InferenceError:
            return False
        return isinstance(decision, Placement) and decision.measured

    def _decide(self, other: Model) -> Placement | Refusal:
        authority = self._authority
        request = request_for(other, candidates(other.effective, authority.observe(), authority.settings))
        assert request is not None
        now = authority.loop.time()
        held = held_models(authority.models.values(), authority.ledger, now)
        emptied = Scene.of(authority.ledger, [item for item in held if item.model != other.id]).emptied
        its_own = {item.holding for item in held if item.model == other.id}
        return plan(request, emptied.ledger.without(its_own), emptied.models, views.policy(authority.settings, now))


def _key(model: Model, refusal: Refusal) -> Key:
    """Of the same kind of change, one check is enough: the figure itself wavers with what others use."""
    return model.effective, model.files, tuple(sorted(refusal.fix))
