"""The whole authority under random events: crashes at any point, late and repeated completions, lost devices, reloads.

What must hold after each step, and at the end of a run, is in `tests/rigs/authority_checks.py`. AUTHORITY_STEPS=100000
runs about 100000 rules.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from inference.authority import events
from inference.authority.lifecycle import ACCEPTING, SERVING, Action
from inference.authority.quarantine import Crash
from inference.devices.signs import Sign
from inference.protocol import ExitCause, ModelState, Priority
from tests.rigs.authority_checks import CheckedWorld
from tests.rigs.authority_world import GPUS, MIB, configuration

NAMES = ("a", "b", "c", "d", "e")
SIZES = {"a": 200, "b": 400, "c": 600, "d": 300, "e": 1200}
LONG = int(os.environ.get("AUTHORITY_STEPS", "0"))
STEPS = 100
names = st.sampled_from(["a", "a", "a", "b", "b", "c", "d", "d", "e"])
ids = st.one_of(names, st.sampled_from(["a@2", "a@3"]))
numbers = st.integers(0, 20)
TIMEOUT_SECONDS = 600


def models(policy: Any, *, warm: bool, pinned: bool, dedicated: bool) -> dict[str, dict[str, Any]]:
    """Three that share accelerators, one for the CPU, and one that needs both accelerators."""
    return {
        "a": {"min_residency": 0, "oom_policy": policy, "warm": warm, "parallel": 4},
        "b": {"min_residency": 0, "idle_timeout": 5, "warm": warm, "parallel": 1, "dedicated": dedicated},
        "c": {"min_residency": 3, "pinned": pinned, "parallel": 1},
        "d": {"min_residency": 0, "gpu_layers": 0, "parallel": 2},
        "e": {"min_residency": 1, "oom_policy": policy, "parallel": 1},
    }


class Authority(RuleBasedStateMachine):
    """Rules are the events of the world; `CheckedWorld` checks each step."""

    @initialize(
        policy=st.sampled_from(["fail_fast", "reduce", "cpu", ["cleanup", "reduce", "cpu"]]),
        warm=st.sampled_from([True, True, False]),
        pinned=st.booleans(), dedicated=st.booleans(), gpus=st.sampled_from([1, 2, 2, 0]),
        kind=st.sampled_from(["cuda", "sim"]), limit=st.sampled_from([None, None, 1.5, 0.6]),
        lazy=st.booleans(), shuts_down=st.booleans(), is_measured=st.sampled_from([True, True, False]),
        stored=st.sampled_from([None, 0.05, 1.0, 3.0]), replicas=st.sampled_from([1, "1..2", "1..3", 2]),
        tells=st.booleans(),
    )  # fmt: skip
    def begin(
        self, policy: Any, warm: bool, pinned: bool, dedicated: bool, gpus: int, kind: str, limit: float | None,
        lazy: bool, shuts_down: bool, is_measured: bool, stored: float | None, replicas: int | str, tells: bool,
    ) -> None:  # fmt: skip
        self.models = models(policy, warm=warm, pinned=pinned, dedicated=dedicated)
        self.models["a"]["replicas"] = replicas
        config = configuration(
            self.models,
            memory_limit_gb=limit,
            acquire_timeout_seconds=TIMEOUT_SECONDS,
            enable_lazy_model_loading=lazy,
            kv_ram_gb=stored,
            pressure_check_interval_seconds=5,
        )
        self.shuts_down = shuts_down
        self.world = CheckedWorld(
            config, SIZES, GPUS[:gpus], kind, tells_processes=tells, context_bytes=30 * MIB * (not lazy)
        )
        self.world.stored_at_stop = 5 * MIB if lazy else 0
        if is_measured:
            self.world.deliver_all()

    # --- requests ----------------------------------------------------------------------------------------------------
    @rule(name=names, priority=st.sampled_from(list(Priority)), seconds=st.sampled_from([None, None, 0.5, 20.0]),
          alone=st.sampled_from([False, False, False, True]), retries=st.integers(0, 1),
          evicts=st.sampled_from([True, True, True, False]))  # fmt: skip
    def want(
        self, name: str, priority: Priority, seconds: float | None, alone: bool, retries: int, evicts: bool
    ) -> None:
        self.world.want(name, priority=priority, seconds=seconds, alone=alone, retries=retries, evicts=evicts)

    @rule(several=st.lists(names, min_size=1, max_size=4), seconds=st.sampled_from([0.0, 0.0, 1.0]))
    def use(self, several: list[str], seconds: float) -> None:
        """Requests arrive, `seconds` pass, and everything that is under way completes."""
        for name in several:
            self.world.want(name)
        self.world.tick(seconds)
        self.world.deliver_all()

    @rule(count=st.integers(5, 20), number=st.integers(0, 3), exact=st.booleans())
    def crowd(self, count: int, number: int, exact: bool) -> None:
        """Many requests for a model with replicas, some of the same conversation, until a further one is loaded."""
        for index in range(count):
            self.world.want("a", conversation=f"{(number + index) % 4}")
        if exact and "a@2" in self.world.config.models:
            self.world.want("a@2", any_replica=False)
        for _ in range(8):
            self.world.deliver_all(3)
            self.world.tick(0.5)

    @rule()
    def queue_behind_claim(self) -> None:
        """A large model waits for the end of a turn; another model would fit, but not beside the large one."""
        for name in ("c", "e", "b") if len(self.world.gpus) > 1 else ("a", "c", "b"):
            self.world.want(name)
            self.world.deliver_all()
            self.world.tick(0.1)

    @rule(count=st.integers(0, 3))
    def recall(self, count: int) -> None:
        """A warm model is wanted."""
        warm = [model.id for model in self.world.state.models.values() if model.state is ModelState.WARM]
        for name in warm[:1]:
            self.world.want(name)
        for _ in range(count):
            self.world.deliver()

    @rule(count=st.integers(0, 4), spawns=st.sampled_from([True, True, False]))
    def keep(self, count: int, spawns: bool) -> None:
        """A loaded model goes into the warm pool; the process that keeps it may fail to start."""
        world = self.world
        failed_before, world.faults.spawn = world.faults.spawn, not spawns
        for model in list(world.state.models.values()):
            if model.state in ACCEPTING:
                self._offload(model.id)
                break
        world.faults.spawn = failed_before
        for _ in range(count):
            world.deliver()

    def _offload(self, name: str) -> None:
        world = self.world
        for lease in [lease for lease, worker in world.leases.items() if worker == world.state.models[name].worker]:
            world.release(lease, completed=True)
        world.command(events.Offload(name))

    @rule(name=names)
    def probe(self, name: str) -> None:
        self.world.want(name, counts_as_use=False)

    @precondition(lambda self: self.world.pending)
    @rule(number=numbers, at_grant=st.booleans())
    def withdraw(self, number: int, at_grant: bool) -> None:
        """A client that waits disconnects, now or at the moment in which it gets its lease."""
        ticket = sorted(self.world.pending)[number % len(self.world.pending)]
        if at_grant:
            self.world.pending[ticket].leaves = True
        else:
            self.world.withdraw(ticket)

    @precondition(lambda self: self.world.leases)
    @rule(number=numbers, completed=st.booleans(), twice=st.booleans(), leaves=st.booleans())
    def release(self, number: int, completed: bool, twice: bool, leaves: bool) -> None:
        lease = sorted(self.world.leases)[number % len(self.world.leases)]
        self.world.release(lease, completed=completed, twice=twice, leaves=leaves)

    @rule()
    def release_all(self) -> None:
        for lease in list(self.world.leases):
            self.world.release(lease, completed=True)

    # --- what takes time ---------------------------------------------------------------------------------------------
    @precondition(lambda self: self.world.later)
    @rule(number=numbers, twice=st.booleans())
    def deliver(self, number: int, twice: bool) -> None:
        self.world.deliver(number, twice=twice)

    @rule(count=st.integers(1, 8))
    def deliver_several(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver()

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(seconds=st.sampled_from([1, 6]))
    def run(self, seconds: int) -> None:
        self.world.settle(seconds)

    @rule(seconds=st.sampled_from([2.0, 50.0]))
    def stand_still(self, seconds: float) -> None:
        self.world.stand_still(seconds)

    # --- what breaks -------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, cause=st.sampled_from(list(ExitCause)), was_ready=st.booleans(), unexplained=st.booleans())
    def crash(self, number: int, cause: ExitCause, was_ready: bool, unexplained: bool) -> None:
        worker = sorted(self.world.alive)[number % len(self.world.alive)]
        self.world.end(worker, cause, was_ready=was_ready, unexplained=unexplained)

    @rule(state=st.sampled_from(list(ModelState)), cause=st.sampled_from(list(ExitCause)))
    def crash_while(self, state: ModelState, cause: ExitCause) -> None:
        """The worker of a model in this state ends."""
        for model in list(self.world.state.models.values()):
            if model.state is state and model.worker in self.world.alive:
                self.world.end(model.worker, cause)
                return

    @precondition(lambda self: self.world.gpus)
    @rule(number=numbers, sign=st.sampled_from([*Sign, Sign.HEALTHY, Sign.HEALTHY, Sign.HEALTHY]), reads=st.booleans())
    def device(self, number: int, sign: Sign, reads: bool) -> None:
        self.world.put_sign(self.world.gpus[number % len(self.world.gpus)], sign)
        if reads:
            self.world.deliver(len(self.world.later) - 1)

    @rule(number=numbers)
    def lose_device_in_use(self, number: int) -> None:
        """The device of a loaded, loading or warm model is lost, and that is read at once."""
        homes = []
        for model in self.world.state.models.values():
            worker = self.world.state.worker_of(model)
            if worker is not None:
                home = model.kept.original_device if model.kept else worker.placement.devices[0]
                homes += [home] if home in self.world.gpus else []
        if homes:
            self._lose(homes[number % len(homes)])

    @precondition(lambda self: self.world.gpus)
    @rule(name=st.sampled_from(["a", "b"]), count=st.integers(1, 6))
    def lose_device_of_kept(self, name: str, count: int) -> None:
        """A model is loaded and goes into the warm pool; the device that it leaves is lost meanwhile, or later."""
        world = self.world
        if name in world.config.models:
            world.want(name)
            world.deliver_all()
            worker = world.state.worker_of(world.state.models[name])
            self._offload(name)
            for _ in range(count):
                world.deliver()
            if worker is not None and worker.placement.devices[0] in world.gpus:
                self._lose(worker.placement.devices[0])

    def _lose(self, device: str) -> None:
        self.world.put_sign(device, Sign.FAILED)
        for _ in range(3):
            self.world.deliver(len(self.world.later) - 1)

    @rule(device=st.sampled_from([*GPUS, "cpu"]), used=st.sampled_from([0, 0, 200, 600, 990, 3900]))
    def others_use(self, device: str, used: int) -> None:
        self.world.use(device, used * MIB)

    @rule()
    def heal(self) -> None:
        """All faults end."""
        self.world.heal()

    @rule(field=st.sampled_from(["spawn", "trials", "readings", "broken_build", "headroom"]),
          value=st.sampled_from([True, False, False]))  # fmt: skip
    def fault(self, field: str, value: bool) -> None:
        setattr(self.world.faults, field, value)

    @rule(
        allocation=st.sampled_from([1.0, 1.0, 1.0, 0.8, 1.05, 0.3, 3.0]), linger=st.sampled_from([0.0, 0.3, 20.0]),
        suspension=st.sampled_from([None, None, "driver", "state"]), damaged=st.sampled_from([None] * 4 + ["a", "d"]),
    )  # fmt: skip
    def faults(self, allocation: float, suspension: str | None, damaged: str | None, linger: float) -> None:
        found = self.world.faults
        found.allocation, found.suspension, found.damaged, found.linger_seconds = (
            allocation, suspension, damaged, linger,
        )  # fmt: skip

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, count=st.sampled_from([100, 300, 1500]))
    def grow(self, number: int, count: int) -> None:
        self.world.grow(sorted(self.world.alive)[number % len(self.world.alive)], count * MIB)

    @precondition(lambda self: self.world.leases and self.world.gpus)
    @rule(number=numbers, device=st.sampled_from(GPUS), count=st.sampled_from([5, 20, 40, 200, 900]))
    def grow_pools(self, number: int, device: str, count: int) -> None:
        """A model that computes takes more of its device than planned."""
        busy = sorted({*self.world.leases.values()} & self.world.alive.keys())
        if busy:
            self.world.grow_pools(busy[number % len(busy)], device, count * MIB)

    @rule(name=names)
    def replace_file(self, name: str) -> None:
        self.world.versions[name] += 1

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, prompt=numbers, generated=numbers)
    def beat(self, number: int, prompt: int, generated: int) -> None:
        self.world.beat(sorted(self.world.alive)[number % len(self.world.alive)], prompt, generated, prompt)

    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, count=st.sampled_from([1, 50, 200, 1000]))
    def store(self, number: int, count: int) -> None:
        """A worker that answers requests stores sequences."""
        workers = [
            worker.id
            for model in self.world.state.models.values()
            if model.state in SERVING
            and (worker := self.world.state.worker_of(model)) is not None
            and worker.id in self.world.alive
        ]
        if workers:
            self.world.store(workers[number % len(workers)], count * MIB)

    @rule(name=names, number=st.integers(0, 2), crashes=st.integers(1, 3), alone=st.booleans(),
          unexplained=st.booleans(), end=st.sampled_from(["", "answered", "cleared"]))  # fmt: skip
    def report(self, name: str, number: int, crashes: int, alone: bool, unexplained: bool, end: str) -> None:
        """A request ends workers, and then is answered or taken out of quarantine."""
        key, crash = f"key-{number}", Crash(ExitCause.ASSERT, "it aborted", alone, unexplained)
        for _ in range(crashes):
            self.world.send(events.CrashReported(name, key, crash))
        if end == "answered":
            self.world.send(events.RequestAnswered(name, key, crashes))
        elif end == "cleared":
            self.world.send(events.CaseCleared(name, key))

    # --- operators ---------------------------------------------------------------------------------------------------
    @rule(name=ids, kind=st.sampled_from(["unload", "now", "offload", "offload", "evict", "keep", "plan", "change"]))
    def command(self, name: str, kind: str) -> None:
        requests: dict[str, events.Request] = {
            "unload": events.Unload(name),
            "now": events.Unload(name, now=True),
            "offload": events.Offload(name),
            "evict": events.Evict(name),
            "keep": events.Evict(name, Action.OFFLOAD),
            "plan": events.Plan(name, {}),
            "change": events.Plan(name, {"parallel": 2}),
        }
        self.world.command(requests[kind])

    @rule(name=ids, device=st.sampled_from([*GPUS, "cpu"]), count=st.integers(0, 6),
          then=st.sampled_from(["", "", "abandon", "crash", "lose"]))  # fmt: skip
    def move(self, name: str, device: str, count: int, then: str) -> None:
        """An operator moves a model, and something happens on its way."""
        world = self.world
        id = world.command(events.Move(name, device, 20))
        for _ in range(count):
            world.deliver()
        model = world.state.models.get(name)
        if then == "abandon" and id in world.commands:
            world.abandon(id)
        elif then == "crash" and model is not None and model.worker in world.alive:
            world.end(model.worker, ExitCause.KILLED)
        elif then == "lose" and device in world.gpus:
            world.put_sign(device, Sign.FAILED)

    @rule(request=st.sampled_from([events.Collect(), events.Defragment(), events.Recover("gpu-0"), events.Refresh()]))
    def operate(self, request: events.Request) -> None:
        self.world.command(request)

    @precondition(lambda self: self.world.commands)
    @rule(number=numbers)
    def abandon(self, number: int) -> None:
        self.world.abandon(sorted(self.world.commands)[number % len(self.world.commands)])

    @rule(kept=st.sampled_from([NAMES, NAMES, NAMES, ("a", "d"), ("b", "c", "e")]), parallel=st.sampled_from([4, 4, 2]),
          limit=st.sampled_from([None, 0.5, 2.0]), most=st.sampled_from([None, None, 1, 2]), pinned=st.booleans(),
          share=st.sampled_from([0.9, 0.5]), stores=st.sampled_from([True, True, False]),
          replicas=st.sampled_from([1, "1..2", "1..3", 2, 3]))  # fmt: skip
    def reload(
        self, kept: tuple[str, ...], parallel: int, limit: float | None, most: int | None, pinned: bool, share: float,
        stores: bool, replicas: int | str,
    ) -> None:  # fmt: skip
        found = {name: dict(keys) for name, keys in self.models.items() if name in kept}
        if "a" in found:
            found["a"] |= {"parallel": parallel, "pinned": pinned, "replicas": replicas}
        config = configuration(
            found,
            memory_limit_gb=limit,
            max_models=most,
            acquire_timeout_seconds=TIMEOUT_SECONDS,
            gpu_memory_max_percent=share,
            kv_enabled=stores,
            kv_ram_gb=self.world.config.settings.kv_ram_gb,
            pressure_check_interval_seconds=5,
        )
        self.world.change(config)

    def teardown(self) -> None:
        """Everything comes to rest, or the service ends; then nothing remains."""
        world = getattr(self, "world", None)
        if world is None or world.is_broken:
            return
        if self.shuts_down:
            world.shut_down()
        else:
            world.rest()


TestAuthority = Authority.TestCase
TestAuthority.settings = settings(
    max_examples=max(1, LONG // STEPS) if LONG else 25,
    stateful_step_count=STEPS,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # to shrink an example takes minutes
    suppress_health_check=list(HealthCheck),
)
pytestmark = [pytest.mark.unmeasured, pytest.mark.timeout(0 if LONG else 600)]


def test_dry_runs_are_compared_with_decisions() -> None:
    """The state machine above makes these comparisons, also for a model that is decided on after others."""
    found = models("fail_fast", warm=True, pinned=False, dedicated=False)
    world = CheckedWorld(configuration(found), SIZES, GPUS[:1])
    for name in "abc":
        world.want(name)
    while world.later:
        world.deliver()
    assert world.state.models["a"].state is ModelState.BUSY
    assert world.compared > world.compared_behind_others > 0


def test_dry_run_of_a_model_behind_a_claim_waits_like_its_request() -> None:
    """The large model waits for the end of a turn; the last one would fit now, but not beside the large one."""
    world = CheckedWorld(configuration(models("fail_fast", warm=True, pinned=False, dedicated=False)), SIZES, GPUS[:1])
    world.deliver_all()
    for name in "acb":
        world.want(name)
        world.deliver_all()
        world.tick(0.1)
    assert [claim.model for claim in world.state.claims] == ["c"]
    assert world.state.models["b"].state is ModelState.COLD
    assert world.compared_behind_others > 0
