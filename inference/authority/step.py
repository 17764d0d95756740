"""The authority as one function: `step(state, event, now) -> (state, effects)`.

Pure: it reads no clock, starts nothing and logs nothing. Everything that takes time comes back as an event.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from inference.authority import events
from inference.authority.draft import Draft
from inference.authority.effects import Effect, Observe, StopWorker, WakeAt
from inference.authority.handlers.measuring import estimates
from inference.authority.handlers.operating import commands, configuration, startup
from inference.authority.handlers.placing import moving, reconcile
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.running import (
    departure,
    device_incidents,
    endings,
    kv_arenas,
    oom_recovery,
    request_events,
    thread_shares,
    tickets,
    warm_pool,
    worker_lifecycle,
    worker_memory,
)
from inference.authority.handlers.watching import governor, growth_on_devices, replica_scaling
from inference.authority.pending_commands import PlanCommand
from inference.authority.state import Purpose, State, TimerKind
from inference.protocol import ModelState

MAX_ROUNDS = 50
"""The most rounds of handlers in one step. A timer starts the next step, which does the remaining work."""


def step(state: State, event: events.Event, now: float) -> tuple[State, tuple[Effect, ...]]:
    """The state after `event`, and the effects. Late and repeated events are ignored."""
    draft = Draft(state, now, observed=isinstance(event, events.Observed))
    if isinstance(event, _WITH_ARENAS):
        draft.state = device_view.stored(draft.state, event.arenas)
    if isinstance(event, _WITH_READINGS):
        before = draft.state.devices.measured
        draft.state = device_view.observed(draft.state, event.readings, now)
        growth_on_devices.observed(draft, before, is_read=_is_read(event))
    _HANDLERS[type(event)](draft, event)
    _settle(draft)
    if _changes_kv(state, draft) and kv_arenas.settle(draft, grows=draft.kv_grows):
        _settle(draft)
    if draft.changed_models:
        thread_shares.changed(draft)
    if draft.retime:
        wake_at = min(draft.state.timers.values(), default=math.inf)
        if wake_at != draft.state.wake_at:
            draft.set(wake_at=wake_at)
            draft.emit(WakeAt(wake_at))
    return draft.state, tuple(draft.effects)


def _is_read(event: events.Event) -> bool:
    """Whether all devices were measured for an event."""
    return isinstance(event, events.DevicesRead) and event.problem is None


def _changes_kv(before: State, draft: Draft) -> bool:
    """Whether memory, settings or states of models changed, on which budgets for stored sequences depend."""
    is_same = draft.state.ledger is before.ledger and draft.state.config is before.config
    return not is_same or bool(draft.changed_models) or draft.kv_grows


def _settle(draft: Draft) -> None:
    """Runs all handlers until nothing changes, or until current readings are needed."""
    for _ in range(MAX_ROUNDS):
        _follow(draft)
        if not draft.state.unplanned:
            return
        if not _has_work(draft.state):
            draft.set(unplanned=False, claims=())
            draft.cancel(TimerKind.PLAN, 0)
            return
        unchecked = _models_to_check(draft.state)
        if not draft.observed or not unchecked <= draft.checked_files:
            draft.emit(Observe(tuple(draft.model(id).effective for id in sorted(unchecked))))
            return
        reconcile.reconcile(draft)
        reconcile.checks(draft)
        startup.measure_next(draft)
        startup.load_next(draft)
        commands.advance_planned(draft)
        moving.advance_cpu_returns(draft)
        if draft.state.pressure.check_requested:
            governor.check(draft, regular=False)
    draft.warning("the handlers still had work after %d rounds; continuing in the next step", MAX_ROUNDS)
    draft.set(unplanned=False)
    draft.wake_in(0.05)


def _follow(draft: Draft) -> None:
    while draft.settled:
        ticket, error = draft.settled.pop(0)
        if ticket.purpose is Purpose.MOVE:
            moving.settled(draft, ticket, error)
        elif ticket.purpose is Purpose.RELOAD:
            request_events.reload_settled(draft, ticket, error)
        elif ticket.purpose is Purpose.REPLICA:
            replica_scaling.load_settled(draft, ticket, error)
        else:
            startup.load_settled(draft, ticket, error)
    if draft.state.reloads:
        request_events.reload_lost(draft)
    departure.advance(draft)
    if draft.state.commands:
        commands.advance(draft)
    device_view.begin_read(draft)


def _models_to_check(state: State) -> set[str]:
    """The models whose files must be checked for the decisions of this step."""
    found = {
        model.id
        for model in state.models.values()
        if model.queue.waiters and model.state in (ModelState.COLD, ModelState.WARM, ModelState.FAILED)
    }
    found |= {worker.model for worker in state.workers.values() if departure.may_be_kept(state, worker)}
    found |= {command.model for command in state.commands.values() if isinstance(command, PlanCommand)}
    return (found | {*state.to_measure[:1]}) & state.models.keys()


def _has_work(state: State) -> bool:
    """Whether something has to be planned, which needs current readings."""
    if (
        state.claims
        or state.checks
        or state.to_measure
        or state.startup
        or state.commands
        or state.pressure.check_requested
    ):
        return True
    if moving.has_pending_cpu_return(state):
        return True
    return any(
        model.queue.waiters or model.eviction_began_at != math.inf or model.state is ModelState.DRAINING
        for model in state.models.values()
    )


# --- events ----------------------------------------------------------------------------------------------------------
def _tick(draft: Draft, event: events.Tick) -> None:
    draft.set(unix_offset=event.unix - draft.now, wake_at=math.inf)
    draft.retime = True
    late_seconds = draft.now - draft.state.ticks_at
    if late_seconds > startup.TICK_SECONDS:
        request_events.extend_deadlines(draft, late_seconds)
    due = sorted((at, timer) for timer, at in draft.state.timers.items() if at <= draft.now)
    for _, timer in due:
        if draft.state.timers.get(timer, math.inf) <= draft.now:
            draft.cancel(*timer)
            kind, id = timer
            _BY_TIMER[kind](draft, id)


def _periodic(draft: Draft) -> None:
    draft.set(ticks_at=draft.now + startup.TICK_SECONDS)
    draft.timer(TimerKind.PERIODIC, 0, draft.now + startup.TICK_SECONDS)
    request_events.idle_models_leave(draft)
    replica_scaling.tick(draft)
    worker_memory.tick(draft)
    device_incidents.tick(draft)
    oom_recovery.tick(draft)
    moving.check_fallbacks(draft)
    governor.tick(draft)
    device_incidents.publish(draft)


def _observed(draft: Draft, event: events.Observed) -> None:
    for id, files in event.files.items():
        if id in draft.state.models:
            estimates.note_files(draft, id, files)
    draft.checked_files = frozenset(event.files)


def _devices_read(draft: Draft, event: events.DevicesRead) -> None:
    devices = draft.state.devices
    if devices.reads_done < devices.reads_begun:
        draft.set_devices(reads_done=devices.reads_begun, refreshed_at=draft.now)
    device_incidents.take_readings(draft)
    device_incidents.read_done(draft)
    endings.reading_taken(draft, problem=event.problem)
    worker_memory.overhead_read(draft, failed=event.problem is not None)
    governor.read_done(draft, event.problem)
    if event.problem is not None:
        draft.debug("the devices could not be read: %s", event.problem)
    draft.plan()


def _estimated(draft: Draft, event: events.Estimated) -> None:
    error = estimates.estimated(draft, event)
    if error is None:
        return
    spec = event.key.spec
    startup.cannot_measure_ahead(draft, spec, error)
    commands.cannot_measure(draft, spec, error)
    moving.cpu_return_is_unmeasurable(draft, spec, error)
    reconcile.cannot_measure(draft, spec)
    model = draft.state.models.get(spec.id)
    if model is not None and model.effective == spec and model.queue.waiters:
        draft.set_model(model.id, failure=error.message)
        tickets.fail(draft, model.id, error)
        draft.changed()


def _closing(draft: Draft, event: events.Closing) -> None:
    request_events.stop_accepting(draft, event.error)
    commands.refuse_pending(draft)
    for model in draft.state.models.values() if event.stops_workers else ():
        if model.worker is not None:
            draft.emit(StopWorker(model.worker))


_WITH_READINGS = (events.Tick, events.Observed, events.DevicesRead, events.WorkersMeasured)
_WITH_ARENAS = (*_WITH_READINGS, events.ContextFreed, events.Exited)

_BY_TIMER: dict[TimerKind, Callable[[Draft, Any], None]] = {
    TimerKind.PERIODIC: lambda draft, _: _periodic(draft),
    TimerKind.PLAN: lambda draft, _: draft.plan(),
    TimerKind.THREADS: lambda draft, _: thread_shares.give_free_threads(draft),
    TimerKind.TICKET: request_events.expired,
    TimerKind.ALONE: tickets.alone_is_over,
    TimerKind.STOP: departure.stop_time_is_over,
    TimerKind.WARM_POOL: warm_pool.step_is_late,
    TimerKind.ROOM_TO_KEEP: departure.room_wait_is_over,
    TimerKind.RETURN: endings.return_is_due,
    TimerKind.COMMAND: commands.overdue,
}

_HANDLERS: dict[type, Callable[[Draft, Any], object]] = {
    events.DevicesFound: startup.devices_found,
    events.SuspensionTested: startup.suspension_tested,
    events.Tick: _tick,
    events.Observed: _observed,
    events.DevicesRead: _devices_read,
    events.DeviceNoticed: lambda draft, event: device_view.read(draft),
    events.TrialEnded: lambda draft, event: device_incidents.trial_ended(
        draft, event.device, event.trial, event.failure
    ),
    events.ProbesRenewed: lambda draft, event: device_incidents.renewed(draft, event.command),
    events.Wanted: request_events.wanted,
    events.Withdrawn: request_events.withdrawn,
    events.Released: request_events.released,
    events.CrashReported: request_events.crash_reported,
    events.RequestAnswered: request_events.request_answered,
    events.CaseCleared: request_events.case_cleared,
    events.Spawned: worker_lifecycle.spawned,
    events.SpawnFailed: worker_lifecycle.spawn_failed,
    events.Progressed: worker_lifecycle.progressed,
    events.Loaded: worker_lifecycle.loaded,
    events.FileHeld: warm_pool.file_held,
    events.ContextFreed: warm_pool.context_freed,
    events.CheckpointEnded: worker_lifecycle.checkpoint_ended,
    events.Exited: worker_lifecycle.exited,
    events.WorkersMeasured: lambda draft, event: worker_memory.measured(draft, event.bytes),
    events.Trimmed: commands.trimmed,
    events.Estimated: _estimated,
    events.FilesChecked: estimates.files_checked,
    events.BuildChecked: worker_lifecycle.build_checked,
    events.ShortageLearned: worker_lifecycle.shortage_learned,
    events.HeadroomChanged: oom_recovery.headroom_changed,
    events.SettingsChanged: configuration.apply,
    events.Commanded: commands.begin,
    events.Abandoned: commands.abandoned,
    events.Closing: _closing,
}
