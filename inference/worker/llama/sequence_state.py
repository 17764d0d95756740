"""Copies the state of a sequence to host memory and back. `context` and `memory` are handles of llama.cpp.

The copies always go through the host, because copies of llama.cpp that stay on a device can abort the process.
`partial` is the part that llama.cpp cannot trim: recurrent states, and the window cells of sliding-window layers.
"""

from __future__ import annotations

import ctypes
from typing import Any

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
