"""The replicas of one model: which of them gets a request, and the devices that are left for a further one."""

from __future__ import annotations

from dataclasses import replace

from inference.authority.draft import Draft
from inference.authority.events import Wanted
from inference.authority.handlers.queries import expectations
from inference.authority.lifecycle import ACCEPTING
from inference.authority.placement import replica_choice
from inference.authority.placement.replica_choice import Replica
from inference.authority.state import ModelRecord, Purpose, State
from inference.devices.device import CPU, Reading
from inference.protocol import ModelState
from inference.settings import replica_ids

_S = ModelState
UP = (_S.LOADING, _S.RESTORING, *ACCEPTING)
"""States in which a replica takes requests, or will soon."""
_LOADABLE = (_S.COLD, _S.WARM)
ALONE_SECONDS = 10.0
"""A request that must run alone waits at most this long for the next load of a replica whose worker has ended."""
MAX_CONVERSATIONS = 1024
"""Conversations per model whose last replica is known; the one with the oldest request is forgotten."""


def has_replicas(model: ModelRecord) -> bool:
    """Whether the model is configured with more than one replica."""
    return model.spec.replicas[1] > 1


def is_first_of_several(model: ModelRecord) -> bool:
    """Whether its id stands for several replicas."""
    return has_replicas(model) and model.spec.replica_of is None


def replicas_of(state: State, model: ModelRecord) -> list[ModelRecord]:
    """Every replica of the same model, the first one first; also those that were removed and are draining."""
    name = model.spec.configured_id
    return [item for item in state.models.values() if item.spec.configured_id == name]


def first_of(state: State, model: ModelRecord) -> ModelRecord:
    """The record of the first replica, which has what the replicas share; the model's own if there is none."""
    return state.models.get(model.spec.configured_id, model)


def is_up(state: State, model: ModelRecord) -> bool:
    """Whether the replica takes requests, or will soon."""
    worker = state.worker_of(model)
    return model.state in UP and not model.removed and worker is not None and not worker.ending


def candidates(state: State, model: ModelRecord, now: float) -> list[Replica]:
    """The configured replicas of a model for the policy."""
    names = replica_ids(model.spec.configured_id, first_of(state, model).spec.replicas[1])
    found = [state.models[id] for id in names if id in state.models and not state.models[id].removed]
    return [_replica(state, item, now) for item in found]


def _replica(state: State, model: ModelRecord, now: float) -> Replica:
    load_seconds = expectations.load_seconds(state, model, now)
    waiting = sum(state.tickets[waiter.id].purpose is Purpose.CLIENT for waiter in model.queue.waiters)
    return Replica(
        model.id,
        is_up(state, model),
        model.reload_seconds if load_seconds is None else load_seconds,
        state.in_flight(model) + waiting,
        model.effective.parallel,
        model.pace.seconds,
        can_load=model.state in _LOADABLE and not model.queue.waiters,
        is_failed=model.state is _S.FAILED,
    )


def choose(state: State, model: ModelRecord, event: Wanted, now: float) -> str:
    """The replica for a new request."""
    found = candidates(state, model, now)
    if event.alone:
        return replica_choice.choose_alone(found, ALONE_SECONDS)
    return replica_choice.choose(found, first_of(state, model).scaling.served.get(event.conversation or ""))


def note_served(draft: Draft, model: ModelRecord, conversation: str) -> None:
    """A replica serves a request of a conversation."""
    first = first_of(draft.state, model)
    served = dict(first.scaling.served)
    served.pop(conversation, None)
    if len(served) >= MAX_CONVERSATIONS:
        del served[next(iter(served))]
    served[conversation] = model.id
    draft.set_model(first.id, scaling=replace(first.scaling, served=served))


def serves_before(state: State, ready: ModelRecord, other: ModelRecord, now: float) -> bool:
    """Whether a ready replica would serve a request earlier than another one where it waits."""
    waits = {item.id: item.wait_seconds for item in candidates(state, ready, now)}
    return other.id not in waits or not is_up(state, other) or waits.get(ready.id, 0.0) < waits[other.id]


def refuge(state: State, model: ModelRecord, now: float) -> str | None:
    """The best other replica that is loaded or loading, for the requests of one that cannot serve them, or None."""
    if not has_replicas(model):
        return None
    others = [item for item in candidates(state, model, now) if item.is_up and item.id != model.id]
    return replica_choice.choose(others) if others else None


def taken_devices(state: State, model: ModelRecord) -> frozenset[str]:
    """The devices that compute other replicas of the model."""
    if not has_replicas(model):
        return frozenset()
    others = [item for item in replicas_of(state, model) if item.id != model.id and is_up(state, item)]
    workers = [state.worker_of(item) for item in others]
    return frozenset(name for worker in workers if worker is not None for name in worker.placement.devices)


def free_of_siblings(state: State, model: ModelRecord, devices: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """`devices` for a load beside other replicas: none that computes one, because a second one there gains nothing, and
    not the CPU as a fallback, because requests would wait for it.
    """
    taken = taken_devices(state, model)
    return tuple(item for item in devices if item.id not in taken and item.id != CPU) if taken else devices


def last_used_at(state: State, model: ModelRecord) -> float:
    """When the model was used last. The least number of replicas stays loaded as long as one of them is used."""
    if not has_replicas(model):
        return model.last_used_at
    up = [item for item in replicas_of(state, model) if is_up(state, item)]
    if len(up) > first_of(state, model).spec.replicas[0]:
        return model.last_used_at
    return max((item.last_used_at for item in up), default=model.last_used_at)
