"""A stored sequence returns exactly as it was written, or its damage is found."""

from __future__ import annotations

import contextlib
import random
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority
from inference.worker.kv.entry_format import (
    ALIGNED,
    HEADER_BYTES,
    Head,
    InvalidEntryError,
    Progress,
    StatesSum,
    blank_header,
    decode_head,
    decode_prefix,
    encode_head,
    most_head_bytes,
    set_progress,
    set_states_sum,
    set_times,
)
from inference.worker.steps import StoredSequence

KEY = {"files": [["model.gguf", 10, 20]], "kv_type": "f16", "flash_attention": True}


def verify(entry: bytes | bytearray) -> Head:
    """Reads and verifies a whole entry. Raises InvalidEntryError."""
    head = decode_head(entry)
    if len(entry) != head.sizes.all_bytes:
        raise InvalidEntryError("not as long as its header says")
    states = StatesSum()
    states.update(entry[head.sizes.state_at :])
    if states.intdigest() != head.states_sum:
        raise InvalidEntryError("the checksum of its states is wrong")
    return head


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


def entry_of(sequence: StoredSequence, state: bytes, states: list[bytes], partial_at: int = 0) -> bytearray:
    """A complete entry, with both checksums."""
    head, sizes = encode_head(sequence, KEY, len(state), [len(item) for item in states], partial_at)
    entry = head + bytes(sizes.all_bytes - sizes.state_at)
    entry[sizes.state_at : sizes.state_at + len(state)] = state
    for at, item in zip(sizes.checkpoints_at, states, strict=True):
        entry[at : at + len(item)] = item
    states_sum = StatesSum(entry[sizes.state_at :]).intdigest()
    set_states_sum(head, states_sum)
    entry[: len(head)] = head
    set_progress(entry, Progress.COMPLETE)
    return entry


def content(entry: bytes | bytearray) -> tuple[object, ...]:
    """All that a reader uses of an entry, except the times. Raises InvalidEntryError."""
    head = verify(entry)
    sizes, sequence = head.sizes, head.sequence
    states = [bytes(entry[at : at + n]) for at, n in zip(sizes.checkpoints_at, sizes.checkpoint_bytes, strict=True)]
    state = bytes(entry[sizes.state_at : sizes.state_at + sizes.state_bytes])
    found = (sequence.tokens, sequence.tenant, sequence.checkpoints, sequence.priority, sequence.compute_seconds)
    return (*found, sequence.hits, sequence.keeps, head.key, head.partial_at, state, states)


@given(sequences())
def test_an_entry_returns_what_was_written(written: tuple[StoredSequence, bytes, list[bytes]]) -> None:
    """Tokens, states and all fields are the same; each part begins at a multiple of the alignment."""
    sequence, state, states = written
    entry = entry_of(*written, partial_at=8)
    head = verify(entry)
    assert content(entry) == (
        sequence.tokens, sequence.tenant, sequence.checkpoints, sequence.priority, sequence.compute_seconds,
        sequence.hits, sequence.keeps, KEY, 8, state, states,
    )  # fmt: skip
    assert (head.sequence.used_at, head.sequence.pinned_until) == (sequence.used_at, sequence.pinned_until)
    assert head.sequence.count_bytes == head.sizes.all_bytes == len(entry)
    assert all(at % ALIGNED == 0 for at in (head.sizes.tokens_at, head.sizes.state_at, *head.sizes.checkpoints_at))
    assert decode_head(entry[: head.sizes.state_at]).sequence.tokens == sequence.tokens


@given(sequences(), st.data())
def test_damage_is_found_or_changes_nothing(
    written: tuple[StoredSequence, bytes, list[bytes]], data: st.DataObject
) -> None:
    """Any bytes may be replaced at any place."""
    entry = entry_of(*written)
    damaged = bytearray(entry)
    at = data.draw(st.integers(0, len(entry) - 1))
    new = data.draw(st.binary(min_size=1, max_size=16))
    damaged[at : at + len(new)] = new[: len(entry) - at]
    with_damage(entry, damaged)


def with_damage(entry: bytearray, damaged: bytearray) -> None:
    try:
        found = content(damaged)
    except InvalidEntryError:
        return
    assert found == content(entry)


def test_damage_of_each_byte_is_found() -> None:
    """Each byte of an entry is changed in turn, in one bit and in all."""
    sequence = StoredSequence(array("i", [1, 2, 3]), "alice", ((1, 0), (2, 1)), compute_seconds=1.5)
    entry = entry_of(sequence, bytes(range(100)), [b"first", b"second"])
    unnoticed = 0
    for at in range(len(entry)):
        for change in (1 << random.Random(at).randrange(8), 0xFF):
            damaged = bytearray(entry)
            damaged[at] ^= change
            with_damage(entry, damaged)
            with contextlib.suppress(InvalidEntryError):
                unnoticed += content(damaged) is not None
    assert unnoticed == 2 * 16, "only the times have no checksum"


@given(sequences(), st.integers(0, 2000), st.binary(min_size=1, max_size=10))
def test_a_shorter_or_longer_entry_is_invalid(
    written: tuple[StoredSequence, bytes, list[bytes]], length: int, more: bytes
) -> None:
    """Truncated files have no content, and neither have files with more bytes."""
    entry = entry_of(*written)
    for changed in (entry[: length % len(entry)], entry + more):
        with pytest.raises(InvalidEntryError):
            verify(changed)


@pytest.mark.parametrize("progress", [Progress.WRITING, Progress.REMOVED])
def test_an_entry_that_is_not_complete_is_invalid(progress: Progress) -> None:
    """It can be passed over, because its size is known."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    set_progress(entry, progress)
    with pytest.raises(InvalidEntryError, match="not complete"):
        verify(entry)
    assert decode_prefix(entry).all_bytes == len(entry)
    blank = decode_prefix(blank_header(12345))
    assert (blank.progress, blank.all_bytes) == (Progress.WRITING, 12345)


def test_times_can_be_changed_in_a_complete_entry() -> None:
    """They are read again, and the entry stays valid."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    set_times(entry, 11.0, 22.0)
    sequence = verify(entry).sequence
    assert (sequence.used_at, sequence.pinned_until) == (11.0, 22.0)


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [(b"HGKVSEQ1", b"HGKVSEQ9", "not an entry"), (b"tenant", b"renter", "metadata"), (b",64]", b",65]", "checkpoints")],
)
def test_an_entry_of_another_version_is_invalid(old: bytes, new: bytes, reason: str) -> None:
    """Its mark, its metadata or its sizes are unknown, although its checksums are right."""
    sequence = StoredSequence(array("i", [1]), "x", ((1, 0),))
    entry = entry_of(sequence, b"state", [bytes(64)])
    head = bytearray(entry[: verify(entry).sizes.state_at].replace(old, new, 1))
    set_states_sum(head, 0)
    with pytest.raises(InvalidEntryError, match=reason):
        decode_head(head)


def test_heads_have_a_largest_size() -> None:
    sequence = StoredSequence(array("i", range(1000)), "tenant" * 40, checkpoints=[(at, 0) for at in range(16)])
    head, sizes = encode_head(sequence, {"files": ["model.gguf" * 20]}, 10**9, [10**8] * 16)
    assert len(head) <= sizes.state_at <= most_head_bytes(1000)


def test_a_part_of_a_head_is_invalid() -> None:
    """Its header says how much is missing."""
    entry = entry_of(StoredSequence(array("i", [1]), "x"), b"state", [])
    with pytest.raises(InvalidEntryError, match="shorter than its head"):
        decode_head(entry[:HEADER_BYTES])
