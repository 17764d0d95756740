"""Trains a bundled demo model, a Llama network in PyTorch, on the corpus and writes it as GGUF.

    python -m inference.tools.demo_training --model demo --out DIR [--seed N] [--steps N] [--minutes N] [--threads N]

Needs the optional extra `train` (a CPU build of PyTorch is enough). Progress goes to stderr, the path of the written
file to stdout. The same seed, steps, thread count and library versions give the same file, except with `--minutes`.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention, silu

from inference.demo import BUNDLED
from inference.tools.demo_samples import (
    CHAT_TEMPLATE,
    IGNORED,
    IM_END,
    IM_START,
    PAD,
    SPECIAL_TOKENS,
    Batch,
    Sampler,
    corpus_texts,
    listed_batch,
    train_tokenizer,
)

VOCABULARY_SIZE = 1536
STEPS = {"demo": 1100, "demo-mini": 1600}
PEAK_LEARNING_RATE = {"demo": 2e-3, "demo-mini": 4e-3}
WARM_UP_STEPS = 60
WEIGHT_DECAY = 0.05
ROPE_BASE = 10000.0
NORM_EPSILON = 1e-5


# --- the network ------------------------------------------------------------------------------------------------------
# Tensor names are those of GGUF, so that the export copies tensors. B is the batch, T the sequence, D the hidden size.
@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of one model.

    `hidden` and `feed_forward` must be multiples of 32 for Q8_0 weights, `head` also for quantized KV caches.
    """

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


# --- training ---------------------------------------------------------------------------------------------------------
def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _learning_rate(peak: float, step: int, progress: float) -> float:
    """Linear warm-up, then half a cosine down to one percent of the peak; `progress` runs from 0 to 1."""
    warm = min(1.0, (step + 1) / WARM_UP_STEPS)
    return peak * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))


def _loss(model: Llama, batch: Batch, *, bfloat16: bool) -> Tensor:
    """Mean cross entropy over the tokens of the assistant."""
    wanted = batch.labels != IGNORED
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        logits = model(batch.tokens, visible(batch.documents), wanted)
    return cross_entropy(logits.float(), batch.labels[wanted])


def _exact(model: Llama, batch: Batch) -> float:
    """Share of rows with an exact answer under greedy decoding: every label is the most likely token."""
    right = total = 0
    for row in range(len(batch.tokens)):
        length = int((batch.documents[row] > 0).sum())
        part = Batch(*(field[row : row + 1, :length] for field in (batch.tokens, batch.labels, batch.documents)))
        wanted = part.labels != IGNORED
        with torch.no_grad():
            guesses = model(part.tokens, visible(part.documents), wanted).argmax(-1)
        right += bool((guesses == part.labels[wanted]).all())
        total += 1
    return right / total


def train(
    name: str, tokenizer: Tokenizer, *, seed: int, steps: int, minutes: float | None = None, bfloat16: bool = False
) -> Llama:
    """Train the model `name` from scratch for `steps` steps of about 4,096 tokens, at most for `minutes`."""
    torch.manual_seed(seed)
    model = Llama(SIZES[name], tokenizer.get_vocab_size())
    matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
    norms = [parameter for parameter in model.parameters() if parameter.ndim != 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": norms, "weight_decay": 0.0}],
        betas=(0.9, 0.98),
        fused=True,
    )
    _note(f"{name}: {sum(p.numel() for p in model.parameters()):,} parameters, {steps} steps, seed {seed}")
    sampler, listed = Sampler(tokenizer, seed), listed_batch(tokenizer)
    started = time.monotonic()
    for step in range(steps):
        elapsed = time.monotonic() - started
        progress = step / steps if minutes is None else max(step / steps, elapsed / (minutes * 60))
        if progress >= 1:
            _note(f"stopped after {step} steps: {minutes:g} minutes have passed")
            break
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(PEAK_LEARNING_RATE[name], step, progress)
        loss = _loss(model, sampler.batch(), bfloat16=bfloat16)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 20 == 0:
            rest = elapsed / max(progress, 1e-9) * (1 - progress) / 60 if step else math.nan
            _note(f"{name} step {step:5d}  loss {loss.item():.4f}  {elapsed / 60:5.1f} min, {rest:.1f} to go")
        if step and step % 200 == 0:
            _note(f"{name} step {step:5d}  listed questions exact: {_exact(model, listed):.0%}")
    _note(f"{name} done, listed questions exact before quantization: {_exact(model, listed):.0%}")
    return model


def write_gguf(path: Path, name: str, model: Llama, tokenizer: Tokenizer) -> None:
    """Write `model` and its vocabulary to `path`: matrices in Q8_0, norms in F32, no output matrix (it is tied)."""
    size = model.size
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type(gguf.GGUFType.MODEL)
    writer.add_name(f"Headgate {name}")
    writer.add_author("Headgate")
    writer.add_description("A toy chat model that learned a few hundred answers about Headgate by heart.")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(size.context)
    writer.add_embedding_length(size.hidden)
    writer.add_block_count(size.layers)
    writer.add_feed_forward_length(size.feed_forward)
    writer.add_head_count(size.heads)
    writer.add_head_count_kv(size.kv_heads)
    writer.add_key_length(size.head)
    writer.add_value_length(size.head)
    writer.add_rope_dimension_count(size.head)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_layer_norm_rms_eps(NORM_EPSILON)
    writer.add_vocab_size(tokenizer.get_vocab_size())

    tokens = [tokenizer.id_to_token(index) for index in range(tokenizer.get_vocab_size())]
    kinds = [gguf.TokenType.CONTROL if token in SPECIAL_TOKENS else gguf.TokenType.NORMAL for token in tokens]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(tokenizer.token_to_id(IM_START))
    writer.add_eos_token_id(tokenizer.token_to_id(IM_END))
    writer.add_eot_token_id(tokenizer.token_to_id(IM_END))
    writer.add_pad_token_id(tokenizer.token_to_id(PAD))
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)

    for key, value in model.state_dict().items():
        array = value.detach().float().numpy()
        if array.ndim == 2:
            data = gguf.quants.quantize(array, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(key, data, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(key, array.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m inference.tools.demo_training", description="Train a bundled demo model."
    )
    parser.add_argument("--model", choices=BUNDLED, required=True)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the GGUF file is written")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, help=f"default: {', '.join(f'{k} {v}' for k, v in STEPS.items())}")
    parser.add_argument("--minutes", type=float, help="stop after this time (the file then depends on the machine)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--bfloat16", action="store_true", help="train in bfloat16 where the CPU has it: faster")
    given = parser.parse_args(arguments)
    torch.set_num_threads(given.threads)
    given.out.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus_texts(), VOCABULARY_SIZE)
    _note(f"vocabulary: {tokenizer.get_vocab_size()} tokens")
    model = train(
        given.model,
        tokenizer,
        seed=given.seed,
        steps=given.steps if given.steps is not None else STEPS[given.model],
        minutes=given.minutes,
        bfloat16=given.bfloat16,
    )
    path = given.out / f"{given.model}.gguf"
    write_gguf(path, given.model, model, tokenizer)
    _note(f"{path.stat().st_size:,} bytes")
    print(path)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
