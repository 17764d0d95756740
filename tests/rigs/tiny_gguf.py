"""Creates tiny random-weight GGUF models for tests, seeded and fast; their answers are reproducible noise."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import gguf
import numpy as np

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('unknown role ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
RERANK = (
    "<|im_start|>system\nDoes the document answer the query?<|im_end|>\n"
    "<|im_start|>user\n<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
FILLS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")
WORDS = ("hello", "world", "gate", "water", "mill", "the", "and", "a", "is", "of", "to", "stream", "token")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a tiny model; `seed` selects other weights, `scale` increases the noise."""

    layers: int = 2
    width: int = 64
    heads: int = 4
    heads_kv: int = 2
    feed: int = 128
    context: int = 4096
    extra_words: int = 0
    seed: int = 1
    scale: float = 1.0
    template: str | None = CHATML
    fills: bool = False
    """Whether the vocabulary has the tokens for filling in the middle (FIM)."""
    bos: bool = False
    """Whether prompts begin with BOS."""
    pooling: str | None = None
    """None for a generative model, else `none`, `mean`, `cls`, `last` or `rank`."""
    architecture: str = "llama"
    """`llama`, `qwen3`, or `qwen2vl`, whose tokens have positions in an image (M-RoPE)."""
    labels: tuple[str, ...] = ()
    """The names of the classes of a classification head; without any there is no head."""
    rerank_template: str | None = None
    tool_template: str | None = None


def generative(**changes: object) -> Path:
    """Path of a llama-architecture chat model of about 0.5 MB with a byte-level BPE vocabulary."""
    return _cached(Shape(**changes))  # type: ignore[arg-type]


def slow(**changes: object) -> Path:
    """Path of a chat model of about 40 MB: a token takes some milliseconds, so that tests can act during an answer."""
    return generative(**{"layers": 8, "width": 256, "feed": 1024, **changes})


def in_parts(directory: Path, tensors: int = 8, **changes: object) -> list[Path]:
    """A chat model as several files in `directory`, each with at most `tensors` tensors; the first is configured."""
    shape = Shape(**changes)  # type: ignore[arg-type]
    writer = gguf.GGUFWriter(directory / "parts.gguf", shape.architecture, split_max_tensors=tensors)
    _fill(shape, writer)
    _put(writer)
    return sorted(directory.glob("parts-*.gguf"))


def embedding(pooling: str = "mean", **changes: object) -> Path:
    """Path of an embedding model of the same kind with that pooling; it has no chat template."""
    return _cached(Shape(pooling=pooling, template=None, **changes))  # type: ignore[arg-type]


def yes_no_reranker(**changes: object) -> Path:
    """Path of a reranker with a prompt about a document and a query, like Qwen3's."""
    fields: dict[str, object] = {
        "architecture": "qwen3",
        "pooling": "rank",
        "labels": ("yes", "no"),
        "template": None,
        "rerank_template": RERANK,
    }
    return _cached(Shape(**{**fields, **changes}))  # type: ignore[arg-type]


def lora(
    shape: Shape | None = None, *, seed: int = 7, rank: int = 4, strength: float = 1.0, wakes_at: tuple[int, ...] = ()
) -> Path:
    """Path of a LoRA adapter for models of `shape` that changes their answers.

    `strength` scales it (0 changes nothing); with `wakes_at` it is one that waits for those tokens (aLoRA).
    """
    shape = shape or Shape()
    recipe = f"{_digest(shape)} {seed} {rank} {strength} {wakes_at}".encode()

    def write(writer: gguf.GGUFWriter) -> None:
        rng = np.random.default_rng(seed)
        writer.add_string("general.type", "adapter")
        writer.add_string("adapter.type", "lora")
        writer.add_float32("adapter.lora.alpha", float(rank))
        if wakes_at:
            kind = gguf.GGUFValueType
            writer.add_key_value("adapter.alora.invocation_tokens", list(wakes_at), kind.ARRAY, kind.UINT32)
        for layer in range(shape.layers):
            name = f"blk.{layer}.ffn_up.weight"
            writer.add_tensor(f"{name}.lora_a", rng.standard_normal((rank, shape.width)).astype(np.float32))
            writer.add_tensor(f"{name}.lora_b", (strength * rng.standard_normal((shape.feed, rank))).astype(np.float32))

    return cached("lora", recipe, shape.architecture, write)


def _directory() -> Path:
    path = Path(tempfile.gettempdir()) / f"headgate-tiny-gguf-{os.getuid()}"
    path.mkdir(mode=0o700, exist_ok=True)
    return path


def _digest(shape: Shape) -> str:
    recipe = Path(__file__).read_bytes() + repr(asdict(shape)).encode()
    return hashlib.sha256(recipe).hexdigest()[:16]


def _cached(shape: Shape) -> Path:
    path = _directory() / f"tiny-{_digest(shape)}.gguf"
    if not path.exists():
        _write(shape, path)
    return path


def cached(name: str, recipe: bytes, architecture: str, write: Callable[[gguf.GGUFWriter], None]) -> Path:
    """Path of the file that `write` fills; it is written again when `recipe` changes."""
    path = _directory() / f"{name}-{hashlib.sha256(recipe).hexdigest()[:16]}.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path.with_suffix(f".{os.getpid()}"), architecture)
        write(writer)
        _finish(writer, path)
    return path


def _byte_letters() -> list[str]:
    """GPT-2's printable letter for each of the 256 bytes."""
    keep = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    spare = iter(range(256, 512))
    return [chr(byte) if byte in keep else chr(next(spare)) for byte in range(256)]


def _vocabulary(extra_words: int, specials: tuple[str, ...] = SPECIALS) -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types and the merges that build every word from letters."""
    letters = _byte_letters()
    tokens = list(letters)
    merges: list[str] = []
    rng = np.random.default_rng(11)
    words = [*WORDS, *("".join(chr(97 + c) for c in rng.integers(0, 26, 6)) for _ in range(extra_words))]
    known = set(tokens)
    for word in [*words, *("Ġ" + word for word in words)]:
        built = word[0]
        for letter in word[1:]:
            if (longer := built + letter) not in known:
                merges.append(f"{built} {letter}")
                tokens.append(longer)
                known.add(longer)
            built = longer
    types = [int(gguf.TokenType.NORMAL)] * len(tokens) + [int(gguf.TokenType.CONTROL)] * len(specials)
    return [*tokens, *specials], types, merges


def write_vocabulary(writer: gguf.GGUFWriter, extra_words: int = 0) -> int:
    """Adds the tokenizer of these models with a chat template; returns the number of its tokens."""
    tokens, types, merges = _vocabulary(extra_words)
    _write_tokenizer(writer, tokens, types, merges)
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHATML)
    return len(tokens)


def _write_tokenizer(writer: gguf.GGUFWriter, tokens: list[str], types: list[int], merges: list[str]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    end_of_text, _start, end_of_turn = (tokens.index(text) for text in SPECIALS)
    writer.add_bos_token_id(end_of_text)
    writer.add_eos_token_id(end_of_turn)


def _write(shape: Shape, path: Path) -> None:
    writer = gguf.GGUFWriter(path.with_suffix(f".{os.getpid()}"), shape.architecture)
    _fill(shape, writer)
    _finish(writer, path)


def _fill(shape: Shape, writer: gguf.GGUFWriter) -> None:
    rng = np.random.default_rng(shape.seed)
    tokens, types, merges = _vocabulary(shape.extra_words, SPECIALS + (FILLS if shape.fills else ()))
    writer.add_name("tiny")
    writer.add_context_length(shape.context)
    writer.add_embedding_length(shape.width)
    writer.add_block_count(shape.layers)
    writer.add_feed_forward_length(shape.feed)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.heads_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(shape.width // shape.heads)
    if shape.architecture == "qwen2vl":
        half = shape.width // shape.heads // 2
        writer.add_rope_dimension_sections([half - 2 * (half // 3), half // 3, half // 3, 0])
    writer.add_vocab_size(len(tokens))
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if shape.pooling:
        writer.add_pooling_type(gguf.PoolingType[shape.pooling.upper()])
        writer.add_causal_attention(shape.pooling == "last")
    _write_tokenizer(writer, tokens, types, merges)
    writer.add_add_bos_token(shape.bos)
    if shape.template is not None:
        writer.add_chat_template(shape.template)
    named = {"rerank": shape.rerank_template, "tool_use": shape.tool_template}
    if any(named.values()):
        writer.add_chat_template([{"name": name, "template": text} for name, text in named.items() if text])
    if shape.labels:
        writer.add_classifier_output_labels(shape.labels)

    def weights(name: str, *size: int, scale: float = 1.0) -> None:
        values = rng.standard_normal(size, dtype=np.float32) * np.float32(scale / np.sqrt(size[-1]))
        writer.add_tensor(name, values)

    weights("token_embd.weight", len(tokens), shape.width, scale=np.sqrt(shape.width))
    weights("output.weight", len(tokens), shape.width, scale=3.0 * shape.scale)
    writer.add_tensor("output_norm.weight", np.ones(shape.width, dtype=np.float32))
    if shape.labels:
        weights("cls.output.weight", len(shape.labels), shape.width, scale=2.0)
    per_head = shape.width // shape.heads
    keyed = per_head * shape.heads_kv
    for layer in range(shape.layers):
        block = f"blk.{layer}"
        writer.add_tensor(f"{block}.attn_norm.weight", np.ones(shape.width, dtype=np.float32))
        writer.add_tensor(f"{block}.ffn_norm.weight", np.ones(shape.width, dtype=np.float32))
        if shape.architecture == "qwen3":
            for part in ("q", "k"):
                writer.add_tensor(f"{block}.attn_{part}_norm.weight", np.ones(per_head, dtype=np.float32))
        weights(f"{block}.attn_q.weight", shape.width, shape.width, scale=2.0)
        weights(f"{block}.attn_k.weight", keyed, shape.width, scale=2.0)
        weights(f"{block}.attn_v.weight", keyed, shape.width, scale=2.0)
        weights(f"{block}.attn_output.weight", shape.width, shape.width, scale=2.0)
        weights(f"{block}.ffn_gate.weight", shape.feed, shape.width, scale=2.0)
        weights(f"{block}.ffn_up.weight", shape.feed, shape.width, scale=2.0)
        weights(f"{block}.ffn_down.weight", shape.width, shape.feed, scale=2.0)


def _finish(writer: gguf.GGUFWriter, path: Path) -> None:
    """Writes under a name of our own and renames, so that parallel test runs never read half a file."""
    _put(writer)
    with contextlib.suppress(FileExistsError):
        path.with_suffix(f".{os.getpid()}").replace(path)


def _put(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
