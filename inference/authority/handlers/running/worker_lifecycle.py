"""The lifecycle of a worker from reservation to exit. Every reservation ends exactly once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import CheckBuild, KillWorker, Publish, RecordCrash, Spawn
from inference.authority.events import (
    BuildChecked,
    CheckpointEnded,
    Exited,
    Loaded,
    Progressed,
    ShortageLearned,
    Spawned,
    SpawnFailed,
)
from inference.authority.handlers.measuring import estimates, read_rates
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queries.plan_inputs import deviation, grant_for
from inference.authority.handlers.running import (
    device_incidents,
    endings,
    kv_arenas,
    kv_counters,
    oom_recovery,
    replicas,
    tickets,
    warm_pool,
    worker_memory,
)
from inference.authority.handlers.running.endings import release_when_free
from inference.authority.lifecycle import ModelEvent
from inference.authority.placement.ledger import LedgerError, Phase
from inference.authority.placement.observed_overhead import Before
from inference.authority.placement.plan import Placement
from inference.authority.quarantine import MAX_IN_A_ROW, SUSPICIOUS, Crash
from inference.authority.retention import Mechanism
from inference.authority.state import SIMULATED, ModelRecord, TimerKind, WorkerRecord, placement_key
from inference.devices.device import environment_of
from inference.errors import BrokenBuild, InferenceError, MemoryRefused, ModelFailed
from inference.file_stamp import Fingerprint, changed
from inference.protocol import ExitCause, ModelState
from inference.worker_link import Heartbeat
from inference.workers.exit_cause import WorkerExit

RETRY_REPLACED_SECONDS = 1.0
"""Delay before a load is repeated because the files changed during it."""
_S, _E = ModelState, ModelEvent
_TRANSITIONS_TO_COLD = {
    _S.LOADING: (_E.UNLOAD, _E.EXITED),
    _S.READY: (_E.DRAIN, _E.UNLOAD, _E.EXITED),
    _S.BUSY: (_E.DRAIN, _E.UNLOAD, _E.EXITED),
    _S.DRAINING: (_E.UNLOAD, _E.EXITED),
    _S.OFFLOADING: (_E.UNLOAD, _E.EXITED),
    _S.WARM: (_E.UNLOAD, _E.EXITED),
    _S.RESTORING: (_E.UNLOAD, _E.EXITED),
    _S.UNLOADING: (_E.EXITED,),
}
"""For every state of a model with a worker, its transitions to cold after the worker ended without a failure."""


# --- beginning -------------------------------------------------------------------------------------------------------
def begin(draft: Draft, id: str, placement: Placement) -> None:
    """Reserves memory and starts a worker; from here on its exit, or its failed start, releases the reservation."""
    model = draft.model(id)
    devices = device_view.named(draft.state, placement.devices, draft.now)
    holding = f"{id}#{draft.number()}"
    ledger = draft.state.ledger.reserve(holding, id, placement.need)
    worker = WorkerRecord(
        holding,
        id,
        holding,
        placement,
        devices[0],
        draft.now,
        model.effective,
        draft.state.estimates_of(model.effective)[placement_key(placement.devices, placement.tensor_split)],
        files=model.seen_files,
        by_hand=model.target is not None and model.target != model.old_device,
        before={item.id: Before.of(item, ledger, holding) for item in devices},
        kv_bytes=0 if kv_arenas.is_enabled(draft.state) else None,
    )
    draft.set(ledger=ledger, workers={**draft.state.workers, holding: worker})
    draft.set_model(id, worker=holding)
    draft.advance(id, _E.LOAD)
    order = grant_for(model.effective, devices, placement, kv_arenas.tiers(draft, holding))
    draft.emit(Spawn(holding, id, environment_of(devices), order, stores=worker.kv_bytes is not None))


def spawned(draft: Draft, event: Spawned) -> None:
    """The process of a worker was started."""
    if event.worker in draft.state.workers:
        worker = draft.set_worker(event.worker, pid=event.pid)
        if worker.predecessor is None:
            draft.info("loading %s on %s (pid %d)", worker.model, ", ".join(worker.placement.devices), event.pid)


def spawn_failed(draft: Draft, event: SpawnFailed) -> None:
    """The process of a worker could not be started."""
    worker = draft.state.workers.get(event.worker)
    if worker is None:
        return
    if worker.predecessor is not None and draft.is_current(worker):
        warm_pool.holder_failed(draft, worker, event.reason)
        return
    draft.set(ledger=draft.state.ledger.release(worker.holding))
    is_current = draft.is_current(worker)
    _remove(draft, worker)
    draft.plan()
    if not is_current:
        return
    if draft.model(worker.model).state is not _S.LOADING:  # the load was cancelled meanwhile
        for step in _TRANSITIONS_TO_COLD[draft.model(worker.model).state]:
            draft.advance(worker.model, step)
        _drop_removed(draft, worker.model)
        return
    failed(draft, worker.model, event.reason)
    _fail_load(draft, worker.model, failed_error(draft.model(worker.model), draft.now))
    _drop_removed(draft, worker.model)


def progressed(draft: Draft, event: Progressed) -> None:
    """A worker reported progress, or sent a heartbeat."""
    worker = draft.state.workers.get(event.worker)
    if worker is None:
        return
    model = draft.state.models.get(worker.model)
    loads = model is not None and model.worker == worker.id and model.state in (_S.LOADING, _S.RESTORING)
    counted = worker.counted
    if loads:
        draft.emit(Publish("load", {"id": worker.model, "progress": round(event.progress, 3)}))
    elif event.beat is not None:
        counted = _count_tokens(draft, worker, event.beat)
        kv_counters.note(draft, worker, event.beat.kv)
        rate = event.beat.decode_tokens_per_second
        if rate is not None and (worker.beat is None or rate != worker.beat.decode_tokens_per_second):
            read_rates.learn(draft, worker, rate)
    worker = draft.set_worker(worker.id, progress=event.progress, beat=event.beat, counted=counted)
    worker_memory.learn_after_full_batch(draft, worker)


def _count_tokens(draft: Draft, worker: WorkerRecord, beat: Heartbeat) -> Mapping[str, int]:
    counted = dict(worker.counted)
    counts = {
        "prompt": beat.prompt_tokens,
        "generated": beat.generated_tokens,
        "proposed": beat.proposed_tokens,
        "accepted": beat.accepted_tokens,
    }
    for kind, count in counts.items():
        if (grown := count - counted.get(kind, 0)) > 0:
            counted[kind] = count
            draft.count("tokens", worker.model, kind, amount=grown)
    return counted


# --- ready -----------------------------------------------------------------------------------------------------------
def checkpoint_ended(draft: Draft, event: CheckpointEnded) -> None:
    """The driver has suspended or resumed a worker, or could not."""
    if event.operation == "suspend":
        warm_pool.suspend_ended(draft, event)
        return
    worker = warm_pool.resume_ended(draft, event)
    if worker is not None and worker.suspended is not None:
        ready = replace(worker.suspended.ready, stored_tokens=0)
        draft.set_worker(worker.id, suspended=None, beat=None)
        loaded(draft, Loaded(worker.id, ready))


def loaded(draft: Draft, event: Loaded) -> None:
    """A worker has loaded or restored its model."""
    worker = draft.state.workers.get(event.worker)
    if worker is None or worker.ending or not draft.is_current(worker):
        return
    model = draft.model(worker.model)
    if model.state not in (_S.LOADING, _S.RESTORING):
        return
    is_back = model.state is _S.RESTORING
    ready, estimate = event.ready, worker.estimate
    actual = dict(estimate.overhead_bytes)
    for buffer in ready.buffers:
        actual[buffer.device] = actual.get(buffer.device, 0) + buffer.bytes
    for name, growth in worker.device_growth.items():  # of a resumed process
        actual[name] = actual.get(name, 0) + growth.bytes
    problem = deviation(estimate, ready)
    try:
        if problem is None:
            _commit(draft, model, worker, actual)
    except LedgerError as error:
        problem = str(error)
    replaced = "" if is_back else _replaced(worker, event.files)
    if problem is not None or replaced:
        failure = ModelFailed(
            f"the load of {model.id!r} was stopped: {replaced or problem}",
            retry_after=RETRY_REPLACED_SECONDS if replaced else None,
        )
        draft.set_worker(worker.id, failure=failure)
        draft.emit(KillWorker(worker.id))
        return
    seconds = draft.now - worker.began_at
    predicted = sum(worker.placement.need.values())
    worker = draft.set_worker(worker.id, ready=ready, ready_at=draft.now, active_at=draft.now, extra=None, progress=1.0)
    _note_load(draft, model, worker, seconds, actual, is_back=is_back)
    draft.set_model(model.id, capabilities=ready.capabilities, failure=None, shortages=(), last_used_at=draft.now)
    draft.count("load_seconds", model.id, "warm" if is_back else "cold", amount=seconds)
    if predicted and not is_back:
        draft.count("estimate_error", amount=sum(actual.values()) / predicted)
    if model.backoff.failures:
        draft.count("recoveries", "reload")
    draft.info(
        "%s is ready on %s after %.2f s: %s used, %s estimated",
        model.id, ", ".join(worker.placement.devices), seconds, format_bytes(sum(actual.values())),
        format_bytes(predicted),
    )  # fmt: skip
    if ready.template_problem and not is_back:
        draft.warning("a chat template of %s is not used: %s", model.id, ready.template_problem)
    draft.advance(model.id, _E.RESTORED if is_back else _E.LOADED)
    tickets.serve(draft, model.id)


def _note_load(
    draft: Draft, model: ModelRecord, worker: WorkerRecord, seconds: float, actual: Mapping[str, int], *, is_back: bool
) -> None:
    ready = worker.ready
    assert ready is not None
    if not is_back:
        draft.set_model(model.id, reload_seconds=seconds, loads=model.loads + 1)
        worker_memory.learn_overhead(draft, worker)
        draft.set(bytes_per_second=sum(actual.values()) / max(seconds, 1e-3))
        return
    draft.set_model(model.id, restore_seconds=seconds)
    draft.set(restorations=draft.state.restorations + 1)
    draft.count("restorations")
    draft.info("%s was restored in %.2f s with %d tokens of stored sequences", model.id, seconds, ready.stored_tokens)


def _commit(draft: Draft, model: ModelRecord, worker: WorkerRecord, actual: Mapping[str, int]) -> None:
    """Books the actual bytes of a ready worker, and releases its warm copy. Raises LedgerError."""
    ledger = draft.state.ledger
    if worker.extra is None:
        ledger = ledger.commit(worker.holding, actual)
    elif model.kept is not None and model.kept.mechanism is Mechanism.STANDBY:
        held = ledger.holdings[worker.holding].bytes
        rest = {name: max(0, count - held.get(name, 0)) for name, count in actual.items()}
        ledger = ledger.commit(worker.extra, rest).absorb(worker.holding, worker.extra)
    else:
        ledger = ledger.commit(worker.holding, actual).release(worker.extra)
    draft.set(ledger=ledger)


# --- exits -----------------------------------------------------------------------------------------------------------
def exited(draft: Draft, event: Exited) -> None:
    """A worker has ended, so its memory is released; if it ran out of memory, after its need was learned."""
    worker = draft.state.workers.get(event.worker)
    if worker is None or worker.ending:
        return
    device_incidents.worker_ended(draft, worker, event.exit)
    worker = draft.worker(worker.id)
    if not draft.is_current(worker):
        _finish(draft, worker, event.exit)
        return
    is_loading = draft.model(worker.model).state is _S.LOADING
    replaced = _replaced(worker, event.files) if is_loading else ""
    if not replaced and oom_recovery.ran_out(event.exit):
        draft.set_worker(worker.id, ending=True)
        tickets.move_to_others(draft, worker.model)
        oom_recovery.learn(draft, worker, event.exit)
        return
    if not replaced:
        oom_recovery.ended_without_shortage(draft, worker, event.exit)
    _finish(draft, worker, event.exit, replaced=replaced)


def shortage_learned(draft: Draft, event: ShortageLearned) -> None:
    """The memory need was measured after an out-of-memory error: completes the end of the worker."""
    worker = draft.state.workers.get(event.worker)
    if worker is None or not worker.ending:
        return
    tries_again = draft.is_current(worker) and oom_recovery.after_shortage(draft, worker, event)
    _finish(draft, worker, event.exit, tries_again=tries_again)


def _replaced(worker: WorkerRecord, files: Fingerprint) -> str:
    """A sentence about files that changed since the load began; empty for none."""
    found = changed(worker.files, files)
    return f"{found} changed while the model was loaded; the next load reads the new file" if found else ""


def _finish(
    draft: Draft, worker: WorkerRecord, exit: WorkerExit, *, tries_again: bool = False, replaced: str = ""
) -> None:
    is_current = draft.is_current(worker)
    draft.count("exits", worker.model, str(exit.cause))
    if is_current:
        draft.set_model(worker.model, worker=None)
    if draft.state.ledger.holdings[worker.holding].phase is not Phase.RELEASING:
        draft.set(ledger=draft.state.ledger.leave(worker.holding))
    _pass_stored_sequences(draft, worker)
    worker = endings.release_extra(draft, worker)
    _remove(draft, worker)
    release_when_free(draft, worker)
    requested = exit.cause is ExitCause.REQUESTED
    if not requested:
        when = " while its model was offloaded" if not is_current and worker.failure is None else ""
        draft.error("%s (pid %s)%s: %s", worker.model, worker.pid, when, exit.message)
        draft.emit(RecordCrash(worker.model, worker.pid or 0, exit, tuple(worker.leases)))
    if worker.device_growth and worker.device.kind not in SIMULATED:
        estimates.measure_again(draft, worker)
    if is_current:
        if requested:
            for step in _TRANSITIONS_TO_COLD[draft.model(worker.model).state]:
                draft.advance(worker.model, step)
            draft.info("%s was unloaded", worker.model)
        else:
            _record_failure(draft, worker, exit, tries_again=tries_again, replaced=replaced)
        _drop_removed(draft, worker.model)
    draft.plan()


def _record_failure(draft: Draft, worker: WorkerRecord, exit: WorkerExit, *, tries_again: bool, replaced: str) -> None:
    model = draft.model(worker.model)
    was_loading = model.state is _S.LOADING
    failure = worker.failure
    if replaced and failure is None:
        failure = ModelFailed(
            f"the load of {model.id!r} failed: {replaced} ({exit.message})", retry_after=RETRY_REPLACED_SECONDS
        )
    message = failure.message if failure else exit.message
    if was_loading and str(model.spec.path) not in message:
        message += f"; its file is {model.spec.path}"
    failed(draft, model.id, message, counts=not (tries_again or replaced) and _counts_as_failure(draft, worker, exit))
    error = failure or _load_error(draft, model.id, worker, exit) if was_loading and not tries_again else None
    if exit.cause is ExitCause.BROKEN_BUILD:
        draft.set_model(model.id, checking_build=True)
        draft.emit(CheckBuild(model.id, error))
    elif error is not None:
        _fail_load(draft, model.id, error)


def build_checked(draft: Draft, event: BuildChecked) -> None:
    """The check of llama.cpp has ended, after a worker crashed at its first step."""
    if event.model not in draft.state.models:
        return
    model = draft.set_model(event.model, checking_build=False)
    draft.plan()
    if not event.computes:
        tickets.fail(draft, model.id, BrokenBuild())
    elif event.error is not None and model.state is _S.FAILED:  # otherwise it is already loading again
        _fail_load(draft, model.id, event.error)


def _pass_stored_sequences(draft: Draft, worker: WorkerRecord) -> None:
    """A worker that passed its model to another worker has ended: its stored sequences belong to the other."""
    for other in list(draft.state.workers.values()):
        if other.predecessor == worker.id:
            draft.set_worker(other.id, saved=worker.saved)


def _remove(draft: Draft, worker: WorkerRecord) -> None:
    draft.set(workers={id: other for id, other in draft.state.workers.items() if id != worker.id})
    model = draft.state.models.get(worker.model)
    if model is not None and model.worker == worker.id:
        draft.set_model(worker.model, worker=None)
    for kind in (TimerKind.ALONE, TimerKind.STOP, TimerKind.WARM_POOL, TimerKind.ROOM_TO_KEEP):
        draft.cancel(kind, worker.id)
    for other in list(draft.state.workers.values()):
        if other.predecessor == worker.id:
            warm_pool.check_holder(draft, other.id)


def _drop_removed(draft: Draft, id: str) -> None:
    model = draft.state.models.get(id)
    if model is not None and model.removed and model.worker is None:
        draft.drop_model(id)


def _counts_as_failure(draft: Draft, worker: WorkerRecord, exit: WorkerExit) -> bool:
    """Whether this exit counts as a failure of the model, with a growing backoff.

    A crash while one request ran alone is attributed to the request.
    """
    quarantine = replicas.first_of(draft.state, draft.model(worker.model)).quarantine
    is_tried = Crash(exit.cause, exit.message, alone=worker.alone is not None).can_confirm
    return (
        exit.cause not in SUSPICIOUS or not is_tried or quarantine.doubted or len(quarantine.in_a_row) >= MAX_IN_A_ROW
    )


def _fail_load(draft: Draft, id: str, error: InferenceError) -> None:
    """A load failed: its requests fail, unless a moved model returns to its old device."""
    if not return_from_move(draft, id, error):
        tickets.fail(draft, id, error)


def return_from_move(draft: Draft, id: str, error: InferenceError) -> bool:
    """A load of a moved model failed: it is loaded on its old device, or else on any device, while its requests wait.

    False if it is not being moved, or was not loaded before.
    """
    model = draft.model(id)
    if model.target is None or model.old_device is None:
        return False
    where = model.old_device if model.target != model.old_device else None
    draft.warning("%s cannot be loaded on %s and returns to %s: %s", id, model.target, where or "any device", error)
    draft.set_model(id, move_error=model.move_error or error, target=where, retry_at=draft.now)
    draft.plan()
    return True


def _load_error(draft: Draft, id: str, worker: WorkerRecord, exit: WorkerExit) -> InferenceError:
    model = draft.model(id)
    if exit.cause is ExitCause.DEVICE_LOST:
        what = f"it could not be loaded: {exit.message}"
        return device_incidents.device_lost_error(draft.state, model, worker.placement.devices, what, draft.now)
    return failed_error(model, draft.now, str(exit.cause))


def failed(draft: Draft, id: str, message: str, *, counts: bool = True) -> None:
    """Records a failure of a model, with a backoff unless `counts` is false."""
    model = draft.model(id)
    backoff = model.backoff.failed() if counts else model.backoff
    retry_at = draft.now + (backoff.delay_seconds if counts else 0.0)
    draft.set_model(id, backoff=backoff, retry_at=retry_at, failure=message)
    draft.advance(id, _E.FAIL)


def failed_error(model: ModelRecord, now: float, cause: str | None = None) -> InferenceError:
    """The error for a request to a failed model, with the rest of its backoff."""
    rest = math.ceil(max(0.0, model.retry_at - now) * 10) / 10
    if model.shortages:
        what = model.failure or "refused"
        return MemoryRefused(model.id, model.shortages, what, retry_after=rest, cause=str(ExitCause.OOM_LOAD))
    return ModelFailed(
        f"the model {model.id!r} failed: {model.failure}",
        retry_after=rest,
        details={"cause": cause, "failures": model.backoff.failures},
    )
