"""A real llama.cpp context whose slots are filled and continued directly, with a store of its sequences."""

from __future__ import annotations

import contextlib
import random
import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from inference.file_stamp import fingerprint
from inference.worker import llama
from inference.worker.backend import OK
from inference.worker.kv.sequence_key import file_keys
from inference.worker.kv.tiered_store import TieredStore, open_store
from inference.worker.llama import sequence_state
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import Loaded, load
from inference.worker.steps import Checkpoint, Row, StoredSequence
from inference.worker_link import Grant, KvTiers
from tests.rigs import tiny_families
from tests.rigs.engine_rig import start
from tests.rigs.worker_rig import grant_for

PLENTY = 2**28


def family(name: str) -> Path:
    """A small model of a family of `tiny_families`."""
    return tiny_families.path(tiny_families.Form(name, layers=3, width=128, heads=4, feed=128))


def random_tokens(seed: int, count: int) -> array[int]:
    """Text tokens that the tiny vocabulary has."""
    chosen = random.Random(seed)
    return array("i", [chosen.randrange(10, 200) for _ in range(count)])


@dataclass(repr=False)
class StoreRig:
    """An open model; `fill` and `go_on` compute in its slots."""

    loaded: Loaded
    grant: Grant

    @property
    def context(self) -> llama.Context:
        """The context of the model."""
        return self.loaded.context

    def fill(self, slot: int, tokens: Sequence[int], checkpoint_every: int = 0, start: int = 0) -> list[Checkpoint]:
        """Computes `tokens` from `start` on; returns the checkpoints that were taken on the way."""
        taken = []
        step = checkpoint_every or self.context.n_batch
        for at in range(start, len(tokens), step):
            self._decode(slot, at, tokens[at : at + step])
            end = at + len(tokens[at : at + step])
            if checkpoint_every:
                oldest = max(0, end - self.context.window) if self.context.window else 0
                taken.append(Checkpoint(end, oldest, self.context.save(slot)))
        return taken

    def go_on(self, slot: int, tokens: Sequence[int], count: int = 12) -> list[int]:
        """The most probable tokens after `tokens`; all but the last token are in the slot."""
        at, token = len(tokens) - 1, tokens[-1]
        answer = []
        for _ in range(count):
            index = self._decode(slot, at, [token])
            token = int(np.argmax(self.context.logits(index)))
            answer.append(token)
            at += 1
        return answer

    def state(self, slot: int) -> bytes:
        """The whole state of a slot."""
        state = np.empty(sequence_state.count_bytes(self.context.handle, slot), np.uint8)
        assert sequence_state.read(self.context.handle, slot, state.ctypes.data, state.size) == state.size
        return state.tobytes()

    def cold(self, tokens: Sequence[int], slot: int = 0) -> list[int]:
        """The continuation of `tokens` without any stored state."""
        self.context.remove(slot)
        self.fill(slot, tokens[:-1])
        answer = self.go_on(slot, tokens)
        self.context.remove(slot)
        return answer

    def _decode(self, slot: int, start: int, tokens: Sequence[int]) -> int:
        status, last = self.context.decode([Row(0, slot, start, tokens, sample=True)])
        assert status is OK
        return last[0]

    @contextlib.contextmanager
    def store(self, keep: int | None = None, ram_bytes: int = PLENTY, **tiers: Any) -> Iterator[OpenStore]:
        """Opens a store for the context."""
        changed = threading.Event()
        grant = replace(self.grant, kv=KvTiers(ram_bytes=ram_bytes, **tiers))
        store = open_store(self.context, grant, file_keys(fingerprint(Path(self.grant.path))), keep, changed.set)
        try:
            yield OpenStore(store, changed, grant.kv)
        finally:
            store.close(30.0)


@dataclass(frozen=True)
class OpenStore:
    """A store, with the event that its background work sets."""

    store: TieredStore
    changed: threading.Event
    tiers: KvTiers

    def save(
        self, slot: int, tokens: array[int], checkpoints: Sequence[Checkpoint] = (), **more: Any
    ) -> StoredSequence:
        """Saves a slot; the sequence is in the catalog."""
        sequence = StoredSequence(tokens, **{"tenant": "", **more})
        assert self.store.add(slot, sequence, checkpoints)
        return sequence

    def found(self, tokens: array[int], tenant: str = "") -> StoredSequence | None:
        """The sequence with these tokens."""
        return self.store.catalog.same(tokens, tenant)

    def wait(self, condition: Any, seconds: float = 20.0) -> None:
        """Runs the store until `condition()` holds."""
        for _ in range(int(seconds / 0.05)):
            self.store.run()
            if condition():
                return
            self.changed.wait(0.05)
            self.changed.clear()
        raise AssertionError(f"not within {seconds:g} s: {condition}")


@contextlib.contextmanager
def store_rig(path: Path, **changes: Any) -> Iterator[StoreRig]:
    """Opens `path` like a worker."""
    start()
    grant = grant_for(path, **{"context_length": 2048, "parallel": 2, "batch": 512, "ubatch": 128, **changes})
    loaded = load(grant, LogTail(lambda _line: None), lambda _fraction: True)
    try:
        yield StoreRig(loaded, grant)
    finally:
        loaded.context.close()
        loaded.model.close()
