"""The format of a stored sequence, the same in host memory and in a file.

    header      HEADER_BYTES   mark with the version, progress, sizes, checksums, times
    metadata    JSON           key, tenant, checkpoints, priority, compute time, uses, hint `keep`, labels
    tokens      int32 each
    state       of llama.cpp   whole sequence
    checkpoints of llama.cpp   one partial state each

Each part begins at a multiple of ALIGNED bytes. Integers are little-endian, as are tokens on all supported systems. Two
checksums (XXH3, 64 bits) cover everything except the fields that change: one from the header to the tokens, so that
this part can be verified alone, and one for the states.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgspec
from xxhash import xxh3_64

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority
from inference.worker.steps import StoredSequence

MARK = b"HGKVSEQ1"
HEADER_BYTES = 128
ALIGNED = 64

_HEADER = struct.Struct("<8sIIQQQQQdd")
"""Mark, progress, metadata bytes, tokens, state bytes, all bytes, checksum of the head, checksum of the states, time of
the last use, and the end of a pin. The rest of HEADER_BYTES is empty."""
_PROGRESS = struct.Struct("<I")
_SUM = struct.Struct("<Q")
_TIMES = struct.Struct("<dd")
_PROGRESS_AT, _SIZES_AT, _HEAD_SUM_AT, _STATES_SUM_AT, _TIMES_AT, _REST_AT = 8, 12, 40, 48, 56, 72
Buffer = bytes | bytearray | memoryview

MAX_METADATA_BYTES = 2**22
MAX_TOKENS = 2**28


class Progress(IntEnum):
    """How far the writing of an entry is. Other values than COMPLETE mean that it cannot be used."""

    WRITING = 1
    COMPLETE = 2
    REMOVED = 3


class InvalidEntryError(ValueError):
    """The bytes are not a complete entry of this format, or they are damaged."""


class _Metadata(msgspec.Struct):
    """`checkpoints`: position, first position of the windows, bytes. `partial_at`: see `Head`. `keeps`: the request had
    the hint `keep`. Entries of other versions may lack `keeps` and `labels`.
    """

    key: dict[str, Any]
    tenant: str
    checkpoints: list[tuple[int, int, int]]
    priority: Priority
    compute_seconds: float
    hits: int
    partial_at: int
    keeps: bool = False
    labels: dict[str, int] = {}


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of an entry, and where its parts begin."""

    metadata_bytes: int
    tokens: int
    state_bytes: int
    checkpoint_bytes: tuple[int, ...] = ()

    @property
    def tokens_at(self) -> int:
        """Where the tokens begin."""
        return _aligned(HEADER_BYTES + self.metadata_bytes)

    @property
    def state_at(self) -> int:
        """Where the state begins, and the head ends."""
        return self.tokens_at + _aligned(4 * self.tokens)

    @property
    def checkpoints_at(self) -> tuple[int, ...]:
        """Where the states of the checkpoints begin."""
        at, places = self.state_at + _aligned(self.state_bytes), []
        for count in self.checkpoint_bytes:
            places.append(at)
            at += _aligned(count)
        return tuple(places)

    @property
    def all_bytes(self) -> int:
        """The size of the entry."""
        return self.state_at + _aligned(self.state_bytes) + sum(map(_aligned, self.checkpoint_bytes))


@dataclass(frozen=True, slots=True)
class Head:
    """All of an entry except its states. `in_ram` and `on_disk` of `sequence` are not set.

    `partial_at`: where the part of the state begins that a checkpoint has; 0 if there is none.
    """

    sizes: Sizes
    key: Mapping[str, Any]
    sequence: StoredSequence
    partial_at: int = 0
    states_sum: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """The fields of a header that are needed to find the other parts."""

    progress: int
    state_at: int
    all_bytes: int


def encode_head(
    sequence: StoredSequence,
    key: Mapping[str, Any],
    state_bytes: int,
    checkpoint_bytes: Sequence[int],
    partial_at: int = 0,
) -> tuple[bytearray, Sizes]:
    """The head of an entry that is being written, without the checksum of its states, and the sizes of the entry.

    `checkpoint_bytes` belong to `sequence.checkpoints`.
    """
    metadata = msgspec.json.encode(
        _Metadata(
            dict(key),
            sequence.tenant,
            [(*at, count) for at, count in zip(sequence.checkpoints, checkpoint_bytes, strict=True)],
            sequence.priority,
            sequence.compute_seconds,
            sequence.hits,
            partial_at,
            sequence.keeps,
            dict(sequence.labels),
        )
    )
    sizes = Sizes(len(metadata), len(sequence.tokens), state_bytes, tuple(checkpoint_bytes))
    head = bytearray(sizes.state_at)
    _HEADER.pack_into(
        head, 0, MARK, Progress.WRITING, sizes.metadata_bytes, sizes.tokens, state_bytes, sizes.all_bytes, 0, 0,
        sequence.used_at, sequence.pinned_until,
    )  # fmt: skip
    head[HEADER_BYTES : HEADER_BYTES + len(metadata)] = metadata
    head[sizes.tokens_at : sizes.tokens_at + 4 * sizes.tokens] = sequence.tokens.tobytes()
    set_states_sum(head, 0)
    return head, sizes


def max_head_bytes(tokens: int) -> int:
    """The largest size of the head of an entry with this number of tokens."""
    return Sizes(MAX_METADATA_BYTES, tokens, 0).state_at


def blank_header(all_bytes: int) -> bytes:
    """The header of an entry of this size of which nothing else is written yet."""
    return _HEADER.pack(MARK, Progress.WRITING, 0, 0, 0, all_bytes, 0, 0, 0.0, 0.0).ljust(HEADER_BYTES, b"\0")


def set_states_sum(head: bytearray, states_sum: int) -> None:
    """Sets the checksum of the states, which was computed with `StatesSum`, and then the checksum of the head."""
    _SUM.pack_into(head, _STATES_SUM_AT, states_sum)
    _SUM.pack_into(head, _HEAD_SUM_AT, _head_sum(head))


def set_progress(header: Buffer, progress: Progress) -> None:
    """Writes the progress into a header."""
    _PROGRESS.pack_into(header, _PROGRESS_AT, progress)


def set_times(header: Buffer, used_at: float, pinned_until: float) -> None:
    """Writes the times into a header."""
    _TIMES.pack_into(header, _TIMES_AT, used_at, pinned_until)


def decode_header(header: Buffer) -> Header:
    """The fields of a header that are needed to read the head. Raises InvalidEntryError."""
    if len(header) < HEADER_BYTES:
        raise InvalidEntryError("is shorter than its header")
    mark, progress, metadata_bytes, tokens, state_bytes, all_bytes, *_ = _HEADER.unpack_from(header)
    if mark != MARK:
        raise InvalidEntryError("is not an entry of this version")
    sizes = Sizes(metadata_bytes, tokens, state_bytes)
    if metadata_bytes > MAX_METADATA_BYTES or tokens > MAX_TOKENS or sizes.all_bytes > all_bytes:
        raise InvalidEntryError("is damaged: its sizes do not fit together")
    return Header(progress, sizes.state_at, all_bytes)


def decode_head(head: Buffer) -> Head:
    """Reads and verifies everything before the states. Raises InvalidEntryError."""
    header = decode_header(head)
    if header.progress != Progress.COMPLETE:
        raise InvalidEntryError("is not complete")
    if len(head) < header.state_at:
        raise InvalidEntryError("is shorter than its head")
    _, _, metadata_bytes, tokens, state_bytes, all_bytes, head_sum, states_sum, used_at, pinned_until = (
        _HEADER.unpack_from(head)
    )
    if head_sum != _head_sum(head[: header.state_at]):
        raise InvalidEntryError("is damaged: the checksum of its head is wrong")
    try:
        found = msgspec.json.decode(head[HEADER_BYTES : HEADER_BYTES + metadata_bytes], type=_Metadata)
    except msgspec.DecodeError as error:  # written by another version
        raise InvalidEntryError(f"has unknown metadata ({error})") from error
    sizes = Sizes(metadata_bytes, tokens, state_bytes, tuple(at[2] for at in found.checkpoints))
    if sizes.all_bytes != all_bytes:
        raise InvalidEntryError("is damaged: its checkpoints do not fit its size")
    sequence = StoredSequence(
        tokens=array("i", bytes(head[sizes.tokens_at : sizes.tokens_at + 4 * tokens])),
        tenant=found.tenant,
        checkpoints=tuple((position, oldest) for position, oldest, _ in found.checkpoints),
        priority=found.priority,
        used_at=used_at,
        pinned_until=pinned_until,
        compute_seconds=found.compute_seconds,
        count_bytes=all_bytes,
        hits=found.hits,
        hint=KvHint("keep") if found.keeps else None,
        labels=found.labels,
    )
    return Head(sizes, found.key, sequence, found.partial_at, states_sum)


StatesSum = xxh3_64
"""Computes the checksum of the states piece by piece: from the end of the head to the end of the entry."""


def _head_sum(head: Buffer) -> int:
    """The checksum of a head without its progress, this checksum, and the times."""
    computed = xxh3_64()
    for part in (head[:_PROGRESS_AT], head[_SIZES_AT:_HEAD_SUM_AT], head[_STATES_SUM_AT:_TIMES_AT], head[_REST_AT:]):
        computed.update(part)
    return computed.intdigest()


def _aligned(count: int) -> int:
    return -(-count // ALIGNED) * ALIGNED
