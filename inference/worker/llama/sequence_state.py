"""Copies the state of a sequence to host memory and back. `context` and `memory` are handles of llama.cpp.

The copies always go through the host, because copies of llama.cpp that stay on a device can abort the process.
`partial` is the part that llama.cpp cannot trim: recurrent states, and the window cells of sliding-window layers.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from inference.worker.llama.binding import lib

_BYTES = ctypes.POINTER(ctypes.c_uint8)


def count_bytes(context: Any, slot: int, *, partial: bool = False) -> int:
    """Size in bytes of the state of a sequence."""
    return int(lib.llama_state_seq_get_size_ext(context, slot, int(partial)))


def read(context: Any, slot: int, address: int, room_bytes: int, *, partial: bool = False) -> int:
    """Copies the state of a sequence to `address`; returns its bytes, 0 if they do not fit into `room_bytes`."""
    target = ctypes.cast(address, _BYTES)
    return int(lib.llama_state_seq_get_data_ext(context, target, room_bytes, slot, int(partial)))


def write(context: Any, slot: int, address: int, held_bytes: int, *, partial: bool = False) -> int:
    """Restores a state from `read`; returns the bytes read, 0 if llama.cpp rejects it.

    A whole state needs an empty sequence, a partial one a sequence that holds at least the same tokens.
    """
    source = ctypes.cast(address, _BYTES)
    return int(lib.llama_state_seq_set_data_ext(context, source, held_bytes, slot, int(partial)))


def bounds(memory: Any, slot: int) -> tuple[int, int]:
    """First and last position of a sequence; (-1, -1) if it is empty."""
    first = int(lib.llama_memory_seq_pos_min(memory, slot))
    return first, int(lib.llama_memory_seq_pos_max(memory, slot))


_HEAD_BYTES = 8
"""A state begins with a mark and the number of its slot, 4 bytes each."""


def partial_at(context: Any, slot: int) -> int:
    """Where the partial state begins in the whole state; 0 if both are equal."""
    at = count_bytes(context, slot) - count_bytes(context, slot, partial=True) + _HEAD_BYTES
    return at if at > _HEAD_BYTES else 0


def streams(state: np.ndarray) -> int:
    """The number of streams of the attention cache with which `state` (uint8) begins."""
    return int.from_bytes(state[_HEAD_BYTES : _HEAD_BYTES + 4].tobytes(), "little")


def empty_streams(context: Any, slot: int) -> int:
    """The number of streams that the attention cache of a context has. `slot` must be empty."""
    state = np.empty(count_bytes(context, slot), np.uint8)
    return streams(state) if read(context, slot, state.ctypes.data, state.size) else 0


def with_streams(state: np.ndarray, count: int, second_at: int = 0, *, second_has_streams: bool = False) -> np.ndarray:
    """A copy of `state` for a context whose attention caches have `count` streams.

    llama.cpp writes the number of cells in each stream, which is 0 for all but that of the slot, and rejects a state
    with another number of streams (`llama_kv_cache::state_write`). `second_at`: where a second part begins, which has
    the same form if it belongs to an attention cache.
    """
    slot = int.from_bytes(state[4:_HEAD_BYTES].tobytes(), "little")
    first = state[_HEAD_BYTES : second_at or state.size]
    second = state[second_at:] if second_at else state[:0]
    parts = [state[:_HEAD_BYTES], *_with_streams(first, slot, count)]
    return np.concatenate([*parts, *(_with_streams(second, slot, count) if second_has_streams else [second])])


def _with_streams(part: np.ndarray, slot: int, count: int) -> list[np.ndarray]:
    before = int.from_bytes(part[:4].tobytes(), "little")
    stream = slot if before > 1 else 0  # a pool is one stream
    cells = part[4 + 4 * stream : part.size - 4 * (before - 1 - stream)]
    head = np.array([count], np.uint32).view(np.uint8)
    return [head, cells, np.zeros(4 * (count - 1), np.uint8)]
