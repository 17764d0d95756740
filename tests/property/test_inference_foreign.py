"""Foreign memory and the memory of workers are never confused, whichever worker loads or ends during a reading."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inference.authority.placement.ledger import Account, Ledger, Phase

pytestmark = pytest.mark.unmeasured

CAPACITY = 1000
GPU = "gpu-0"


@dataclass
class Worker:
    """The real use of a worker, beside its booking."""

    booked: int
    used: int = 0


class DeviceMachine(RuleBasedStateMachine):
    """A real device beside the ledger: other programs come and go, workers allocate step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger().open(Account(GPU, CAPACITY, CAPACITY)).observe(GPU, 0, CAPACITY)
        self.foreign = 0
        self.workers: dict[str, Worker] = {}
        self.count = 0
        self.known = 0
        """Foreign use at the last reading without a load or an unload."""

    @property
    def used(self) -> int:
        return self.foreign + sum(worker.used for worker in self.workers.values())

    @property
    def quiet(self) -> bool:
        return all(item.phase is Phase.RESIDENT for item in self.ledger.holdings.values())

    @rule(to=st.integers(0, 600))
    def others(self, to: int) -> None:
        """Another program allocates or frees memory."""
        self.foreign = min(to, CAPACITY - (self.used - self.foreign))

    @rule()
    def read(self) -> None:
        before = self.ledger.balance(GPU).foreign_bytes
        self.ledger = self.ledger.observe(GPU, self.used, CAPACITY - self.used)
        after = self.ledger.balance(GPU).foreign_bytes
        if self.quiet:
            assert after == self.foreign
            self.known = self.foreign
        else:
            assert after >= before, (
                "memory of others cannot be distinguished from memory that a load has not allocated yet"
            )

    @rule(need=st.integers(1, 500))
    def admit(self, need: int) -> None:
        """An admission right after a reading fits beside all bookings, wherever the loads are."""
        self.read()
        if self.ledger.lacks({GPU: need}):
            return
        leaving = self.some(Phase.RELEASING)
        due = sum(worker.used if id in leaving else worker.booked for id, worker in self.workers.items())
        assert self.foreign + due + need <= CAPACITY
        self.count += 1
        self.ledger = self.ledger.reserve(f"w{self.count}", "m", {GPU: need})
        self.workers[f"w{self.count}"] = Worker(need)

    def some(self, *phases: Phase) -> list[str]:
        return [id for id, item in self.ledger.holdings.items() if item.phase in phases]

    @precondition(lambda self: self.some(Phase.RESERVED))
    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    def loads(self, which: int, share: float) -> None:
        ids = self.some(Phase.RESERVED)
        worker = self.workers[ids[which % len(ids)]]
        worker.used = max(worker.used, min(int(worker.booked * share), worker.used + CAPACITY - self.used))

    @precondition(lambda self: self.some(Phase.RESERVED))
    @rule(which=st.integers(0, 9))
    def ready(self, which: int) -> None:
        ids = self.some(Phase.RESERVED)
        id = ids[which % len(ids)]
        worker = self.workers[id]
        if self.used - worker.used + worker.booked <= CAPACITY:  # else others were faster, and the load fails
            worker.used = worker.booked
            self.ledger = self.ledger.commit(id, {GPU: worker.booked})

    @precondition(lambda self: self.some(Phase.RESERVED, Phase.RESIDENT))
    @rule(which=st.integers(0, 9))
    def leaves(self, which: int) -> None:
        ids = self.some(Phase.RESERVED, Phase.RESIDENT)
        self.ledger = self.ledger.leave(ids[which % len(ids)])

    @precondition(lambda self: self.some(Phase.RELEASING))
    @rule(which=st.integers(0, 9), share=st.floats(0, 1))
    def gives_back(self, which: int, share: float) -> None:
        ids = self.some(Phase.RELEASING)
        worker = self.workers[ids[which % len(ids)]]
        worker.used = min(worker.used, int(worker.used * share))

    @precondition(lambda self: self.some(Phase.RELEASING))
    @rule(which=st.integers(0, 9))
    def gone(self, which: int) -> None:
        ids = self.some(Phase.RELEASING)
        id = ids[which % len(ids)]
        del self.workers[id]
        self.ledger = self.ledger.release(id)

    @invariant()
    def foreign_use_is_never_underestimated(self) -> None:
        """Foreign use is at least that of the last quiet reading, and the service's own bytes are its bookings."""
        assert self.ledger.balance(GPU).foreign_bytes >= self.known
        assert self.ledger.balance(GPU).ours_bytes == sum(worker.booked for worker in self.workers.values())


DeviceMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestDevice = DeviceMachine.TestCase
