"""The status of a model over several nodes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.nodes.merged_models import merged
from inference.protocol import ModelState, ModelStatus

STATES = st.sampled_from(ModelState)


def status(state: ModelState = ModelState.READY, **more: object) -> ModelStatus:
    return ModelStatus("demo", state, capabilities=("chat",), context_length=100, **more)  # type: ignore[arg-type]


def test_state_and_waits_are_those_of_the_best_node_and_requests_are_added() -> None:
    found = merged(
        {
            "a": status(queue_seconds=3.0, in_flight=4, queued=2, parallel=4, devices=("gpu-0",), actual_bytes=10),
            "b": status(queue_seconds=1.0, in_flight=3, parallel=2, devices=("gpu-0", "gpu-1"), predicted_bytes=7),
            "c": status(ModelState.COLD, load_seconds=9.0, parallel=8, idle_seconds=3.0, retry_after_seconds=2.0),
        }
    )
    assert (found.state, found.queue_seconds, found.load_seconds) == (ModelState.READY, 1.0, None)
    assert (found.in_flight, found.queued, found.parallel) == (7, 2, 6)
    assert found.devices == ("a/gpu-0", "b/gpu-0", "b/gpu-1")
    assert (found.actual_bytes, found.predicted_bytes, found.idle_seconds) == (10, 7, 3.0)


def test_what_one_node_does_not_know_is_unknown() -> None:
    assert merged({"a": status(fits=False), "b": status()}).fits is None
    assert merged({"a": status(fits=False), "b": status(fits=True)}).fits is True
    assert merged({"a": status(fits=False), "b": status(fits=False)}).fits is False
    unknown = ModelStatus("demo", ModelState.COLD)
    both = merged({"a": status(), "b": unknown})
    assert (both.capabilities, both.context_length) == ((), 0)


@given(st.dictionaries(st.sampled_from("abcd"), STATES, min_size=1))
def test_one_loaded_node_is_enough(states: dict[str, ModelState]) -> None:
    found = merged({node: status(state) for node, state in states.items()})
    assert found.state in states.values()
    if ModelState.READY in states.values():
        assert found.state is ModelState.READY
    if set(states.values()) != {ModelState.FAILED}:
        assert found.state is not ModelState.FAILED
