"""Saves the sequences of a context to memory that outlives it, and restores them.

The memory starts with a mark, which is written last, and a table in JSON. Tokens and states follow. The memory may
outlive the process that wrote it (the inference service holds the descriptor too), so the table also contains all
properties that must be equal when the states are restored. Nothing is written to a disk.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import struct
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.worker import llama
from inference.worker.kv.saved_sequences import Retained, chosen, differing
from inference.worker.llama import sequence_state
from inference.worker.llama.binding import lib
from inference.worker_link import Grant

log = logging.getLogger("headgate.worker.offload")

_MARK = b"HGKEPT01"
_HEAD = struct.Struct("<8sQ")
_ALIGNED = 64
_TABLE_BYTES = 4096
"""Size of the table without its entries for sequences."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The size of the saved sequences."""

    count_bytes: int = 0
    sequences: int = 0
    tokens: int = 0


class SequenceStore:
    """Memory for saved sequences: a shared descriptor, or private memory of this process."""

    def __init__(self, handle: int | None = None) -> None:
        self._handle = handle
        self._own: mmap.mmap | None = None

    def make(self, size: int) -> mmap.mmap:
        """Replaces the memory with `size` empty bytes."""
        self.clear()
        if self._handle is None:
            self._own = mmap.mmap(-1, size)
            return self._own
        os.ftruncate(self._handle, size)
        return mmap.mmap(self._handle, size)

    def open(self) -> mmap.mmap | None:
        """The memory, None if it is empty."""
        if self._handle is None:
            return self._own
        size = os.fstat(self._handle).st_size
        return mmap.mmap(self._handle, size) if size else None

    def clear(self) -> None:
        """Frees the memory."""
        if self._handle is not None:
            os.ftruncate(self._handle, 0)
        elif self._own is not None:
            self._own.close()
            self._own = None


def key(grant: Grant, file: Sequence[int]) -> dict[str, Any]:
    """The properties that must be equal for a state to be valid. `file` is the `stamp` of the weights."""
    return {
        "file": list(file),
        "lora": [[path, *stamp(path)] for path in grant.lora],
        "kv_type": grant.kv_type,
        "flash_attention": grant.flash_attention,
        "context_length": grant.context_length,
        "parallel": grant.parallel,
        "swa_full": grant.swa_full,
        "library": list(stamp(lib._lib._name)),
    }


def stamp(path: str | int) -> tuple[int, int, int]:
    """Size, modification time in ns and inode of a file; (0, 0, 0) if there is none."""
    try:
        status = os.fstat(path) if isinstance(path, int) else Path(path).stat()
    except OSError:
        return 0, 0, 0
    return status.st_size, status.st_mtime_ns, status.st_ino


def save(
    context: llama.Context,
    retained: Sequence[Retained],
    store: SequenceStore,
    most_bytes: int,
    under: Mapping[str, Any],
) -> Saved:
    """Copies the sequences of `retained` that fit in `most_bytes` into `store`. No other thread may use the context.

    Sequences with images are skipped, because the numbers of images are valid in this process only. Sequences with
    more cells than tokens are skipped if the surplus cells cannot be removed.
    """
    sound = [item for item in retained if _is_text(item) and _fits_tokens(context, item)]
    sizes = {
        item.slot: _rounded(sequence_state.count_bytes(context.handle, item.slot)) + _rounded(4 * len(item.tokens))
        for item in sound
    }
    overhead = _rounded(_TABLE_BYTES + 512 * len(sound) + sum(len(item.tenant) * 6 for item in sound))
    wanted = chosen(sound, sizes, most_bytes - overhead)
    if not wanted:
        store.clear()
        return Saved()
    total = overhead + sum(sizes[item.slot] for item in wanted)
    memory = store.make(total)
    table: list[dict[str, Any]] = []
    at = overhead
    with _Address(memory) as address:
        for item in wanted:
            tokens_at, state_at = at, at + _rounded(4 * len(item.tokens))
            memory[tokens_at : tokens_at + 4 * len(item.tokens)] = item.tokens.tobytes()
            size = sequence_state.read(context.handle, item.slot, address + state_at, at + sizes[item.slot] - state_at)
            at += sizes[item.slot]
            if size:
                table.append(
                    {
                        "slot": item.slot, "tenant": item.tenant, "tokens_at": tokens_at, "tokens": len(item.tokens),
                        "state_at": state_at, "state_bytes": size,
                    }
                )  # fmt: skip
    text = json.dumps({"under": dict(under), "sequences": table}).encode()
    if len(text) + _HEAD.size > overhead:
        store.clear()
        return Saved()
    memory[_HEAD.size : _HEAD.size + len(text)] = text
    memory[: _HEAD.size] = _HEAD.pack(_MARK, len(text))
    return Saved(total, len(table), sum(row["tokens"] for row in table))


def restore(context: llama.Context, store: SequenceStore, under: Mapping[str, Any]) -> list[Retained]:
    """Restores saved sequences, oldest first. Sequences that do not match are skipped and logged."""
    memory = store.open()
    if memory is None or len(memory) < _HEAD.size:
        return []
    mark, length = _HEAD.unpack(memory[: _HEAD.size])
    if mark != _MARK:
        log.warning("no sequences restored: saving them was interrupted")
        return []
    kept = json.loads(memory[_HEAD.size : _HEAD.size + length])
    if names := differing(kept["under"], under):
        log.warning("no sequences restored: changed since they were saved: %s", ", ".join(names))
        return []
    found = []
    with _Address(memory) as address:
        for row in reversed(kept["sequences"]):
            tokens = array("i")
            tokens.frombytes(memory[row["tokens_at"] : row["tokens_at"] + 4 * row["tokens"]])
            taken = sequence_state.write(context.handle, row["slot"], address + row["state_at"], row["state_bytes"])
            last = sequence_state.bounds(context.memory, row["slot"])[1]
            if taken != row["state_bytes"] or last != row["tokens"] - 1:
                log.warning("sequence not restored: tokens=%d", row["tokens"])
                context.remove(row["slot"])
                continue
            found.append(Retained(row["slot"], tokens, row["tenant"]))
    return found


def _is_text(item: Retained) -> bool:
    """Whether the sequence is not empty and has no image (negative token numbers)."""
    return min(item.tokens, default=-1) >= 0


def _fits_tokens(context: llama.Context, item: Retained) -> bool:
    """Removes surplus cells; returns whether the sequence then holds exactly its tokens."""
    if sequence_state.bounds(context.memory, item.slot)[1] >= len(item.tokens):
        context.remove(item.slot, len(item.tokens))
    return sequence_state.bounds(context.memory, item.slot)[1] == len(item.tokens) - 1


def _rounded(count: int) -> int:
    return -(-count // _ALIGNED) * _ALIGNED


class _Address:
    """The address of mapped memory; the mapping cannot be closed inside the `with` block."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def __enter__(self) -> int:
        self._view = ctypes.c_char.from_buffer(self._memory)
        return ctypes.addressof(self._view)

    def __exit__(self, *_error: object) -> None:
        del self._view
