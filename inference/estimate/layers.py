"""The bytes of a model by layer: how they divide over devices and depend on settings.

llama.cpp puts the last `gpu_layers` of the repeating layers plus the head (output norm and matrix, which counts as one
layer) on accelerators, in order, and the rest with the token embeddings in host memory; the cache of a layer is where
the layer is (`llama_model::load_tensors`, `llama_kv_cache`). Experts of the first layers may be in host memory although
their layers are on an accelerator. So one measurement gives the sizes of other placements: exactly for weights, within
a few percent for compute buffers. Uncertain values are rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import NamedTuple

from inference.estimate.header_formula import KV_BYTES_PER_VALUE, Parameters, Parts

HOST = "cpu"
COPIES = 4
"""Copies of the inputs of a step on every device when several share a model (`GGML_SCHED_MAX_COPIES`)."""
SURE = 1.03
"""Safety factor for sizes that shrink with a setting, because they are not exactly proportional."""


class Sizes(NamedTuple):
    """Bytes of one repeating layer. `grows`: its cache grows with the context (not for sliding windows and recurrent
    states). `expert_bytes`: the part of the weights that may be in host memory without the rest.
    """

    weights_bytes: int
    kv_bytes: int
    grows: bool = True
    expert_bytes: int = 0


@dataclass(frozen=True)
class Layers:
    """A model as measured with `parameters`.

    `head_bytes`: weights of the output. `input_bytes`: the part that is always in host memory. `compute_bytes`: compute
    buffer of each device with layers. `host_compute_bytes`: compute buffer of the host if it has no layers.
    """

    parameters: Parameters
    sizes: tuple[Sizes, ...]
    head_bytes: int
    input_bytes: int
    compute_bytes: int
    host_compute_bytes: int
    by_tensor: bool = False
    """Several devices share every place, instead of having whole ones (`split_mode: tensor`)."""

    @property
    def places(self) -> int:
        """The number of layers to place: the repeating ones and the head."""
        return len(self.sizes) + 1

    @cached_property
    def offloaded(self) -> int:
        """The number of `places` on accelerators."""
        wanted = self.parameters.gpu_layers
        return self.places if wanted < 0 else min(wanted, self.places)

    @cached_property
    def sums(self) -> tuple[int, ...]:
        """Bytes of the first 0, 1, 2, ... places on accelerators, in order, without experts in host memory. With
        `by_tensor` each place counts as an equal share of the sum.
        """
        first = self.places - self.offloaded
        here = (whole - apart for whole, apart in zip(self._every[first:], self._apart[first:], strict=True))
        sums = tuple(accumulate(here, initial=0))
        return tuple(sums[-1] * at // self.offloaded for at in range(len(sums))) if self.by_tensor else sums

    @cached_property
    def _every(self) -> list[int]:
        return [*(size.weights_bytes + size.kv_bytes for size in self.sizes), self.head_bytes]

    @cached_property
    def _apart(self) -> list[int]:
        """Bytes of each place that are in host memory wherever the place is: its experts."""
        first = self.parameters.host_expert_layers
        return [*(size.expert_bytes if at < first else 0 for at, size in enumerate(self.sizes)), 0]

    @property
    def last_expert_layer(self) -> int:
        """The number of the last layer on an accelerator that has experts, counted from 1; 0 if there is none."""
        first = self.places - self.offloaded
        return max((at for at, size in enumerate(self.sizes, 1) if at > first and size.expert_bytes), default=0)

    def need(self, counts: Mapping[str, int], overhead: Mapping[str, int]) -> dict[str, int]:
        """Bytes per device with `counts` places on each accelerator, in order, and the rest in host memory.

        `overhead` is the need of each device beyond this model's buffers; the sum of `counts` is `offloaded`, or 0.
        """
        need = {}
        at = 0
        more = self.copies_bytes if len(counts) > 1 else 0
        for device, count in counts.items():
            here = self.sums[at + count] - self.sums[at]
            need[device] = here + self.compute_bytes + more + overhead.get(device, 0)
            at += count
        need[HOST] = self.host_bytes(at) + more + overhead.get(HOST, 0)
        return need

    def host_bytes(self, placed: int) -> int:
        """Bytes in host memory while the last `placed` places are on accelerators."""
        first = self.places - placed
        here = sum(self._every[:first]) + sum(self._apart[first:])
        computes = placed < self.places or any(self._apart)  # the host has layers or experts
        compute = max(self.host_compute_bytes, self.compute_bytes) if computes else self.host_compute_bytes
        return self.input_bytes + here + compute

    @property
    def mask_bytes(self) -> int:
        """The attention mask of a step, its largest input: f16, tokens of a step x cells of a sequence or pool."""
        cells = self.parameters.mask_cells
        return min(self.compute_bytes, cells * min(self.parameters.ubatch, cells) * 2)

    @cached_property
    def copies_bytes(self) -> int:
        """Additional bytes on each device and the host when several accelerators share the model.

        llama.cpp makes no copies if layers or experts are in host memory, or if it treats the devices as one
        (`by_tensor`).
        """
        is_whole = self.offloaded == self.places and not self.parameters.host_expert_layers
        has_copies = is_whole and not self.by_tensor
        return (COPIES - 1) * self.mask_bytes if has_copies else 0

    def active_bytes(self, counts: Mapping[str, int], share: float) -> dict[str, int]:
        """Bytes of weights that each device reads for one token, with `counts` as for `need`.

        `share` of the experts compute a token. Of the embeddings only one row is read.
        """
        weights = [*(size.weights_bytes for size in self.sizes), self.head_bytes]
        experts = [*(size.expert_bytes for size in self.sizes), 0]
        at = self.places - sum(counts.values())
        host = sum(weights[:at]) - sum(experts[:at]) * (1 - share) + (0 if counts else self.input_bytes)
        found = {}
        for device, count in counts.items():
            end = at + count
            dense, apart = sum(weights[at:end]) - sum(experts[at:end]), sum(self._apart[at:end])
            found[device] = round(dense + (sum(experts[at:end]) - apart) * share)
            host += apart * share
            at = end
        return {**found, HOST: round(host)}

    def exchanges(self, counts: Mapping[str, int]) -> int:
        """Number of layers whose experts are in host memory while the rest is on a device; `counts` as for `need`."""
        return sum(apart > 0 for apart in self._apart[self.places - sum(counts.values()) :])

    def changed(self, **settings: int | str) -> Layers:
        """The layers with smaller settings: `context_length`, `parallel`, `kv_cells`, `kv_type`, `gpu_layers`; or with
        more `host_expert_layers`.
        """
        was = self.parameters
        now = replace(was, **settings)  # type: ignore[arg-type]
        ratio = now.cells / was.cells * KV_BYTES_PER_VALUE[now.kv_type] / KV_BYTES_PER_VALUE[was.kv_type]

        @cache
        def shrunken(size: Sizes) -> Sizes:
            kv = min(size.kv_bytes, math.ceil(size.kv_bytes * ratio * SURE)) if size.grows else size.kv_bytes
            return size._replace(kv_bytes=kv)

        less = int(self.mask_bytes * (1 - now.mask_cells / was.mask_cells) / SURE)
        return replace(
            self,
            parameters=now,
            sizes=tuple(map(shrunken, self.sizes)) if ratio < 1 else self.sizes,
            compute_bytes=self.compute_bytes - less,
        )


def layers_of(
    parameters: Parameters, exact: Mapping[str, Parts], accelerator: str | None, measured: Sequence[Sizes]
) -> Layers | None:
    """The layers of a model with the `exact` bytes on one device; None if they cannot be separated.

    `measured` are the sizes per layer from the header and the log. Caches are scaled to the exact sum; the rest of the
    weights is the head and the embeddings.
    """
    here = exact.get(accelerator or HOST)
    host = exact.get(HOST, Parts(0, 0, 0))
    if here is None or not measured:
        return None
    kv = here.kv_bytes + (host.kv_bytes if accelerator else 0)
    known = sum(size.kv_bytes for size in measured)
    sizes = tuple(
        size._replace(kv_bytes=math.ceil(size.kv_bytes * kv / known) if known else math.ceil(kv / len(measured)))
        for size in measured
    )
    if accelerator is None:
        rest = max(0, here.weights_bytes - sum(size.weights_bytes for size in sizes))
        return Layers(replace(parameters, gpu_layers=0), sizes, 0, rest, here.compute_bytes, here.compute_bytes)
    places = len(sizes) + 1
    offloaded = places if parameters.gpu_layers < 0 else min(parameters.gpu_layers, places)
    first = places - offloaded
    apart = sum(size.expert_bytes for size in sizes[first : max(first, parameters.host_expert_layers)])
    stay = sum(size.weights_bytes for size in sizes[:first]) + apart
    gone = sum(size.weights_bytes for size in sizes[first:]) - apart
    return Layers(
        parameters,
        sizes,
        max(0, here.weights_bytes - gone),
        max(0, host.weights_bytes - stay),
        here.compute_bytes,
        host.compute_bytes,
    )
