"""Distributes CPU threads among workers as models become busy and idle.

Workers that get fewer threads and workers that become busy are changed at once. Others get free threads after
QUIET_SECONDS without changes, because a change between two short requests costs more than it gains.
"""

from __future__ import annotations

from collections.abc import Mapping

from inference.authority.draft import Draft
from inference.authority.effects import Instruct
from inference.authority.lifecycle import SERVING
from inference.authority.state import ModelRecord, State, TimerKind
from inference.devices.device import CPU
from inference.worker_link import Threads

QUIET_SECONDS = 1.0


def changed(draft: Draft) -> None:
    """Models became ready, busy or idle, or are leaving."""
    names, draft.changed_models = draft.changed_models, []
    found = [draft.state.models.get(name) for name in dict.fromkeys(names)]
    concerned = [
        model for model in found if model is not None and (model.worker is None or _on_cpu(draft.state, model))
    ]
    if draft.state.closing or not concerned:
        return
    for model in concerned:
        _distribute(draft, model.id, grow=False)
    draft.timer(TimerKind.THREADS, 0, draft.now + QUIET_SECONDS)


def give_free_threads(draft: Draft) -> None:
    """Distributes free threads after a time without changes."""
    _distribute(draft, None, grow=True)


def _distribute(draft: Draft, newcomer: str | None, *, grow: bool) -> None:
    state = draft.state
    busy = {
        model.id: model.effective.threads
        for model in state.models.values()
        if model.state in SERVING and state.in_flight(model) and _on_cpu(state, model)
    }
    for name, count in shares(state.cores, busy).items():
        worker = draft.worker_of(name)
        assert worker is not None
        before = worker.threads or draft.model(name).effective.threads or state.cores
        if count == before or (count > before and not grow and name != newcomer):
            continue
        draft.set_worker(worker.id, threads=count)
        draft.emit(Instruct(worker.id, Threads(count)))
        draft.debug("%s computes with %d threads (before: %d)", name, count, before)


def _on_cpu(state: State, model: ModelRecord) -> bool:
    worker = state.worker_of(model)
    return worker is not None and worker.placement.devices == (CPU,)


def shares(cores: int, busy: Mapping[str, int | None]) -> Mapping[str, int]:
    """The number of threads of each model in `busy`, which maps ids to the configured number or None.

    Waiting threads spin, so more threads than cores make every model slow.

    Fixed numbers are kept. The other models share the remaining cores evenly, earlier models get the remainder, and
    each gets at least one thread.
    """
    fixed = {name: count for name, count in busy.items() if count is not None}
    others = [name for name in busy if name not in fixed]
    left = max(0, cores - sum(fixed.values()))
    each, odd = divmod(left, len(others)) if others else (0, 0)
    return {**fixed, **{name: max(1, each + (at < odd)) for at, name in enumerate(others)}}
