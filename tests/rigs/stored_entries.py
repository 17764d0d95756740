"""Entries whose content follows from a number, in an arena or on disk; also written by processes that are killed.

python -m tests.rigs.stored_entries arena HANDLE SEED
python -m tests.rigs.stored_entries disk DIRECTORY MAX_BYTES SEED
"""

from __future__ import annotations

import random
import sys
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from inference.worker.kv.arena import Arena, Region
from inference.worker.kv.disk_tier import DiskTier
from inference.worker.kv.entry_format import Head, decode_head, decode_header, encode_head
from inference.worker.steps import StoredSequence

KEY: Mapping[str, Any] = {"files": [["tiny.gguf", 1, 2]], "kv_type": "f16"}
PLENTY = 2**30


def sequence_of(number: int) -> StoredSequence:
    """The sequence with this number."""
    return StoredSequence(array("i", [number, 1, 2]), "alice", compute_seconds=float(number))


def state_of(number: int) -> bytes:
    """Its state, of up to 3 MiB."""
    chosen = random.Random(number)
    return chosen.randbytes(1000) * chosen.choice((1, 30, 400, 3000))


def put(arena: Arena, number: int, max_bytes: int = PLENTY) -> Region:
    """Writes an entry to an arena."""
    head, sizes = encode_head(sequence_of(number), KEY, len(state_of(number)), [])
    region = arena.allocate(sizes.all_bytes, max_bytes)
    state = state_of(number)
    for at in range(0, len(state), 2**18):  # in pieces, so that a process may be killed between them
        piece = state[at : at + 2**18]
        region.view[sizes.state_at + at : sizes.state_at + at + len(piece)] = piece
    region.view[: len(head)] = head
    arena.commit(region)
    return region


def number_in(region: Region) -> int:
    """The number of a complete entry in a region; its content must be right."""
    head = decode_head(region.view[: decode_header(region.view).state_at])
    return _checked(head, region)


def write(
    tier: DiskTier,
    number: int,
    is_abandoned: Callable[[], bool] = lambda: False,
    key: Mapping[str, Any] = KEY,
    pinned_until: float = 0.0,
) -> list[str]:
    """Writes a file; returns the names of the files that were removed for it."""
    sequence, state = sequence_of(number), state_of(number)
    sequence.pinned_until = pinned_until
    head, sizes = encode_head(sequence, key, len(state), [])
    states = state.ljust(sizes.all_bytes - sizes.state_at, b"\0")
    removed: list[str] = []
    tier.write(sequence, head, memoryview(states), is_abandoned, removed)
    return removed


def read(tier: DiskTier, number: int) -> int:
    """Reads a file and checks its content; returns its number."""
    arena = Arena()
    arena.open()
    region, head = tier.read(sequence_of(number), arena, PLENTY)
    found = _checked(head, region)
    arena.release(region)
    arena.close()
    return found


def _checked(head: Head, region: Region) -> int:
    number = head.sequence.tokens[0]
    sizes = head.sizes
    assert head.sequence.tokens == sequence_of(number).tokens
    assert head.sequence.compute_seconds == number
    assert region.view[sizes.state_at : sizes.state_at + sizes.state_bytes] == state_of(number)
    return number


def _use_arena(handle: int, seed: int) -> None:
    """Adds and removes entries until it is killed; prints `begun` before the first."""
    chosen = random.Random(seed)
    arena = Arena(handle)
    assert arena.open()
    held = {number_in(region): region for region in arena.scan()}
    _begun()
    while True:
        number = seed * 1000 + chosen.randrange(30)
        if number in held:
            arena.release(held.pop(number), spare=chosen.random() < 0.5)
        else:
            held[number] = put(arena, number)
        if chosen.random() < 0.2:
            arena.trim(chosen.choice((0, 2**21)))
        if chosen.random() < 0.2:
            arena.prepare(2**21, 2**22)


def _use_disk(directory: str, max_bytes: int, seed: int) -> None:
    """Writes files until it is killed; prints `begun` before the first."""
    chosen = random.Random(seed)
    tier = DiskTier(Path(directory), KEY, max_bytes)
    _begun()
    while True:
        write(tier, seed * 1000 + chosen.randrange(30))


def _begun() -> None:
    sys.stdout.write("begun\n")
    sys.stdout.flush()


if __name__ == "__main__":
    if sys.argv[1] == "arena":
        _use_arena(int(sys.argv[2]), int(sys.argv[3]))
    else:
        _use_disk(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
