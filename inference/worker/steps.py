"""Data of the scheduler: jobs, limits, stored sequences, steps and the phases of a job."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from headgate.shared.kv_hint import KvHint
from inference.protocol import Priority

PRIORITY_OFFSET_SECONDS: Mapping[Priority, float] = {Priority.HIGH: 0.0, Priority.NORMAL: 10.0, Priority.LOW: 60.0}
"""Offset added to the arrival time in the order of service. It is constant, so that no priority starves."""


class Phase(StrEnum):
    """The state of a job."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    ENDED = "ended"


WAITING, PREFILL, DECODE, ENDED = Phase
"""Module constants, because Python 3.11 looks up enum members slowly and each step needs them once per sequence."""

TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (WAITING, "admit"): PREFILL,
    (WAITING, "end"): ENDED,
    (PREFILL, "computed"): DECODE,
    (PREFILL, "preempt"): WAITING,
    (PREFILL, "end"): ENDED,
    (DECODE, "preempt"): WAITING,
    (DECODE, "end"): ENDED,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of an engine: `slots` sequences of at most `context` tokens, `batch` tokens per step, `queue` waiting jobs.

    `cells`: the size of the pool of cells that the sequences share, at least `context`; 0 if each has its own.
    `can_trim`: the end of a slot can be removed and its beginning copied (not possible with recurrent states).
    `outputs`: tokens per step whose logits can be read, at least one per slot; 0 means one per slot.
    `min_copied`: the minimum number of tokens that are copied from another slot instead of computed.
    `prefetched`: the maximum number of waiting jobs, beyond those that get a slot, whose sequences are read from disk.
    `threshold`: the share of slots in use from which on retained sequences are stored while others run.
    `window`: tokens that sliding-window layers attend to; 0 if all layers keep all tokens. `window_cells`: cells of a
    slot in these layers. `checkpoints`: the most checkpoints of a slot, at least `checkpoint_gap` tokens apart and in a
    prompt at most `checkpoint_tokens`.
    """

    slots: int
    context: int
    batch: int
    queue: int
    can_trim: bool = True
    outputs: int = 0
    min_copied: int = 1
    window: int = 0
    window_cells: int = 0
    checkpoints: int = 0
    checkpoint_tokens: int = 2048
    checkpoint_gap: int = 16
    """Computing so few tokens again costs less than a checkpoint."""
    prefetched: int = 0
    threshold: float = 1.0
    cells: int = 0
    answer_cells: int = 32
    """Cells of a pool that are kept for the answer of each job when a further job gets a slot."""

    def __post_init__(self) -> None:
        fits = 0 < self.slots <= self.batch and self.context > 0 and self.min_copied > 0
        fits = fits and (self.cells == 0 or self.cells >= self.context)
        fits = (
            fits
            and self.window <= self.window_cells
            and self.checkpoints >= 0 < self.checkpoint_gap <= self.checkpoint_tokens
        )
        if not (fits and self.queue >= 0 and (self.outputs == 0 or self.outputs >= self.slots)):
            raise ValueError(f"invalid limits of an engine: {self}")


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence to generate. Times are seconds on the caller's clock.

    `deadline`: limit for the first token of the `request`, in any of its jobs. A job without `request` is a request of
    its own. Jobs of one `group` have the same prompt: the first one computes it, the others copy its cells.
    `score`: logits of all prompt tokens are needed, so no prefix is reused and a step computes fewer tokens of it.
    `message_starts`: positions in the prompt at which a message begins, ascending; later prompts often depart there.
    `kv`: what happens to the tokens after the job. `speculates`: tokens may be proposed. `labels`: see `kv.labels`.
    """

    id: int
    prompt: Sequence[int]
    tenant: str = ""
    priority: Priority = Priority.NORMAL
    arrival: float = 0.0
    deadline: float | None = None
    group: int | None = None
    score: bool = False
    request: int | None = None
    message_starts: Sequence[int] = ()
    kv: KvHint | None = None
    speculates: bool = True
    labels: Sequence[str] = ()

    @property
    def key(self) -> tuple[float, int]:
        """Place in the order of service; the smallest comes first."""
        return (self.arrival + PRIORITY_OFFSET_SECONDS[self.priority], self.id)


def sequence_id(tokens: array[int], tenant: str) -> str:
    """A hash that identifies the sequence of a model in all tiers, 32 hexadecimal digits."""
    return hashlib.blake2b(tenant.encode() + b"\0" + tokens.tobytes(), digest_size=16).hexdigest()


@dataclass(slots=True, eq=False)
class StoredSequence:
    """A sequence in host memory, on disk, or both. Times are Unix seconds.

    `checkpoints` are pairs of a position and the first position that the sliding-window layers had there, ascending.
    `compute_seconds`: the estimated time to compute the tokens again. `count_bytes`: the size of its entry.
    `hits`: how often it was loaded. `fetching`: it is being read from disk to host memory. `fetched`: it was read, and
    has not been loaded since. `fetch_seconds`: how long the read took. `wanted`: it will be loaded in the next step.
    `hint`: what the request wants to happen to it. `labels`: labels of the prompts that it begins with, each with the
    number of their tokens.
    """

    tokens: array[int]
    tenant: str
    checkpoints: Sequence[tuple[int, int]] = ()
    priority: Priority = Priority.NORMAL
    used_at: float = 0.0
    pinned_until: float = 0.0
    compute_seconds: float = 0.0
    count_bytes: int = 0
    hits: int = 0
    in_ram: bool = False
    on_disk: bool = False
    fetching: bool = False
    fetched: bool = False
    fetch_seconds: float = 0.0
    wanted: bool = False
    hint: KvHint | None = None
    labels: Mapping[str, int] = field(default_factory=dict)
    _id: str = field(default="", init=False, repr=False)

    @property
    def id(self) -> str:
        """See `sequence_id`. Computed once, so that lists of thousands of sequences take no time of the engine."""
        self._id = self._id or sequence_id(self.tokens, self.tenant)
        return self._id

    @property
    def keeps(self) -> bool:
        """Whether the request asked to keep it, so that others are removed first."""
        return self.hint is not None and self.hint.kind == "keep"


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove the tokens of `slot` from position `start` on."""

    slot: int
    start: int


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the first `count` tokens of `source` to the empty slot `target`."""

    source: int
    target: int
    count: int


@dataclass(slots=True, eq=False)
class Checkpoint:
    """The part of a slot's state that its later tokens overwrite, as it was after `position` tokens.

    `oldest`: the first position that the sliding-window layers still had. `state`: opaque data of the backend; None
    until it is saved, and if the memory for it was missing.
    """

    position: int
    oldest: int = 0
    state: Any = None


@dataclass(frozen=True, slots=True)
class SaveCheckpoint:
    """Fill `checkpoint` with the present state of `slot`."""

    slot: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class RestoreCheckpoint:
    """Go back to `checkpoint` in `slot`, which holds at least its tokens, and remove the tokens behind it."""

    slot: int
    checkpoint: Checkpoint


@dataclass(frozen=True, slots=True)
class Store:
    """Copy the sequence of `slot` with its `checkpoints` to host memory, as `sequence`."""

    slot: int
    sequence: StoredSequence
    checkpoints: Sequence[Checkpoint] = ()


@dataclass(frozen=True, slots=True)
class Load:
    """Copy `sequence` from host memory to the empty `slot`, and fill its `checkpoints`."""

    slot: int
    sequence: StoredSequence
    checkpoints: Sequence[Checkpoint] = ()


@dataclass(frozen=True, slots=True)
class Fetch:
    """Begin to read `sequence` from disk to host memory."""

    sequence: StoredSequence


Operation = Remove | Copy | SaveCheckpoint | RestoreCheckpoint | Store | Load | Fetch


def perform_all(operations: Sequence[Operation], perform: Callable[[Operation], bool]) -> list[int]:
    """Performs memory operations in order; returns the slots that do not hold what they should.

    `perform` returns False if a slot is empty because it could not be restored or loaded. Its later saves and
    restores are left out, and copies of it are not made.
    """
    lost: list[int] = []
    for operation in operations:
        match operation:
            case Copy(source, target) if source in lost:
                lost.append(target)
            case SaveCheckpoint(slot) | RestoreCheckpoint(slot) if slot in lost:
                pass
            case _:
                if not perform(operation):
                    assert isinstance(operation, RestoreCheckpoint | Load)
                    lost.append(operation.slot)
    return lost


class Row(NamedTuple):
    """Tokens of one job to compute, starting at position `start`. A tuple, because each step creates one per sequence.

    `sample`: a token is sampled from the logits of the last token. `every`: the logits of all tokens are needed.
    `proposed`: number of its last tokens that are only proposals; a token is sampled from the logits of each one until
    it differs from the next proposal.
    """

    job: int
    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool
    every: bool = False
    proposed: int = 0


class Candidate(NamedTuple):
    """A decoding job that may get proposals: its slot, all of its tokens, and the maximum number of proposals."""

    job: int
    slot: int
    tokens: array[int]
    most: int


class Step(NamedTuple):
    """Memory operations to run in order, then one batch with its rows in the order of slots.

    Rows hold one token of each decoding job and pieces of prompts; without prompts also proposals. `prefill`: number of
    prompt tokens. `tokens`: number of all tokens. `proposed`: number of proposed tokens. `expired`: jobs that ended
    because of their deadline.
    """

    operations: Sequence[Operation] = ()
    rows: Sequence[Row] = ()
    expired: Sequence[int] = ()
    prefill: int = 0
    tokens: int = 0
    proposed: int = 0
