"""The working copy of the state within one step: handlers change it, and `step` returns the result.

A draft lives within one call of `step`. It replaces frozen records, collects effects, and offers what every handler
needs: the lifecycle table, timers, log lines, new numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from inference.authority.effects import Answer, Count, Effect, Log, NotifyModels, Refuse
from inference.authority.lifecycle import ModelEvent, advance
from inference.authority.pending_commands import Command
from inference.authority.state import ModelRecord, State, TicketRecord, TimerKind, WorkerRecord
from inference.errors import InferenceError
from inference.protocol import ModelState

SETTLE_SECONDS = 0.2
"""Delay of notifications about values that change often."""
_KEEPS = (ModelState.WARM, ModelState.UNLOADING, ModelState.RESTORING)


class Draft:
    """The draft of one step. `observed`: the readings are current, so models may be placed now."""

    __slots__ = (
        "changed_models",
        "checked_files",
        "effects",
        "kv_grows",
        "now",
        "observed",
        "retime",
        "settled",
        "state",
    )

    def __init__(self, state: State, now: float, *, observed: bool = False) -> None:
        self.state = state
        self.now = now
        self.observed = observed
        self.effects: list[Effect] = []
        self.changed_models: list[str] = []
        """models whose change may affect the threads of others"""
        self.settled: list[tuple[TicketRecord, InferenceError | None]] = []
        """internal tickets that were granted or have failed"""
        self.checked_files: frozenset[str] = frozenset()
        """models whose files were checked for this step"""
        self.retime = False
        self.kv_grows = False
        """budgets for stored sequences may grow in this step"""

    # --- records -----------------------------------------------------------------------------------------------------
    def set(self, **changes: Any) -> None:
        """Replaces fields of the state."""
        self.state = replace(self.state, **changes)

    def model(self, id: str) -> ModelRecord:
        """One model."""
        return self.state.models[id]

    def set_model(self, id: str, **changes: Any) -> ModelRecord:
        """Replaces fields of a model."""
        model = replace(self.state.models[id], **changes)
        self.set(models={**self.state.models, id: model})
        return model

    def drop_model(self, id: str) -> None:
        """Removes a model."""
        self.set(models={name: model for name, model in self.state.models.items() if name != id})

    def worker(self, id: str) -> WorkerRecord:
        """One worker."""
        return self.state.workers[id]

    def worker_of(self, model: str) -> WorkerRecord | None:
        """The worker of a model."""
        return self.state.worker_of(self.state.models[model])

    def set_worker(self, id: str, **changes: Any) -> WorkerRecord:
        """Replaces fields of a worker."""
        worker = replace(self.state.workers[id], **changes)
        self.set(workers={**self.state.workers, id: worker})
        return worker

    def is_current(self, worker: WorkerRecord) -> bool:
        """Whether it is the current worker of its model."""
        model = self.state.models.get(worker.model)
        return model is not None and model.worker == worker.id

    def set_devices(self, **changes: Any) -> None:
        """Replaces fields of the devices."""
        self.set(devices=replace(self.state.devices, **changes))

    def set_command(self, id: int, command: Command) -> None:
        """Adds or replaces a command."""
        self.set(commands={**self.state.commands, id: command})

    def drop_command(self, id: int) -> None:
        """Removes a command and its timer."""
        self.set(commands={other: command for other, command in self.state.commands.items() if other != id})
        self.cancel(TimerKind.COMMAND, id)

    def answer(self, id: int, value: object = None) -> None:
        """Ends a command with its result."""
        self.drop_command(id)
        self.emit(Answer(id, value))

    def refuse(self, id: int, error: InferenceError) -> None:
        """Ends a command with an error."""
        self.drop_command(id)
        self.emit(Refuse(id, error))

    def number(self) -> int:
        """A new unique number."""
        self.set(numbers=self.state.numbers + 1)
        return self.state.numbers

    # --- lifecycle ---------------------------------------------------------------------------------------------------
    def advance(self, id: str, event: ModelEvent, *, quietly: bool = False) -> None:
        """Changes the lifecycle state of a model; nothing else does. Raises IllegalTransition."""
        model = self.state.models[id]
        state = advance(model.state, event)
        self.set_model(id, state=state, kept=model.kept if state in _KEEPS else None)
        self.changed_models.append(id)
        self.changed(SETTLE_SECONDS if quietly else 0.0)
        self.plan()

    def plan(self) -> None:
        """Requests a reconciliation at the end of this step, or of the next one with current readings."""
        if not self.state.unplanned:
            self.set(unplanned=True)

    # --- effects -----------------------------------------------------------------------------------------------------
    def emit(self, effect: Effect) -> None:
        """Adds an effect."""
        self.effects.append(effect)

    def changed(self, seconds: float = 0.0) -> None:
        """Notifies listeners of changed models within `seconds`."""
        self.set(revision=self.state.revision + 1)
        self.emit(NotifyModels(seconds))

    def count(self, metric: str, *labels: str, amount: float = 1.0) -> None:
        """Adds to a metric."""
        self.emit(Count(metric, labels, amount))

    def debug(self, text: str, *values: object) -> None:
        """Logs at level DEBUG."""
        self.emit(Log("DEBUG", text % values))

    def info(self, text: str, *values: object) -> None:
        """Logs at level INFO."""
        self.emit(Log("INFO", text % values))

    def warning(self, text: str, *values: object) -> None:
        """Logs at level WARNING."""
        self.emit(Log("WARNING", text % values))

    def error(self, text: str, *values: object) -> None:
        """Logs at level ERROR."""
        self.emit(Log("ERROR", text % values))

    # --- time --------------------------------------------------------------------------------------------------------
    @property
    def unix(self) -> float:
        """Now, in Unix seconds."""
        return self.now + self.state.unix_offset

    def timer(self, kind: TimerKind, id: str | int, at: float) -> None:
        """Sets or changes a timer."""
        self.set(timers={**self.state.timers, (kind, id): at})
        self.retime = True

    def cancel(self, kind: TimerKind, id: str | int) -> None:
        """Cancels a timer, if it is set."""
        if (kind, id) in self.state.timers:
            self.set(timers={timer: at for timer, at in self.state.timers.items() if timer != (kind, id)})
            self.retime = True

    def wake_in(self, seconds: float) -> None:
        """Requests a reconciliation within `seconds`."""
        due = self.now + seconds
        if self.state.timers.get((TimerKind.PLAN, 0), due + 1) > due:
            self.timer(TimerKind.PLAN, 0, due)
