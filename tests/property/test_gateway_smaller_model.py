"""Which model `local/smaller` stands for: properties over random lists of models, and examples."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.smaller_model import Option, others, ranked, why_not_now
from inference.protocol import ModelState, ModelStatus, ReplicaStatus

ABILITIES = ("chat", "completions", "tools", "vision", "embeddings")
STATUSES = st.builds(
    ModelStatus,
    id=st.sampled_from([f"m{number}" for number in range(8)]),
    state=st.sampled_from(ModelState),
    capabilities=st.lists(st.sampled_from(ABILITIES), unique=True).map(tuple),
    predicted_bytes=st.none() | st.integers(1, 5),
    actual_bytes=st.none() | st.integers(1, 5),
    fits=st.none() | st.booleans(),
)
MODELS = st.lists(STATUSES, max_size=8, unique_by=lambda status: status.id)
NAMES = st.frozensets(st.sampled_from([f"m{number}" for number in range(8)]), max_size=3)
NEEDS = st.frozensets(st.sampled_from(ABILITIES[:4]), max_size=2)


@given(MODELS, NAMES, NEEDS)
def test_chat_models_outside_the_chain_with_the_needed_capabilities_are_options(
    models: list[ModelStatus], named: frozenset[str], needs: frozenset[str]
) -> None:
    found = others(models, named, needs)
    for model in models:
        can = not model.capabilities or {"chat", *needs} <= set(model.capabilities)
        assert (model in found) == (can and model.id not in named)


@given(MODELS, st.data())
def test_models_known_to_answer_come_first_and_larger_ones_before_smaller(models: list[ModelStatus], data: Any) -> None:
    options = [Option(model, data.draw(st.none() | st.just("no"))) for model in models]
    order = ranked(options)
    assert set(order) == {option for option in options if option.obstacle is None}
    keys = [(option.is_known_to_answer, option.size_bytes) for option in order]
    assert keys == sorted(keys, reverse=True)
    assert ranked(options[::-1]) == order, "the order of the list does not matter"


CHAT = ("chat",)


@pytest.mark.parametrize(
    ("status", "known"),
    [
        (ModelStatus("a", ModelState.READY, capabilities=CHAT), True),
        (ModelStatus("a", ModelState.BUSY, capabilities=CHAT), True),
        (ModelStatus("a", ModelState.COLD, capabilities=CHAT, fits=True), True),
        (ModelStatus("a", ModelState.COLD, capabilities=CHAT, fits=None), False),
        (ModelStatus("a", ModelState.COLD, fits=True), False),
    ],
)
def test_model_is_known_to_answer_if_it_is_ready_or_fits_with_known_capabilities(
    status: ModelStatus, known: bool
) -> None:
    assert Option(status).is_known_to_answer is known


@pytest.mark.parametrize(
    ("status", "why"),
    [
        (ModelStatus("a", ModelState.COLD, predicted_bytes=5, fits=True), None),
        (ModelStatus("a", ModelState.BUSY, predicted_bytes=5), None),
        (ModelStatus("a", ModelState.COLD), None),
        (ModelStatus("a", ModelState.COLD, predicted_bytes=5, reason="waits for b"), "waits for b"),
        (ModelStatus("a", ModelState.COLD, predicted_bytes=5), "whether it fits now is not known"),
    ],
)
def test_measured_model_that_may_have_to_wait_is_not_chosen(status: ModelStatus, why: str | None) -> None:
    assert why_not_now(status) == why


def test_size_of_a_model_with_replicas_is_the_size_of_one_replica() -> None:
    """The figures of the model are sums over its replicas."""
    replicas = tuple(ReplicaStatus(name, ModelState.READY, predicted_bytes=3) for name in ("a", "a@2"))
    doubled = ModelStatus("a", ModelState.READY, capabilities=("chat",), predicted_bytes=6, replicas=replicas)
    larger = ModelStatus("b", ModelState.READY, capabilities=("chat",), predicted_bytes=5)
    assert [option.status.id for option in ranked([Option(doubled), Option(larger)])] == ["b", "a"]
