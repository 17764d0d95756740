"""Estimates the bytes of a model from its header: the cross-check and the fallback of the exact estimate.

The exact figures come from llama.cpp (`inference.estimate.estimate_job`). This formula:

- weights: the tensors' own bytes, as the header lists them;
- KV cache: `cells x layers x (key_length + value_length) x kv heads` values, f16 or in ggml blocks of 32
  (llama.cpp `llama_kv_cache`: one K and one V tensor per layer of `n_embd_k_gqa x kv_size` values);
- compute: the peak use of a step of `ubatch` tokens: logits (f32), the feed-forward activations, queries and
  outputs (f32), and the attention mask (f16, `ubatch` times the cells of one sequence, or of the pool). llama.cpp's
  own reservation of the worst-case graph was 0.5 to 1.0 times this for Llama-family models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

CELLS_STEP = 256
"""The cells of a sequence or pool are rounded up to a multiple of this (llama.cpp's `n_ctx_seq`)."""

KV_BYTES_PER_VALUE: Mapping[str, float] = {"f16": 2.0, "q8_0": 34 / 32, "q4_0": 18 / 32}


@dataclass(frozen=True, slots=True)
class Facts:
    """The facts in a GGUF header. `kv_values_per_cell` is keys plus values of one token over all layers."""

    architecture: str
    layers: int
    embedding: int
    feed_forward: int
    vocabulary: int
    context_trained: int
    kv_values_per_cell: int
    weight_bytes: int
    layer_bytes: int
    """The part of `weight_bytes` in the repeating layers; the rest is embeddings and output."""
    quantization: str = ""
    """The type of most weights (`Q4_K_M`); empty when the header does not contain it."""
    by_layer: tuple[tuple[int, int, int], ...] = ()
    """Per repeating layer: bytes of its weights, keys plus values of one token, and the bytes of its experts."""
    experts: int = 0
    experts_used: int = 0
    """Experts of a layer, and those that compute a token; both 0 in a dense model."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """The settings of a model that determine its size."""

    context_length: int
    parallel: int
    kv_cells: int | None = None
    kv_type: str = "f16"
    batch: int = 2048
    ubatch: int = 512
    gpu_layers: int = 0
    flash_attention: bool = True
    swa_full: bool = False
    kv_checkpoints: int = 0
    host_expert_layers: int = 0
    """The experts of the first layers, up to this number, are in host memory wherever the layers are."""

    @property
    def cells(self) -> int:
        """KV cells of all sequences together."""
        return self.kv_cells or self.context_length * self.parallel

    @property
    def mask_cells(self) -> int:
        """KV cells that llama.cpp compares with each token of a step: those of a sequence, or the whole pool."""
        return self.kv_cells or self.context_length


@dataclass(frozen=True, slots=True)
class Parts:
    """A model's bytes on one device."""

    weights_bytes: int
    kv_bytes: int
    compute_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum."""
        return self.weights_bytes + self.kv_bytes + self.compute_bytes


def formula(facts: Facts, parameters: Parameters) -> Parts:
    """The bytes of the whole model on one device."""
    in_mask = -(-parameters.mask_cells // CELLS_STEP) * CELLS_STEP
    cells = in_mask if parameters.kv_cells else in_mask * parameters.parallel
    kv = cells * facts.kv_values_per_cell * KV_BYTES_PER_VALUE[parameters.kv_type]
    tokens = min(parameters.ubatch, max(cells, 1))
    activations = tokens * 4 * (facts.vocabulary + 2 * facts.feed_forward + 4 * facts.embedding)
    mask = tokens * in_mask * 2
    return Parts(facts.weight_bytes, int(kv), activations + mask)


def formula_on(facts: Facts, parameters: Parameters, shares: Mapping[str, int]) -> dict[str, Parts]:
    """The bytes per device: all on `cpu`, or the last layers and the head on the accelerators, in order.

    `shares` are layers per accelerator; the head counts as one, and a negative number stands for all `gpu_layers`
    (which is negative for all layers). As in llama.cpp, the token embeddings and the experts of the first
    `host_expert_layers` stay in host memory.
    """
    whole = formula(facts, parameters)
    if not shares or parameters.gpu_layers == 0 or facts.layers == 0:
        return {"cpu": whole}
    places = facts.layers + 1
    wanted = places if parameters.gpu_layers < 0 else min(parameters.gpu_layers, places)
    head = facts.weight_bytes - facts.layer_bytes
    at, moved = places - wanted, 0
    found: dict[str, Parts] = {}
    for device, count in shares.items():
        end = places if count < 0 else min(places, at + count)
        layers = max(0, min(end, facts.layers) - at) / facts.layers
        apart = sum(experts for _weights, _kv, experts in facts.by_layer[at : min(end, parameters.host_expert_layers)])
        weights = int(facts.layer_bytes * layers) - apart + (head if end == places else 0)
        found[device] = Parts(max(0, weights), int(whole.kv_bytes * layers), whole.compute_bytes)
        moved += apart
        at = end
    stay = (places - wanted) / facts.layers
    return {**found, "cpu": Parts(head + int(facts.layer_bytes * stay) + moved, int(whole.kv_bytes * stay), 0)}


def plausible(exact: Mapping[str, Parts], facts: Facts, parameters: Parameters) -> str | None:
    """Why the exact figures contradict the header, or None. Tolerates a factor of two.

    In a pool, windows and recurrent states still have the size of all sequences.
    """
    rough = formula(facts, replace(parameters, kv_cells=None))
    weights = sum(parts.weights_bytes for parts in exact.values())
    kv = sum(parts.kv_bytes for parts in exact.values())
    if not rough.weights_bytes / 2 <= weights <= rough.weights_bytes * 2 + 2**20:
        return f"weights of {weights} bytes against {rough.weights_bytes} in the header"
    if rough.kv_bytes and kv > rough.kv_bytes * 2 + 2**20:
        return f"a KV cache of {kv} bytes against {rough.kv_bytes} from the header"
    return None
