"""The estimated bytes of a model per device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from inference.devices.device import CPU
from inference.estimate.header_formula import Parameters, Parts
from inference.estimate.layers import Sizes
from inference.settings import ModelSpec


@dataclass(frozen=True, slots=True)
class Estimate:
    """The bytes of a model per device. `source` is `llama.cpp` or `header`; `overhead_bytes` is added to both.

    `draft_bytes` are the weights, KV cache and compute buffers of a draft model, which are not among the `parts`.

    `sizes` are those of the repeating layers; `counts` are the layers of each device when there are several.
    """

    parts: Mapping[str, Parts]
    overhead_bytes: Mapping[str, int]
    source: str
    note: str
    context_trained: int
    capabilities: tuple[str, ...] = ()
    """Capabilities of the model; empty when only its header was read."""
    sizes: tuple[Sizes, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    headroom_bytes: Mapping[str, int] = field(default_factory=dict)
    """The part of `overhead_bytes` that was learned after out-of-memory errors."""
    draft_bytes: Mapping[str, int] = field(default_factory=dict)
    architecture: str = ""
    quantization: str = ""
    """The type of most weights (`Q4_K_M`); empty when the header does not contain it."""
    expert_share: float = 1.0
    """The share of its experts that compute a token."""
    host_bytes_per_second: float = 0.0
    """The measured rate of host memory; 0 if the model has no experts."""
    split_problem: str = ""
    """Why the device cannot share the model with other devices in the split mode of the model."""
    shape: str = ""
    """What its learned overhead belongs to (`inference.estimate.overheads`)."""

    @property
    def beyond_parts(self) -> dict[str, int]:
        """Bytes per device beyond the `parts`: overhead and draft model."""
        devices = dict.fromkeys((*self.overhead_bytes, *self.draft_bytes))
        return {device: self.overhead_bytes.get(device, 0) + self.draft_bytes.get(device, 0) for device in devices}

    @property
    def need(self) -> dict[str, int]:
        """Bytes to reserve per device."""
        beyond = self.beyond_parts
        return {
            device: (self.parts[device].total_bytes if device in self.parts else 0) + beyond.get(device, 0)
            for device in dict.fromkeys((*self.parts, *beyond))
        }

    def to_json(self) -> dict[str, Any]:
        """The entry in `/memory/plan`."""
        return {
            "devices": {
                device: {
                    **asdict(parts),
                    "overhead_bytes": self.overhead_bytes.get(device, 0),
                    "headroom_bytes": self.headroom_bytes.get(device, 0),
                    "draft_bytes": self.draft_bytes.get(device, 0),
                }
                for device, parts in self.parts.items()
            },
            "total_bytes": sum(self.need.values()),
            "source": self.source,
            "note": self.note,
        }


def parameters_of(spec: ModelSpec, device: str) -> Parameters:
    """The parameters that determine the size of `spec` on the device with this id."""
    return Parameters(
        context_length=spec.context_length,
        parallel=spec.parallel,
        kv_cells=spec.kv_cells,
        kv_type=spec.kv_type,
        batch=spec.batch,
        ubatch=spec.ubatch,
        gpu_layers=0 if device == CPU else spec.gpu_layers,
        flash_attention=spec.flash_attention,
        swa_full=spec.swa_full,
        kv_checkpoints=spec.kv_checkpoints,
        host_expert_layers=0 if device == CPU else spec.host_expert_layers,
    )
