"""Creates damaged GGUF files from a good one, each with one named defect.

A good file is divided into its parts (`Parts`), one part is changed, and the file is written again, so that the defect
is exactly the named one.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

U8, I8, U16, I16, U32, I32, F32, BOOL, STRING, ARRAY, U64, I64, F64 = range(13)
_SIZES = {U8: 1, I8: 1, U16: 2, I16: 2, U32: 4, I32: 4, F32: 4, BOOL: 1, U64: 8, I64: 8, F64: 8}
HUGE = 2**63
MOST = 2**64 - 1

Entry = tuple[bytes, int, bytes]
"""Key, type of the value, and the value as it stands in the file."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor's place in the header."""

    name: bytes
    shape: tuple[int, ...]
    kind: int
    offset: int
    dimensions: int | None = None
    """The claimed length in the header instead of that of `shape`."""

    def encode(self) -> bytes:
        """As it stands in the file."""
        claimed = len(self.shape) if self.dimensions is None else self.dimensions
        sizes = struct.pack(f"<{len(self.shape)}Q", *self.shape)
        return text(self.name) + struct.pack("<I", claimed) + sizes + struct.pack("<IQ", self.kind, self.offset)


@dataclass(frozen=True, slots=True)
class Parts:
    """A GGUF file in its parts; counts of None are computed."""

    entries: tuple[Entry, ...]
    tensors: tuple[Tensor, ...]
    data: bytes
    magic: bytes = b"GGUF"
    version: int = 3
    entry_count: int | None = None
    tensor_count: int | None = None

    @classmethod
    def read(cls, file: bytes) -> Parts:
        """The parts of a good file with the usual alignment of 32."""
        at = 24
        version, tensor_count, entry_count = struct.unpack_from("<IQQ", file, 4)
        entries: list[Entry] = []
        for _ in range(entry_count):
            key, at = _take_text(file, at)
            (kind,) = struct.unpack_from("<I", file, at)
            end = _end(file, at + 4, kind)
            entries.append((key, kind, file[at + 4 : end]))
            at = end
        tensors: list[Tensor] = []
        for _ in range(tensor_count):
            name, at = _take_text(file, at)
            (dimensions,) = struct.unpack_from("<I", file, at)
            shape = struct.unpack_from(f"<{dimensions}Q", file, at + 4)
            kind, offset = struct.unpack_from("<IQ", file, at + 4 + 8 * dimensions)
            tensors.append(Tensor(name, shape, kind, offset))
            at += 16 + 8 * dimensions
        return cls(tuple(entries), tuple(tensors), file[-(-at // 32) * 32 :], version=version)

    def sections(self) -> tuple[bytes, bytes, bytes]:
        """Head with counts, metadata, descriptions of tensors with the padding behind them."""
        tensor_count = len(self.tensors) if self.tensor_count is None else self.tensor_count
        entry_count = len(self.entries) if self.entry_count is None else self.entry_count
        head = self.magic + struct.pack("<IQQ", self.version, tensor_count, entry_count)
        metadata = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in self.entries)
        tensors = b"".join(tensor.encode() for tensor in self.tensors)
        return head, metadata, tensors + bytes(-(len(head) + len(metadata) + len(tensors)) % 32)

    def encode(self) -> bytes:
        """The file."""
        return b"".join(self.sections()) + self.data

    def with_entry(self, key: str, kind: int, value: bytes) -> Parts:
        """With `key` set to `value`, in its place or at the end."""
        name = key.encode()
        fresh = (name, kind, value)
        if any(entry[0] == name for entry in self.entries):
            return replace(self, entries=tuple(fresh if entry[0] == name else entry for entry in self.entries))
        return replace(self, entries=(*self.entries, fresh))

    def without_entry(self, key: str) -> Parts:
        """Without `key`."""
        return replace(self, entries=tuple(entry for entry in self.entries if entry[0] != key.encode()))

    def with_tensor(self, index: int, **changes: object) -> Parts:
        """With one tensor described differently."""
        changed = list(self.tensors)
        changed[index] = replace(changed[index], **changes)  # type: ignore[arg-type]
        return replace(self, tensors=tuple(changed))

    def value(self, key: str) -> bytes:
        """The value of `key` as encoded in the file."""
        return next(entry[2] for entry in self.entries if entry[0] == key.encode())


def text(value: bytes) -> bytes:
    """A text as GGUF writes it."""
    return struct.pack("<Q", len(value)) + value


def texts(values: Sequence[str]) -> bytes:
    """A list of texts as GGUF writes it."""
    return struct.pack("<IQ", STRING, len(values)) + b"".join(text(value.encode()) for value in values)


def _take_text(file: bytes, at: int) -> tuple[bytes, int]:
    (length,) = struct.unpack_from("<Q", file, at)
    return file[at + 8 : at + 8 + length], at + 8 + length


def _end(file: bytes, at: int, kind: int) -> int:
    if kind == STRING:
        return _take_text(file, at)[1]
    if kind != ARRAY:
        return at + _SIZES[kind]
    inner, count = struct.unpack_from("<IQ", file, at)
    at += 12
    if inner != STRING:
        return at + count * _SIZES[inner]
    for _ in range(count):
        at = _take_text(file, at)[1]
    return at


def _texts_in(parts: Parts, key: str) -> list[str]:
    value = parts.value(key)
    (count,) = struct.unpack_from("<Q", value, 4)
    at, found = 12, []
    for _ in range(count):
        item, at = _take_text(value, at)
        found.append(item.decode())
    return found


@dataclass(frozen=True, slots=True)
class Damaged:
    """One damaged file. `may_load`: the defect does not have to prevent loading and requests."""

    name: str
    content: bytes
    may_load: bool = False


def corpus(good: bytes) -> Iterator[Damaged]:
    """All damaged files of `good`, a small llama model with a byte-level BPE vocabulary."""
    parts = Parts.read(good)
    assert parts.encode() == good, "a good file is unchanged by dividing it"
    yield from _foreign(good)
    yield from _cut(parts, good)
    for name, change in {**_COUNTS, **_VALUES, **_TENSORS, **_SIZES_OF_MODELS}.items():
        yield Damaged(name, change(parts).encode())
    for name, change in {**_HARMLESS, **_VOCABULARIES}.items():
        yield Damaged(name, change(parts).encode(), may_load=True)
    for name, source in TEMPLATES.items():
        value = text(source if isinstance(source, bytes) else source.encode())
        changed = parts.with_entry("tokenizer.chat_template", STRING, value)
        yield Damaged(f"template-{name}", changed.encode(), may_load=True)


def _foreign(good: bytes) -> Iterator[Damaged]:
    """Files of other kinds."""
    yield Damaged("empty", b"")
    yield Damaged("one-byte", b"G")
    yield Damaged("magic-alone", b"GGUF")
    yield Damaged("zeros", bytes(4096))
    yield Damaged("web-page", b"<!DOCTYPE html><html><head><title>404 Not Found</title></head></html>")
    yield Damaged("large-file-pointer", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    yield Damaged("zip", b"PK\x03\x04" + bytes(200))
    yield Damaged("safetensors", struct.pack("<Q", 40) + b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}')
    for magic in (b"ggml", b"ggjt", b"FUGG", b"gguf"):
        yield Damaged(f"magic-{magic.decode()}", magic + good[4:])
    yield Damaged("big-endian", b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + good[24:])


def _cut(parts: Parts, good: bytes) -> Iterator[Damaged]:
    """The same file cut within and at the end of each of its parts."""
    head, metadata, tensors = parts.sections()
    begin = len(head) + len(metadata)
    inside = good.index(b"tokenizer.ggml.merges") + 60
    places = {
        "version": 6,
        "counts": 15,
        "head": len(head),
        "first-key": len(head) + 10,
        "first-value": len(head) + 8 + len(parts.entries[0][0]) + 6,
        "tokens": good.index(b"tokenizer.ggml.tokens") + 90,
        "merges": inside,
        "metadata": begin,
        "tensor-name": begin + 9,
        "tensor-shape": begin + 8 + len(parts.tensors[0].name) + 10,
        "tensor-list": begin + len(tensors) // 2,
        "descriptions": begin + len(tensors),
        "first-weight": begin + len(tensors) + 3,
        "half-the-weights": begin + len(tensors) + len(parts.data) // 2,
        "last-weight": len(good) - 33,
    }
    for name, end in places.items():
        yield Damaged(f"cut-{name}", good[:end])


Change = Callable[[Parts], Parts]

_COUNTS: Mapping[str, Change] = {
    **{
        f"version-{version}": (lambda parts, version=version: replace(parts, version=version))  # type: ignore[misc]
        for version in (0, 1, 4, 2**32 - 1)
    },
    "tensors-absurd": lambda parts: replace(parts, tensor_count=HUGE),
    "tensors-most": lambda parts: replace(parts, tensor_count=MOST),
    "tensors-none": lambda parts: replace(parts, tensors=()),
    "tensors-too-many": lambda parts: replace(parts, tensor_count=len(parts.tensors) + 1),
    "tensors-too-few": lambda parts: replace(parts, tensor_count=len(parts.tensors) - 1),
    "entries-absurd": lambda parts: replace(parts, entry_count=HUGE),
    "entries-most": lambda parts: replace(parts, entry_count=MOST),
    "entries-none": lambda parts: replace(parts, entries=()),
    "entries-too-many": lambda parts: replace(parts, entry_count=len(parts.entries) + 1),
    "entries-too-few": lambda parts: replace(parts, entry_count=len(parts.entries) - 1),
}


def _entry(key: str, kind: int, value: bytes) -> Change:
    return lambda parts: parts.with_entry(key, kind, value)


def _array(inner: int, count: int, value: bytes = b"") -> bytes:
    return struct.pack("<IQ", inner, count) + value


def _u32(value: int) -> bytes:
    return struct.pack("<I", value)


def _with_empty_key(parts: Parts) -> Parts:
    (key, kind, value), *rest = parts.entries
    return replace(parts, entries=((b"", kind, value), (key, kind, value), *rest))


_VALUES: Mapping[str, Change] = {
    "text-absurd": _entry("general.name", STRING, struct.pack("<Q", HUGE) + b"x"),
    "text-beyond-the-end": _entry("general.name", STRING, struct.pack("<Q", 2**30)),
    "type-unknown": _entry("general.name", 13, bytes(8)),
    "type-most": _entry("general.name", 2**32 - 1, bytes(8)),
    "array-absurd": _entry("general.tags", ARRAY, _array(U32, HUGE)),
    "array-of-texts-absurd": _entry("general.tags", ARRAY, _array(STRING, 2**26)),
    "array-beyond-the-end": _entry("general.tags", ARRAY, _array(U64, 2**26)),
    "array-of-arrays": _entry("general.tags", ARRAY, _array(ARRAY, 1, _array(U8, 1, b"x"))),
    "array-of-unknown": _entry("general.tags", ARRAY, _array(77, 5000, bytes(5000))),
    "key-empty": _with_empty_key,
    "key-twice": lambda parts: replace(parts, entries=(*parts.entries, parts.entries[-1])),
    "alignment-zero": _entry("general.alignment", U32, _u32(0)),
    "alignment-odd": _entry("general.alignment", U32, _u32(3)),
    "alignment-absurd": _entry("general.alignment", U32, _u32(2**31)),
    "alignment-text": _entry("general.alignment", STRING, text(b"32")),
    "alignment-list": _entry("general.alignment", ARRAY, _array(U32, 1, _u32(32))),
    "alignment-fraction": _entry("general.alignment", F32, struct.pack("<f", float("nan"))),
    "architecture-missing": lambda parts: parts.without_entry("general.architecture"),
    "architecture-empty": _entry("general.architecture", STRING, text(b"")),
    "architecture-unknown": _entry("general.architecture", STRING, text(b"perpetuum-mobile")),
    "architecture-number": _entry("general.architecture", U32, _u32(7)),
    "architecture-not-text": _entry("general.architecture", STRING, text(b"\xff\xfe\x00llama")),
    "architecture-long": _entry("general.architecture", STRING, text(b"llama" * 100_000)),
}


def _shaped(*shape: int) -> Change:
    return lambda parts: parts.with_tensor(0, shape=shape)


def _renamed(parts: Parts) -> Parts:
    return replace(parts, tensors=tuple(replace(tensor, name=b"x" + tensor.name) for tensor in parts.tensors))


_TENSORS: Mapping[str, Change] = {
    "tensor-offset-absurd": lambda parts: parts.with_tensor(1, offset=HUGE),
    "tensor-offset-beyond": lambda parts: parts.with_tensor(1, offset=2**40),
    "tensor-offset-odd": lambda parts: parts.with_tensor(1, offset=parts.tensors[1].offset + 1),
    "tensor-overlaps": lambda parts: parts.with_tensor(2, offset=0),
    "tensor-twice": lambda parts: parts.with_tensor(1, name=parts.tensors[0].name),
    "tensor-name-empty": lambda parts: parts.with_tensor(0, name=b""),
    "tensor-name-long": lambda parts: parts.with_tensor(0, name=b"t" * 5000),
    "tensor-type-unknown": lambda parts: parts.with_tensor(0, kind=200),
    "tensor-type-most": lambda parts: parts.with_tensor(0, kind=2**32 - 1),
    "tensor-type-removed": lambda parts: parts.with_tensor(0, kind=4),
    "tensor-dimensions-absurd": lambda parts: parts.with_tensor(0, dimensions=2**32 - 1),
    "tensor-dimensions-many": lambda parts: parts.with_tensor(0, shape=(2, 2, 2, 2, 2)),
    "tensor-without-dimensions": _shaped(),
    "tensor-size-zero": _shaped(0, 16),
    "tensor-size-absurd": _shaped(MOST, 1),
    "tensor-size-wraps": _shaped(2**32, 2**32),
    "tensor-size-negative": _shaped(MOST - 15, 16),
    "tensor-turned": lambda parts: parts.with_tensor(0, shape=parts.tensors[0].shape[::-1]),
    "tensor-missing": lambda parts: replace(parts, tensors=parts.tensors[1:]),
    "tensors-renamed": _renamed,
}


def _number(name: str, value: int) -> Change:
    return _entry(f"llama.{name}", U32, _u32(value))


_MANY = 2**32 - 1
_SIZES_OF_MODELS: Mapping[str, Change] = {
    "layers-none": _number("block_count", 0),
    "context-zero": _number("context_length", 0),
    "context-absurd": _number("context_length", _MANY),
    "context-missing": lambda parts: parts.without_entry("llama.context_length"),
    "epsilon-nan": _entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", float("nan"))),
    "epsilon-negative": _entry("llama.attention.layer_norm_rms_epsilon", F32, struct.pack("<f", -1.0)),
    "experts-absurd": _number("expert_count", _MANY),
    "layers-too-many": _number("block_count", 513),
    "layers-missing": lambda parts: parts.without_entry("llama.block_count"),
    "layers-predicted": _number("nextn_predict_layers", 9),
    "experts-unused": _number("expert_count", 4),
    "experts-used-without-any": _number("expert_used_count", 2),
    "rope-base-nan": _entry("llama.rope.freq_base", F32, struct.pack("<f", float("nan"))),
    "rope-scaling-unknown": _entry("llama.rope.scaling.type", STRING, text(b"rubber")),
    "layers-more": _number("block_count", 7),
    "layers-absurd": _number("block_count", _MANY),
    "layers-text": _entry("llama.block_count", STRING, text(b"two")),
    "layers-negative": _entry("llama.block_count", I32, struct.pack("<i", -2)),
    "width-zero": _number("embedding_length", 0),
    "width-odd": _number("embedding_length", 31),
    "width-absurd": _number("embedding_length", _MANY),
    "width-fraction": _entry("llama.embedding_length", F32, struct.pack("<f", float("inf"))),
    "width-missing": lambda parts: parts.without_entry("llama.embedding_length"),
    "feed-absurd": _number("feed_forward_length", _MANY),
    "heads-zero": _number("attention.head_count", 0),
    "heads-absurd": _number("attention.head_count", _MANY),
    "heads-negative": _entry("llama.attention.head_count", I32, struct.pack("<i", -4)),
    "heads-missing": lambda parts: parts.without_entry("llama.attention.head_count"),
    "heads-list-short": _entry("llama.attention.head_count", ARRAY, _array(U32, 0)),
    "heads-list-of-texts": _entry("llama.attention.head_count", ARRAY, texts(["4"])),
    "kv-heads-more-than-heads": _number("attention.head_count_kv", 5),
    "kv-heads-absurd": _number("attention.head_count_kv", _MANY),
    "kv-heads-text": _entry("llama.attention.head_count_kv", STRING, text(b"many")),
    "key-length-absurd": _number("attention.key_length", _MANY),
    "rope-absurd": _number("rope.dimension_count", _MANY),
}

_HARMLESS: Mapping[str, Change] = {
    # llama.cpp may accept these; the results are meaningless
    "layers-fewer": _number("block_count", 1),
    "kv-heads-zero": _number("attention.head_count_kv", 0),
    "rope-odd": _number("rope.dimension_count", 3),
    "pooling-text": _entry("llama.pooling_type", STRING, text(b"mean")),
    "pooling-unknown": _number("pooling_type", 99),
    "pooling-rank-without-head": _number("pooling_type", 4),
    "file-type-absurd": _entry("general.file_type", U32, _u32(_MANY)),
    "name-not-text": _entry("general.name", STRING, text(b"\xff\xfe\x00\x1b[2J")),
    "name-number": _entry("general.name", U64, struct.pack("<Q", MOST)),
    "weights-not-numbers": lambda parts: replace(parts, data=b"\xff" * len(parts.data)),
    "bool-of-many-values": _entry("tokenizer.ggml.add_bos_token", BOOL, b"\xff"),
    "data-longer": lambda parts: replace(parts, data=parts.data + bytes(100_000)),
    "vocabulary-size-absurd": _number("vocab_size", _MANY),
}


def _merges(values: Sequence[str]) -> Change:
    return _entry("tokenizer.ggml.merges", ARRAY, texts(values))


def _tokens(change: Callable[[list[str]], list[str]]) -> Change:
    key = "tokenizer.ggml.tokens"
    return lambda parts: parts.with_entry(key, ARRAY, texts(change(_texts_in(parts, key))))


_VOCABULARIES: Mapping[str, Change] = {
    "tokenizer-unknown": _entry("tokenizer.ggml.model", STRING, text(b"runes")),
    "tokenizer-missing": lambda parts: parts.without_entry("tokenizer.ggml.model"),
    "tokenizer-other": _entry("tokenizer.ggml.model", STRING, text(b"llama")),
    "tokenizer-number": _entry("tokenizer.ggml.model", U32, _u32(1)),
    "pre-tokenizer-unknown": _entry("tokenizer.ggml.pre", STRING, text(b"unknown")),
    "tokens-missing": lambda parts: parts.without_entry("tokenizer.ggml.tokens"),
    "tokens-numbers": _entry("tokenizer.ggml.tokens", ARRAY, _array(U32, 4, bytes(16))),
    "tokens-empty": _tokens(lambda tokens: [""] * len(tokens)),
    "tokens-alike": _tokens(lambda tokens: ["a"] * len(tokens)),
    "tokens-fewer": _tokens(lambda tokens: tokens[:50]),
    "tokens-more": _tokens(lambda tokens: [*tokens, *(f"more{n}" for n in range(1000))]),
    "token-types-short": _entry("tokenizer.ggml.token_type", ARRAY, _array(I32, 3, bytes(12))),
    "token-types-unknown": lambda parts: parts.with_entry(
        "tokenizer.ggml.token_type", ARRAY, parts.value("tokenizer.ggml.token_type").replace(b"\1\0\0\0", b"\x63\0\0\0")
    ),
    "merges-missing": lambda parts: parts.without_entry("tokenizer.ggml.merges"),
    "merges-without-space": _merges(["ab", "c"] * 50),
    "merges-empty": _merges([""] * 50),
    "merges-of-unknown": _merges(["\u2603 \u2603", "nowhere here"] * 20),
    "merges-in-a-circle": _merges(["h e", "he l", "l he", "hel he", "he hel", "e h", "eh e", "h eh"]),
    "merges-alike": _merges(["h e"] * 5000),
    "merges-numbers": _entry("tokenizer.ggml.merges", ARRAY, _array(U32, 4, bytes(16))),
    "bos-out-of-range": _entry("tokenizer.ggml.bos_token_id", U32, _u32(10**6)),
    "eos-out-of-range": _entry("tokenizer.ggml.eos_token_id", U32, _u32(_MANY)),
    "eos-missing": lambda parts: parts.without_entry("tokenizer.ggml.eos_token_id"),
    "eos-text": _entry("tokenizer.ggml.eos_token_id", STRING, text(b"</s>")),
    "template-number": _entry("tokenizer.chat_template", U32, _u32(5)),
    "template-list": _entry("tokenizer.chat_template", ARRAY, texts(["{{ messages }}"])),
}

_SHARED = (
    "{%- set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor -%}"
)
"""Two lists that are small in memory and have 2**60 numbers for a program that iterates over them."""

TEMPLATES: Mapping[str, str | bytes] = {
    "empty": "",
    "not-text": b"\xff\xfe{{ messages }}",
    "syntax": "{% for message in messages %}{{ message.content }",
    "unknown-tag": "{% explode %}",
    "endless": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}x",
    "endless-while-compiling": "{{ 9**9**9**9 }}",
    "memory": "{% set n = namespace(t='x') %}{% for i in range(90) %}{% set n.t = n.t ~ n.t %}{% endfor %}{{ n.t }}",
    "memory-times": "{{ 'x' * 10000000000 }}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "escape": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "escape-by-filter": "{{ messages|attr('__class__')|attr('__init__') }}",
    "escape-to-modules": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "include": "{% include '/etc/passwd' %}{% import 'os' as os %}",
    "raises": "{{ raise_exception('no') }}",
    "undefined": "{{ messages[999].content.nothing.at.all }}",
    "deep": "(" * 5000 + "{{" + "(" * 500 + "1" + ")" * 500 + "}}",
    "deep-blocks": "{% if true %}" * 500 + "x" + "{% endif %}" * 500,
    "large": "x" * (2**20 + 1),
    "nothing-of-the-messages": "{# silent #}",
    "shared-compared": _SHARED + "{{ ns.a == ns.b }}",
    "shared-as-json": _SHARED + "{{ ns.a | tojson }}",
    "shared-as-text": _SHARED + "{{ ns.a | string }}",
    "wide-by-star": "{{ ('%*d' % (1500000000, 1)) | length }}",
    "wide-by-format": "{{ '{:>1500000000}'.format('x') | length }}",
    "wide-json": "{{ [1] | tojson(indent=1500000000) | length }}",
    "wide-batch": "{{ [1] | batch(150000000, 'x') | list | length }}",
    "bytes-times": "{{ ('x'.encode() * 1500000000) | length }}",
    "bytes-of-a-number": "{{ (1).to_bytes(1500000000) | length }}",
    "large-numbers": (
        "{% set ns = namespace(n=3) %}{% for i in range(40) %}{% set ns.n = ns.n * ns.n %}{% endfor %}{{ ns.n > 1 }}"
    ),
    "namespaces-as-text": (
        "{% set ns = namespace(a=1) %}{% for i in range(40) %}{% set ns.a = namespace(a=ns.a, b=ns.a) %}{% endfor %}"
        "{{ ns.a }}"
    ),
    "zero-bytes": "a\0b{{ messages[0].content }}\0",
}
