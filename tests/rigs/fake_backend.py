"""A llama.cpp that computes nothing: it checks positions like the real one and returns what tests set."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from headgate.shared.parameters import Sampling
from inference.worker.backend import BatchRow, Constraint, Decode

END = 256


class ByteVocabulary:
    """Every byte is a token; 256 ends."""

    end_tokens = frozenset({END})
    message_tokens = np.array([], np.int32)

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The byte itself."""
        return b"" if token >= END else bytes([token])


@dataclass
class FakeBackend:
    """`held` are the tokens of each slot. `fates` are outcomes of the next decodes, then all is OK; an exception among
    them is raised. `gate`, when set, holds every decode until it is released.
    """

    can_trim: bool = True
    slots: int = 8
    fates: deque[Decode | BaseException] = field(default_factory=deque)
    gate: threading.Semaphore | None = None
    held: list[list[int]] = field(default_factory=list)
    batches: list[list[tuple[int, int, int]]] = field(default_factory=list)
    entered: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.held = [[] for _ in range(self.slots)]

    def remove(self, slot: int, start: int = 0) -> bool:
        """Removes a tail."""
        del self.held[slot][start:]
        return True

    def copy(self, source: int, target: int, count: int) -> None:
        """Shares a head."""
        self.held[target] = self.held[source][:count]

    def save(self, slot: int) -> list[int]:
        """The tokens."""
        return self.held[slot][:]

    def restore(self, slot: int, state: list[int], count: int) -> bool:
        """Returns to the first `count` tokens, whose state is `state`."""
        assert state == self.held[slot][:count], "the state of other tokens"
        del self.held[slot][count:]
        return True

    def decode(self, rows: Sequence[BatchRow]) -> tuple[Decode, list[int]]:
        """Checks positions and takes the tokens."""
        self.entered.set()
        if self.gate is not None and not self.gate.acquire(timeout=20):
            raise AssertionError("the step was not released")
        fate = self.fates.popleft() if self.fates else Decode.OK
        if isinstance(fate, BaseException):
            raise fate
        if fate is not Decode.OK:
            return fate, []
        last = []
        at = -1
        for row in rows:
            assert row.start == len(self.held[row.slot]), "inconsistent positions"
            self.held[row.slot] += row.tokens
            at += len(row.tokens)
            last.append(at)
        self.batches.append([(row.slot, row.start, len(row.tokens)) for row in rows])
        return Decode.OK, last

    def logits(self, index: int) -> np.ndarray:
        """The same for every token."""
        return np.zeros(END + 1, np.float32)


@dataclass
class FakeSampler:
    """Samples the letters of `say` in turn, then ends."""

    say: bytes
    fails_at: int = -1
    closed: int = 0
    drawn: int = 0

    def sample(self, index: int) -> int:
        """The next letter."""
        if self.drawn == self.fails_at:
            raise RuntimeError("the sampler is broken")
        self.drawn += 1
        return self.say[self.drawn - 1] if self.drawn <= len(self.say) else END

    def accept(self, tokens: Sequence[int]) -> None:
        """Letters that were sampled elsewhere."""
        self.drawn += len(tokens)

    def close(self) -> None:
        """Must happen exactly once."""
        self.closed += 1


@dataclass
class SamplerShop:
    """Creates fake samplers and records them. Seed 666: one that fails at its second token; 667: ValueError."""

    say: bytes = b"abcdefgh"
    made: list[FakeSampler] = field(default_factory=list)

    def __call__(self, sampling: Sampling, choice: int, constraint: Constraint | None = None) -> FakeSampler:
        """A sampler for one choice."""
        if sampling.seed == 667:
            raise ValueError("no such sampler")
        if constraint is not None:
            constraint.start()
        self.made.append(FakeSampler(self.say, 1 if sampling.seed == 666 else -1))
        return self.made[-1]
