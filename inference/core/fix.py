"""Decides which smaller setting of a model would fit; never applies one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

CONTEXT_STEP = 256
LEAST_CONTEXT = 512
SMALLER_KV: tuple[tuple[str, float], ...] = (("q8_0", 34 / 64), ("q4_0", 18 / 64))
"""KV cache types by size relative to f16: ggml blocks of 32 values take 34 (q8_0), 18 (q4_0) and 64 (f16) bytes."""


SURE = 0.97
"""Share of the room a suggestion fills: what else shrinks or grows with the settings is not exactly proportional."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a model's need on `device` follows its settings: `kv_bytes` (the cache) and `mask_bytes` (of the compute
    buffers, the attention mask) grow with context_length x parallel.
    """

    device: str
    kv_bytes: int
    mask_bytes: int
    context_length: int
    parallel: int
    kv_type: str = "f16"


def nearest_fix(scaling: Scaling, need: Mapping[str, int], rooms: Mapping[str, int]) -> Mapping[str, Any]:
    """The change that keeps most: fewer parallel sequences, a smaller KV type, a shorter context; empty when none fits.

    `need` and `rooms` are bytes per device.
    """
    over = {device: count - rooms.get(device, 0) for device, count in need.items()}
    if any(short > 0 for device, short in over.items() if device != scaling.device):
        return {}
    growing = scaling.kv_bytes + scaling.mask_bytes
    room = (growing - over.get(scaling.device, 0)) * SURE
    cells = scaling.context_length * scaling.parallel
    if room <= 0 or cells <= 0 or growing <= 0:
        return {}
    fitting = int(room * cells / growing)
    if scaling.parallel > 1 and (parallel := fitting // scaling.context_length) >= 1:
        return {"parallel": parallel}
    if scaling.kv_type == "f16" and scaling.parallel == 1:
        for kv_type, ratio in SMALLER_KV:
            if scaling.kv_bytes * ratio + scaling.mask_bytes <= room:
                return {"kv_type": kv_type}
    context = fitting // CONTEXT_STEP * CONTEXT_STEP
    if context >= LEAST_CONTEXT:
        fix: dict[str, Any] = {"context_length": context}
        return fix if scaling.parallel == 1 else {"parallel": 1, **fix}
    return {}
