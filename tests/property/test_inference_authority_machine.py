"""The whole authority under random events: crashes at any point, late and repeated completions, lost devices, reloads.

After every step the ledger balances, each reservation is released once, no waiter is lost, no transition is illegal,
and a decision is that of a dry run. AUTHORITY_STEPS=100000 makes a long run of about as many steps.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from inference.authority import events
from inference.authority.lifecycle.departures import Action, Reason
from inference.devices.signs import Sign
from inference.protocol import ExitCause, ModelState, Priority
from tests.rigs.authority_world import GPUS, MIB, World, configuration

NAMES = ("a", "b", "c", "d")
SIZES = {"a": 200, "b": 400, "c": 700, "d": 300}
LONG = int(os.environ.get("AUTHORITY_STEPS", "0"))
STEPS = 60
CAUSES = [cause for cause in ExitCause if cause is not ExitCause.BROKEN_BUILD]
names = st.sampled_from(NAMES)
numbers = st.integers(0, 20)


def models(policy: str, *, warm: bool, pinned: bool) -> dict[str, dict[str, Any]]:
    return {
        "a": {"min_residency": 0, "oom_policy": policy, "warm": warm},
        "b": {"min_residency": 0, "idle_timeout": 5, "warm": warm},
        "c": {"min_residency": 3, "pinned": pinned},
        "d": {"min_residency": 0, "gpu_layers": 0},
    }


class Authority(RuleBasedStateMachine):
    """Rules are the events of the world; the checks are in `World.check`."""

    @initialize(
        policy=st.sampled_from(["fail_fast", "reduce", "cpu"]), warm=st.booleans(), pinned=st.booleans(),
        gpus=st.integers(0, 2), limit=st.sampled_from([None, 1.0, 0.6]),
    )  # fmt: skip
    def begin(self, policy: str, warm: bool, pinned: bool, gpus: int, limit: float | None) -> None:
        self.models = models(policy, warm=warm, pinned=pinned)
        config = configuration(self.models, memory_limit_gb=limit, acquire_timeout_seconds=40)
        self.world = World(config, SIZES, GPUS[:gpus])
        self.tickets: list[int] = []

    # --- requests ----------------------------------------------------------------------------------------------------
    @rule(name=names, priority=st.sampled_from(list(Priority)), seconds=st.sampled_from([None, 0.5, 20]),
          alone=st.booleans())  # fmt: skip
    def want(self, name: str, priority: Priority, seconds: float | None, alone: bool) -> None:
        self.tickets.append(self.world.want(name, priority=priority, seconds=seconds, alone=alone))

    @precondition(lambda self: self.tickets)
    @rule(number=numbers)
    def withdraw(self, number: int) -> None:
        ticket = self.tickets[number % len(self.tickets)]
        self.world.asked.pop(ticket, None)
        self.world.send(events.Withdrawn(ticket))

    @precondition(lambda self: self.world.leases)
    @rule(number=numbers, completed=st.booleans(), twice=st.booleans())
    def release(self, number: int, completed: bool, twice: bool) -> None:
        lease = sorted(self.world.leases)[number % len(self.world.leases)]
        worker = self.world.leases.pop(lease)
        for _ in range(1 + twice):
            self.world.send(events.Released(worker, lease, completed))

    # --- what takes time ---------------------------------------------------------------------------------------------
    @rule(number=numbers, twice=st.booleans())
    def deliver(self, number: int, twice: bool) -> None:
        self.world.deliver(number, twice=twice)

    @rule(count=st.integers(1, 6))
    def deliver_several(self, count: int) -> None:
        for _ in range(count):
            self.world.deliver(0)

    @rule(seconds=st.sampled_from([0.05, 0.5, 3.0, 30.0]))
    def wait(self, seconds: float) -> None:
        self.world.tick(seconds)

    @rule(seconds=st.sampled_from([2.0, 50.0]))
    def stand_still(self, seconds: float) -> None:
        self.world.now += seconds
        self.world.send(events.Tick(self.world.readings(), self.world.now))

    # --- what breaks -------------------------------------------------------------------------------------------------
    @precondition(lambda self: self.world.alive)
    @rule(number=numbers, cause=st.sampled_from(CAUSES), was_ready=st.booleans())
    def crash(self, number: int, cause: ExitCause, was_ready: bool) -> None:
        self.world.end(sorted(self.world.alive)[number % len(self.world.alive)], cause, was_ready=was_ready)

    @precondition(lambda self: self.world.gpus)
    @rule(number=numbers, sign=st.sampled_from([Sign.FINE, Sign.FINE, Sign.DEAD, Sign.ILL, Sign.UNSURE]))
    def device(self, number: int, sign: Sign) -> None:
        self.world.signs[self.world.gpus[number % len(self.world.gpus)]] = sign
        self.world.send(events.DeviceNoticed())

    @rule(device=st.sampled_from([*GPUS, "cpu"]), used=st.sampled_from([0, 200 * MIB, 600 * MIB, 990 * MIB]))
    def others_use(self, device: str, used: int) -> None:
        self.world.foreign[device] = used

    @rule(spawn=st.booleans(), trials=st.booleans(), damaged=st.sampled_from([None, *NAMES]))
    def faults(self, spawn: bool, trials: bool, damaged: str | None) -> None:
        self.world.spawn_fails, self.world.trials_fail = spawn, trials
        self.world.unmeasurable = {damaged} if damaged else set()

    @rule(name=names)
    def replace_file(self, name: str) -> None:
        self.world.versions[name] += 1

    # --- operators ---------------------------------------------------------------------------------------------------
    @rule(name=names, kind=st.sampled_from(["unload", "now", "offload", "evict", "keep", "plan", "other plan"]))
    def command(self, name: str, kind: str) -> None:
        requests = {
            "unload": events.Unload(name),
            "now": events.Unload(name, now=True),
            "offload": events.Offload(name),
            "evict": events.Evict(name),
            "keep": events.Evict(name, Action.OFFLOAD),
            "plan": events.Plan(name, {}),
            "other plan": events.Plan(name, {"parallel": 2}),
        }
        self.world.command(requests[kind])

    @rule(name=names, device=st.sampled_from([*GPUS, "cpu"]))
    def move(self, name: str, device: str) -> None:
        self.world.command(events.Move(name, device, 20))

    @rule(request=st.sampled_from([events.Collect(), events.Defragment(), events.Recover("gpu-0"), events.Refresh()]))
    def operate(self, request: events.Request) -> None:
        self.world.command(request)

    @precondition(lambda self: self.world.commands)
    @rule(number=numbers)
    def abandon(self, number: int) -> None:
        id = sorted(self.world.commands)[number % len(self.world.commands)]
        self.world.commands.discard(id)
        self.world.send(events.Abandoned(id))

    @rule(name=names, reason=st.sampled_from(list(Reason)), action=st.sampled_from(list(Action)))
    def leave(self, name: str, reason: Reason, action: Action) -> None:
        self.world.send(events.DepartureWanted(name, str(reason), action))

    @rule(kept=st.sets(names, min_size=1), parallel=st.integers(1, 2), limit=st.sampled_from([None, 0.5, 2.0]),
          most=st.sampled_from([None, 1]))  # fmt: skip
    def reload(self, kept: set[str], parallel: int, limit: float | None, most: int | None) -> None:
        found = {name: dict(keys) for name, keys in self.models.items() if name in kept}
        if "a" in found:
            found["a"]["parallel"] = parallel
        config = configuration(found, memory_limit_gb=limit, max_models=most, acquire_timeout_seconds=40)
        self.world.send(events.SettingsChanged(config))

    @rule(regular=st.booleans())
    def check_pressure(self, regular: bool) -> None:
        self.world.send(events.PressureChecked(self.world.readings(), regular))

    def teardown(self) -> None:
        """Once everything that is under way has arrived, all requests end and every byte is back."""
        world = getattr(self, "world", None)
        if world is None:
            return
        world.spawn_fails = world.trials_fail = False
        for lease, worker in list(world.leases.items()):
            del world.leases[lease]
            world.send(events.Released(worker, lease, True))
        world.settle()
        world.tick(60.0)
        world.settle()
        assert not world.asked, "every wait has ended"
        world.send(events.Quiesced())
        for name in list(world.state.models):
            if name in world.state.models:
                world.command(events.Unload(name, now=True))
        world.settle()
        assert not world.state.ledger.holdings, "every byte is back"
        assert not world.state.workers
        assert all(model.state in (ModelState.COLD, ModelState.FAILED) for model in world.state.models.values())
        world.tick(60.0)
        world.settle()
        assert not world.commands, "every command is answered"


TestAuthority = Authority.TestCase
TestAuthority.settings = settings(
    max_examples=max(1, LONG // (STEPS * 3)) if LONG else 25,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
pytestmark = pytest.mark.timeout(0 if LONG else 120)


def test_dry_runs_are_compared_with_decisions() -> None:
    """The comparison of the machine above happens."""
    world = World(configuration(models("fail_fast", warm=True, pinned=False)), SIZES)
    world.want("a")
    world.settle()
    assert world.compared > 0
    assert world.state.models["a"].state is ModelState.BUSY
