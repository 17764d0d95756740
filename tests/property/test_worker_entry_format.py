"""A stored sequence returns exactly as it was written, or its damage is found."""

from __future__ import annotations

import contextlib
import random
from array import array
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority
from inference.worker.kv.arena import Arena
from inference.worker.kv.disk_tier import DiskTier
from inference.worker.kv.entry_format import (
    ALIGNED,
    HEADER_BYTES,
    Head,
    InvalidEntryError,
    Progress,
    blank_header,
    decode_head,
    decode_header,
    encode_head,
    max_head_bytes,
    set_progress,
    set_states_sum,
    set_times,
)
from inference.worker.steps import StoredSequence

KEY = {"files": [["model.gguf", 10, 20]], "kv_type": "f16", "flash_attention": True}


@st.composite
def sequences(draw: st.DrawFn) -> tuple[StoredSequence, bytes, list[bytes]]:
    """A sequence with its state and the states of its checkpoints."""
    states = draw(st.lists(st.binary(max_size=150), max_size=3))
    positions = sorted(draw(st.sets(st.integers(0, 2**31 - 1), min_size=len(states), max_size=len(states))))
    sequence = StoredSequence(
        tokens=array("i", draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=40))),
        tenant=draw(st.text(max_size=20)),
        checkpoints=tuple((position, position // 2) for position in positions),
        priority=draw(st.sampled_from(Priority)),
        used_at=draw(st.floats(0, 2e9)),
        pinned_until=draw(st.floats(0, 2e9)),
        compute_seconds=draw(st.floats(0, 1e6)),
        hits=draw(st.integers(0, 1000)),
        hint=draw(st.sampled_from([None, KvHint("keep"), KvHint("pin", 60.0)])),
    )
    return sequence, draw(st.binary(min_size=1, max_size=300)), states


class Files:
    """The files of a model, written and read as the worker does it."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tier = DiskTier(root, KEY, 2**30)
        self._arena = Arena()
        self._arena.open()

    def write(self, sequence: StoredSequence, state: bytes, states: list[bytes], partial_at: int = 0) -> Path:
        """Writes an entry; returns its file."""
        head, sizes = encode_head(sequence, KEY, len(state), [len(item) for item in states], partial_at)
        rest = bytearray(sizes.all_bytes)
        for at, item in zip((sizes.state_at, *sizes.checkpoints_at), (state, *states), strict=True):
            rest[at : at + len(item)] = item
        self._tier.write(sequence, head, memoryview(rest)[sizes.state_at :], lambda: False, [])
        (path,) = self._root.rglob(self._tier.name_of(sequence))
        return path

    def read(self, sequence: StoredSequence) -> tuple[Head, bytes, list[bytes]]:
        """The head and the states of the entry of a sequence. Raises InvalidEntryError."""
        region, head = self._tier.read(sequence, self._arena, 2**30)
        sizes, entry = head.sizes, region.view
        state = bytes(entry[sizes.state_at : sizes.state_at + sizes.state_bytes])
        parts = zip(sizes.checkpoints_at, sizes.checkpoint_bytes, strict=True)
        states = [bytes(entry[at : at + count]) for at, count in parts]
        self._arena.release(region)
        return head, state, states

    def content(self, sequence: StoredSequence) -> tuple[object, ...]:
        """All that a reader uses of an entry, except the times. Raises InvalidEntryError."""
        head, state, states = self.read(sequence)
        found = head.sequence
        parts = (found.tokens, found.tenant, found.checkpoints, found.priority, found.compute_seconds, found.hits)
        return (*parts, found.keeps, head.key, head.partial_at, state, states)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("kv"))


def entry_of(sequence: StoredSequence, state: bytes, states: list[bytes]) -> bytearray:
    """A complete entry in memory, without the checksum of its states."""
    head, sizes = encode_head(sequence, KEY, len(state), [len(item) for item in states])
    set_progress(head, Progress.COMPLETE)
    return head + bytes(sizes.all_bytes - sizes.state_at)


@given(sequences())
def test_an_entry_returns_what_was_written(files: Files, written: tuple[StoredSequence, bytes, list[bytes]]) -> None:
    """Tokens, states and all fields are the same; each part begins at a multiple of the alignment."""
    sequence, state, states = written
    path = files.write(*written, partial_at=8)
    assert files.content(sequence) == (
        sequence.tokens, sequence.tenant, sequence.checkpoints, sequence.priority, sequence.compute_seconds,
        sequence.hits, sequence.keeps, KEY, 8, state, states,
    )  # fmt: skip
    head, *_ = files.read(sequence)
    assert (head.sequence.used_at, head.sequence.pinned_until) == (sequence.used_at, sequence.pinned_until)
    assert head.sequence.count_bytes == head.sizes.all_bytes == path.stat().st_size
    assert all(at % ALIGNED == 0 for at in (head.sizes.tokens_at, head.sizes.state_at, *head.sizes.checkpoints_at))
    assert decode_head(path.read_bytes()[: head.sizes.state_at]).sequence.tokens == sequence.tokens


@given(sequences(), st.data())
def test_damage_is_found_or_changes_nothing(
    files: Files, written: tuple[StoredSequence, bytes, list[bytes]], data: st.DataObject
) -> None:
    """Any bytes may be replaced at any place."""
    path = files.write(*written)
    before, entry = files.content(written[0]), path.read_bytes()
    at = data.draw(st.integers(0, len(entry) - 1))
    new = data.draw(st.binary(min_size=1, max_size=16))[: len(entry) - at]
    path.write_bytes(entry[:at] + new + entry[at + len(new) :])
    with contextlib.suppress(InvalidEntryError):
        assert files.content(written[0]) == before


def test_damage_of_each_byte_except_the_times_is_found(files: Files) -> None:
    """Each byte of an entry is changed in turn, in one bit and in all."""
    sequence = StoredSequence(array("i", [1, 2, 3]), "alice", ((1, 0), (2, 1)), compute_seconds=1.5)
    path = files.write(sequence, bytes(range(100)), [b"first", b"second"])
    before, entry = files.content(sequence), path.read_bytes()
    unnoticed = 0
    for at in range(len(entry)):
        for change in (1 << random.Random(at).randrange(8), 0xFF):
            damaged = bytearray(entry)
            damaged[at] ^= change
            path.write_bytes(damaged)
            with contextlib.suppress(InvalidEntryError):
                assert files.content(sequence) == before
                unnoticed += 1
    assert unnoticed == 2 * 16, "only the times have no checksum"


@given(sequences(), st.integers(0, 2000), st.binary(min_size=1, max_size=10))
def test_a_shorter_or_longer_entry_is_invalid(
    files: Files, written: tuple[StoredSequence, bytes, list[bytes]], length: int, more: bytes
) -> None:
    """Truncated files have no content, and neither have files with more bytes."""
    path = files.write(*written)
    entry = path.read_bytes()
    for changed in (entry[: length % len(entry)], entry + more):
        path.write_bytes(changed)
        with pytest.raises(InvalidEntryError):
            files.read(written[0])


@pytest.mark.parametrize("progress", [Progress.WRITING, Progress.REMOVED])
def test_an_entry_that_is_not_complete_is_invalid(progress: Progress) -> None:
    """A reader can skip it, because its size is known."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    set_progress(entry, progress)
    with pytest.raises(InvalidEntryError, match="not complete"):
        decode_head(entry)
    assert decode_header(entry).all_bytes == len(entry)
    blank = decode_header(blank_header(12345))
    assert (blank.progress, blank.all_bytes) == (Progress.WRITING, 12345)


def test_times_can_be_changed_in_a_complete_entry() -> None:
    """They are read again, and the entry stays valid."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    set_times(entry, 11.0, 22.0)
    sequence = decode_head(entry).sequence
    assert (sequence.used_at, sequence.pinned_until) == (11.0, 22.0)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [(b"HGKVSEQ1", b"HGKVSEQ9", "not an entry"), (b"tenant", b"renter", "metadata"), (b",64]", b",65]", "checkpoints")],
)
def test_an_entry_of_another_version_is_invalid(old: bytes, new: bytes, reason: str) -> None:
    """Its mark, its metadata or its sizes are unknown, although its checksums are right."""
    sequence = StoredSequence(array("i", [1]), "x", ((1, 0),))
    entry = entry_of(sequence, b"state", [bytes(64)])
    head = bytearray(entry[: decode_head(entry).sizes.state_at].replace(old, new, 1))
    set_states_sum(head, 0)
    with pytest.raises(InvalidEntryError, match=reason):
        decode_head(head)


def test_size_of_a_head_is_within_its_maximum() -> None:
    sequence = StoredSequence(array("i", range(1000)), "tenant" * 40, checkpoints=[(at, 0) for at in range(16)])
    head, sizes = encode_head(sequence, {"files": ["model.gguf" * 20]}, 10**9, [10**8] * 16)
    assert len(head) <= sizes.state_at <= max_head_bytes(1000)


def test_a_part_of_a_head_is_invalid() -> None:
    """Its header says how much is missing."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    with pytest.raises(InvalidEntryError, match="shorter than its head"):
        decode_head(entry[:HEADER_BYTES])
