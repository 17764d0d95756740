"""Host memory for stored sequences: budgets, orders to workers, and the end of arenas.

The cache of a model in the ledger is the budget of its arena. Budgets are reduced after each event that leaves less
memory for them, first in the ledger, then in the workers. They grow at loads and regular pressure checks only. An arena
that no worker uses cannot be reduced; it is dropped when it does not fit.
"""

from __future__ import annotations

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import DropKv, LimitKv
from inference.authority.handlers.queries import pressure_view
from inference.authority.handlers.running import endings
from inference.authority.lifecycle import Action, Departure, Reason
from inference.authority.placement import kv_budgets
from inference.authority.placement.kv_budgets import ArenaUse
from inference.authority.retention import HOST
from inference.authority.state import ModelRecord, State, WorkerRecord
from inference.protocol import ModelState
from inference.worker_link import KvTiers

_S = ModelState
_FILLS = (_S.LOADING, _S.READY, _S.BUSY, _S.DRAINING, _S.OFFLOADING, _S.RESTORING)
_SERVES = (_S.READY, _S.BUSY, _S.DRAINING)


def is_enabled(state: State) -> bool:
    """Whether sequences are stored in host memory that outlives workers."""
    return state.settings.kv_enabled and state.linux and HOST in state.ledger.accounts


def tiers(draft: Draft, worker: str) -> KvTiers:
    """Where a worker that is about to load or restore its model stores sequences."""
    settle(draft, grows=True)
    settings = draft.state.settings
    if not settings.kv_enabled:
        return KvTiers()
    record = draft.worker(worker)
    budget = 0
    if record.kv_bytes is not None:
        budget = budget_of(draft.state, record.model)
        draft.set_worker(worker, kv_bytes=budget)
    directory = settings.kv_dir or draft.state.kv_directory
    has_disk = settings.kv_disk_bytes > 0 and directory is not None
    return KvTiers(
        ram_bytes=budget,
        disk_bytes=settings.kv_disk_bytes if has_disk else 0,
        directory=str(directory) if has_disk else None,
        policy=settings.kv_policy,
        threshold=settings.kv_threshold,
        prefetch=settings.kv_prefetch,
    )


def budget_of(state: State, model: str) -> int:
    """The budget of the arena of a model in bytes; 0 without one."""
    cache = state.ledger.caches.get(model)
    return 0 if cache is None else sum(cache.bytes.values())


# --- budgets ---------------------------------------------------------------------------------------------------------
def settle(draft: Draft, *, grows: bool = False) -> bool:
    """Brings budgets, orders and arenas in line with the memory that is left. `grows`: budgets may become larger.

    Returns whether a model was made to leave.
    """
    arenas = _arenas(draft.state)
    for owner in draft.state.ledger.caches:
        if owner not in draft.state.models:
            _drop(draft, owner, "the model was removed")
    if not arenas:
        return False
    total = _total(draft.state)
    found = kv_budgets.budgets(arenas, total, alone=len(draft.state.models) == 1)
    leaves = False
    for arena in arenas:
        wanted = found[arena.model]
        if arena.fills:
            _book(draft, arena, wanted if grows else min(wanted, budget_of(draft.state, arena.model)))
        elif wanted:
            _book(draft, arena, wanted)
        else:
            leaves = _give_up(draft, arena, total) or leaves
    for arena in arenas:
        _send_order(draft, arena.model)
    return leaves


def _total(state: State) -> int:
    if not is_enabled(state):
        return 0
    room, _ = state.ledger.room(HOST, exempt=True)
    if state.settings.enable_memory_governor:
        room = min(room, pressure_view.bytes_below_high(state, HOST))
    budget = state.ledger.accounts[HOST].budget_bytes
    return kv_budgets.total_bytes(state.settings.kv_ram_bytes, budget, room)


def _arenas(state: State) -> list[ArenaUse]:
    caches = state.ledger.caches
    found = []
    for model in state.models.values():
        worker, cache = state.worker_of(model), caches.get(model.id)
        fills = _fills(model, worker)
        if fills or cache is not None:
            used = 0 if cache is None else cache.used_bytes
            found.append(ArenaUse(model.id, used, model.last_used_at, fills))
    return found


def _fills(model: ModelRecord, worker: WorkerRecord | None) -> bool:
    """Whether the model has a worker that adds sequences, now or after its load; a suspended process does not."""
    has_arena = worker is not None and worker.kv_bytes is not None and worker.suspended is None and not worker.ending
    return has_arena and model.state in _FILLS


def _book(draft: Draft, arena: ArenaUse, budget_bytes: int) -> None:
    ledger = draft.state.ledger
    cache = ledger.caches.get(arena.model)
    if cache is None:
        id = f"{arena.model}#{draft.number()}"
        draft.set(ledger=ledger.cache(id, arena.model, HOST, budget_bytes))
    elif sum(cache.bytes.values()) != budget_bytes:
        draft.set(ledger=ledger.cache(cache.id, arena.model, HOST, budget_bytes))
        if budget_bytes < arena.used_bytes:
            draft.info(
                "%s may keep %s of its %s of stored sequences in host memory",
                arena.model, format_bytes(budget_bytes), format_bytes(arena.used_bytes),
            )  # fmt: skip


def _give_up(draft: Draft, arena: ArenaUse, total: int) -> bool:
    """The arena of a model that is not loaded is empty or does not fit. Returns whether the model is made to leave."""
    model, worker = draft.model(arena.model), draft.worker_of(arena.model)
    if worker is not None and worker.suspended is not None:
        _book(draft, arena, 0)
        if not arena.used_bytes or model.state is not _S.WARM:
            return False
        why = f"its process holds {format_bytes(arena.used_bytes)} of stored sequences"
        draft.info("unloading %s, which is warm (%s; %s)", model.id, Reason.MEMORY_WANTED, why)
        endings.end(draft, model.id, Departure(Reason.MEMORY_WANTED, Action.UNLOAD, (why,)))
        return True
    why = f"all models may keep {format_bytes(total)}" if is_enabled(draft.state) else "INFERENCE_KV_ENABLED is false"
    _drop(draft, arena.model, why)
    return False


def _drop(draft: Draft, owner: str, why: str) -> None:
    cache = draft.state.ledger.caches[owner]
    draft.set(ledger=draft.state.ledger.release(cache.id))
    draft.emit(DropKv(owner))
    if cache.used_bytes:
        draft.info("%s of stored sequences of %s are dropped: %s", format_bytes(cache.used_bytes), owner, why)


def _send_order(draft: Draft, id: str) -> None:
    """Sends a changed budget to a worker that serves its model; others get theirs with a grant or when it is ready."""
    model, worker = draft.model(id), draft.worker_of(id)
    if worker is None or worker.kv_bytes is None or worker.ending:
        return
    budget = budget_of(draft.state, id)
    if budget != worker.kv_bytes and model.state in _SERVES:
        draft.set_worker(worker.id, kv_bytes=budget)
        draft.emit(LimitKv(worker.id, budget))
