"""Makes random-weight GGUF models of several families: dense, with experts, sliding windows or recurrent states.

Seeded, and written once per recipe; their answers are noise. Only the layout of caches and layers matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.rigs import tiny_gguf

FAMILIES = ("dense", "gqa", "moe", "window", "hybrid", "recurrent")


@dataclass(frozen=True, slots=True)
class Form:
    """Sizes of a model; `words` are tokens beyond the smallest vocabulary."""

    family: str
    layers: int = 6
    width: int = 256
    heads: int = 8
    heads_kv: int = 2
    feed: int = 512
    words: int = 0
    context: int = 65536

    @property
    def per_head(self) -> int:
        """Values of one attention head."""
        return self.width // self.heads


def path(form: Form) -> Path:
    """The file of that form."""
    recipe = Path(__file__).read_bytes() + repr(asdict(form)).encode()
    return tiny_gguf.cached(f"family-{form.family}", recipe, _ARCHITECTURES[form.family], lambda out: _write(out, form))


_ARCHITECTURES = {
    "dense": "llama",
    "gqa": "llama",
    "moe": "llama",
    "window": "gemma3",
    "hybrid": "lfm2",
    "recurrent": "mamba",
}
EXPERTS = 4
WINDOW_TOKENS = 512


class _Weights:
    """Adds tensors of seeded noise."""

    def __init__(self, writer: gguf.GGUFWriter) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(5)

    def noise(self, name: str, *size: int) -> None:
        values = self._rng.standard_normal(size, dtype=np.float32) / np.float32(np.sqrt(size[-1]))
        self._writer.add_tensor(f"{name}.weight", values)

    def ones(self, name: str, size: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(size, dtype=np.float32))


def _write(writer: gguf.GGUFWriter, form: Form) -> None:
    tokens = tiny_gguf.write_vocabulary(writer, form.words)
    if form.family == "recurrent":
        _write_recurrent(writer, form, tokens)
        return
    heads_kv: int | Sequence[int] = form.heads if form.family == "dense" else form.heads_kv
    if form.family == "hybrid":
        heads_kv = [0 if layer % 3 else form.heads_kv for layer in range(form.layers)]
        writer.add_shortconv_l_cache(3)
    writer.add_name(form.family)
    writer.add_context_length(form.context)
    writer.add_embedding_length(form.width)
    writer.add_block_count(form.layers)
    writer.add_feed_forward_length(form.feed)
    writer.add_head_count(form.heads)
    writer.add_head_count_kv(heads_kv)
    writer.add_key_length(form.per_head)
    writer.add_value_length(form.per_head)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(form.per_head)
    writer.add_vocab_size(tokens)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if form.family == "moe":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    if form.family == "window":
        writer.add_sliding_window(WINDOW_TOKENS)
    weights = _Weights(writer)
    weights.noise("token_embd", tokens, form.width)
    if form.family == "hybrid":
        weights.ones("token_embd_norm", form.width)
    else:
        weights.ones("output_norm", form.width)
    if form.family in ("dense", "gqa", "moe"):
        weights.noise("output", tokens, form.width)
    for layer in range(form.layers):
        keyed = (heads_kv[layer] if isinstance(heads_kv, list) else int(heads_kv)) * form.per_head  # type: ignore[call-overload]
        _layer(weights, form, f"blk.{layer}", keyed)


STATE_SIZE = 16
CONVOLUTION = 4


def _write_recurrent(writer: gguf.GGUFWriter, form: Form, tokens: int) -> None:
    """A Mamba model: layers with a state instead of attention."""
    inner, rank = 2 * form.width, max(1, form.width // 16)
    writer.add_name(form.family)
    writer.add_context_length(form.context)
    writer.add_embedding_length(form.width)
    writer.add_block_count(form.layers)
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_ssm_conv_kernel(CONVOLUTION)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(STATE_SIZE)
    writer.add_ssm_time_step_rank(rank)
    writer.add_vocab_size(tokens)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    weights = _Weights(writer)
    weights.noise("token_embd", tokens, form.width)
    weights.ones("output_norm", form.width)
    weights.noise("output", tokens, form.width)
    for layer in range(form.layers):
        block = f"blk.{layer}"
        weights.ones(f"{block}.attn_norm", form.width)
        weights.noise(f"{block}.ssm_in", 2 * inner, form.width)
        weights.noise(f"{block}.ssm_conv1d", inner, CONVOLUTION)
        weights.noise(f"{block}.ssm_x", rank + 2 * STATE_SIZE, inner)
        weights.noise(f"{block}.ssm_dt", inner, rank)
        weights.noise(f"{block}.ssm_out", form.width, inner)
        writer.add_tensor(f"{block}.ssm_conv1d.bias", np.zeros(inner, dtype=np.float32))
        writer.add_tensor(f"{block}.ssm_dt.bias", np.zeros(inner, dtype=np.float32))
        writer.add_tensor(f"{block}.ssm_a", -np.tile(np.arange(1, STATE_SIZE + 1, dtype=np.float32), (inner, 1)))
        writer.add_tensor(f"{block}.ssm_d", np.ones(inner, dtype=np.float32))


def _layer(weights: _Weights, form: Form, block: str, keyed: int) -> None:
    weights.ones(f"{block}.attn_norm", form.width)
    weights.ones(f"{block}.ffn_norm", form.width)
    if keyed:
        weights.noise(f"{block}.attn_q", form.width, form.width)
        weights.noise(f"{block}.attn_k", keyed, form.width)
        weights.noise(f"{block}.attn_v", keyed, form.width)
        weights.noise(f"{block}.attn_output", form.width, form.width)
        if form.family in ("window", "hybrid"):
            weights.ones(f"{block}.attn_q_norm", form.per_head)
            weights.ones(f"{block}.attn_k_norm", form.per_head)
    else:
        weights.noise(f"{block}.shortconv.conv", form.width, 3)
        weights.noise(f"{block}.shortconv.in_proj", 3 * form.width, form.width)
        weights.noise(f"{block}.shortconv.out_proj", form.width, form.width)
    if form.family == "window":
        weights.ones(f"{block}.post_attention_norm", form.width)
        weights.ones(f"{block}.post_ffw_norm", form.width)
    if form.family == "moe":
        weights.noise(f"{block}.ffn_gate_inp", EXPERTS, form.width)
        weights.noise(f"{block}.ffn_gate_exps", EXPERTS, form.feed, form.width)
        weights.noise(f"{block}.ffn_up_exps", EXPERTS, form.feed, form.width)
        weights.noise(f"{block}.ffn_down_exps", EXPERTS, form.width, form.feed)
        return
    weights.noise(f"{block}.ffn_gate", form.feed, form.width)
    weights.noise(f"{block}.ffn_up", form.feed, form.width)
    weights.noise(f"{block}.ffn_down", form.width, form.feed)
