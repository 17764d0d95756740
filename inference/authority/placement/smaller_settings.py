"""Smaller settings for a model that lacks memory.

`nearest_fix` computes a suggestion for an operator, `nearest_fit` the settings with which a model is loaded instead of
the configured ones (`fit`, `experts: auto`). `next_step` has the steps of `oom_policy`: clean up, smaller batch,
smaller context, the CPU. They are taken once. Then the model keeps the smaller sizes that helped, or its requests fail,
until the rest period is over.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from inference.estimate.layers import Layers

CONTEXT_STEP = 256
MIN_CONTEXT = 512
SMALLER_KV = ("q8_0", "q4_0")
REST_SECONDS = 60.0
"""Configured sizes are tried again this long after the last step."""
MIN_UBATCH = 32
UBATCH_DIVISOR = 4
MIN_REDUCED_CONTEXT = 256


# --- suggestions -----------------------------------------------------------------------------------------------------
class Fits(Protocol):
    """Whether a model with these layers would fit; without `host`: whether its accelerator part would fit."""

    def __call__(self, layers: Layers, *, host: bool = True) -> bool:
        """Must be monotonic: a model that fits also fits into more room."""
        ...


def nearest_fix(layers: Layers, would_fit: Fits) -> Mapping[str, Any]:
    """The smallest reduction with which the model `would_fit`; empty if there is none.

    In this order: fewer parallel sequences (or fewer shared KV cells), a smaller KV type, a shorter context, experts
    in host memory, fewer layers on the accelerator, and the last two with the minimum of the others.
    """
    now = layers.parameters

    def fits(**settings: int | str) -> bool:
        return would_fit(layers.changed(**settings))

    def shorter(context_length: int) -> dict[str, Any]:
        shared = {} if now.kv_cells is None else {"kv_cells": context_length}
        return {**alone, "context_length": context_length, **shared}

    alone: dict[str, Any] = {}
    """The changes that leave room for exactly one sequence of full length."""
    if now.kv_cells is not None:
        steps = _most(lambda count: fits(kv_cells=count * CONTEXT_STEP), (now.kv_cells - 1) // CONTEXT_STEP)
        if steps * CONTEXT_STEP >= now.context_length:
            return {"kv_cells": steps * CONTEXT_STEP}
        alone = {} if now.kv_cells == now.context_length else {"kv_cells": now.context_length}
    elif now.parallel > 1:
        if parallel := _most(lambda count: fits(parallel=count), now.parallel - 1):
            return {"parallel": parallel}
        alone = {"parallel": 1}
    if now.kv_type == "f16" and now.flash_attention and not alone:
        for kv_type in SMALLER_KV:
            if fits(kv_type=kv_type):
                return {"kv_type": kv_type}
    steps = _most(lambda count: fits(**shorter(count * CONTEXT_STEP)), (now.context_length - 1) // CONTEXT_STEP)
    if steps * CONTEXT_STEP >= MIN_CONTEXT:
        return shorter(steps * CONTEXT_STEP)
    least = alone if now.context_length <= MIN_CONTEXT else shorter(MIN_CONTEXT)
    for others in ({}, least):
        if found := _experts_apart(layers, others, would_fit) or _fewer_layers(layers, others, would_fit):
            return found
    return {}


class FitStep(StrEnum):
    """A setting that is changed without a command when a model does not fit; in the order in which they are tried."""

    CONTEXT = "context"
    EXPERTS = "experts"
    LAYERS = "layers"


@dataclass(frozen=True, slots=True)
class Fit:
    """The changes that a model allows. Its context gets no shorter than `min_context`."""

    steps: Collection[FitStep] = ()
    min_context: int = MIN_CONTEXT

    def allows(self, fix: Mapping[str, Any]) -> bool:
        """Whether the model may be loaded with this change; False for no change."""
        keys = {key for step in self.steps for key in SETTINGS[step]}
        return bool(fix) and keys.issuperset(fix) and fix.get("context_length", self.min_context) >= self.min_context


SETTINGS: Mapping[FitStep, tuple[str, ...]] = {
    FitStep.CONTEXT: ("context_length", "kv_cells"),
    FitStep.EXPERTS: ("experts",),
    FitStep.LAYERS: ("gpu_layers",),
}
"""The settings of a model that a step changes."""


def nearest_fit(layers: Layers, fit: Fit, would_fit: Fits) -> Mapping[str, Any]:
    """The smallest change that `fit` allows and with which the model `would_fit`; empty if there is none.

    A step is tried with the minimum of the steps before it.
    """
    now = layers.parameters
    least = min(fit.min_context, now.context_length)

    def shorter(context_length: int) -> dict[str, Any]:
        """The number of shared KV cells shrinks with the context."""
        if context_length == now.context_length:
            return {}
        shared = {} if now.kv_cells is None else {"kv_cells": now.kv_cells * context_length // now.context_length}
        return {"context_length": context_length, **shared}

    others: dict[str, Any] = {}
    if FitStep.CONTEXT in fit.steps:
        steps = _most(
            lambda count: would_fit(layers.changed(**shorter(count * CONTEXT_STEP))),
            (now.context_length - 1) // CONTEXT_STEP,
        )
        if steps * CONTEXT_STEP >= least:
            return shorter(steps * CONTEXT_STEP)
        others = shorter(least)
        if others and would_fit(layers.changed(**others)):
            return others
    if FitStep.EXPERTS in fit.steps:
        if found := _experts_apart(layers, others, would_fit):
            return found
        if layers.last_expert_layer > now.host_expert_layers:
            others = {**others, "experts": layers.last_expert_layer}
    return _fewer_layers(layers, others, would_fit) if FitStep.LAYERS in fit.steps else {}


def smaller(fix: Mapping[str, Any], context_length: int) -> Mapping[str, Any]:
    """The next smaller suggestion of the same kind for a model with this `context_length`; empty when there is none."""
    if (layers := fix.get("gpu_layers", 0)) > 1:
        return {**fix, "gpu_layers": layers - 1}
    if "experts" in fix and "gpu_layers" not in fix:
        return {**fix, "experts": fix["experts"] + 1}
    context = _less(fix.get("context_length", 0))
    if "gpu_layers" not in fix and context >= MIN_CONTEXT:
        return {**fix, "context_length": context} | ({"kv_cells": context} if "kv_cells" in fix else {})
    if set(fix) == {"kv_cells"} and (cells := _less(fix["kv_cells"])) >= context_length:
        return {"kv_cells": cells}
    if set(fix) == {"parallel"} and fix["parallel"] > 1:
        return {"parallel": fix["parallel"] - 1}
    kinds = SMALLER_KV[SMALLER_KV.index(fix["kv_type"]) + 1 :] if set(fix) == {"kv_type"} else ()
    return {"kv_type": kinds[0]} if kinds else {}


def _less(tokens: int) -> int:
    """15/16 of `tokens`, rounded down to a multiple of CONTEXT_STEP."""
    return tokens * 15 // 16 // CONTEXT_STEP * CONTEXT_STEP


def _fewer_layers(layers: Layers, others: Mapping[str, Any], would_fit: Fits) -> Mapping[str, Any]:
    """`others` with the largest number of accelerator layers that fits, if the host has room for the rest."""
    smaller = changed_layers(layers, others)
    count = _most(lambda count: would_fit(smaller.changed(gpu_layers=count), host=False), layers.offloaded - 1)
    if count and would_fit(smaller.changed(gpu_layers=count)):
        return {**others, "gpu_layers": count}
    return {}


def _experts_apart(layers: Layers, others: Mapping[str, Any], would_fit: Fits) -> Mapping[str, Any]:
    """`others` with the smallest number of layers whose experts are in host memory, if the host has room for them."""
    smaller = changed_layers(layers, others)
    before, most = layers.parameters.host_expert_layers, layers.last_expert_layer
    too_few = _most(
        lambda count: not would_fit(smaller.changed(host_expert_layers=before + count), host=False), most - before
    )
    count = before + too_few + 1
    if count <= most and would_fit(smaller.changed(host_expert_layers=count)):
        return {**others, "experts": count}
    return {}


def changed_layers(layers: Layers, settings: Mapping[str, Any]) -> Layers:
    """The layers with these settings of a model."""
    return layers.changed(**{"host_expert_layers" if key == "experts" else key: settings[key] for key in settings})


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


# --- oom_policy -------------------------------------------------------------------------------------------------------
class Step(StrEnum):
    """One step."""

    CLEAN = "clean up"
    """all models drop retained prefixes and trim their heaps"""
    UBATCH = "smaller ubatch"
    CONTEXT = "smaller context"
    CPU = "cpu"
    """the configured sizes, on the CPU"""


_OF_POLICY: Mapping[str, tuple[Step, ...]] = {
    "cleanup": (Step.CLEAN,),
    "reduce": (Step.UBATCH, Step.CONTEXT),
    "cpu": (Step.CPU,),
}


def steps_of(policy: Collection[str]) -> tuple[Step, ...]:
    """The steps of an `oom_policy`, in order."""
    return tuple(step for word in policy for step in _OF_POLICY[word])


@dataclass(frozen=True, slots=True)
class Reduction:
    """The steps that were taken or left out, and the end of the rest period (seconds)."""

    taken: frozenset[Step] = frozenset()
    rests_until: float = -math.inf

    def rest(self, now: float) -> float:
        """Seconds until configured sizes may be tried again."""
        return max(0.0, self.rests_until - now)

    def rested(self, now: float) -> Reduction:
        """This reduction, or a new one after the rest period."""
        return self if self.rest(now) else Reduction()


def next_step(
    reduction: Reduction, steps: Sequence[Step], now: float, without: Collection[Step] = ()
) -> tuple[Reduction, Step | None]:
    """The next of `steps` that is not in `without`; None after the last one. Each begins the rest period."""
    passed = set(reduction.taken)
    for step in steps:
        if step in passed:
            continue
        passed.add(step)
        if step not in without:
            return Reduction(frozenset(passed), now + REST_SECONDS), step
    return reduction, None


def smaller_ubatch(ubatch: int) -> int | None:
    """A quarter of `ubatch`, which needs about a quarter of the compute memory; None if `ubatch` is at its minimum."""
    return max(MIN_UBATCH, ubatch // UBATCH_DIVISOR) if ubatch > MIN_UBATCH else None


def smaller_context(context_length: int) -> int | None:
    """Half of `context_length`; None if it is at its minimum."""
    return max(MIN_REDUCED_CONTEXT, context_length // 2) if context_length > MIN_REDUCED_CONTEXT else None
