"""Memory that a device refuses although the plan allowed it: what each `oom_policy` tries."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority import events
from inference.authority.handlers.running import oom_recovery
from inference.authority.placement.plan import Refusal
from inference.authority.placement.smaller_settings import REST_SECONDS
from inference.authority.views.inference_metrics import cooldown_seconds
from inference.devices.signs import Sign
from inference.errors import DeviceLost, InvalidRequestError, MemoryRefused, ModelFailed, Shortage
from inference.protocol import ExitCause, ModelState
from inference.settings import InferenceConfig
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import StepWorld
from tests.rigs.step_world import begin as begin_world

pytestmark = pytest.mark.unmeasured

S = ModelState


def begin(**keys: Any) -> StepWorld:
    return begin_world({"a": keys}, {"a": 160}, gpus=("gpu-0",))


def configured(**keys: Any) -> InferenceConfig:
    """As of `begin`, for a reload."""
    return configuration({"a": {"parallel": 1, "min_residency": 0, **keys}})


def fail_load(world: StepWorld, cause: ExitCause = ExitCause.OOM_LOAD) -> None:
    """The load that is under way fails."""
    world.arrive(events.Loaded)
    world.end(world.model("a").worker or "", cause, was_ready=False)
    world.arrive(events.Loaded)


def devices(world: StepWorld) -> tuple[str, ...]:
    worker = world.state.worker_of(world.model("a"))
    assert worker is not None
    return worker.placement.devices


def test_fail_fast_keeps_the_configured_sizes() -> None:
    world = begin()
    ticket = world.want("a")
    fail_load(world)
    assert isinstance(world.errors[ticket], MemoryRefused)
    assert (world.model("a").state, world.model("a").reduced) == (S.FAILED, None)
    assert not world.state.ledger.holdings


def test_load_that_allocates_more_than_planned_fails() -> None:
    world = begin()
    world.faults.allocation = 2.0
    ticket = world.want("a")
    world.arrive()
    assert isinstance(world.errors[ticket], ModelFailed)
    assert "it allocated 300.0 MiB on gpu-0 where 150.0 MiB were planned" in world.errors[ticket].message
    assert not world.state.ledger.holdings


def test_reduce_tries_a_smaller_batch_and_then_a_smaller_context() -> None:
    world = begin(oom_policy="reduce", context_length=4096)
    ticket = world.want("a")
    for _ in range(3):
        fail_load(world)
    world.arrive()
    model = world.model("a")
    assert ticket in world.grants
    assert (model.effective.ubatch, model.effective.context_length) == (128, 2048)
    assert model.backoff.failures == 0
    assert 0 < model.reduction.rest(world.now) <= REST_SECONDS
    world.finish(world.grants[ticket])
    world.command(events.Unload("a"))
    world.live(5)
    assert world.model("a").reduced is not None
    world.live(REST_SECONDS)
    assert world.model("a").reduced is None


@pytest.mark.parametrize(("pool", "reduced"), [(16384, (8192, 4096)), (6000, (4096, 4096)), (4096, (2048, 2048))])
def test_reduce_makes_a_pool_smaller_before_the_context(pool: int, reduced: tuple[int, int]) -> None:
    """A pool always has room for one request of full length."""
    world = begin(oom_policy="reduce", context_length=4096, parallel=8, kv_cells=pool)
    ticket = world.want("a")
    for _ in range(3):
        fail_load(world)
    world.arrive()
    assert ticket in world.grants
    effective = world.model("a").effective
    assert (effective.kv_cells, effective.context_length) == reduced


@pytest.mark.parametrize(
    ("changes", "name", "words"),
    [
        ({"context_length": 2048}, "kv_cells", "kv_cells 1024 is less than context_length 2048"),
        ({"ubatch": 4096}, "ubatch", "ubatch 4096 is larger than batch 2048"),
        ({"kv_type": "q8_0"}, "kv_type", "kv_type q8_0 needs flash_attention: true"),
        ({"split_mode": "tensor"}, "split_mode", "or set split_mode: layer"),
        ({"fit": "context", "min_context": 513}, "min_context", "make it 512 or less"),
    ],
)
def test_dry_run_with_settings_that_contradict_others_is_refused(
    changes: dict[str, Any], name: str, words: str
) -> None:
    """As in the configuration. The default of `min_context` may be more than the context."""
    world = begin(context_length=512, parallel=4, kv_cells=1024, flash_attention=False)
    error = world.errors[world.command(events.Plan("a", changes))]
    assert (type(error), error.param) == (InvalidRequestError, name)
    assert words in error.message
    allowed = world.command(events.Plan("a", {"fit": "context", "ubatch": 256}))
    world.arrive()
    assert allowed in world.answers


def test_reduce_fails_after_all_smaller_settings_were_tried() -> None:
    world = begin(oom_policy="reduce", context_length=4096)
    ticket = world.want("a")
    for _ in range(10):
        if ticket not in world.errors:
            fail_load(world)
    assert isinstance(world.errors[ticket], MemoryRefused)
    model = world.model("a")
    assert (model.backoff.failures, model.reduced) == (1, None)
    refusal = Refusal((Shortage("gpu-0", 2, 1, "it"),), "it does not fit")
    assert not oom_recovery.can_reduce(model, refusal, world.now)


def test_model_that_lacked_memory_while_it_computed_is_loaded_with_a_smaller_batch() -> None:
    world = begin(oom_policy="reduce")
    world.finish(world.leased("a"))
    world.end(world.model("a").worker or "", ExitCause.OOM_COMPUTE)
    world.live(5)
    world.leased("a")
    assert world.model("a").effective.ubatch == 128


def test_shortage_of_a_worker_with_replaced_settings_is_not_a_shortage_of_the_new_ones() -> None:
    """A reload changed the settings while the worker computed its last request."""
    world = begin(oom_policy="reduce", context_length=4096)
    world.leased("a")
    before = world.model("a").spec
    world.change(configured(oom_policy="reduce", context_length=1024))
    world.end(world.model("a").worker or "", ExitCause.OOM_COMPUTE)
    world.live(5)
    model = world.model("a")
    assert world.learned_from == [before]
    assert (model.steps, model.reduced, model.shortages) == ((), None, ())
    world.leased("a")
    assert (model.effective.context_length, model.effective.ubatch) == (1024, before.ubatch)


@pytest.mark.parametrize(("changes", "is_new"), [({"context_length": 1024}, False), ({"idle_timeout": 900.0}, True)])
def test_normal_end_counts_for_the_settings_that_the_worker_had(changes: dict[str, Any], *, is_new: bool) -> None:
    """Settings that change while the model stays loaded apply to its worker."""
    world = begin(context_length=4096)
    lease = world.leased("a")
    before = world.model("a").spec
    world.change(configured(**{"context_length": 4096, **changes}))
    world.finish(lease)
    world.command(events.Unload("a"))
    world.live(5)
    assert world.learned_from == [world.model("a").spec if is_new else before]


def test_cpu_policy_loads_the_model_on_the_cpu_and_later_moves_it_back() -> None:
    world = begin(oom_policy="cpu")
    ticket = world.want("a")
    fail_load(world)
    world.arrive()
    assert ticket in world.grants
    assert (devices(world), world.model("a").backoff.failures) == (("cpu",), 0)
    assert oom_recovery.is_fallback(world.state, world.model("a"))
    world.finish(world.grants[ticket])
    rest = cooldown_seconds(world.model("a"), world.now)
    assert rest > 0
    world.live(rest / 2)
    assert devices(world) == ("cpu",)
    world.live(rest)
    assert (devices(world), world.model("a").state) == (("gpu-0",), S.READY)
    assert not oom_recovery.is_fallback(world.state, world.model("a"))


def test_model_that_was_moved_to_the_cpu_by_hand_stays_there() -> None:
    world = begin(oom_policy="cpu")
    world.command(events.Move("a", "cpu", None))
    world.live(100)
    assert devices(world) == ("cpu",)
    assert not oom_recovery.is_fallback(world.state, world.model("a"))


def test_move_to_a_device_that_disappears_meanwhile_fails_and_the_model_is_loaded_elsewhere() -> None:
    world = begin_world({"a": {}}, {"a": 160}, gpus=("gpu-0", "gpu-1"))
    lease = world.leased("a")
    before, target = devices(world), next(name for name in ("gpu-0", "gpu-1") if name not in devices(world))
    move = world.command(events.Move("a", target, None))
    world.live(1)
    assert world.model("a").state is S.DRAINING
    world.put_sign(target, Sign.MISSING)
    world.finish(lease)
    world.live(5)
    assert devices(world) == before
    assert isinstance(world.errors[move], DeviceLost)
    assert world.errors[move].message == f"{target} is gone; 'a' was loaded on {before[0]}"


def test_error_of_a_later_failure_does_not_name_memory() -> None:
    world = begin()
    world.want("a")
    fail_load(world)
    world.live(2)
    ticket = world.want("a")
    fail_load(world, ExitCause.STARTUP)
    world.arrive()
    assert type(world.errors[ticket]) is ModelFailed
    assert world.model("a").shortages == ()
