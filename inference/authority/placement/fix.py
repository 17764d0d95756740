"""Finds smaller settings with which a model would fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from inference.estimate.layers import Layers

CONTEXT_STEP = 256
LEAST_CONTEXT = 512
SMALLER_KV = ("q8_0", "q4_0")


class Fits(Protocol):
    """Whether a model with these layers would fit; without `host`: whether its accelerator part would fit."""

    def __call__(self, layers: Layers, *, host: bool = True) -> bool:
        """Must be monotonic: a model that fits also fits into more room."""
        ...


def nearest_fix(layers: Layers, would_fit: Fits) -> Mapping[str, Any]:
    """The smallest reduction with which the model `would_fit`; empty if there is none.

    In this order: fewer parallel sequences, a smaller KV type, a shorter context, fewer layers on the accelerator, and
    fewer layers with the minimum of the others.
    """
    now = layers.parameters

    def fits(**settings: int | str) -> bool:
        return would_fit(layers.changed(**settings))

    if now.parallel > 1 and (parallel := _most(lambda count: fits(parallel=count), now.parallel - 1)):
        return {"parallel": parallel}
    alone: dict[str, Any] = {} if now.parallel == 1 else {"parallel": 1}
    if now.kv_type == "f16" and now.flash_attention and not alone:
        for kv_type in SMALLER_KV:
            if fits(kv_type=kv_type):
                return {"kv_type": kv_type}
    steps = _most(
        lambda count: fits(**alone, context_length=count * CONTEXT_STEP), (now.context_length - 1) // CONTEXT_STEP
    )
    if steps * CONTEXT_STEP >= LEAST_CONTEXT:
        return {**alone, "context_length": steps * CONTEXT_STEP}
    least = {} if now.context_length <= LEAST_CONTEXT else {"context_length": LEAST_CONTEXT}
    return _fewer_layers(layers, {}, would_fit) or _fewer_layers(layers, {**alone, **least}, would_fit)


def smaller(fix: Mapping[str, Any]) -> Mapping[str, Any]:
    """The next smaller suggestion of the same kind; empty when there is none."""
    if (layers := fix.get("gpu_layers", 0)) > 1:
        return {**fix, "gpu_layers": layers - 1}
    context = fix.get("context_length", 0) * 15 // 16 // CONTEXT_STEP * CONTEXT_STEP
    if "gpu_layers" not in fix and context >= LEAST_CONTEXT:
        return {**fix, "context_length": context}
    if set(fix) == {"parallel"} and fix["parallel"] > 1:
        return {"parallel": fix["parallel"] - 1}
    kinds = SMALLER_KV[SMALLER_KV.index(fix["kv_type"]) + 1 :] if set(fix) == {"kv_type"} else ()
    return {"kv_type": kinds[0]} if kinds else {}


def _fewer_layers(layers: Layers, others: Mapping[str, Any], would_fit: Fits) -> Mapping[str, Any]:
    """`others` with the largest number of accelerator layers that fits, if the host has room for the rest."""
    count = _most(lambda count: would_fit(layers.changed(**others, gpu_layers=count), host=False), layers.offloaded - 1)
    if count and would_fit(layers.changed(**others, gpu_layers=count)):
        return {**others, "gpu_layers": count}
    return {}


def _most(true: Callable[[int], bool], most: int) -> int:
    """The largest count from 1 to `most` for which `true` holds, 0 for none; `true` must be monotonic."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if true(middle):
            low = middle
        else:
            high = middle - 1
    return low
