"""A context of llama.cpp: KV cache and compute buffers of a model. It computes batches into logits or vectors."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from inference.protocol import ExitCause
from inference.worker.backend import OK, BatchRow, Decode
from inference.worker.llama import sequence_state
from inference.worker.llama.binding import lib
from inference.worker.llama.llama_model import Model
from inference.worker.llama.llama_process import without_gil_release
from inference.worker.llama.params import POOLING_LAST, POOLING_RANK
from inference.worker.worker_errors import LoadError

_seq_rm = without_gil_release("llama_memory_seq_rm")
_seq_cp = without_gil_release("llama_memory_seq_cp")
_pos_max = without_gil_release("llama_memory_seq_pos_max")
_logits_ith: Any = without_gil_release("llama_get_logits_ith")
_logits_ith.restype = ctypes.c_void_p

WIDEST_GAP = 3
"""llama.cpp computes sequences together only if their numbers are consecutive. If up to
this many other sequences are between two of a batch, one token of each of them is computed too and removed afterwards.
On two cores an additional row of a small model takes a third of the time of an additional pass over its weights; with
larger models or on devices it takes less.
"""

COPIED_PART = 128
"""A copy moves all cells of a sequence. On two cores a copy of N cells took as long as the prefill of N/60 tokens with
15 M parameters, and of N/320 with 135 M. Larger models compute longer per byte of a cell.
"""
MIN_COPIED = 16

CELLS_STEP = 256
"""llama.cpp rounds the cells of sliding-window layers up to a multiple of this."""


class Context:
    """KV cache and compute buffers of a model. Used by one thread only, except for `close` and `use_threads`."""

    def __init__(self, model: Model, params: Any) -> None:
        """Allocates the context; raises LoadError(OOM_LOAD) when llama.cpp returns NULL."""
        self.model = model
        self._adapters: list[Any] = []
        self.handle = lib.llama_init_from_model(model.handle, params)
        if not self.handle:
            raise LoadError(ExitCause.OOM_LOAD, "llama.cpp could not allocate the context")
        self.memory = lib.llama_get_memory(self.handle)
        self.pooling = int(lib.llama_pooling_type(self.handle))
        self.n_ctx = int(lib.llama_n_ctx(self.handle))
        self.n_batch = int(lib.llama_n_batch(self.handle))
        self.n_ubatch = int(lib.llama_n_ubatch(self.handle))
        self.n_slots = int(lib.llama_n_seq_max(self.handle))
        self.n_outputs = int(params.n_outputs_max) or self.n_batch
        """Maximum number of tokens of a batch whose logits can be read."""
        self._logits_row = ctypes.c_float * model.n_vocab
        self._logits_views: dict[int, np.ndarray] = {}
        is_causal = self.memory is not None and bool(lib.llama_get_causal_attn(self.handle))
        shares_cells = bool(params.kv_unified) and self.pooling <= 0 and not lib.llama_model_is_recurrent(model.handle)
        self.cells = int(params.n_ctx) if shares_cells else 0
        """Cells that all sequences share, 0 if each has its own. Copies share the cells of their source."""
        self.n_ctx_seq = self.n_ctx // (1 if params.kv_unified else self.n_slots)
        """The maximum number of cells of one sequence."""
        if params.kv_unified:
            self.n_ctx_seq = min(self.n_ctx, params.context_length)
        self._in_pieces = is_causal and self.pooling in (POOLING_LAST, POOLING_RANK)
        self.pool_tokens = min(self.n_ctx, max(self.n_batch, self.n_ctx_seq))
        if not self._in_pieces:
            self.pool_tokens = min(self.pool_tokens, self.n_ubatch)
        self.can_trim = False
        n_swa = int(lib.llama_model_n_swa(model.handle))
        swa_cells = min(self.n_ctx_seq, n_swa + self.n_ubatch)
        self.window_cells = n_swa if self.cells else -(-swa_cells // CELLS_STEP) * CELLS_STEP
        """Cells that a sequence has at least in sliding-window layers (`llama_kv_cache_iswa`). In a pool, new tokens of
        any sequence take cells that are outside the window of the sequence that has them, even if others are free."""
        self.window = 0 if params.swa_full and not self.cells else n_swa
        """Tokens that sliding-window layers attend to, if they have fewer cells than the context; else 0."""
        if self.window_cells >= self.n_ctx_seq or self.pooling > 0:
            self.window = 0
        self.min_copied = max(MIN_COPIED, (self.window if self.cells else self.n_ctx_seq) // COPIED_PART)
        """The minimum number of tokens that are copied instead of computed."""
        self.checkpoint_bytes = 0
        """The size of a checkpoint: of the states and windows of one sequence. Set by `warm_up`."""
        self._sequence_ids = np.arange(self.n_slots, dtype=np.int32)
        first = self._sequence_ids.ctypes.data
        self._sequence_pointers = [first + 4 * slot for slot in range(self.n_slots)]
        is_mrope = lib.llama_model_rope_type(model.handle) in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)
        self._sections = 4 if is_mrope else 1
        self._width = int(lib.llama_model_n_embd_inp(model.handle))
        size = self.n_batch
        self._tokens = np.zeros(size, np.int32)
        self._positions = np.zeros(size, np.int32)
        self._one_each = np.ones(size, np.int32)
        self._owners = np.zeros(size, np.uint64)
        self._wanted = np.zeros(size, np.int8)
        self._batch = lib.llama_batch(
            n_tokens=0,
            token=self._tokens.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            embd=None,
            pos=self._positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._one_each.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            seq_id=self._owners.ctypes.data_as(ctypes.POINTER(ctypes.POINTER(ctypes.c_int32))),
            logits=self._wanted.ctypes.data_as(ctypes.POINTER(ctypes.c_int8)),
        )

    @property
    def output_bytes(self) -> int:
        """Host memory for the outputs of the largest batch.

        llama.cpp allocates it with the first such batch and does not report it: a row of logits per output token, or
        with pooling a row of logits and one of the embedding per token (`llama_context::output_reserve`).
        """
        if self.pooling > 0:
            return self.n_ubatch * (self.model.n_vocab + self.model.n_embd) * 4
        return self.n_outputs * self.model.n_vocab * 4

    def use_threads(self, count: int) -> None:
        """Sets the maximum number of threads from the next step on; may be called while a step runs."""
        lib.llama_set_n_threads(self.handle, count, count)

    def close(self) -> None:
        """Frees the KV cache and the compute buffers."""
        lib.llama_free(self.handle)

    def apply_lora(self, paths: Sequence[str]) -> None:
        """Loads the adapters and applies all of them with scale 1.0.

        Raises LoadError with the path of the adapter that failed: OOM_LOAD if llama.cpp returns NULL; its log has the
        reason.
        """
        if not paths:
            return
        adapters = []
        for path in paths:
            adapter = lib.llama_adapter_lora_init(self.model.handle, path.encode())
            if not adapter:
                raise LoadError(
                    ExitCause.OOM_LOAD,
                    f"the LoRA adapter {path} cannot be applied to this model, or there is no memory for it",
                )
            if lib.llama_adapter_get_alora_n_invocation_tokens(adapter) > 0:
                raise LoadError(
                    ExitCause.STARTUP,
                    f"the LoRA adapter {path} needs invocation tokens (aLoRA), which are not supported; use an adapter "
                    "that is always active",
                )
            adapters.append(adapter)
        self._use(adapters)

    def inherit(self, before: Context) -> None:
        """Copies the adapters and the results of `warm_up` from an earlier context of the same model."""
        if before._adapters:
            self._use(before._adapters)
        self.can_trim, self.checkpoint_bytes = before.can_trim, before.checkpoint_bytes

    def _use(self, adapters: list[Any]) -> None:
        self._adapters = adapters
        handles = (lib.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
        scales = (ctypes.c_float * len(adapters))(*([1.0] * len(adapters)))
        if lib.llama_set_adapters_lora(self.handle, handles, len(adapters), scales) != 0:
            raise LoadError(ExitCause.STARTUP, "llama.cpp rejected the LoRA adapters")

    def remove(self, slot: int, start: int = 0) -> bool:
        """Removes the tokens of `slot` from position `start` on; False if a part of a sequence cannot be removed."""
        return self.memory is None or bool(_seq_rm(self.memory, slot, start, -1))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copies the first `count` tokens of `source` to the empty slot `target`.

        If each sequence has its own cells, llama.cpp copies only whole sequences (it asserts that), and the data moves
        at the beginning of the next step. In a pool the copy shares the cells and is complete at once. It gets its own
        cells in sliding-window layers, because llama.cpp never takes shared ones for new tokens, and they would run
        out.
        """
        if not self.cells:
            _seq_cp(self.memory, source, target, -1, -1)
            _seq_rm(self.memory, target, count, -1)
            return
        _seq_cp(self.memory, source, target, 0, count)
        state = self.save(target) if self.window else None
        if state is not None and not self.restore(target, state, count):
            _seq_cp(self.memory, source, target, 0, count)

    def save(self, slot: int) -> np.ndarray | None:
        """The recurrent state and the window cells of `slot`, for `restore`; None if that fails, as without memory."""
        try:
            state = np.empty(sequence_state.count_bytes(self.handle, slot, partial=True), np.uint8)
        except MemoryError:
            return None
        return state if sequence_state.read(self.handle, slot, state.ctypes.data, state.size, partial=True) else None

    def restore(self, slot: int, state: np.ndarray, count: int) -> bool:
        """Puts back a `state` of the first `count` tokens of `slot`, and removes the others; False empties the slot."""
        taken = sequence_state.write(self.handle, slot, state.ctypes.data, state.size, partial=True)
        if taken == state.size and self.remove(slot, count) and _pos_max(self.memory, slot) == count - 1:
            return True
        self.remove(slot)
        return False

    def decode(self, rows: Sequence[BatchRow], *, every: bool = False) -> tuple[Decode, list[int]]:
        """Computes `rows` as one batch. Returns the status and the batch index of the last token of each row.

        Rows must be in the order of their slots, so that llama.cpp computes them together. `every`: compute outputs for
        all tokens, as pooling needs. Token ids and lengths must be valid, because llama.cpp asserts on some invalid
        ones. A batch with more outputs than reserved returns BAD_BATCH, because llama.cpp would assert.
        """
        gap = self._gap(rows) if self.can_trim and not self.window and not self.cells and len(rows) > 1 else []
        if not gap:
            return self._decode(rows, every)
        together = sorted([*rows, *gap], key=_slot_of)
        status, last = self._decode(together, every)
        for row in gap:
            _seq_rm(self.memory, row.slot, row.start, -1)
        if status is Decode.NO_ROOM:  # a gap slot may be full: images have more cells than positions
            return self._decode(rows, every)
        return status, [index for row, index in zip(together, last, strict=False) if row not in gap]

    def _gap(self, rows: Sequence[BatchRow]) -> list[_Row]:
        """One token for each sequence in gaps of up to WIDEST_GAP between the sequences of a decoding step."""
        gap: list[_Row] = []
        if rows[-1].slot - rows[0].slot < len(rows) or any(len(row.tokens) != 1 for row in rows):
            return gap
        for before, after in itertools.pairwise(rows):
            slots = range(before.slot + 1, after.slot)
            starts = [_pos_max(self.memory, slot) + 1 for slot in slots[: WIDEST_GAP + 1]]
            if len(starts) <= WIDEST_GAP and all(start < self.n_ctx_seq for start in starts):
                gap += [_Row(slot, start, rows[0].tokens, False) for slot, start in zip(slots, starts, strict=True)]
        return gap

    def _decode(self, rows: Sequence[BatchRow], every: bool) -> tuple[Decode, list[int]]:
        tokens, positions, owners, wanted = self._tokens, self._positions, self._owners, self._wanted
        pointers = self._sequence_pointers
        last: list[int] = []
        at = 0
        for row in rows:
            count = len(row.tokens)
            end = at + count
            if count == 1:  # a decoding row
                tokens[at], positions[at], owners[at] = row.tokens[0], row.start, pointers[row.slot]
                wanted[at] = row.sample or row.every or every
            else:
                tokens[at:end] = row.tokens
                positions[at:end] = np.arange(row.start, row.start + count, dtype=np.int32)
                owners[at:end] = pointers[row.slot]
                wanted[at:end] = row.every or every
                wanted[end - 1] |= row.sample
            last.append(end - 1)
            at = end
        if not every and at > self.n_outputs and np.count_nonzero(wanted[:at]) > self.n_outputs:
            return Decode.BAD_BATCH, []
        self._batch.n_tokens = at
        return self._compute(self._batch), last

    def decode_image(self, slot: int, positions: np.ndarray, rows: np.ndarray, *, non_causal: bool) -> Decode:
        """Computes the embeddings `rows` (float32) of an image as cells of `slot`, without logits.

        `positions` (int32) has one section, or four with M-RoPE. An image with `non_causal` attention must fit into a
        physical batch. Returns BAD_BATCH for an image that does not fit, because llama.cpp would assert.
        """
        count = len(rows)
        if count > (self.n_ubatch if non_causal else self.n_batch) or rows.shape[1] != self._width:
            return Decode.BAD_BATCH
        if self._sections > 1 and positions.ndim == 1:
            positions = np.stack([positions, *[np.zeros_like(positions)] * (self._sections - 1)])
        positions = np.ascontiguousarray(positions, np.int32)
        self._owners[:count] = self._sequence_pointers[slot]
        self._wanted[:count] = 0
        batch = lib.llama_batch(
            n_tokens=count,
            token=None,
            embd=rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float)),
            pos=positions.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            n_seq_id=self._batch.n_seq_id,
            seq_id=self._batch.seq_id,
            logits=self._batch.logits,
        )
        if non_causal:
            lib.llama_set_causal_attn(self.handle, False)
        try:
            return self._compute(batch)
        finally:
            if non_causal:
                lib.llama_set_causal_attn(self.handle, True)

    def _compute(self, batch: Any) -> Decode:
        """Computes a batch and waits for its end.

        On a device `llama_decode` returns earlier, and the first call that reads outputs waits. These calls hold the
        GIL, so all threads of the process would wait with it.
        """
        if code := lib.llama_decode(self.handle, batch):
            return Decode(code)
        lib.llama_synchronize(self.handle)
        return OK

    def pool(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[np.ndarray]]:
        """Computes complete inputs with at most `pool_tokens` tokens in total, and empties the memory.

        Returns one vector per row: the embedding, or the outputs of the classification head of a reranker. Models with
        causal attention that pool the last token compute inputs in pieces of a physical batch. Raises ValueError for
        more tokens, because llama.cpp would abort the process.
        """
        if sum(len(row.tokens) for row in rows) > self.pool_tokens:
            raise ValueError(f"a batch of a pooling model holds at most {self.pool_tokens} tokens")
        self.forget_all()
        size = self.model.n_scores if self.pooling == POOLING_RANK else self.model.n_embd
        vectors = []
        for pieces in _in_pieces(rows, self.n_ubatch) if self._in_pieces else [[(row, True) for row in rows]]:
            status, _last = self.decode([piece for piece, _ends in pieces], every=True)
            if status is not OK:
                return status, []
            for piece, ends in pieces:
                if ends:
                    pointer = lib.llama_get_embeddings_seq(self.handle, piece.slot)
                    vectors.append(np.ctypeslib.as_array(pointer, shape=(size,)).copy())
        self.forget_all()
        return OK, vectors

    def forget_all(self) -> None:
        """Empties the memory."""
        if self.memory is not None:
            lib.llama_memory_clear(self.memory, False)

    def logits(self, index: int) -> np.ndarray:
        """A view of the logits (float32, one per vocabulary entry) at a batch index; valid until the next decode.

        Raises LookupError if no logits were computed there.
        """
        address = _logits_ith(self.handle, index)
        if address is None:
            raise LookupError(f"the last batch has no logits at {index}")
        view = self._logits_views.get(address)
        if view is None:  # rows keep their addresses; creating a view is slower than a lookup
            view = self._logits_views[address] = np.ctypeslib.as_array(self._logits_row.from_address(address))
        return view

    def warm_up(self) -> None:
        """Computes one step before the first request, so that lazy allocations fail here; raises LoadError.

        Sets `can_trim`: whether the end of a sequence can be removed, which is impossible with recurrent states.
        """
        token = self.model.bos if self.model.bos is not None else 0
        many = 2 if self.pooling > 0 else min(self.n_outputs, self.n_ctx_seq)
        row = _Row(0, 0, (token,) * many, every=self.pooling <= 0)
        status = self.pool([row])[0] if self.pooling > 0 else self.decode([row])[0]
        if self.pooling <= 0 and (self.window or self.model.has_recurrent_state):
            size = sequence_state.count_bytes(self.handle, 0, partial=True)
            self.checkpoint_bytes = size * self.window // many if self.window else size
        self.can_trim = self.pooling <= 0 and not self.model.has_recurrent_state and self.remove(0, 1)
        self.forget_all()
        if status is not OK:
            raise LoadError(
                ExitCause.OOM_COMPUTE, f"llama.cpp could not compute the first step ({status.name.lower()})"
            )


@dataclass(frozen=True, slots=True)
class _Row:
    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = True
    every: bool = False


def _slot_of(row: BatchRow) -> int:
    return row.slot


def _in_pieces(rows: Sequence[BatchRow], size: int) -> Iterator[list[tuple[BatchRow, bool]]]:
    """Divides `rows` into batches of at most `size` tokens. Yields each piece with whether it ends its row."""
    batch: list[tuple[BatchRow, bool]] = []
    room = size
    for row in rows:
        at = 0
        while at < len(row.tokens):
            count = min(room, len(row.tokens) - at)
            piece = _Row(row.slot, row.start + at, row.tokens[at : at + count])
            at += count
            room -= count
            batch.append((piece, at == len(row.tokens)))
            if room == 0:
                yield batch
                batch, room = [], size
    if batch:
        yield batch
