"""Settings that change so that a model fits (`experts: auto`), and the expected speed of a plan."""

from __future__ import annotations

from typing import Any

import pytest

from inference.authority import events
from inference.authority.handlers.operating.commands import Planned
from inference.authority.handlers.queries.decode_speed import EXCHANGE_SECONDS
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.placement.plan import Placement, Refusal
from inference.authority.placement.smaller_settings import REST_SECONDS
from inference.authority.state import EstimateKey
from inference.authority.views import model_status
from inference.devices.device import CPU, Reading
from inference.errors import InferenceError, MemoryLimitExceededError
from inference.estimate.header_formula import Parts
from inference.estimate.layers import Sizes
from inference.estimate.model_estimate import Estimate
from inference.protocol import ModelState
from inference.worker_link import Heartbeat
from tests.rigs.authority_world import configuration
from tests.rigs.step_world import MIB, OVERHEAD_BYTES, StepWorld

pytestmark = pytest.mark.unmeasured

LAYERS, EXPERTS_MIB = 4, 300
DENSE_MIB = 150
"""Everything else of the model."""


class ExpertsWorld(StepWorld):
    """Each layer has 300 MiB of experts, of which an eighth is used. With experts in host memory `wrong` needs 1 GiB
    more than the layers say."""

    def _estimate(self, key: EstimateKey, devices: tuple[Reading, ...]) -> Estimate | InferenceError:
        spec, device = key.spec, devices[0].id
        on_host = 0 if spec.gpu_layers < 0 else LAYERS + 1 - spec.gpu_layers
        apart = max(on_host, min(spec.host_expert_layers, LAYERS))
        apart = 0 if device == CPU else apart
        more = 1024 if key.spec.id == "wrong" and apart else 0
        weights = (DENSE_MIB + (LAYERS - apart) * EXPERTS_MIB + more) * MIB
        parts = {device: Parts(weights, 0, 0)}
        if device != CPU:
            parts[CPU] = Parts(apart * EXPERTS_MIB * MIB, 0, 0)
        sizes = (Sizes(EXPERTS_MIB * MIB, 0, True, EXPERTS_MIB * MIB),) * LAYERS
        return Estimate(
            parts,
            dict.fromkeys(parts, OVERHEAD_BYTES),
            "llama.cpp",
            "",
            4096,
            sizes=sizes,
            expert_share=1 / 8,
            host_bytes_per_second=1e9,
        )

    def plan(self, model: str, **changes: object) -> Planned:
        """The answer to a dry run."""
        command = self.command(events.Plan(model, changes))
        self.arrive()
        planned = self.answers[command]
        assert isinstance(planned, Planned)
        return planned


def begin(models: dict[str, dict[str, Any]], **settings: Any) -> ExpertsWorld:
    found = {name: {"parallel": 1, "min_residency": 0, **keys} for name, keys in models.items()}
    world = ExpertsWorld(configuration(found, **settings), dict.fromkeys(models, 100), ("gpu-0",))
    world.arrive()
    return world


def test_fewest_layers_have_their_experts_in_host_memory() -> None:
    """The device has room for the rest and the experts of two of four layers. The log names the change, and both
    memories are booked.
    """
    world = begin({"a": {"experts": "auto"}})
    ticket = world.want("a")
    world.arrive()
    assert ticket in world.grants
    model = world.model("a")
    assert (model.effective.experts, model.spec.experts) == (2, "auto")
    assert model.spec.changed(model.effective) == ("experts",)
    assert any("does not fit as configured and is loaded with experts: 2" in line for line in world.log)
    assert (world.booked("gpu-0"), world.booked(CPU)) == (760, 610)


def test_configured_settings_are_used_if_they_fit() -> None:
    """With `gpu_layers: 0` all experts are in host memory anyway."""
    world = begin({"a": {"experts": "auto", "gpu_layers": 0}})
    world.used("a")
    assert world.model("a").reduced is None
    assert world.booked(CPU) == DENSE_MIB + LAYERS * EXPERTS_MIB + 10


def test_configured_settings_are_tried_again_later() -> None:
    world = begin({"a": {"experts": "auto"}})
    world.used("a")
    world.command(events.Unload("a"))
    world.live(5)
    assert world.model("a").reduced is not None
    world.live(REST_SECONDS)
    assert world.model("a").reduced is None
    world.used("a")
    assert world.model("a").effective.experts == 2


def test_models_that_fit_after_a_change_are_not_reported_as_too_large() -> None:
    world = begin({"a": {"experts": "auto"}, "b": {}})
    for name in ("a", "b"):
        world.plan(name)
    moment = Predictions(world.state, world.now)
    assert moment.of(world.model("a")) is None
    assert isinstance(moment.of(world.model("b")), Refusal)


def test_dry_run_of_fit_has_the_cost_of_each_step() -> None:
    world = begin({"a": {}})
    assert isinstance(world.plan("a").outcome, Refusal)
    assert isinstance(world.plan("a", fit="context").outcome, Refusal)
    planned = world.plan("a", fit="auto", min_context=4096)
    assert isinstance(planned.outcome, Placement)
    assert planned.changes == {"experts": 2}
    (step,) = planned.steps
    assert (step["step"], step["settings"]) == ("experts", {"experts": 2})
    assert step["saved_bytes"] == {"gpu-0": 600 * MIB, CPU: -600 * MIB}
    assert step["tokens_per_second"] is None
    both = world.plan("a", fit="auto", min_context=1024)
    assert both.changes == {"context_length": 1024, "experts": 2}
    assert [(step["step"], step["settings"]) for step in both.steps] == [
        ("context", {"context_length": 1024}), ("experts", {"experts": 2}),
    ]  # fmt: skip
    assert [step["saved_bytes"]["gpu-0"] for step in both.steps] == [0, 600 * MIB]
    layers = world.plan("a", fit="layers")
    assert layers.changes == {"gpu_layers": 3}


def test_steps_are_recorded_and_forgotten_with_the_changes() -> None:
    world = begin({"a": {"fit": "experts", "oom_policy": ["cleanup", "reduce", "cpu"]}})
    world.used("a")
    status = model_status.status(world.state, world.model("a"), world.now)
    assert status.steps == ({"step": "fit", "settings": {"experts": 2}},)
    assert (status.experts, status.reduced) == (2, ("experts",))
    world.command(events.Unload("a"))
    world.live(5 + REST_SECONDS)
    assert model_status.status(world.state, world.model("a"), world.now).steps == ()


def test_changes_stay_while_a_worker_that_was_moved_has_them() -> None:
    found = {"a": {"parallel": 1, "min_residency": 0, "fit": "experts"}}
    world = ExpertsWorld(configuration(found), {"a": 100}, ("gpu-0", "gpu-1"))
    world.arrive()
    world.used("a")
    worker = world.state.worker_of(world.model("a"))
    assert worker is not None
    world.live(REST_SECONDS + 5)
    world.command(events.Move("a", {"gpu-0": "gpu-1", "gpu-1": "gpu-0"}[worker.device.id], None))
    world.live(20)
    moved = world.state.worker_of(world.model("a"))
    assert moved is not None
    assert (moved.device.id != worker.device.id, moved.spec.experts) == (True, 2)
    assert world.model("a").effective.experts == 2


def test_steps_of_the_policy_are_taken_in_order_and_recorded() -> None:
    """No smaller size helps; on the CPU the model has its configured settings."""
    world = begin({"a": {"oom_policy": ["cleanup", "reduce", "cpu"], "context_length": 4096}})
    world.used("a")
    model = world.model("a")
    worker = world.state.worker_of(model)
    assert worker is not None
    assert worker.placement.devices == (CPU,)
    assert (model.effective, model.reduced) == (model.spec, None)
    status = model_status.status(world.state, model, world.now)
    assert [step["step"] for step in status.steps] == ["cleanup", "reduce", "reduce", "cpu"]
    assert [step["settings"] for step in status.steps][1] == {"ubatch": 128}
    assert status.fallback


def test_fallback_that_the_plan_chose_is_a_step() -> None:
    world = begin({"a": {"oom_policy": "cpu"}})
    world.used("a")
    assert model_status.status(world.state, world.model("a"), world.now).steps == ({"step": "cpu", "settings": {}},)


@pytest.mark.parametrize("experts", ["device", 1])
def test_model_without_automatic_experts_is_refused_with_a_suggestion(experts: str | int) -> None:
    world = begin({"a": {"experts": experts}})
    ticket = world.want("a")
    world.arrive()
    error = world.errors[ticket]
    assert isinstance(error, MemoryLimitExceededError)
    assert "experts: 2" in error.message


def test_change_that_is_measured_not_to_suffice_is_not_made() -> None:
    """The load is refused after some further numbers of layers were measured. Another model is changed as usual."""
    world = begin({"wrong": {"experts": "auto"}, "other": {"experts": "auto", "oom_policy": "cpu"}})
    ticket = world.want("wrong")
    world.arrive()
    assert isinstance(world.errors[ticket], MemoryLimitExceededError)
    assert world.model("wrong").reduced is None
    world.used("other")
    assert world.model("other").effective.experts == 2


def test_fallback_is_used_if_no_allowed_change_suffices() -> None:
    world = begin({"wrong": {"experts": "auto", "oom_policy": "cpu"}})
    world.used("wrong")
    worker = world.state.worker_of(world.model("wrong"))
    assert worker is not None
    assert (worker.placement.devices, worker.spec.experts) == ((CPU,), "auto")


def test_model_that_is_loaded_at_the_start_is_changed_too() -> None:
    world = begin({"a": {"experts": "auto"}}, enable_lazy_model_loading=False)
    world.live(5)
    assert world.model("a").state is ModelState.READY
    assert world.model("a").effective.experts == 2


def test_dry_run_shows_the_change_and_the_expected_speed() -> None:
    """Each token reads an eighth of the experts; the rate of the device is unknown until the model has run."""
    world = begin({"a": {"experts": "auto"}})
    planned = world.plan("a")
    assert isinstance(planned.outcome, Placement)
    assert planned.changes == {"experts": 2}
    assert world.model("a").reduced is None
    assert planned.speed is not None
    assert planned.speed.read_bytes == {"gpu-0": (DENSE_MIB + 75) * MIB, CPU: 75 * MIB}
    assert planned.speed.tokens_per_second is None
    assert planned.speed.to_json()["bytes_per_second"] == {CPU: 10**9}
    world.used("a")
    seconds = planned.speed.read_bytes[CPU] / 1e9 + planned.speed.read_bytes["gpu-0"] / 50e9
    seconds += 2 * EXCHANGE_SECONDS
    beat(world, "a", 1 / seconds)
    speed = world.plan("a").speed
    assert speed is not None
    assert speed.tokens_per_second == pytest.approx(1 / seconds)
    assert speed.bytes_per_second["gpu-0"] == pytest.approx(50e9)
    other = world.plan("a", experts=4).speed
    assert other is not None
    assert other.tokens_per_second == pytest.approx(
        1 / (150 * MIB / 1e9 + DENSE_MIB * MIB / 50e9 + 4 * EXCHANGE_SECONDS)
    )


def test_read_rate_of_a_device_is_the_largest_measured_one() -> None:
    """A measurement is ignored if the known rates do not explain it."""
    world = begin({"a": {"experts": "auto"}, "b": {"gpu_layers": 0}})
    world.used("a")
    beat(world, "a", 1e9)
    assert world.state.read_rates == {CPU: 1e9}
    world.used("b")
    for rate in (100.0, 50.0):
        beat(world, "b", rate)
    read = DENSE_MIB + LAYERS * EXPERTS_MIB // 8
    assert world.state.read_rates == {CPU: 100.0 * read * MIB}


def beat(world: ExpertsWorld, model: str, tokens_per_second: float) -> None:
    """A heartbeat with this decode speed."""
    worker = world.model(model).worker
    assert worker is not None
    found = Heartbeat(None, 0, 0, 0, 0, 0, decode_tokens_per_second=tokens_per_second)
    world.send(events.Progressed(worker, 1.0, found))
