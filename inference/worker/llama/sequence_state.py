"""Copies the state of a sequence to host memory and back.

The copies always go through the host, because copies of llama.cpp that stay on a device can abort the process.
"""

from __future__ import annotations

import ctypes

from inference.worker.llama.binding import lib
from inference.worker.llama.context import Context

_BYTES = ctypes.POINTER(ctypes.c_uint8)


def count_bytes(context: Context, slot: int) -> int:
    """Size in bytes of the state of a sequence."""
    return int(lib.llama_state_seq_get_size(context.handle, slot))


def read(context: Context, slot: int, address: int, room_bytes: int) -> int:
    """Copies the state of a sequence to `address`; returns its bytes, 0 if they do not fit into `room_bytes`."""
    return int(lib.llama_state_seq_get_data(context.handle, ctypes.cast(address, _BYTES), room_bytes, slot))


def write(context: Context, slot: int, address: int, held_bytes: int) -> int:
    """Restores a state from `read` into an empty sequence; returns the bytes read, 0 if llama.cpp rejects it."""
    return int(lib.llama_state_seq_set_data(context.handle, ctypes.cast(address, _BYTES), held_bytes, slot))


def bounds(context: Context, slot: int) -> tuple[int, int]:
    """First and last position of a sequence; (-1, -1) if it is empty."""
    first = int(lib.llama_memory_seq_pos_min(context.memory, slot))
    return first, int(lib.llama_memory_seq_pos_max(context.memory, slot))
