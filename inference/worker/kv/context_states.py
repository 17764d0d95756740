"""Copies the states of sequences between the slots of a context and host memory."""

from __future__ import annotations

import numpy as np

from inference.worker import llama
from inference.worker.llama import sequence_state
from inference.worker.llama.binding import lib


class ContextStates:
    """The slots of a context. States are arrays of uint8.

    A state may come from a context with another number of slots; it is then converted.
    """

    def __init__(self, context: llama.Context) -> None:
        model = context.model
        self._context = context
        self._has_window = int(lib.llama_model_n_swa(model.handle)) > 0
        self._has_partial = self._has_window or model.has_recurrent_state
        self._has_attention = not lib.llama_model_is_recurrent(model.handle)
        self._streams = 0
        self.can_trim = context.can_trim and not context.window
        """Whether a longer sequence can always be used in place of its beginning."""

    def trim(self, slot: int, count: int) -> bool:
        """Removes surplus cells of a slot; returns whether it then holds exactly `count` tokens."""
        if self._last(slot) >= count:
            self._context.remove(slot, count)
        return self._last(slot) == count - 1

    def measure(self, slot: int) -> tuple[int, int]:
        """The size of the state of a slot in bytes, and where the part begins that a checkpoint has (0: nowhere)."""
        handle = self._context.handle
        partial_at = sequence_state.partial_at(handle, slot) if self._has_partial else 0
        return sequence_state.count_bytes(handle, slot), partial_at

    def read(self, slot: int, target: np.ndarray) -> bool:
        """Copies the state of a slot to `target`, which has its size; returns False if llama.cpp does not."""
        return sequence_state.read(self._context.handle, slot, target.ctypes.data, target.size) == target.size

    def write(self, slot: int, state: np.ndarray, partial_at: int, count: int) -> bool:
        """Restores a state of `count` tokens into an empty slot; it is empty again if llama.cpp rejects the state."""
        if self._is_other(slot, state):
            state = sequence_state.with_streams(state, self._streams, partial_at, second_has_streams=self._has_window)
        taken = sequence_state.write(self._context.handle, slot, state.ctypes.data, state.size)
        if taken == state.size and self._last(slot) == count - 1:
            return True
        self._context.remove(slot)
        return False

    def checkpoint(self, state: np.ndarray) -> np.ndarray:
        """A copy of the state of a checkpoint that this context can restore."""
        if self._has_window and self._streams != sequence_state.streams(state):
            return sequence_state.with_streams(state, self._streams)
        return state.copy()

    def _is_other(self, slot: int, state: np.ndarray) -> bool:
        """Whether a state comes from a context with another number of streams. `slot` is empty."""
        if not self._has_attention:
            return False
        self._streams = self._streams or sequence_state.empty_streams(self._context.handle, slot)
        return self._streams != sequence_state.streams(state)

    def _last(self, slot: int) -> int:
        return sequence_state.bounds(self._context.memory, slot)[1]
