"""Creates tiny random-weight BERT encoders for tests: embedding models, and cross-encoders with a head."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np

from tests.rigs import tiny_gguf

SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes; `positions` is the longest text, `head` the number of classes of the classification head."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    feed: int = 128
    positions: int = 128
    pooling: str | None = "cls"
    head: int = 0
    seed: int = 3


def embedding(**changes: object) -> Path:
    """Path of an encoder with learned positions, about 0.5 MB, with CLS pooling (or as `pooling` says)."""
    return _file(Shape(**changes))  # type: ignore[arg-type]


def cross_encoder(**changes: object) -> Path:
    """Path of a classifier of one class over pairs of texts."""
    return _file(Shape(**{"pooling": "rank", "head": 1, **changes}))  # type: ignore[arg-type]


def _file(shape: Shape) -> Path:
    recipe = Path(__file__).read_bytes() + repr(asdict(shape)).encode()
    return tiny_gguf.cached("bert", recipe, "bert", lambda writer: _write(shape, writer))


def _write(shape: Shape, writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(shape.seed)
    letters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    # A word begins with U+2581; parts inside a word have no prefix.
    begins = dict.fromkeys((*tiny_gguf.WORDS, *letters))
    tokens = [*SPECIALS, *("\u2581" + text for text in begins), *letters]
    writer.add_name("tiny")
    writer.add_context_length(shape.positions)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_layer_norm_eps(1e-12)
    writer.add_causal_attention(False)
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if shape.pooling is not None:
        writer.add_pooling_type(gguf.PoolingType[shape.pooling.upper()])
    if shape.head > 1:
        writer.add_classifier_output_labels([f"class {number}" for number in range(shape.head)])
    writer.add_tokenizer_model("bert")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [int(gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL) for token in tokens]
    )
    writer.add_token_type_count(2)
    for name, text in (("pad", "[PAD]"), ("unk", "[UNK]"), ("sep", "[SEP]"), ("mask", "[MASK]")):
        getattr(writer, f"add_{name}_token_id")(tokens.index(text))
    writer.add_bos_token_id(tokens.index("[CLS]"))

    def weights(name: str, *size: int, scale: float = 2.0) -> None:
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(scale / np.sqrt(size[-1]))
        writer.add_tensor(name, values)

    def norm(name: str) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(shape.width, np.float32))
        writer.add_tensor(f"{name}.bias", np.zeros(shape.width, np.float32))

    weights("token_embd.weight", len(tokens), shape.width, scale=np.sqrt(shape.width))
    weights("token_types.weight", 2, shape.width)
    weights("position_embd.weight", shape.positions, shape.width)
    norm("token_embd_norm")
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            weights(f"{block}.{part}.weight", shape.width, shape.width)
        weights(f"{block}.ffn_up.weight", shape.feed, shape.width)
        weights(f"{block}.ffn_down.weight", shape.width, shape.feed)
        norm(f"{block}.attn_output_norm")
        norm(f"{block}.layer_output_norm")
    if shape.head:
        weights("cls.weight", shape.width, shape.width)
        writer.add_tensor("cls.bias", np.zeros(shape.width, np.float32))
        weights("cls.output.weight", shape.head, shape.width)
        writer.add_tensor("cls.output.bias", np.zeros(shape.head, np.float32))
