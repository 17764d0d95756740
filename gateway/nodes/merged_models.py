"""The status of one model over all nodes that have it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from inference.protocol import ModelState, ModelStatus

_S = ModelState
_ORDER = (
    _S.READY, _S.BUSY, _S.DRAINING, _S.RESTORING, _S.LOADING, _S.OFFLOADING, _S.WARM, _S.COLD, _S.UNLOADING, _S.FAILED,
)  # fmt: skip
"""States from the most to the least useful for a new request."""

_LOADED = frozenset((_S.READY, _S.BUSY, _S.DRAINING))


def merged(statuses: Mapping[str, ModelStatus]) -> ModelStatus:
    """The status of a model, from that of each node with it (at least one): what a new request can expect.

    State, rates, and the times to load and in the queue are those of the best node. Requests, slots of loaded copies
    and used memory are sums; the predicted memory and the context are the largest, the retry time is the smallest.
    Devices have the name of their node in front: `NODE/gpu-0`.
    """
    found = list(statuses.values())
    best = min(found, key=_rank)
    contexts = [one.context_length for one in found]
    waits = [one.retry_after_seconds for one in found if one.retry_after_seconds is not None]
    idle = [one.idle_seconds for one in found if one.idle_seconds is not None]
    loaded = [one for one in found if one.state in _LOADED]
    return replace(
        best,
        aliases=_union(one.aliases for one in found),
        context_length=max(contexts) if all(contexts) else 0,
        parallel=sum(one.parallel for one in loaded) or best.parallel,
        devices=tuple(f"{node}/{device}" for node, one in statuses.items() for device in one.devices),
        predicted_bytes=max((one.predicted_bytes for one in found if one.predicted_bytes is not None), default=None),
        actual_bytes=sum(one.actual_bytes or 0 for one in found) or None,
        in_flight=sum(one.in_flight for one in found),
        queued=sum(one.queued for one in found),
        idle_seconds=min(idle, default=None),
        loads=sum(one.loads for one in found),
        capabilities=_union(one.capabilities for one in found) if all(one.capabilities for one in found) else (),
        fits=_any_fits(one.fits for one in found),
        retry_after_seconds=min(waits, default=None),
        pid=None,
        replicas=(),
    )


def _rank(status: ModelStatus) -> tuple[int, float]:
    return _ORDER.index(status.state), (status.load_seconds or 0.0) + (status.queue_seconds or 0.0)


def _union(parts: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(item for part in parts for item in part))


def _any_fits(fits: Iterable[bool | None]) -> bool | None:
    """Whether the model fits on a node; None while no node says yes and one does not know."""
    known = set(fits)
    return True if True in known else None if None in known else False
