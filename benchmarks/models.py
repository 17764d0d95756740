"""Writes GGUF models of real shapes with random Q8_0 weights. They have the speed of the real models.

The vocabulary begins with that of the bundled demo model, so that texts have the same tokens, and is filled up with
artificial words. Input and output embeddings share one tensor, as in the models with these shapes. Rows of control
tokens are zero, so that no greedy answer ends early.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase

import gguf
import numpy as np

CACHE = Path(__file__).parent / "results" / "models"
"""Ignored by git; a model is written once."""

BLOCK_WEIGHTS = 32
BLOCK_BYTES = 2 + BLOCK_WEIGHTS
"""A block of Q8_0: a scale (float16) and 32 weights (int8)."""

POOL_BLOCKS = 262_147
"""Number of random blocks that all tensors are cut from; a prime, so that rows of a tensor differ."""

SPREAD = 40.0
"""Standard deviation of the int8 weights."""

SEED = 20
EXPERTS_USED = 4


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model with the llama architecture. With `experts`, `feed` is the width of each, and four are used."""

    name: str
    layers: int
    width: int
    heads: int
    heads_kv: int
    feed: int
    vocabulary: int
    context: int = 8192
    rope_base: float = 10_000.0
    experts: int = 0

    @property
    def keyed(self) -> int:
        """Width of K and of V."""
        return self.width // self.heads * self.heads_kv

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], float]]:
        """Name, shape (rows, columns) and standard deviation of every matrix. Norms have one dimension and are ones.

        The output of a layer is about as large as its input and embeddings are small, so that an answer does not repeat
        one token. Sums over a row stay near one, so that nothing overflows.
        """
        across, along = 1 / self.width**0.5, 1 / self.feed**0.5
        yield "token_embd.weight", (self.vocabulary, self.width), 0.05
        for layer in range(self.layers):
            block = f"blk.{layer}."
            yield block + "attn_norm.weight", (self.width,), 0.0
            yield block + "attn_q.weight", (self.width, self.width), across
            yield block + "attn_k.weight", (self.keyed, self.width), across
            yield block + "attn_v.weight", (self.keyed, self.width), across
            yield block + "attn_output.weight", (self.width, self.width), across
            yield block + "ffn_norm.weight", (self.width,), 0.0
            among, ending = ((self.experts,), "_exps") if self.experts else ((), "")
            if self.experts:
                yield block + "ffn_gate_inp.weight", (self.experts, self.width), across
            yield block + f"ffn_gate{ending}.weight", (*among, self.feed, self.width), across
            yield block + f"ffn_up{ending}.weight", (*among, self.feed, self.width), across
            yield block + f"ffn_down{ending}.weight", (*among, self.width, self.feed), along
        yield "output_norm.weight", (self.width,), 0.0

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(int(np.prod(size)) for _name, size, _deviation in self.tensors())


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("15m", layers=6, width=288, heads=6, heads_kv=6, feed=768, vocabulary=32_000),
        Shape("20m", layers=6, width=288, heads=6, heads_kv=6, feed=768, vocabulary=49_152),
        Shape("135m", layers=30, width=576, heads=9, heads_kv=3, feed=1536, vocabulary=49_152),
        Shape("1b", layers=16, width=2048, heads=32, heads_kv=8, feed=8192, vocabulary=128_256, rope_base=500_000.0),
        Shape("moe", layers=16, width=1024, heads=16, heads_kv=4, feed=1024, vocabulary=32_000, experts=32),
        Shape("moe-small", layers=6, width=288, heads=6, heads_kv=6, feed=288, vocabulary=32_000, experts=16),
    )
}
"""15m as the TinyStories model of llama2.c, 20m the same with the vocabulary of 135m, as its draft model, 135m as
SmolLM2-135M, 1b as Llama-3.2-1B; `moe` as no known model."""


def path_of(shape: Shape) -> Path:
    """The file of the model; writes it if it is missing."""
    path = CACHE / f"random-{shape.name}-q8_0.gguf"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        try:
            write(shape, unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
    return path


def one_token_words(path: Path) -> list[str]:
    """Words that are one token after a space, independent of their neighbors; in a fixed order."""
    reader = gguf.GGUFReader(path)
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    merged = {merge.replace(" ", "") for merge in reader.fields["tokenizer.ggml.merges"].contents()}
    return [
        text[1:] for text in tokens if text in merged and text[0] == "Ġ" and text[1:].isascii() and text[1:].isalpha()
    ]


def write(shape: Shape, path: Path) -> None:
    """Writes the model tensor by tensor, so that memory holds one tensor at a time."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {shape.name}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    writer.add_rope_freq_base(shape.rope_base)
    if shape.experts:
        writer.add_expert_count(shape.experts)
        writer.add_expert_used_count(EXPERTS_USED)
    writer.add_vocab_size(shape.vocabulary)
    control = _add_vocabulary(writer, shape.vocabulary)
    tensors = list(shape.tensors())
    for name, size, _deviation in tensors:
        if len(size) == 1:
            writer.add_tensor_info(name, size, np.dtype(np.float32), size[0] * 4)
        else:
            stored = (*size[:-1], _row_bytes(size[-1]))
            writer.add_tensor_info(
                name, stored, np.dtype(np.uint8), math.prod(stored), raw_dtype=gguf.GGMLQuantizationType.Q8_0
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    blocks = Blocks()
    for name, size, deviation in tensors:
        if len(size) == 1:
            writer.write_tensor_data(np.ones(size, np.float32))
            continue
        data = blocks.take(size, deviation)
        if name == "token_embd.weight":
            data[control] = 0
        writer.write_tensor_data(data)
    writer.close()


class Blocks:
    """Random Q8_0 blocks, used in a cycle."""

    def __init__(self, count: int = POOL_BLOCKS) -> None:
        rng = np.random.default_rng(SEED)
        drawn = np.clip(rng.standard_normal((count, BLOCK_WEIGHTS), dtype=np.float32) * SPREAD, -127, 127)
        self._pool = np.zeros((count, BLOCK_BYTES), np.uint8)
        self._pool[:, 2:] = drawn.astype(np.int8).view(np.uint8)
        self._next = 0

    def take(self, size: tuple[int, ...], deviation: float) -> np.ndarray:
        """A tensor (.., rows, columns) as bytes (.., rows, row bytes), standard deviation of weights `deviation`."""
        *rows, columns = size
        count = math.prod(size) // BLOCK_WEIGHTS
        chosen = (np.arange(count, dtype=np.int64) + self._next) % len(self._pool)
        self._next = int((self._next + count) % len(self._pool))
        blocks = self._pool[chosen]
        blocks[:, :2] = np.full(1, deviation / SPREAD, "<f2").view(np.uint8)
        return blocks.reshape(*rows, _row_bytes(columns))


def _row_bytes(columns: int) -> int:
    assert columns % BLOCK_WEIGHTS == 0
    return columns // BLOCK_WEIGHTS * BLOCK_BYTES


def _add_vocabulary(writer: gguf.GGUFWriter, size: int) -> list[int]:
    """Adds the tokenizer; returns the ids of control tokens."""
    from inference.demo import bundled_path

    reader = gguf.GGUFReader(bundled_path("demo"))
    fields = reader.fields
    tokens = list(fields["tokenizer.ggml.tokens"].contents())
    types = list(fields["tokenizer.ggml.token_type"].contents())
    known = set(tokens)
    made = ("Ġ" + "".join(letters) for letters in product(ascii_lowercase, repeat=4))
    while len(tokens) < size:
        if (word := next(made)) not in known:
            tokens.append(word)
            types.append(int(gguf.TokenType.NORMAL))
    writer.add_tokenizer_model(fields["tokenizer.ggml.model"].contents())
    writer.add_tokenizer_pre(fields["tokenizer.ggml.pre"].contents())
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(fields["tokenizer.ggml.merges"].contents())
    writer.add_bos_token_id(fields["tokenizer.ggml.bos_token_id"].contents())
    writer.add_eos_token_id(fields["tokenizer.ggml.eos_token_id"].contents())
    writer.add_add_bos_token(False)
    writer.add_add_eos_token(False)
    writer.add_chat_template(fields["tokenizer.chat_template"].contents())
    # Tokens of single bytes are excluded: part of a character has no text.
    return [number for number, kind in enumerate(types) if kind != gguf.TokenType.NORMAL or len(tokens[number]) == 1]


if __name__ == "__main__":
    for name in sys.argv[1:] or SHAPES:
        print(path_of(SHAPES[name]))
