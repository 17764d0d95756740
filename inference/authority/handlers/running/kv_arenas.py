"""Host memory for stored sequences: budgets, orders to workers, and the end of arenas.

The cache of a model in the ledger is the budget of its arena. Budgets are reduced after each event that leaves less
memory for them, first in the ledger, then in the workers. They grow at loads, reloads of the configuration and regular
pressure checks only. An arena that no worker uses cannot be reduced; it is dropped when it does not fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from headgate.shared.units import format_bytes
from inference.authority.draft import Draft
from inference.authority.effects import DropKv, Instruct
from inference.authority.handlers.queries import pressure_view
from inference.authority.handlers.running import endings
from inference.authority.lifecycle import SERVING, Action, Departure, Reason
from inference.authority.placement import kv_budgets
from inference.authority.placement.kv_budgets import ArenaUse
from inference.authority.placement.ledger import Holding
from inference.authority.retention import HOST
from inference.authority.state import ModelRecord, State
from inference.protocol import ModelState
from inference.worker_link import KvBudget, KvTiers

_S = ModelState
_FILLS = (_S.LOADING, _S.READY, _S.BUSY, _S.DRAINING, _S.OFFLOADING, _S.RESTORING, _S.UNLOADING)
"""States in which a worker may add sequences. One that is stopped stores its sequences before it ends."""


def is_enabled(state: State) -> bool:
    """Whether sequences are stored in host memory that outlives workers."""
    return state.settings.kv_enabled and state.linux and HOST in state.ledger.accounts


def tiers(draft: Draft, worker: str) -> KvTiers:
    """Books the budget of a worker that is about to load or restore its model; returns where it stores sequences."""
    settle(draft, grows=True)
    settings = draft.state.settings
    if not settings.kv_enabled:
        return KvTiers()
    record = draft.worker(worker)
    budget = 0
    if record.kv_bytes is not None:
        cache = draft.state.ledger.caches.get(record.model)
        budget = 0 if cache is None else sum(cache.bytes.values())
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


# --- budgets ---------------------------------------------------------------------------------------------------------
def settle(draft: Draft, *, grows: bool = False) -> bool:
    """Brings budgets, orders and arenas in line with the memory that is left. `grows`: budgets may become larger.

    Returns whether a model was made to leave.
    """
    caches = draft.state.ledger.caches
    for owner in caches:
        if owner not in draft.state.models:
            _drop(draft, caches[owner], "the model was removed")
    arenas = _arenas(draft.state, caches)
    if not arenas:
        return False
    total = _total(draft.state)
    found = kv_budgets.budgets(arenas, total, alone=len(draft.state.models) == 1)
    leaves = False
    for arena in arenas:
        cache, wanted = caches.get(arena.model), found[arena.model]
        if arena.fills:
            before = 0 if cache is None else sum(cache.bytes.values())
            _book(draft, arena, cache, wanted if grows else min(wanted, before))
        elif cache is not None and wanted:
            _book(draft, arena, cache, wanted)
        elif cache is not None:
            leaves = _give_up(draft, arena, cache, total) or leaves
    return leaves


def _total(state: State) -> int:
    if not is_enabled(state):
        return 0
    room, _ = state.ledger.room(HOST, exempt=True)
    if state.settings.enable_memory_governor:
        room = min(room, pressure_view.bytes_below_high(state, HOST))
    budget = state.ledger.accounts[HOST].budget_bytes
    return kv_budgets.total_bytes(state.settings.kv_ram_bytes, budget, room)


def _arenas(state: State, caches: Mapping[str, Holding]) -> list[ArenaUse]:
    found = []
    for model in state.models.values():
        fills, cache = _fills(state, model), caches.get(model.id)
        if fills or cache is not None:
            used = 0 if cache is None else cache.used_bytes
            found.append(ArenaUse(model.id, used, model.last_used_at, fills))
    return found


def _fills(state: State, model: ModelRecord) -> bool:
    """Whether the model has a worker that may add sequences, now or later; a suspended process does not."""
    worker = state.worker_of(model)
    has_arena = worker is not None and worker.kv_bytes is not None and worker.suspended is None and not worker.ending
    return has_arena and model.state in _FILLS


def _book(draft: Draft, arena: ArenaUse, cache: Holding | None, budget_bytes: int) -> None:
    """Books the budget and sends it to a worker that serves the model; others get it with their grant, or when they are
    ready.
    """
    ledger, id = draft.state.ledger, arena.model
    if cache is None:
        draft.set(ledger=ledger.cache(f"{id}#{draft.number()}", id, HOST, budget_bytes))
    elif sum(cache.bytes.values()) != budget_bytes:
        draft.set(ledger=ledger.cache(cache.id, id, HOST, budget_bytes))
        if budget_bytes < arena.used_bytes:
            draft.info(
                "%s may keep %s of its %s of stored sequences in host memory",
                id, format_bytes(budget_bytes), format_bytes(arena.used_bytes),
            )  # fmt: skip
    worker = draft.worker_of(id)
    if worker is None or worker.kv_bytes in (None, budget_bytes) or worker.ending:
        return
    if draft.model(id).state in SERVING:
        draft.set_worker(worker.id, kv_bytes=budget_bytes)
        draft.emit(Instruct(worker.id, KvBudget(budget_bytes)))


def _give_up(draft: Draft, arena: ArenaUse, cache: Holding, total: int) -> bool:
    """The arena of a model that is not loaded is empty or does not fit. Returns whether the model is made to leave."""
    model, worker = draft.model(arena.model), draft.worker_of(arena.model)
    if worker is not None and worker.suspended is not None:
        _book(draft, arena, cache, 0)
        if not arena.used_bytes or model.state is not _S.WARM:
            return False
        why = f"its process holds {format_bytes(arena.used_bytes)} of stored sequences"
        draft.info("unloading %s, which is warm (%s; %s)", model.id, Reason.MEMORY_WANTED, why)
        endings.end(draft, model.id, Departure(Reason.MEMORY_WANTED, Action.UNLOAD, (why,)))
        return True
    if worker is not None and worker.kv_bytes and model.state is _S.WARM:
        draft.set_worker(worker.id, kv_bytes=0)
        draft.emit(Instruct(worker.id, KvBudget(0)))  # the process of a warm model may use the arena still
    limit = f"those of all models may take {format_bytes(total)} of host memory"
    why = limit if is_enabled(draft.state) else "INFERENCE_KV_ENABLED is false"
    _drop(draft, cache, why)
    return False


def _drop(draft: Draft, cache: Holding, why: str) -> None:
    draft.set(ledger=draft.state.ledger.release(cache.id))
    draft.emit(DropKv(cache.owner))
    if cache.used_bytes:
        draft.info("%s of stored sequences of %s are dropped: %s", format_bytes(cache.used_bytes), cache.owner, why)
