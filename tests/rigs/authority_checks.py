"""What must hold in the world of `authority_world`: after each step, at each rest, and at the end of a run."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import astuple, replace
from typing import Any

from inference.authority import effects, events
from inference.authority.device_health import USABLE
from inference.authority.handlers.operating.commands import Planned
from inference.authority.handlers.operating.startup import TICK_SECONDS
from inference.authority.handlers.queries.plan_inputs import held_models
from inference.authority.handlers.running import device_incidents, replicas, tickets
from inference.authority.handlers.running.endings import SLACK_BYTES
from inference.authority.lifecycle import ACCEPTING, SERVING, Reason
from inference.authority.pending_commands import MoveCommand
from inference.authority.placement.ledger import Ledger, Phase
from inference.authority.placement.plan import Placement, Refusal, Result
from inference.authority.placement.turns import MAX_SWAP_SECONDS, age_rank
from inference.authority.pressure.relief import Restriction
from inference.authority.quarantine import Suspicion
from inference.authority.retention import Mechanism
from inference.authority.state import LeaseRecord, ModelRecord, Purpose, State, TimerKind, WorkerRecord
from inference.authority.step import step
from inference.authority.views.live_figures import live_figures
from inference.errors import DeadlineExceeded, InferenceError, ModelLoading, ShuttingDown
from inference.protocol import DeviceState, ExitCause, ModelState
from inference.settings import ModelSpec
from inference.worker_link import Grant, Hold, Offloaded
from tests.rigs.authority_world import CPU, World

_S = ModelState
BETWEEN = (_S.LOADING, _S.OFFLOADING, _S.RESTORING, _S.UNLOADING)
NOT_FOR_PINNED = (Reason.IDLE, Reason.PRESSURE, Reason.MEMORY_WANTED)
_OF_WORKER = (TimerKind.ALONE, TimerKind.STOP, TimerKind.WARM_POOL, TimerKind.ROOM_TO_KEEP)
_DOUBTFUL = (ExitCause.DEVICE_LOST, ExitCause.HANG)
_WAIT_ON = (ExitCause.REQUESTED, ExitCause.OOM_LOAD, ExitCause.OOM_COMPUTE, ExitCause.BROKEN_BUILD)
_ALWAYS = (TimerKind.PERIODIC, TimerKind.PLAN, TimerKind.THREADS)


class CheckedWorld(World):
    """A world that fails at the first step after which something does not hold."""

    # --- after each step ---------------------------------------------------------------------------------------------
    def after_step(self, before: State, event: events.Event, expected: Any) -> None:
        for name in self.state.models.keys() - before.models.keys():
            self.uses[name] = 0
        self._check_ledger(before, event)
        self._check_holdings(before, event)
        self._check_caches(before, event)
        for model in self.state.models.values():
            self._check_model(model)
            self._check_saved(before, model)
            self.visited[model.state] += 1
        for worker in self.state.workers.values():
            self._check_worker(worker)
        self._check_processes()
        self._check_late_report(before, event)
        self._check_devices(before, event)
        self._check_waiters()
        self._check_timers(event)
        self._check_departures(before)
        self._check_counters(before)
        self._check_loads(before)
        self._check_limits(before)
        self._check_suspicions(before, event)
        self._check_failed_load(before, event)
        for id, outcome in expected:
            self._compare(id, outcome)

    def _check_ledger(self, before: State, event: events.Event) -> None:
        ledger = self.state.ledger
        for device, account in ledger.accounts.items():
            balance = ledger.balance(device)
            figures = (balance.free_bytes, balance.foreign_bytes, balance.reserved_bytes, balance.resident_bytes,
                       balance.releasing_bytes, balance.cached_bytes, balance.shortfall_bytes,
                       balance.room_bytes)  # fmt: skip
            assert min(figures) >= 0, "no account is negative"
            assert balance.capacity_bytes + balance.shortfall_bytes == sum(figures[:6])
            ours = balance.ours_bytes
            is_outgrown = any(self._has_outgrown(worker, device) for worker in self.state.workers.values())
            if device in before.ledger.accounts and ours > before.ledger.balance(device).ours_bytes:
                assert ours <= account.budget_bytes or is_outgrown, "no more is booked than our share of a device"
        anew = Ledger(ledger.accounts, ledger.holdings, ledger.limit_bytes).sums
        for device in {*anew, *ledger.sums}:
            assert ledger.sums.get(device) == anew.get(device) or not any(astuple(ledger.sums[device])), "sums"
        if ledger.limit_bytes is not None and not isinstance(event, events.SettingsChanged):
            before_bytes = before.ledger.loaded_bytes
            is_outgrown = any(
                self._has_outgrown(worker, device)
                for worker in self.state.workers.values()
                for device in worker.device_growth
            )
            limit = max(before_bytes, ledger.limit_bytes)
            assert ledger.loaded_bytes <= limit or is_outgrown, "the memory limit holds"

    @staticmethod
    def _has_outgrown(worker: WorkerRecord, device: str) -> bool:
        """Whether a model leaves because it grew on a device."""
        is_leaving = worker.departure is not None and worker.departure.reason.is_final
        return is_leaving and device in worker.device_growth

    def _check_holdings(self, before: State, event: events.Event) -> None:
        state = self.state
        holdings = state.ledger.holdings
        owners = Counter(holding for worker in state.workers.values() for holding in (worker.holding, worker.extra))
        owners.update(state.returns.keys())
        owners.update(state.helpers.values())
        del owners[None]
        of_processes = {id for id, holding in holdings.items() if not holding.cache}
        assert owners.keys() == of_processes, "each holding has an owner, and each owner its holding"
        assert not owners or max(owners.values()) == 1, "each holding has one owner"
        for worker in state.workers.values():
            assert holdings[worker.holding].owner == worker.model
            assert worker.extra is None or holdings[worker.extra].owner == worker.model
        for id, awaited in state.returns.items():
            assert holdings[id].phase is Phase.RELEASING
            assert state.timers[TimerKind.RETURN, id] <= awaited.deadline
        gone = before.ledger.holdings.keys() - holdings.keys()
        assert not gone & self.released, "a reservation is released once"
        self.released |= gone
        if isinstance(event, events.Exited | events.ShortageLearned) and event.worker in before.workers:
            worker = before.workers[event.worker]
            on_device = any(device != CPU for device in worker.placement.need)
            assert worker.holding not in gone or not on_device, "a reading shows that device memory is free"
        assert not self.released & holdings.keys()
        for id in gone & before.returns.keys():
            awaited = before.returns[id]
            until, left = self.lingering.get(awaited.worker, (0.0, {}))
            # memory that was given up may count as foreign until a later reading
            is_known = all(awaited.foreign.get(device, 0) <= self.foreign.get(device, 0) for device in left)
            is_awaited = until > self.now and awaited.deadline > self.now and is_known
            others = [item for item in before.ledger.holdings.values() if item.id != id and left.keys() & item.bytes]
            if is_awaited and not others and not any(self._is_empty(device) for device in left):
                assert max(left.values(), default=0) <= SLACK_BYTES, "memory is given back when the device shows it"

    def _check_caches(self, before: State, event: events.Event) -> None:
        """Stored sequences never stand in the way of a model, and their budgets are in force."""
        state, ledger = self.state, self.state.ledger
        caches = [holding for holding in ledger.holdings.values() if holding.cache]
        assert len({cache.owner for cache in caches}) == len(caches), "a model has one arena"
        assert {cache.owner for cache in caches} <= state.models.keys(), "a removed model has no arena"
        assert all(cache.bytes.keys() == {CPU} for cache in caches)
        if not caches:
            return
        balance = ledger.balance(CPU)
        assert balance.cached_bytes <= ledger.room(CPU, exempt=True)[0], "budgets are within what is left"
        without = ledger.without([cache.id for cache in caches]).balance(CPU)
        assert balance.shortfall_bytes == without.shortfall_bytes, "caches lead to no shortfall"
        begins = any(
            worker.began_at == self.now and worker != before.workers.get(id) for id, worker in state.workers.items()
        )
        for cache in caches:
            budget, was = cache.bytes[CPU], before.ledger.caches.get(cache.owner)
            model = state.models[cache.owner]
            process = self.alive.get(model.worker or "")
            if process is not None and model.state in SERVING and process.has_arena:
                assert process.kv_bytes == budget, f"the worker of {model.id} has its budget"
            is_checked = state.pressure.devices != before.pressure.devices or isinstance(
                event, events.DevicesRead | events.DevicesFound | events.SettingsChanged
            )
            worker = state.worker_of(model)
            is_filled = worker is not None and not worker.ending and model.state in SERVING
            if was is not None and is_filled and budget > was.bytes[CPU]:
                assert begins or is_checked, "budgets grow at loads and checks"

    def _is_empty(self, device: str) -> bool:
        """Whether a device has lost what was in its memory."""
        case = self.state.devices.health.get(device)
        return case is not None and case.emptied

    # --- models and workers ------------------------------------------------------------------------------------------
    def _check_model(self, model: ModelRecord) -> None:
        state = self.state
        holds = model.state not in (_S.COLD, _S.FAILED)
        assert (model.worker is not None) == holds, f"{model.id} is {model.state} with worker {model.worker}"
        assert (model.kept is not None) <= (model.state in (_S.WARM, _S.UNLOADING, _S.RESTORING))
        assert (model.old_device is None) or model.target is not None or model.move_error is not None
        assert not model.removed or (model.worker is not None and not model.queue.waiters)
        assert model.uses == self.uses[model.id]
        worker = state.worker_of(model)
        if worker is None:
            return
        assert worker.model == model.id
        held, process = state.ledger.holdings[worker.holding], self.alive.get(worker.id)
        assert worker.ending or process is not None or self._ends_soon(worker.id)
        if model.state is not _S.DRAINING and not worker.ending:
            assert (model.state is _S.BUSY) == bool(worker.leases), "busy with requests, and with nothing else"
        if model.state is _S.LOADING:
            assert (held.exempt, worker.ready, worker.extra) == (False, None, None)
            assert held.phase is Phase.RESERVED or worker.failure is not None
            reserved = _nonzero(worker.placement.need)
            assert worker.failure is not None or _nonzero(held.bytes) == reserved, "what is planned is reserved"
        elif model.state in SERVING:
            assert (held.phase, held.exempt, worker.extra, worker.suspended) == (Phase.RESIDENT, False, None, None)
            assert worker.ending or process is not None
            self._check_resident(worker, held.bytes)
            departure = worker.departure
            if departure is not None and departure.reason in (Reason.DEVICE, Reason.MOVED, Reason.OUTGREW):
                is_stopped = worker.ending or (process is not None and process.is_stopped)
                assert is_stopped or (TimerKind.STOP, worker.id) in state.timers, (
                    "a model that must leave has a deadline"
                )
        elif model.state is _S.WARM:
            assert (held.phase, held.exempt, worker.extra, worker.ready) == (Phase.RESIDENT, True, None, None)
            assert set(_nonzero(held.bytes)) <= {CPU}, "a warm model has no device memory"
            assert model.kept is not None
            assert sum(held.bytes.values()) == model.kept.count_bytes
            assert worker.predecessor not in state.workers
        elif model.state is _S.RESTORING:
            assert worker.extra is not None
            assert model.kept is not None
        elif model.state is _S.UNLOADING:
            assert held.phase is Phase.RELEASING
            assert worker.ending or process is None or process.is_stopped, "a model that leaves has its worker stopped"

    def _check_saved(self, before: State, model: ModelRecord) -> None:
        """A model in the warm pool has the sequences that its worker has saved, and no others."""
        was = before.models.get(model.id)
        if model.kept is None or model.state is not _S.WARM or was is None or was.state is not _S.OFFLOADING:
            return
        worker = before.workers[model.worker or ""]
        if model.kept.mechanism is not Mechanism.CHECKPOINT:
            saved = self.saved.get(worker.predecessor or worker.id, Offloaded(0, 0, 0))
            found = (model.kept.sequences, model.kept.tokens)
            assert found == (saved.sequences, saved.tokens), f"{model.id} has what was saved"

    def _check_resident(self, worker: WorkerRecord, held: Any) -> None:
        """A loaded model holds what its worker reported."""
        assert worker.ready is not None
        actual = Counter(dict(worker.estimate.overhead_bytes))
        for buffer in worker.ready.buffers:
            actual[buffer.device] += buffer.bytes
        actual[CPU] += worker.grown_bytes
        actual.update({device: grown.bytes for device, grown in worker.device_growth.items()})
        if worker.id in self.visited_standby:
            assert all(held.get(device, 0) >= count for device, count in actual.items())
        else:
            assert _nonzero(held) == _nonzero(actual), f"{worker.id} holds what it reported"

    def _check_worker(self, worker: WorkerRecord) -> None:
        model = self.state.models.get(worker.model)
        is_current = model is not None and model.worker == worker.id
        process = self.alive.get(worker.id)
        if is_current and process is not None and worker.spec.gpu_layers == 0:
            assert process.threads == worker.threads
        if not is_current and process is not None and not worker.ending:
            assert process.is_stopped, "the worker of no model ends"
        ours = {lease for lease, owner in self.leases.items() if owner == worker.id}
        assert ours == worker.leases.keys(), "a lease ends when its request does, and not before"
        if worker.alone is not None:
            assert worker.leases.keys() == {worker.alone}
            is_over = worker.ending or not is_current
            assert is_over or (TimerKind.ALONE, worker.id) in self.state.timers, "a request runs alone for a time"
        if is_current and model is not None and model.state in (_S.WARM, _S.OFFLOADING, _S.RESTORING, _S.UNLOADING):
            assert not worker.leases
        kept = model.kept if model is not None and is_current else None
        if kept is not None and kept.mechanism is Mechanism.STANDBY:
            self.visited_standby.add(worker.id)

    def _check_processes(self) -> None:
        """What a process takes is booked for it."""
        ledger = self.state.ledger
        for id, process in self.alive.items():
            worker = self.state.workers.get(id)
            assert worker is not None, "no process is forgotten"
            if worker.ending or process.is_stopped or worker.failure is not None:
                continue
            booked: Counter[str] = Counter(dict(ledger.holdings[worker.holding].bytes))
            if worker.extra is not None:
                booked.update(ledger.holdings[worker.extra].bytes)
            for device, count in process.bytes.items():
                more = process.grown_bytes if device == CPU else process.pools[device]
                assert self._is_empty(device) or count - more <= booked[device], f"{id} takes {count} of {device}"

    def _check_late_report(self, before: State, event: events.Event) -> None:
        """A report of a worker that has ended, and a second or late one of a load, change nothing."""
        id = getattr(event, "worker", None)
        if id is None:
            return
        worker = before.workers.get(id)
        is_late = worker is None
        if worker is not None and isinstance(event, events.Loaded):
            model = before.models.get(worker.model)
            is_current = model is not None and model.worker == id and not worker.ending
            is_late = not is_current or model is None or model.state not in (_S.LOADING, _S.RESTORING)
        if is_late:
            now = self.state
            assert (now.models, now.workers) == (before.models, before.workers), f"{event} comes late"
            assert now.ledger.holdings == before.ledger.holdings, f"{event} comes late"

    def _ends_soon(self, worker: str) -> bool:
        """Whether the start of its process has just failed."""
        return any(isinstance(item, events.SpawnFailed) and item.worker == worker for item in self.now_due)

    # --- devices -----------------------------------------------------------------------------------------------------
    def _check_devices(self, before: State, event: events.Event) -> None:
        state = self.state
        self._check_doubts(before, event)
        self._check_reloads(before)
        for device, case in state.devices.health.items():
            if not case.emptied:
                continue
            for holding in state.ledger.holdings.values():
                is_trial = holding.id in state.helpers.values()
                assert is_trial or not holding.bytes.get(device), (
                    f"{holding.id} has nothing on {device}, which is {case.state}"
                )
            for worker in state.workers.values():
                if device in worker.placement.devices:
                    model, process = state.models.get(worker.model), self.alive.get(worker.id)
                    assert model is None or model.worker != worker.id, f"{worker.id} is attached to {device}"
                    assert process is None or process.is_stopped
            was = before.devices.health.get(device)
            if case.state is DeviceState.LOST and was is not None and not was.emptied:
                for model in state.models.values():
                    kept = model.kept if model.state is _S.WARM else None
                    place = None if kept is None else (kept.mechanism, kept.original_device)
                    assert place != (Mechanism.CHECKPOINT, device), f"{model.id} is not kept, because {device} is lost"
        for device, (_, trial) in state.devices.trials.items():
            assert trial <= state.devices.health[device].trial

    def _check_doubts(self, before: State, event: events.Event) -> None:
        """A device is tried after a worker on it ended by a hang or by the loss of the device."""
        if not isinstance(event, events.Exited) or event.exit.cause not in _DOUBTFUL:
            return
        worker = before.workers.get(event.worker)
        if worker is None or worker.ending or worker.failure is not None:
            return
        for device in worker.placement.devices:
            if device != CPU and device_incidents.health_of(before, device).usable:
                assert device_incidents.health_of(self.state, device).state is DeviceState.PROBING, f"{device} is tried"

    def _check_reloads(self, before: State) -> None:
        """When a lost device is usable again, the models that lost it are wanted or loaded."""
        reloading = {ticket.model for ticket in self.state.tickets.values() if ticket.purpose is Purpose.RELOAD}
        for device, names in before.devices.lost_models.items():
            is_unchanged = (
                device in self.state.devices.lost_models or not device_incidents.health_of(before, device).emptied
            )
            if is_unchanged or self.state.closing:
                continue
            for model in (self.state.models[name] for name in names if name in self.state.models):
                is_back = model.removed or model.id in reloading or model.state in ACCEPTING
                assert is_back, f"{model.id} is loaded again, because {device} is usable again"

    # --- requests ----------------------------------------------------------------------------------------------------
    def _check_waiters(self) -> None:
        state = self.state
        for model in state.models.values():
            assert [waiter.id for waiter in model.queue.waiters] == [
                waiter.id for waiter in sorted(model.queue.waiters, key=lambda waiter: waiter.rank)
            ]
            ours = {id: ticket for id, ticket in state.tickets.items() if ticket.model == model.id}
            assert {waiter.id: waiter for waiter in model.queue.waiters} == {
                id: ticket.waiter for id, ticket in ours.items()
            }, "queues and tickets are the same requests"
        assert all(ticket.model in state.models for ticket in state.tickets.values())
        waiting = {id for id, ticket in state.tickets.items() if ticket.purpose is Purpose.CLIENT}
        unstarted = {item.ticket for item in self.now_due if isinstance(item, events.Wanted)}
        assert waiting == self.pending.keys() - unstarted, "no waiter is lost"
        for id, ticket in state.tickets.items():
            due = state.timers[TimerKind.TICKET, id]
            request = self.pending.get(id)
            pauses = self.pauses if request is None else self.pauses[request.pauses :]
            begun = (
                ticket.waiter.arrived_at + ticket.wait_seconds
                if request is None
                else request.arrived_at + request.seconds
            )
            least = 0.0 if request is None else sum(pauses) - len(pauses) * TICK_SECONDS
            assert begun + least - 1e-6 <= due <= begun + sum(pauses) + 1e-6, "each wait has its deadline"
        for command in state.commands.values():
            if isinstance(command, MoveCommand) and command.ticket is not None:
                assert command.ticket in state.tickets, "a move waits for its ticket"
        moves = {command.ticket for command in state.commands.values() if isinstance(command, MoveCommand)}
        for id, ticket in state.tickets.items():
            assert ticket.purpose is not Purpose.MOVE or id in moves, "a move that ended waits for nothing"

    def granted(self, ticket: int, lease: LeaseRecord) -> None:
        request, worker = self.pending[ticket], self.state.workers[lease.worker]
        assert lease.worker in self.alive
        assert lease.model == worker.model
        assert request.model in (lease.model, worker.spec.configured_id)
        assert self.state.models[lease.model].worker == worker.id
        if not request.alone:
            for other, waiting in self.pending.items():
                other_ticket = self.state.tickets.get(other)
                if other_ticket is not None and other_ticket.model == lease.model and not waiting.alone:
                    assert (waiting.rank, -other) >= (request.rank, -ticket), "requests are served in their order"

    def _check_timers(self, event: events.Event) -> None:
        state = self.state
        first = min(state.timers.values(), default=math.inf)
        assert state.wake_at == first, "the service wakes up for its first timer"
        assert self.wake_at == first
        if isinstance(event, events.Tick):
            assert first >= self.now, "what is due is done"
        for kind, id in state.timers:
            if kind in _OF_WORKER:
                assert id in state.workers, f"{kind} of {id} is forgotten"
                assert kind is not TimerKind.ALONE or self._runs_alone(state.workers[str(id)])
            elif kind is TimerKind.TICKET:
                assert id in state.tickets
            elif kind is TimerKind.RETURN:
                assert id in state.returns
            elif kind is TimerKind.COMMAND:
                assert id in state.commands
            else:
                assert (kind in _ALWAYS, id) == (True, 0)

    def _runs_alone(self, worker: WorkerRecord) -> bool:
        """Whether a request runs alone on a worker, or waits to."""
        model = self.state.models.get(worker.model)
        if worker.alone is not None or model is None or model.worker != worker.id or model.state not in SERVING:
            return True
        return bool(model.queue.waiters) and model.queue.waiters[0].alone

    # --- decisions ---------------------------------------------------------------------------------------------------
    def _check_departures(self, before: State) -> None:
        """A model is made to leave only for a reason that may make it leave."""
        for id, worker in self.state.workers.items():
            old, departure = before.workers.get(id), worker.departure
            if departure is None or old is None or old.departure == departure:
                continue
            was, now = before.models.get(worker.model), self.state.models.get(worker.model)
            if was is None or now is None or was.worker != id or was.state not in ACCEPTING:
                continue
            if departure.reason in NOT_FOR_PINNED:
                assert not was.spec.pinned, f"{was.id} is pinned"
                assert not was.spec.dedicated or departure.reason is Reason.IDLE, f"{was.id} is dedicated"
            if departure.reason is Reason.PRESSURE and departure.explanation:
                self._check_pressure_cause(departure.explanation[0])
            if departure.reason in (Reason.IDLE, Reason.PRESSURE):
                assert not worker.leases
                assert not now.queue.waiters
            if departure.reason is Reason.MEMORY_WANTED and "room for" in " ".join(departure.explanation):
                swap_seconds = min(MAX_SWAP_SECONDS, was.reload_seconds) if worker.leases else 0.0
                turn_seconds = max(was.spec.min_residency, swap_seconds)
                assert self.now >= worker.ready_at + turn_seconds, f"{was.id} has had its turn"

    def _check_pressure_cause(self, reason: str) -> None:
        """No model leaves because another one grew: idle models leave for a waiting model or for other programs."""
        device = reason.partition(" ")[0]
        if device == CPU or "a model waits for memory" in reason or self.state.settings.pressure_eager:
            return
        lingers = any(device in left for _, left in self.lingering.values())
        ends = any(process.is_stopped and device in process.bytes for process in self.alive.values())
        is_foreign = self.foreign.get(device) or lingers or ends or self.foreign_moved_at > self.now - 60
        assert is_foreign, f"a model left because another one grew: {reason}"

    def _check_counters(self, before: State) -> None:
        state = self.state
        assert self.metrics["evictions"] == sum(state.departures.values())
        assert self.metrics["restorations"] == state.restorations
        assert sum(len(model.queue) for model in state.models.values()) == len(state.tickets)
        assert state.settings is state.config.settings
        assert state.config is self.config
        assert state.config.models.keys() <= state.models.keys()
        for model in state.models.values():
            assert model.removed == (model.id not in state.config.models)
            assert model.removed or model.spec == state.config.models[model.id]
        for record in state.evictions[len(before.evictions) :]:
            old = sum(before.ledger.owned_by(record.model_name).values())
            new = sum(state.ledger.owned_by(record.model_name).values())
            assert record.memory_freed_mb * 2**20 <= old - new + 2**12, "a record names what was freed"

    def _check_loads(self, before: State) -> None:
        """A load begins only where the limits allow it."""
        for model in self.state.models.values():
            was = before.models.get(model.id)
            if model.state not in (_S.LOADING, _S.RESTORING) or was is None or was.worker == model.worker:
                continue
            worker = self.state.workers[model.worker or ""]
            holdings = self.state.ledger.holdings  # a warm model does not count, also while it is dropped
            held = [item for item in held_models(self.state, self.now) if not holdings[item.holding].exempt]
            most = self.state.settings.max_models
            assert most is None or len(held) <= most, "INFERENCE_MAX_MODELS holds"
            for device in worker.placement.devices:
                if device != CPU:
                    assert device_incidents.health_of(self.state, device).state in USABLE
                beside = [item for item in held if device in item.devices and item.holding != worker.holding]
                assert not beside or not (model.spec.dedicated or any(item.dedicated for item in beside))
            others = [item for item in replicas.replicas_of(self.state, model) if item.id != model.id]
            for other in others:
                its_worker = self.state.worker_of(other)
                shared = its_worker is not None and {*its_worker.placement.devices} & {*worker.placement.devices}
                assert not shared or not replicas.is_up(self.state, other), "replicas compute on different devices"
            assert not model.removed
            assert not self.state.closing

    def _check_limits(self, before: State) -> None:
        """The limits of workers are those of their records, and follow from the last check of the pressure."""
        state = self.state
        began = any(  # a reservation changes the gauges without a check
            model.state in (_S.LOADING, _S.RESTORING)
            and model.worker is not None
            and model != before.models.get(model.id)
            for model in state.models.values()
        )
        checked = state.pressure.devices is not before.pressure.devices and not began
        for model in state.models.values():
            worker, was = state.worker_of(model), before.models.get(model.id)
            if worker is None or model.state not in ACCEPTING or worker.ending:
                continue
            most = model.effective.parallel
            assert (self.alive[worker.id].limit or most) == (worker.limit or most), f"the limit of {worker.id}"
            if checked and was is not None and was.state in ACCEPTING and was.worker == worker.id:
                held = state.ledger.holdings[worker.holding].bytes
                restrictions = [item.restriction for name, item in state.pressure.devices.items() if held.get(name)]
                restriction = max(restrictions, default=0)
                expected = most if restriction < Restriction.HALVE else max(1, most >> (restriction - 1))
                assert (worker.limit or most) == expected, "the pressure decides how many run at once"
        for device, pressure in state.pressure.devices.items():
            old = before.pressure.devices.get(device)
            assert (
                pressure.restriction - (old.restriction if old else 0) in (-1, 0, 1)
                or not state.settings.enable_memory_governor
            )

    def _check_suspicions(self, before: State, event: events.Event) -> None:
        """An answered request is not suspected, and a request that crashed alone twice is confirmed."""
        if not isinstance(event, events.CrashReported | events.RequestAnswered | events.CaseCleared):
            return
        model, was = self.state.models.get(event.model), before.models.get(event.model)
        if model is None or was is None:
            return
        model, was = replicas.first_of(self.state, model), replicas.first_of(before, was)
        new, old = model.quarantine.suspicion(event.key, self.now), was.quarantine.suspicion(event.key, self.now)
        if not isinstance(event, events.CrashReported):
            assert new is Suspicion.NONE
        elif old is Suspicion.CONFIRMED or model.quarantine.doubted:
            return
        elif event.crash.can_confirm and not event.crash.unexplained and old is not Suspicion.NONE:
            assert new is Suspicion.CONFIRMED
        else:
            assert new is not Suspicion.NONE
            assert new is not Suspicion.CONFIRMED or old is Suspicion.STRONG

    def _check_failed_load(self, before: State, event: events.Event) -> None:
        """A load that failed and is not tried again at once, or a failed estimate, ends the waits of its requests."""
        if isinstance(event, events.Estimated) and isinstance(event.result, InferenceError):
            model, known = self.state.models.get(event.key.spec.id), before.models.get(event.key.spec.id)
            if model is not None and known is not None and event.key in before.measuring:
                assert known.effective != event.key.spec or not model.queue.waiters
        if not isinstance(event, events.Exited) or event.exit.starved or event.exit.cause in _WAIT_ON:
            return
        worker = before.workers.get(event.worker)
        was = None if worker is None else before.models.get(worker.model)
        if worker is None or was is None or was.worker != worker.id or was.state is not _S.LOADING:
            return
        now = self.state.models.get(was.id)
        if now is not None and was.target is None:
            waiting = {waiter.id for waiter in was.queue.waiters} & {waiter.id for waiter in now.queue.waiters}
            assert not waiting, f"the load of {was.id} failed and its requests wait"

    # --- dry runs ----------------------------------------------------------------------------------------------------
    def before_step(self, event: events.Event) -> list[tuple[str, Placement | Refusal]]:
        """The answers of dry runs, on copies, for the models that are decided on first and last in this step."""
        state = self.state
        if not isinstance(event, events.Observed) or state.closing or not state.unplanned or not state.started:
            return []
        wanted = [model for model in state.models.values() if model.queue.waiters]
        if not wanted or state.commands or state.startup or state.checks:
            return []
        optional = (Purpose.STARTUP, Purpose.REPLICA)
        if any(ticket.purpose in optional or not ticket.evicts for ticket in state.tickets.values()):
            return []  # these loads do not wait
        if any(model.state is _S.DRAINING for model in state.models.values()):
            return []
        placed = [model for model in wanted if model.state in (_S.COLD, _S.WARM, _S.FAILED)]
        if any(model.id not in event.files for model in placed):
            return []
        wanted.sort(key=lambda model: (model.eviction_began_at, age_rank(model.queue.waiters)))
        found = []
        if all(model.state is _S.COLD for model in wanted):
            found += self._dry_run(wanted[0], event, [*state.tickets])
        if len(wanted) > 1:
            behind = self._dry_run(wanted[-1], event, [waiter.id for waiter in wanted[-1].queue.waiters])
            self.compared_behind_others += len(behind)
            found += behind
        return found

    def _dry_run(
        self, model: ModelRecord, event: events.Event, withdrawn: list[int]
    ) -> list[tuple[str, Placement | Refusal]]:
        """The answer for a model whose requests have just arrived, without the tickets `withdrawn`; empty for none."""
        if model.state is not _S.COLD or model.cleaning or model.wanted_at != self.now or model.target is not None:
            return []
        state = copy = self.state
        for ticket in withdrawn:
            copy, _ = step(copy, events.Withdrawn(ticket), self.now)
        planning, _ = step(copy, events.Commanded(0, events.Plan(model.id, {})), self.now)
        after, found = step(planning, event, self.now)
        answers = [effect.value for effect in found if isinstance(effect, effects.Answer)]
        if not answers or not isinstance(answers[0], Planned):
            return []
        if len(withdrawn) == len(state.tickets):
            without, _ = step(copy, event, self.now)  # a reading can begin a move to an accelerator
            assert _without_caches(after) == _without_caches(without), "a dry run books nothing and orders nothing"
            assert {name: item.state for name, item in after.models.items()} == {
                name: item.state for name, item in without.models.items()
            }
        return [(model.id, answers[0].outcome)]

    def _compare(self, id: str, outcome: Placement | Refusal) -> None:
        """The decision is that of the dry run."""
        model = self.state.models[id]
        worker = self.state.worker_of(model)
        self.compared += 1
        if isinstance(outcome, Refusal):
            doubted = any(case.state is DeviceState.PROBING for case in self.state.devices.health.values())
            if not model.effective.oom_policy and not doubted:
                assert worker is None, outcome
                assert bool(model.queue.waiters) == bool(outcome.waits_for), "a final refusal ends the wait"
        elif outcome.result is Result.FREE:
            assert worker is not None
            assert (worker.placement.devices, worker.placement.need) == (outcome.devices, outcome.need)
        else:
            assert isinstance(outcome, Placement)
            assert worker is None, outcome
            for name in outcome.evict:
                other = self.state.models[name]
                leaver = self.state.worker_of(other)
                has_ended = leaver is not None and leaver.ending
                assert has_ended or other.state not in ACCEPTING, f"{name} leaves for {id}"

    # --- starts and commands -----------------------------------------------------------------------------------------
    def spawning(self, worker: str, order: Grant | Hold) -> None:
        record = self.state.workers[worker]
        held = self.state.ledger.holdings[record.holding]
        assert worker not in self.alive
        assert held.phase is not Phase.RESIDENT, "memory is reserved before a process starts"
        if isinstance(order, Grant):
            assert _nonzero(order.reserved_bytes) == _nonzero(held.bytes)
            assert tuple(item.id for item in order.devices) == record.placement.devices

    def commanding(self, request: events.Request) -> Any:
        if isinstance(request, events.Unload):
            model = self.state.models.get(request.model)
            return None if model is None else model.worker
        return self.state.devices.reads_begun if isinstance(request, events.Refresh) else None

    def answered(self, request: events.Request, noted: Any) -> None:
        state = self.state
        match request:
            case events.Unload():
                assert noted not in state.workers, "an unload is answered when the worker has ended"
            case events.Offload(name):
                assert name not in state.models or state.models[name].state not in (_S.DRAINING, _S.OFFLOADING)
            case events.Move(name, device):
                worker = state.worker_of(state.models[name])
                assert worker is not None
                assert worker.placement.devices == (device,), "a move is answered when the model is there"
            case events.Refresh():
                assert state.devices.reads_done > noted, "a refresh is answered by a reading that began after it"
            case events.Recover(device):
                assert device_incidents.health_of(state, device).state is not DeviceState.PROBING
            case _:
                pass

    # --- at rest -----------------------------------------------------------------------------------------------------
    def settled(self) -> None:
        """What waits has something to wait for."""
        state = self.state
        if not state.started:
            return
        assert not state.unplanned, "what was wanted was looked at"
        for id, worker in state.workers.items():
            assert worker.ending or id in self.alive, f"{id} has ended"
        coming = {getattr(item, "worker", None) for item in self.later}
        assert self.leases.keys() == self.open.keys(), "the lease of a client that has left is released"
        for worker in state.workers.values():
            assert not worker.room_awaited or {*worker.room_awaited} & state.workers.keys(), "a departure continues"
        for model in state.models.values():
            worker = state.worker_of(model)
            is_ending = worker is not None and worker.ending  # its end, which is under way, leads to another decision
            is_waited_for = model.queue.waiters and not state.closing and not is_ending
            if model.state in (_S.COLD, _S.WARM, _S.FAILED) and is_waited_for:
                assert self._is_decided_later(model), f"{model.id} is waited for and nothing will happen"
            if not replicas.is_up(state, model) and not state.closing and not model.removed:
                movable = [
                    waiter for waiter in model.queue.waiters if state.tickets[waiter.id].movable and not waiter.alone
                ]
                place = replicas.refuge(state, model, self.now)
                assert not movable or place is None, f"requests wait for {model.id}, and {place} could serve them"
            if worker is None:
                continue
            self._check_draining(model, worker)
            if worker.ending:
                assert worker.id in coming
            elif model.state in ACCEPTING and model.queue.waiters:
                first = model.queue.waiters[0]
                assert not tickets.is_open(worker, alone=first.alone), f"{first.id} could be served"
                assert (TimerKind.ALONE, worker.id) in state.timers
            elif model.state is _S.DRAINING and not worker.leases:
                process = self.alive[worker.id]
                timer = (TimerKind.ROOM_TO_KEEP, worker.id)
                assert process.is_stopped or (worker.room_awaited and timer in state.timers), f"{model.id} leaves"
            elif model.state in BETWEEN:
                assert {worker.id, worker.predecessor} & coming, f"{model.id} is {model.state} for ever"
                assert self._has_deadline(model, worker), f"{model.id} is {model.state} without a deadline"
        for kind in (events.Loaded, events.Estimated, events.TrialEnded):
            self.visited[kind.__name__] += any(isinstance(item, kind) for item in self.later)
        reading = any(isinstance(item, events.DevicesRead) for item in self.later)
        assert reading == (state.devices.reads_begun > state.devices.reads_done), "one reading at a time"
        assert {item.key for item in self.later if isinstance(item, events.Estimated)} >= state.measuring
        trimmed = {item.job for item in self.later if isinstance(item, events.Trimmed)}
        assert {model.id for model in state.models.values() if model.cleaning} <= trimmed
        for id in state.commands:
            assert id >= 0 or id in self.commands, "an abandoned command is forgotten"
        assert self.commands.keys() <= state.commands.keys() | {
            item.command for item in self.now_due if isinstance(item, events.Commanded)
        }, "a command is answered or continues"

    def _is_decided_later(self, model: ModelRecord) -> bool:
        """Whether a timer or an event that is under way leads to another decision about a model."""
        state = self.state
        if (TimerKind.PLAN, 0) in state.timers or any(claim.model == model.id for claim in state.claims):
            return True
        return any(
            isinstance(item, events.DevicesRead)
            or (isinstance(item, events.Estimated) and item.key.spec.id == model.id)
            or (isinstance(item, events.Trimmed) and item.job == model.id)
            or (isinstance(item, events.BuildChecked) and item.model == model.id)
            for item in self.later
        )

    def _has_deadline(self, model: ModelRecord, worker: WorkerRecord) -> bool:
        """Whether a step into or out of the warm pool has a deadline. The supervisor of workers has that of loads."""
        if model.state is not _S.OFFLOADING and (model.state is not _S.RESTORING or worker.suspended is None):
            return True
        awaited = worker.id if worker.predecessor is None or worker.held_bytes is None else worker.predecessor
        return self.alive[awaited].is_killed or (TimerKind.WARM_POOL, awaited) in self.state.timers

    def _check_draining(self, model: ModelRecord, worker: WorkerRecord) -> None:
        """A model that drains because others need its memory stays when no request waits for them any more."""
        departure = worker.departure
        if model.state is not _S.DRAINING or worker.ending or departure is None or self.state.closing:
            return
        if departure.reason is Reason.MEMORY_WANTED:
            others = [other for other in self.state.models.values() if other.queue.waiters and other.id != model.id]
            is_replaced = {*replicas.taken_devices(self.state, model)} & {*worker.placement.devices}
            assert others or is_replaced, f"{model.id} leaves for no other model"

    # --- at the end of a run -----------------------------------------------------------------------------------------
    def rest(self) -> None:
        """All faults end and all requests complete; then nothing may remain."""
        self.heal()
        failed = len(self.failures)
        self.settle(55)
        self._check_idle()
        for request, error in self.failures[failed:]:
            if isinstance(error, DeadlineExceeded | ModelLoading):
                assert request.seconds < 100, f"a request for {request.model} waits for nothing"
        for name in list(self.state.models):
            self.command(events.Unload(name, now=True))
            self.settle(1)
        self.settle(20)
        self._check_empty()

    def shut_down(self) -> None:
        """The service drains and ends; then nothing may remain."""
        failed = len(self.failures)
        waited = len(self.pending)
        self.send(events.Closing())
        assert not self.pending
        assert all(isinstance(error, ShuttingDown) for _, error in self.failures[failed : failed + waited])
        self.send(events.Closing(stops_workers=True))
        for id in self.alive:
            assert self.alive[id].is_stopped or self.state.workers[id].leases or model_is_gone(self.state, id)
        self.settle(20)
        self._check_empty()

    def _check_idle(self) -> None:
        state = self.state
        while self.later:
            self.deliver()
        state = self.state
        assert not self.pending, "every wait has ended"
        assert not self.commands, "every command is answered"
        left = {
            "tickets": state.tickets, "commands": state.commands, "returns": state.returns, "checks": state.checks,
            "measuring": state.measuring, "reloads": state.reloads, "to_measure": state.to_measure,
            "claims": state.claims, "startup": state.startup, "trials": state.devices.trials,
            "lost": [name for names in state.devices.lost_models.values() for name in names if name in state.models],
        }  # fmt: skip
        assert not {name: found for name, found in left.items() if found}
        assert {kind for kind, _ in state.timers} <= {*_ALWAYS}
        assert all(case.state is DeviceState.HEALTHY for case in state.devices.health.values())
        for model in state.models.values():
            assert model.state in (_S.COLD, _S.FAILED, _S.READY, _S.WARM), f"{model.id} is {model.state}"
            assert (model.target, model.old_device, model.move_error, model.cleaning) == (None, None, None, False)
            assert not model.removed
            worker = state.worker_of(model)
            if worker is not None and "reduce" not in model.spec.oom_policy:
                hard = {*model.spec.changed(worker.spec)} - ModelSpec.SOFT
                assert not hard or model.state is _S.WARM, f"{model.id} runs with other settings: {hard}"
        assert all(item.phase in (Phase.RESIDENT, Phase.CACHED) for item in state.ledger.holdings.values())
        for shown in live_figures(state, self.now)["devices"]:
            if state.ledger.account_of(shown["id"]) not in state.ledger.shared.values():
                parts = sum(row["resident"] for row in shown["by_model"].values()) + sum(shown["warm"].values())
                assert parts == shown["accounts"]["resident"], f"the figures of {shown['id']} add up"
        for device, account in state.ledger.accounts.items():
            balance = state.ledger.balance(device)
            grown = sum(
                process.grown_bytes if device == CPU else process.pools[device] for process in self.alive.values()
            )
            assert balance.foreign_bytes <= grown, f"nothing else uses {device}"
            assert balance.ours_bytes <= account.budget_bytes, "a lowered limit holds in the end"
        limit = state.ledger.limit_bytes
        assert limit is None or state.ledger.loaded_bytes <= limit
        # A pinned model is not evicted, however much it has grown.
        pinned = {id for id, worker in state.workers.items() if state.models[worker.model].spec.pinned}
        for device, pressure in state.pressure.devices.items():
            if not any(process.pools[device] for id, process in self.alive.items() if id in pinned):
                assert pressure.restriction is Restriction.NONE

    def _check_empty(self) -> None:
        state = self.state
        assert all(item.cache for item in state.ledger.holdings.values()), "every byte is back"
        assert {model for model, count in self.arenas.items() if count} == state.ledger.caches.keys()
        for cache in state.ledger.caches.values():
            assert cache.bytes == {CPU: self.arenas[cache.owner]}, "what no worker uses is booked as it is"
        assert not state.workers
        assert not self.alive
        assert not state.returns
        assert not state.tickets
        assert not self.commands
        assert not any(any(_figures(sums)) for sums in state.ledger.sums.values())
        assert all(model.state in (_S.COLD, _S.FAILED) for model in state.models.values())
        assert self.metrics["exits"] == self.exits, "every end of a worker is counted once"


def model_is_gone(state: State, worker: str) -> bool:
    """Whether no model has this worker any more."""
    return not any(model.worker == worker for model in state.models.values())


def _without_caches(state: State) -> tuple[dict[str, Any], dict[str, Any]]:
    """Holdings and workers without budgets for stored sequences, which follow each reading."""
    helpers = {*state.helpers.values()}
    holdings = {id: held for id, held in state.ledger.holdings.items() if not held.cache and id not in helpers}
    return holdings, {id: replace(worker, kv_bytes=None) for id, worker in state.workers.items()}


def _nonzero(counts: Any) -> dict[str, int]:
    return {device: count for device, count in counts.items() if count}


def _figures(sums: Any) -> tuple[int, ...]:
    """The sums that are 0 without workers."""
    return (sums.reserved_bytes, sums.resident_bytes, sums.releasing_bytes, sums.exempt_bytes)
