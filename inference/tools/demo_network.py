"""The Llama network of the demo models in PyTorch, for training only.

Tensor names are those of GGUF, so that the export copies tensors. B is the batch, T the sequence, D the hidden size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

__all__ = ["SIZES", "Llama", "Size", "visible"]

ROPE_BASE = 10000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of one model. `head` must be a multiple of 32 for quantized KV caches, the rest for Q8_0 weights."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    head: int = 64
    context: int = 4096


SIZES = {
    "demo": Size(hidden=256, layers=6, heads=4, kv_heads=2, feed_forward=704),
    "demo-mini": Size(hidden=128, layers=4, heads=2, kv_heads=1, feed_forward=384),
}


def visible(documents: Tensor) -> Tensor:
    """Mask [B, 1, T, T]: each token attends to earlier tokens of its own document.

    `documents` [B, T] numbers the chats packed into a row.
    """
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]


def _rotations(length: int, head: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [T, head/2] of the rotary embedding (Su et al., 2021, RoFormer)."""
    frequencies = ROPE_BASE ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
    angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate neighboring pairs of x [B, heads, T, head], which is llama.cpp's NORM order for the llama architecture."""
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cosines - odd * sines, even * sines + odd * cosines), dim=-1).flatten(-2)


class Block(nn.Module):  # type: ignore[misc, unused-ignore]  # PyTorch may be absent
    """One layer: grouped-query attention and a SwiGLU feed-forward part, each after an RMS norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.attn_norm = nn.RMSNorm(size.hidden, eps=NORM_EPSILON)
        self.attn_q = nn.Linear(size.hidden, size.heads * size.head, bias=False)
        self.attn_k = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.attn_v = nn.Linear(size.hidden, size.kv_heads * size.head, bias=False)
        self.attn_output = nn.Linear(size.heads * size.head, size.hidden, bias=False)
        self.ffn_norm = nn.RMSNorm(size.hidden, eps=NORM_EPSILON)
        self.ffn_gate = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.ffn_up = nn.Linear(size.hidden, size.feed_forward, bias=False)
        self.ffn_down = nn.Linear(size.feed_forward, size.hidden, bias=False)

    def forward(self, x: Tensor, mask: Tensor, rotations: tuple[Tensor, Tensor]) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        batch, length, _ = x.shape
        normed = self.attn_norm(x)
        q = self.attn_q(normed).view(batch, length, self.size.heads, self.size.head).transpose(1, 2)
        k = self.attn_k(normed).view(batch, length, self.size.kv_heads, self.size.head).transpose(1, 2)
        v = self.attn_v(normed).view(batch, length, self.size.kv_heads, self.size.head).transpose(1, 2)
        groups = self.size.heads // self.size.kv_heads
        q, k = _rotate(q, *rotations).to(v.dtype), _rotate(k, *rotations).to(v.dtype)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.attn_output(attended.transpose(1, 2).reshape(batch, length, -1))
        normed = self.ffn_norm(x)
        return x + self.ffn_down(silu(self.ffn_gate(normed)) * self.ffn_up(normed))


class Llama(nn.Module):  # type: ignore[misc, unused-ignore]  # PyTorch may be absent
    """The network; the output matrix is the token embedding."""

    def __init__(self, size: Size, vocabulary_size: int) -> None:
        super().__init__()
        self.size = size
        self.token_embd = nn.Embedding(vocabulary_size, size.hidden)
        self.blk = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.output_norm = nn.RMSNorm(size.hidden, eps=NORM_EPSILON)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:
                deep = name.endswith(("attn_output.weight", "ffn_down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * size.layers) ** 0.5 if deep else 0.02)

    def forward(self, tokens: Tensor, mask: Tensor, wanted: Tensor | None = None) -> Tensor:
        """Logits [N, vocabulary] of the positions where `wanted` [B, T] is true, or [B, T, vocabulary] without it.

        `tokens` is [B, T] and `mask` is [B, 1, T, T], see `visible`.
        """
        x = self.token_embd(tokens)
        rotations = _rotations(tokens.shape[1], self.size.head)
        for block in self.blk:
            x = block(x, mask, rotations)
        x = self.output_norm(x if wanted is None else x[wanted])
        return linear(x, self.token_embd.weight)
