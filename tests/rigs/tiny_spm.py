"""Writes a SentencePiece vocabulary with byte tokens and without weights."""

from __future__ import annotations

from pathlib import Path

import gguf

from tests.rigs import tiny_gguf

WORDS = ("hello", "world", "water", "wheel", "the", "é", "漢", "字", "über")
LETTERS = "abcdefghijklmnopqrstuvwxyzé漢字ü,.!"


def vocabulary() -> Path:
    """Path of a GGUF to open with `vocab_only`: control tokens, 256 bytes, letters, and words that merge from them."""
    return tiny_gguf.cached("spm", Path(__file__).read_bytes(), "llama", _write)


def _write(writer: gguf.GGUFWriter) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    pieces = dict.fromkeys(["▁", *LETTERS])
    for word in [*WORDS, *("▁" + word for word in WORDS)]:
        pieces.update(dict.fromkeys(word[:length] for length in range(2, len(word) + 1)))
    scores = [0.0] * len(tokens) + [-float(number) for number in range(len(pieces))]
    tokens += pieces
    types += [gguf.TokenType.NORMAL] * len(pieces)
    writer.add_context_length(64)
    writer.add_embedding_length(8)
    writer.add_block_count(1)
    writer.add_feed_forward_length(8)
    writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
