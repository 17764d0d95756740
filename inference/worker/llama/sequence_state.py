"""What one sequence of a context holds, as bytes in host memory, and back; decides nothing.

Plain copies through the host, whatever device the cells are on: llama.cpp's copies that stay on a device can abort.
"""

from __future__ import annotations

import ctypes

from inference.worker.llama.binding import lib
from inference.worker.llama.context import Context

_BYTES = ctypes.POINTER(ctypes.c_uint8)


def count_bytes(context: Context, slot: int) -> int:
    """How many bytes `read` will write for that sequence."""
    return int(lib.llama_state_seq_get_size(context.handle, slot))


def read(context: Context, slot: int, address: int, room_bytes: int) -> int:
    """Writes the sequence's state to memory at `address`; the bytes written, 0 when they do not fit."""
    return int(lib.llama_state_seq_get_data(context.handle, ctypes.cast(address, _BYTES), room_bytes, slot))


def write(context: Context, slot: int, address: int, held_bytes: int) -> int:
    """Puts a state that `read` wrote into the sequence, which must be empty; the bytes taken, 0 when it is refused."""
    return int(lib.llama_state_seq_set_data(context.handle, ctypes.cast(address, _BYTES), held_bytes, slot))


def bounds(context: Context, slot: int) -> tuple[int, int]:
    """First and last position that the sequence holds; (-1, -1) for an empty one."""
    first = int(lib.llama_memory_seq_pos_min(context.memory, slot))
    return first, int(lib.llama_memory_seq_pos_max(context.memory, slot))
