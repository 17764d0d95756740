"""What each change of `fit` saves in memory and costs in speed, for a model that does not fit as configured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.authority.handlers.queries.decode_speed import of_layers
from inference.authority.placement.smaller_settings import SETTINGS, FitStep, changed_layers
from inference.devices.device import CPU
from inference.estimate.layers import layers_of
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.settings import ModelSpec


def fit_costs(
    rates: Mapping[str, float], configured: ModelSpec, chosen: ModelSpec, estimate: Estimate, device: str
) -> list[dict[str, Any]]:
    """Each step in order: its settings, the bytes that it saves (less than 0: that it adds) on each device, and the
    expected speed after it.

    Computed from the estimate of the configured settings on `device`, so the bytes are approximate.
    """
    layers = layers_of(
        parameters_of(configured, device), estimate.parts, None if device == CPU else device, estimate.sizes
    )
    found: list[dict[str, Any]] = []
    if layers is None:
        return found
    for step in FitStep:
        names = [name for name in SETTINGS[step] if getattr(configured, name) != getattr(chosen, name)]
        if not names:
            continue
        settings = {name: getattr(chosen, name) for name in names}
        smaller = changed_layers(layers, settings)
        counts = [{} if device == CPU else {device: item.offloaded} for item in (layers, smaller)]
        before, after = layers.need(counts[0], {}), smaller.need(counts[1], {})
        speed = of_layers(rates, smaller, counts[1], estimate.expert_share).tokens_per_second
        found.append(
            {
                "step": str(step),
                "settings": settings,
                "saved_bytes": {name: before[name] - after[name] for name in before},
                "tokens_per_second": None if speed is None else round(speed, 3),
            }
        )
        layers = smaller
    return found
