"""Models and decisions as JSON, as functions of the state."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from typing import Any

from inference.authority.handlers.queries import device_view, expectations
from inference.authority.handlers.running import replicas
from inference.authority.handlers.running.oom_recovery import is_fallback
from inference.authority.handlers.watching.growth_on_devices import sentence
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.placement.plan import Placement, Refusal
from inference.authority.state import ModelRecord, State, TakenStep
from inference.protocol import ModelState, ModelStatus, ReplicaStatus


def snapshot(state: State, now: float) -> dict[str, Any]:
    """The whole state, for listeners that begin or fell behind."""
    return {
        "models": [found.to_json() for found in statuses(state, now)],
        "devices": [reading.to_json() for reading in device_view.readings(state, now)],
        "ready": state.started and not state.closing,
    }


def statuses(state: State, now: float) -> list[ModelStatus]:
    """Every model in the order of the file, each with its replicas."""
    predictions = Predictions(state, now)
    shown = (model for model in state.models.values() if replicas.first_of(state, model) is model)
    return [status(state, model, now, predictions) for model in shown]


def status(state: State, model: ModelRecord, now: float, predictions: Predictions | None = None) -> ModelStatus:
    """One model as `/v1/models`, `/events` and `ps` show it: all its replicas together, or one by its own id."""
    predictions = predictions or Predictions(state, now)
    every = replicas.replicas_of(state, model) if model.spec.replica_of is None else [model]
    found = [_status(state, item, now, predictions) for item in every]
    return together(found, [item.id for item in every if replicas.is_up(state, item)]) if found[1:] else found[0]


_ORDER = (
    ModelState.BUSY,
    ModelState.READY,
    ModelState.RESTORING,
    ModelState.LOADING,
    ModelState.WARM,
    ModelState.COLD,
    ModelState.DRAINING,
    ModelState.OFFLOADING,
    ModelState.UNLOADING,
    ModelState.FAILED,
)
"""The state of a model is the first of these states that any of its replicas has."""


def together(found: Sequence[ModelStatus], up: Collection[str]) -> ModelStatus:
    """The status of a model from those of its replicas, the first one first; `up` are loaded or loading."""
    best = min(found, key=lambda item: _ORDER.index(item.state))
    serving = [item for item in found if item.id in up] or [best]
    paces = [item.answer_seconds for item in serving if item.answer_seconds]
    return replace(
        best,
        id=found[0].id,
        aliases=found[0].aliases,
        parallel=sum(item.parallel for item in serving),
        devices=tuple(dict.fromkeys(name for item in found for name in item.devices)),
        predicted_bytes=_sum(item.predicted_bytes for item in serving),
        actual_bytes=_sum(item.actual_bytes for item in found),
        in_flight=sum(item.in_flight for item in found),
        queued=sum(item.queued for item in found),
        idle_seconds=None if any(item.in_flight for item in found) else _least(item.idle_seconds for item in found),
        loads=sum(item.loads for item in found),
        load_seconds=_least(item.load_seconds for item in serving),
        queue_seconds=_least(item.queue_seconds for item in serving),
        answer_seconds=_rounded(1 / sum(1 / seconds for seconds in paces)) if paces else None,
        growth=tuple(text for item in found for text in item.growth),
        replicas=tuple(
            ReplicaStatus(**{field: getattr(item, field) for field in ReplicaStatus.__dataclass_fields__})
            for item in found
        ),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if known else None


def _least(figures: Iterable[float | None]) -> float | None:
    return min((figure for figure in figures if figure is not None), default=None)


def _status(state: State, model: ModelRecord, now: float, predictions: Predictions) -> ModelStatus:
    worker, in_flight = state.worker_of(model), state.in_flight(model)
    estimate = next(iter(state.estimates_of(model.effective).values()), None)
    is_known = worker is not None and (worker.ready is not None or model.state is ModelState.WARM)
    actual = sum(state.ledger.owned_by(model.id).values()) if is_known else None
    fits, reason, rest = _fits(state, model, now, predictions)
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
        experts=model.effective.experts,
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
        steps=_steps(state, model),
        fallback=is_fallback(state, model),
        load_seconds=_rounded(expectations.load_seconds(state, model, now)),
        queue_seconds=_rounded(expectations.queue_seconds(state, model)),
        answer_seconds=_rounded(model.pace.seconds),
        prefill_tokens_per_second=_rounded(expectations.prefill_rate(state, model)),
        template_problem=worker.ready.template_problem or None if worker and worker.ready else None,
        growth=tuple(sentence(*item) for item in worker.device_growth.items()) if worker else (),
    )


def _steps(state: State, model: ModelRecord) -> tuple[dict[str, Any], ...]:
    """What was done because of missing memory; a plan may have placed the model on the CPU at once."""
    on_cpu = (TakenStep("cpu"),) if is_fallback(state, model) else ()
    return tuple(step.to_json() for step in (*(step for step in model.steps if step.step != "cpu"), *on_cpu))


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, 3)


def _fits(
    state: State, model: ModelRecord, now: float, predictions: Predictions
) -> tuple[bool | None, str | None, float | None]:
    """Whether the model fits, why not, and the seconds until its lost device is tried again."""
    if model.worker is not None and model.state is not ModelState.UNLOADING:
        return True, None, None
    if not state.started:
        return None, None, None  # the devices are not known yet
    found = predictions.of(model)
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
    return _quiet(now) != _quiet(reported)


def _quiet(status: ModelStatus) -> ModelStatus:
    replicas = tuple(replace(item, in_flight=0, idle_seconds=None) for item in status.replicas)
    return replace(status, replicas=replicas, **_QUIET)  # type: ignore[arg-type]


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
