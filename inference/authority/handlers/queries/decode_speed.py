"""Expected decode speed of a model: the weights that a token reads on each device, over the measured rate of each, and
the time in which layers wait for experts in host memory.

Compute time, the cache and other transfers are not counted, so a real speed is lower for long contexts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.authority.placement.plan import Placement
from inference.devices.device import CPU
from inference.estimate.layers import Layers, layers_of
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.settings import ModelSpec

EXCHANGE_SECONDS = 0.0003
"""Time for the transfers and waits of a layer whose experts are computed on the host, for one token (measured with an
H200: 0.3 ms).
"""


@dataclass(frozen=True, slots=True)
class DecodeSpeed:
    """Bytes of weights that one token reads on each device, the measured bytes per second of the devices, and the
    number of layers with experts in host memory (`Layers.exchanges`).
    """

    read_bytes: Mapping[str, int]
    bytes_per_second: Mapping[str, float]
    exchanges: int = 0

    @property
    def exchange_seconds(self) -> float:
        """Time of all exchanges for one token."""
        return self.exchanges * EXCHANGE_SECONDS

    @property
    def tokens_per_second(self) -> float | None:
        """Of one sequence; None while the rate of a device is unknown."""
        seconds = self.exchange_seconds
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
    return of_layers(rates, layers, {} if first == CPU else counts, estimate.expert_share)


def of_layers(
    rates: Mapping[str, float], layers: Layers, counts: Mapping[str, int], expert_share: float
) -> DecodeSpeed:
    """The speed with `counts` layers on each device; `expert_share` of the experts compute a token."""
    read = {device: count for device, count in layers.active_bytes(counts, expert_share).items() if count}
    known = {device: rates[device] for device in read if device in rates}
    return DecodeSpeed(read, known, layers.exchanges(counts))
