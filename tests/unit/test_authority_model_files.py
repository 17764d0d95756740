"""Model files that are replaced while the service runs, or whose chat template is not used."""

from __future__ import annotations

from dataclasses import replace

from inference.authority import events
from inference.authority.handlers.watching.predictions import Predictions
from inference.authority.placement.plan import Refusal
from inference.authority.views import model_status
from inference.protocol import ExitCause, ModelState
from tests.rigs.step_world import begin


def test_model_that_did_not_fit_is_measured_again_when_its_file_changes() -> None:
    world = begin({"a": {}}, {"a": 500}, memory_limit_gb=0.25)
    assert isinstance(Predictions(world.state, world.now).of(world.model("a")), Refusal)
    world.sizes = {"a": 100}
    world.versions["a"] += 1
    world.live(5)
    assert Predictions(world.state, world.now).of(world.model("a")) is True


def test_backoff_of_a_failed_model_ends_when_its_file_changes() -> None:
    world = begin({"a": {}})
    for failures in range(1, 8):
        world.want("a")
        world.arrive(events.Loaded)
        world.end(world.model("a").worker or "", ExitCause.STARTUP, was_ready=False)
        world.arrive()
        world.live(0 if failures == 7 else 2 ** (failures - 1))
    model = world.model("a")
    assert (model.state, model.backoff.failures) == (ModelState.FAILED, 7)
    assert model.retry_at - world.now > 30
    world.versions["a"] += 1
    world.live(5)
    assert world.model("a").backoff.failures == 0
    world.leased("a")


def test_template_problem_is_logged_and_shown_until_the_model_is_unloaded() -> None:
    world = begin({"a": {}})
    world.want("a")
    world.arrive(events.Loaded)
    loaded = next(event for event in world.later if isinstance(event, events.Loaded))
    problem = "the chat template does not compile: line 1"
    world.later[world.later.index(loaded)] = replace(loaded, ready=replace(loaded.ready, template_problem=problem))
    world.arrive()
    assert [line for line in world.log if "template" in line] == [f"a chat template of a is not used: {problem}"]
    shown = model_status.status(world.state, world.model("a"), world.now)
    assert (shown.template_problem, shown.to_json()["headgate"]["template_problem"]) == (problem, problem)
    world.end(world.model("a").worker or "", ExitCause.REQUESTED)
    world.arrive()
    assert model_status.status(world.state, world.model("a"), world.now).template_problem is None
