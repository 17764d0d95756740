"""Expected decode speed of a model: the weights that a token reads on each device, over the measured rate of each.

Compute time, the cache and the transfers between devices are not counted, so a real speed is lower for long contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.authority.placement.plan import Placement
from inference.devices.device import CPU
from inference.estimate.layers import layers_of
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.settings import ModelSpec


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Bytes of weights that one token reads on each device, and the measured bytes per second of the devices."""

    read_bytes: Mapping[str, int]
    bytes_per_second: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float | None:
        """Of one sequence; None while the rate of a device is unknown."""
        seconds = 0.0
        for device, count in self.read_bytes.items():
            if not (rate := self.bytes_per_second.get(device)):
                return None
            seconds += count / rate
        return 1 / seconds if seconds else None

    def to_json(self) -> dict[str, Any]:
        """The entry in `/memory/plan`."""
        rate = self.tokens_per_second
        return {
            "tokens_per_second": None if rate is None else round(rate, 3),
            "read_bytes": dict(self.read_bytes),
            "bytes_per_second": {device: round(rate) for device, rate in self.bytes_per_second.items()},
        }


def expected(
    rates: Mapping[str, float], spec: ModelSpec, estimate: Estimate, placement: Placement
) -> DecodeSpeed | None:
    """The speed of a model with this placement, from its estimate on the first device; None without sizes by layer, and
    where devices share each layer, because their transfers decide then.
    """
    if placement.tensor_split and spec.split_mode != "layer":
        return None
    first = placement.devices[0]
    layers = layers_of(parameters_of(spec, first), estimate.parts, None if first == CPU else first, estimate.sizes)
    if layers is None:
        return None
    counts = {first: layers.offloaded}
    if placement.tensor_split:
        counts = dict(zip(placement.devices, map(int, placement.tensor_split), strict=True))
    read = layers.active_bytes({} if first == CPU else counts, estimate.expert_share)
    read = {device: count for device, count in read.items() if count}
    return DecodeSpeed(read, {device: rates[device] for device in read if device in rates})
