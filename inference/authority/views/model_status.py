"""Models and decisions as JSON, as functions of the state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import expectations
from inference.authority.handlers.running.oom_recovery import is_fallback
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.placement.plan import Placement, Refusal
from inference.authority.state import ModelRecord, State
from inference.protocol import ModelState, ModelStatus


def snapshot(state: State, now: float) -> dict[str, Any]:
    """The whole state, for listeners that begin or fell behind."""
    moment = Predictions(state, now)
    return {
        "models": [status(state, model, now, moment).to_json() for model in state.models.values()],
        "devices": [reading.to_json() for reading in device_view.readings(state, now)],
        "ready": state.started and not state.closing,
    }


def status(state: State, model: ModelRecord, now: float, moment: Predictions | None = None) -> ModelStatus:
    """One model as `/v1/models`, `/events` and `ps` show it."""
    worker, in_flight = state.worker_of(model), state.in_flight(model)
    estimate = next(iter(state.estimates_of(model.effective).values()), None)
    is_known = worker is not None and (worker.ready is not None or model.state is ModelState.WARM)
    actual = sum(state.ledger.owned_by(model.id).values()) if is_known else None
    fits, reason, rest = _fits(state, model, now, moment or Predictions(state, now))
    if model.state is ModelState.FAILED:
        rest = model.retry_at - now
    return ModelStatus(
        id=model.id,
        state=model.state,
        aliases=model.spec.aliases,
        context_length=worker.ready.context_length if worker and worker.ready else model.effective.context_length,
        parallel=model.effective.parallel,
        kv_cells=model.effective.kv_cells,
        gpu_layers=model.effective.gpu_layers,
        devices=worker.placement.devices if worker else (),
        predicted_bytes=sum(estimate.need.values()) if estimate else None,
        actual_bytes=actual,
        in_flight=in_flight,
        queued=len(model.queue),
        idle_seconds=round(now - model.last_used_at, 3) if is_known and not in_flight else None,
        loads=model.loads,
        capabilities=model.spec.capabilities or model.capabilities,
        fits=fits,
        reason=reason,
        retry_after_seconds=None if rest is None else round(max(0.0, rest), 3),
        pid=worker.pid if worker else None,
        headroom_bytes=sum(estimate.headroom_bytes.values()) if estimate else 0,
        reduced=model.spec.changed(model.effective),
        fallback=is_fallback(state, model),
        load_seconds=_rounded(expectations.load_seconds(state, model, now)),
        queue_seconds=_rounded(expectations.queue_seconds(state, model)),
        answer_seconds=_rounded(model.pace.seconds),
        prefill_tokens_per_second=_rounded(expectations.prefill_rate(state, model)),
        template_problem=worker.ready.template_problem or None if worker and worker.ready else None,
    )


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _fits(
    state: State, model: ModelRecord, now: float, moment: Predictions
) -> tuple[bool | None, str | None, float | None]:
    """Whether the model fits, why not, and the seconds until its lost device is tried again."""
    if model.worker is not None and model.state is not ModelState.UNLOADING:
        return True, None, None
    if not state.started:
        return None, None, None  # the devices are not known yet
    found = moment.of(model)
    if not isinstance(found, Refusal):
        return found, model.failure, None
    if found.waits_for:
        return None, found.reason, None
    lost, seconds = device_view.lost_for(model.effective, device_view.readings(state, now))
    return False, f"{found.reason}; {lost}" if lost else found.reason, seconds


_QUIET = {
    "idle_seconds": None,
    "in_flight": 0,
    "retry_after_seconds": None,
    "load_seconds": None,
    "queue_seconds": None,
    "answer_seconds": None,
    "prefill_tokens_per_second": None,
}


def differs(now: ModelStatus, reported: ModelStatus | None) -> bool:
    """Whether listeners get an event: not for changing figures and requests in flight alone."""
    if reported is None:
        return True
    return replace(now, **_QUIET) != replace(reported, **_QUIET)  # type: ignore[arg-type]


def decision_json(decision: Placement | Refusal, lost: str = "") -> dict[str, Any]:
    """A decision as `/memory/plan` shows it; `lost` names missing accelerators with the reason."""
    common = {"result": str(decision.result), "trace": list(decision.trace)}
    if isinstance(decision, Placement):
        return {
            **common,
            "allocation": str(decision.allocation),
            "device": decision.device,
            "devices": list(decision.devices),
            "tensor_split": list(decision.tensor_split),
            "need_bytes": dict(decision.need),
            "evict": list(decision.evict),
        }
    return {
        **common,
        "reason": f"{decision.reason}; {lost}" if lost else decision.reason,
        "waits_for": list(decision.waits_for),
        "fix": dict(decision.fix) or None,
        "short": [lack.to_json() for lack in decision.lacks],
    }
