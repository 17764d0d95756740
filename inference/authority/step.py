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
from inference.authority.handlers.operating import commands, configuration, startup_devices
from inference.authority.handlers.placing import cpu_fallback_return, measuring, moving, reconcile, startup_loads
from inference.authority.handlers.queries import device_view
from inference.authority.handlers.queueing import poison_cases, request_events
from inference.authority.handlers.running import (
    departure,
    device_care,
    growth_watch,
    learning,
    memory_return,
    model_files,
    oom_ladder,
    thread_shares,
    tickets,
    warm_pool,
    worker_life,
)
from inference.authority.handlers.watching import advisor, governor
from inference.authority.lifecycle.departures import Reason
from inference.authority.state import Purpose, State, Timer, TimerKind
from inference.protocol import ModelState

MOST_ROUNDS = 50
"""Rounds per step; after that the rest is done a moment later."""


def step(state: State, event: events.Event, now: float) -> tuple[State, tuple[Effect, ...]]:
    """The state after `event`, and the effects. Late and repeated events are ignored."""
    draft = Draft(state, now, observed=isinstance(event, events.Observed))
    _HANDLERS[type(event)](draft, event)
    _settle(draft)
    for id in draft.used_files:
        if id in draft.state.models:
            draft.set_model(id, files_seen_at=-math.inf)
    if draft.threads_of:
        thread_shares.changed(draft)
    if draft.retime:
        wake_at = min(draft.state.timers.values(), default=math.inf)
        if wake_at != draft.state.wake_at:
            draft.set(wake_at=wake_at)
            draft.emit(WakeAt(wake_at))
    return draft.state, tuple(draft.effects)


def _settle(draft: Draft) -> None:
    """Runs all handlers until nothing changes."""
    for _ in range(MOST_ROUNDS):
        _follow(draft)
        if not draft.state.unplanned:
            return
        if not _has_work(draft.state):
            draft.set(unplanned=False, claims=())
            draft.cancel(TimerKind.PLAN, 0)
            return
        if not draft.observed:
            draft.emit(Observe())
            return
        reconcile.reconcile(draft)
        reconcile.checks(draft)
        measuring.foresee(draft)
        startup_loads.advance(draft)
        commands.advance_planned(draft)
        cpu_fallback_return.advance(draft)
        if draft.state.pressure.check_requested:
            governor.check(draft, regular=False)
    draft.warning("the handlers still had work after %d rounds; continuing in the next step", MOST_ROUNDS)
    draft.set(unplanned=False)
    draft.wake_in(0.05)


def _follow(draft: Draft) -> None:
    while draft.settled:
        ticket, error = draft.settled.pop(0)
        if ticket.purpose is Purpose.MOVE:
            moving.settled(draft, ticket, error)
        elif ticket.purpose is Purpose.RELOAD:
            request_events.reload_settled(draft, ticket, error)
        else:
            startup_loads.settled(draft, ticket, error)
    if draft.state.reloads:
        request_events.load_again(draft)
    departure.room_is_there(draft)
    if draft.state.commands:
        commands.advance(draft)
    device_view.begin_read(draft)


def _has_work(state: State) -> bool:
    """Whether something has to be planned, which needs current readings."""
    if (
        state.claims
        or state.checks
        or state.foreseen
        or state.startup
        or state.commands
        or state.pressure.check_requested
    ):
        return True
    if cpu_fallback_return.is_pending(state):
        return True
    return any(
        model.queue.waiters or model.called_at != math.inf or model.state is ModelState.DRAINING
        for model in state.models.values()
    )


# --- events ----------------------------------------------------------------------------------------------------------
def _tick(draft: Draft, event: events.Tick) -> None:
    draft.set(unix_offset=event.unix - draft.now, wake_at=math.inf)
    draft.retime = True
    late_seconds = draft.now - draft.state.ticks_at
    if late_seconds > startup_devices.TICK_SECONDS:
        request_events.put_off(draft, late_seconds)
    draft.state = device_view.observed(draft.state, event.readings, draft.now)
    due = sorted((at, timer) for timer, at in draft.state.timers.items() if at <= draft.now)
    for _, timer in due:
        if draft.state.timers.get(timer, math.inf) <= draft.now:
            draft.cancel(*timer)
            _fire(draft, timer)


def _fire(draft: Draft, timer: Timer) -> None:
    kind, id = timer
    if kind is TimerKind.PERIODIC:
        _periodic(draft)
    elif kind is TimerKind.PLAN:
        draft.plan()
    elif kind is TimerKind.THREADS:
        thread_shares.calm(draft)
    else:
        _BY_TIMER[kind](draft, id)


def _periodic(draft: Draft) -> None:
    draft.set(ticks_at=draft.now + startup_devices.TICK_SECONDS)
    draft.timer(TimerKind.PERIODIC, 0, draft.now + startup_devices.TICK_SECONDS)
    request_events.idle_models_leave(draft)
    growth_watch.tick(draft)
    device_care.tick(draft)
    oom_ladder.tick(draft)
    cpu_fallback_return.tick(draft)
    governor.tick(draft)
    device_care.publish(draft)


def _observed(draft: Draft, event: events.Observed) -> None:
    draft.state = device_view.observed(draft.state, event.readings, draft.now)


def _devices_read(draft: Draft, event: events.DevicesRead) -> None:
    devices = draft.state.devices
    if devices.done < devices.begun:
        draft.set_devices(done=devices.begun, refreshed_at=draft.now)
    draft.state = device_view.observed(draft.state, event.readings, draft.now)
    device_care.take(draft)
    device_care.read_done(draft)
    memory_return.look(draft, problem=event.problem)
    learning.read_done(draft, failed=event.problem is not None)
    governor.read_done(draft, event.problem)
    if event.problem is not None:
        draft.debug("the devices could not be read: %s", event.problem)
    draft.plan()


def _checked(draft: Draft, event: events.PressureChecked) -> None:
    draft.state = device_view.observed(draft.state, event.readings, draft.now)
    governor.check(draft, regular=event.regular)
    if event.regular:
        advisor.report(draft)


def _noticed(draft: Draft, event: events.DeviceNoticed) -> None:
    del event
    device_view.read(draft)


def _measured(draft: Draft, event: events.WorkersMeasured) -> None:
    draft.state = device_view.observed(draft.state, event.readings, draft.now)
    growth_watch.measured(draft, event.bytes)


def _estimated(draft: Draft, event: events.Estimated) -> None:
    error = measuring.done(draft, event)
    if error is None:
        return
    spec = event.key.spec
    measuring.cannot_foresee(draft, spec, error)
    startup_loads.cannot_measure(draft, spec, error)
    commands.cannot_measure(draft, spec, error)
    cpu_fallback_return.cannot_measure(draft, spec, error)
    reconcile.cannot_measure(draft, spec)
    model = draft.state.models.get(spec.id)
    if model is not None and model.effective == spec and model.queue.waiters:
        draft.set_model(model.id, failure=error.message)
        tickets.fail(draft, model.id, error)
        draft.changed()


def _departure_wanted(draft: Draft, event: events.DepartureWanted) -> None:
    if event.model in draft.state.models:
        departure.leave(draft, event.model, Reason(event.reason), event.action)


def _quiesced(draft: Draft, event: events.Quiesced) -> None:
    request_events.quiesce(draft, event.error)
    commands.quiesce(draft)


def _ended(draft: Draft, event: events.Ended) -> None:
    _quiesced(draft, events.Quiesced())
    del event
    for model in draft.state.models.values():
        if model.worker is not None:
            draft.emit(StopWorker(model.worker))


def _returns_due(draft: Draft, id: str | int) -> None:
    memory_return.due(draft, str(id))


_BY_TIMER: dict[TimerKind, Callable[[Draft, Any], None]] = {
    TimerKind.TICKET: request_events.expired,
    TimerKind.ALONE: tickets.alone_is_over,
    TimerKind.STOP: departure.hurry,
    TimerKind.OFFLOAD: warm_pool.offload_is_late,
    TimerKind.SAVE: warm_pool.save_is_late,
    TimerKind.ROOM_TO_KEEP: departure.go_on,
    TimerKind.RETURN: _returns_due,
    TimerKind.COMMAND: commands.overdue,
}

_HANDLERS: dict[type, Callable[[Draft, Any], None]] = {
    events.DevicesFound: startup_devices.devices_found,
    events.SuspensionTested: startup_devices.suspension_tested,
    events.Tick: _tick,
    events.Observed: _observed,
    events.DevicesRead: _devices_read,
    events.DeviceNoticed: _noticed,
    events.PressureChecked: _checked,
    events.TrialEnded: lambda draft, event: device_care.trial_ended(draft, event.device, event.trial, event.failure),
    events.ProbesRenewed: lambda draft, event: device_care.renewed(draft, event.command),
    events.Wanted: request_events.wanted,
    events.Withdrawn: request_events.withdrawn,
    events.Released: request_events.released,
    events.CrashReported: poison_cases.crashed,
    events.RequestAnswered: poison_cases.answered,
    events.CaseCleared: poison_cases.cleared,
    events.Spawned: worker_life.spawned,
    events.SpawnFailed: worker_life.spawn_failed,
    events.Progressed: worker_life.progressed,
    events.Loaded: worker_life.loaded,
    events.FileHeld: warm_pool.file_held,
    events.ContextFreed: warm_pool.context_freed,
    events.SuspendEnded: warm_pool.suspend_ended,
    events.ResumeEnded: worker_life.resumed,
    events.Exited: worker_life.exited,
    events.WorkersMeasured: _measured,
    events.Trimmed: commands.trimmed,
    events.Estimated: _estimated,
    events.FilesRead: departure.files_read,
    events.FilesSeen: model_files.looked,
    events.BuildChecked: worker_life.build_checked,
    events.ShortageLearned: worker_life.shortage_learned,
    events.HeadroomChanged: oom_ladder.headroom_changed,
    events.SettingsChanged: configuration.apply,
    events.Commanded: commands.begin,
    events.Abandoned: commands.abandoned,
    events.DepartureWanted: _departure_wanted,
    events.Quiesced: _quiesced,
    events.Ended: _ended,
}
