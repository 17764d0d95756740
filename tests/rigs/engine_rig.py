"""A real llama.cpp context with its engine in this process, run step by step in the calling thread."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.shared.parameters import Sampling
from inference.file_stamp import fingerprint
from inference.worker import llama
from inference.worker.answers.generation import Output
from inference.worker.assembly import limits_of, speculation_of
from inference.worker.backend import Constraint
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Delivery
from inference.worker.kv.sequence_key import file_keys
from inference.worker.kv.tiered_store import TieredStore, open_store
from inference.worker.llama.llama_process import LogTail
from inference.worker.loading import Loaded, load
from inference.worker.sampling import ChainSampler
from tests.rigs.table_backend import EagerSpeculation
from tests.rigs.worker_rig import grant_for

GREEDY = Sampling(temperature=0.0)


class Mailbox:
    """Replaces a ticket: a reader that reads at once, or never."""

    def __init__(self) -> None:
        self.gone = False
        self.progress: object = None
        self.sent = self.read = 0
        self.stalled = False
        self.on_room: object = None
        self.restored: list[object] = []
        self.begun_at: float | None = None
        self.prefilled_at: float | None = None


@dataclass(repr=False)
class EngineRig:
    """The engine runs in the calling thread: `answer` runs it until all requests ended."""

    loaded: Loaded
    engine: Engine
    store: TieredStore | None = None
    delivered: list[Delivery] = field(default_factory=list)

    @property
    def model(self) -> llama.Model:
        """The open model."""
        return self.loaded.model

    @property
    def context(self) -> llama.Context:
        """Its context."""
        return self.loaded.context

    def ask(self, prompt: list[int], **changes: Any) -> Mailbox:
        """Submits one prompt, by default greedy with eight tokens."""
        work: dict[str, Any] = {"prompts": [prompt], "n": 1, "sampling": GREEDY, "max_tokens": 8}
        ticket = Mailbox()
        self.engine.submit(Work(**{**work, **changes}), ticket)  # type: ignore[arg-type]
        return ticket

    def run(self) -> None:
        """Runs until nothing is left."""
        deadline = time.monotonic() + 60.0
        while self.engine._iterate() or self.engine._scheduler.has_work:
            assert time.monotonic() < deadline

    def outputs(self, ticket: Mailbox) -> list[Output]:
        """All outputs of the ticket."""
        return [output for owner, output in self.delivered if owner is ticket]  # type: ignore[comparison-overlap]

    def answer(self, prompt: list[int], **changes: Any) -> list[Output]:
        """All outputs of one prompt."""
        ticket = self.ask(prompt, **changes)
        self.run()
        return self.outputs(ticket)


@contextlib.contextmanager
def engine_rig(
    path: Path,
    *,
    clock: Callable[[], float] = time.monotonic,
    is_eager: bool = False,
    **changes: Any,
) -> Iterator[EngineRig]:
    """Opens `path` like a worker (`changes` apply to its grant), without serving it. `kv` opens a store as well.

    `is_eager`: all proposals that fit into a step are verified.
    """
    start()
    grant = grant_for(path, **changes)
    loaded = load(grant, LogTail(lambda _line: None), lambda _fraction: True)
    model, context = loaded.model, loaded.context
    limits = limits_of(loaded, grant)
    has_store = grant.kv.ram_bytes > 0 or grant.kv.directory is not None
    store = open_store(context, grant, file_keys(fingerprint(path)), None, lambda: None) if has_store else None
    delivered: list[Delivery] = []

    def sampler(sampling: Sampling, choice: int, _constraint: Constraint | None) -> ChainSampler:
        return ChainSampler(model, context, sampling, choice)

    speculation = speculation_of(grant, limits, loaded.draft, clock)
    if is_eager and speculation is not None:
        speculation = EagerSpeculation(speculation._source)
    engine = Engine(context, model, sampler, limits, delivered.extend, print, clock, store, speculation)
    try:
        yield EngineRig(loaded, engine, store, delivered)
    finally:
        if store is not None:
            store.close(30.0)
        for each in loaded.contexts:
            each.close()
        model.close()
        if loaded.draft is not None:
            loaded.draft.model.close()


@functools.cache
def start() -> None:
    """Initializes llama.cpp in this process, once."""
    llama.start(LogTail(lambda _line: None))
