"""Events of requests that are suspected of ending their workers."""

from __future__ import annotations

from typing import Any

from inference.authority.draft import Draft
from inference.authority.events import CaseCleared, CrashReported, RequestAnswered
from inference.authority.quarantine import Standing
from inference.authority.state import State


def crashed(draft: Draft, event: CrashReported) -> None:
    """A worker crashed while a request was in flight."""
    model = draft.state.models.get(event.model)
    if model is None:
        return
    quarantine = model.quarantine.crashed(event.key, event.crash, draft.now)
    draft.set_model(model.id, quarantine=quarantine)
    draft.warning(
        "request %s to %s is %s: %s%s",
        event.key, model.id, quarantine.standing(event.key, draft.now), event.crash.message,
        " (alone)" if event.crash.alone else "",
    )  # fmt: skip


def answered(draft: Draft, event: RequestAnswered) -> None:
    """A request was answered, and the worker is alive."""
    if event.crashes:
        draft.count("recoveries", "rerun")
    model = draft.state.models.get(event.model)
    if model is None:
        return
    quarantine = model.quarantine
    if not quarantine.cases and not quarantine.in_a_row and not quarantine.doubted:
        return
    if quarantine.standing(event.key, draft.now) is not Standing.INNOCENT:
        draft.info("request %s to %s is no longer suspected", event.key, model.id)
    draft.set_model(model.id, quarantine=quarantine.answered(event.key))


def cleared(draft: Draft, event: CaseCleared) -> None:
    """An operator removed a request from quarantine."""
    model = draft.state.models.get(event.model)
    if model is not None:
        draft.set_model(model.id, quarantine=model.quarantine.forget(event.key))
        draft.info("an operator removed request %s to %s from quarantine", event.key, model.id)


def listing(state: State, now: float) -> list[dict[str, Any]]:
    """All current cases by model, oldest first; times in seconds."""
    return [
        {
            "key": key,
            "model": model.id,
            "standing": str(case.standing),
            "crashes": case.crashes,
            "cause": str(case.cause),
            "message": case.message,
            "age_seconds": round(now - case.since, 3),
            "seconds_left": round(case.until - now, 3),
        }
        for model in state.models.values()
        for key, case in model.quarantine.cases.items()
        if model.quarantine.standing(key, now) is not Standing.INNOCENT
    ]
