"""Which node takes a request, and what is reported when none does."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from gateway.nodes.node_choice import ChosenNode, NodeFacts, NodeNeeds, NoNode, choose
from gateway.providers.local.candidate_facts import LikelyFailure, Speed
from inference.protocol import ModelState, ModelStatus

LOADED = Speed(0.0, 0.0, 1000.0)
NEEDS = NodeNeeds(prompt_tokens=1000, capabilities=frozenset(("chat",)))


def chosen(*nodes: NodeFacts, needs: NodeNeeds = NEEDS, seed: int = 1) -> ChosenNode:
    result = choose(nodes, needs, random.Random(seed).random)
    assert isinstance(result, ChosenNode)
    return result


def loaded(name: str, load: int = 0, parallel: int = 4, cached: int = 0) -> NodeFacts:
    return NodeFacts(name, speed=LOADED, in_flight=load, parallel=parallel, cached_tokens=cached)


@pytest.mark.parametrize(("node", "reason", "retry_in"), [
    (NodeFacts("a", excluded="failed before"), "failed before", None),
    (NodeFacts("a", listed=False), "does not have the model", None),
    (NodeFacts("a", capabilities=("tools",)), "cannot do chat", None),
    (NodeFacts("a", breaker_open_for=0.5), "its breaker is open; retry in a moment", 0.5),
    (NodeFacts("a", queue_full_for=3.0), "its queue is full; retry in 3 s", 3.0),
    (NodeFacts("a", fits=False, fit_in=9.0), "cannot fit now: not enough memory", 9.0),
    (NodeFacts("a", fits=False, fit_reason="gpu-0 lacks 3 GiB"), "cannot fit now: gpu-0 lacks 3 GiB", None),
])  # fmt: skip
def test_the_reason_of_every_node_is_reported(node: NodeFacts, reason: str, retry_in: float | None) -> None:
    result = choose([node, NodeFacts("b", queue_full_for=20.0)], NEEDS, random.random)
    assert result == NoNode({"a": reason, "b": "its queue is full; retry in 20 s"}, min(retry_in or 20.0, 20.0))
    assert chosen(node, loaded("c")) == ChosenNode("c", 1.0)


def test_choice_among_no_nodes_is_no_node_without_reasons() -> None:
    assert choose([], NEEDS, random.random) == NoNode({})


def test_unchecked_fit_and_unknown_facts_exclude_no_node() -> None:
    assert chosen(NodeFacts("a", fits=False), needs=NEEDS._replace(fit_check=False)).name == "a"
    assert chosen(NodeFacts("a")).name == "a"


def test_the_earliest_first_token_wins() -> None:
    cold, queued = NodeFacts("cold", speed=Speed(30.0)), NodeFacts("queued", speed=Speed(0.0, 5.0))
    assert chosen(cold, queued).name == "queued"
    assert chosen(cold, queued, loaded("a")).name == "a"
    assert chosen(cold, queued._replace(speed=Speed(0.0, 60.0))).name == "cold"
    assert chosen(loaded("a"), loaded("b", cached=900)) == ChosenNode("b", 0.1, ("a",))
    assert chosen(NodeFacts("unknown"), loaded("a")).name == "a"  # loading probably takes time


def test_a_node_with_a_low_prefill_rate_gets_a_few_requests_that_measure_it_again() -> None:
    slow = loaded("slow")._replace(speed=Speed(0.0, 0.0, 10.0))
    nodes = (slow, loaded("a", load=1), loaded("b", load=1))
    counts = Counter(chosen(*nodes, seed=seed).name for seed in range(400))
    assert 5 <= counts["slow"] <= 50


def test_unknown_parts_are_the_median_of_the_others() -> None:
    known = [NodeFacts(f"n{number}", speed=Speed(8.0, 4.0, 500.0)) for number in range(3)]
    assert chosen(*known, NodeFacts("a", in_flight=1, cached_tokens=1000)) == ChosenNode("a", 12.0, ("n0", "n1", "n2"))


def test_equal_nodes_share_the_requests_and_the_less_loaded_gets_more() -> None:
    nodes = [loaded("a"), loaded("b"), loaded("c"), loaded("d", load=3)]
    counts = Counter(chosen(*nodes, seed=seed).name for seed in range(300))
    assert min(counts[name] for name in "abc") > 60
    assert counts["d"] < 40


def test_among_equal_nodes_with_a_place_the_load_of_all_models_decides() -> None:
    busy = loaded("busy", load=1)._replace(node_load=0.9)
    quiet = loaded("quiet", load=2)._replace(node_load=0.2)
    assert Counter(chosen(busy, quiet, seed=seed).name for seed in range(100))["quiet"] > 60


def test_facts_come_from_the_status_of_the_model() -> None:
    status = ModelStatus(
        "m", ModelState.READY, parallel=2, capabilities=("chat",), context_length=4096, fits=True, load_seconds=0.0,
        answer_seconds=3.0, prefill_tokens_per_second=900.0,
    )  # fmt: skip
    facts = NodeFacts.of("a", status, 4, 0.5, 100)
    assert facts.speed == Speed(0.0, 9.0, 900.0)
    assert (facts.name, facts.in_flight, facts.parallel, facts.node_load, facts.cached_tokens) == ("a", 4, 2, 0.5, 100)
    assert (facts.capabilities, facts.context_length, facts.fits) == (("chat",), 4096, True)
    assert NodeFacts.of("a", ModelStatus("m", ModelState.COLD), 0, 0.0, 0).capabilities is None


def test_a_loaded_node_far_above_the_mean_is_spared_while_others_have_places() -> None:
    hot = loaded("hot", load=8, cached=1000)
    assert chosen(hot, loaded("a", load=2), loaded("b", load=2)).name != "hot"
    assert chosen(hot, loaded("a", load=8), loaded("b", load=8)).name == "hot"
    assert chosen(loaded("hot", load=3, cached=1000), loaded("a"), loaded("b")).name == "hot"  # it has a place
    assert chosen(loaded("hot", load=4, cached=1000), loaded("a", load=3)).name == "hot"  # near the mean
    cold = NodeFacts("cold", speed=Speed(0.1), in_flight=9)
    assert chosen(loaded("a", load=3), cold).name == "a"


def test_nodes_that_would_fail_or_are_too_small_come_last() -> None:
    failing = loaded("failing")._replace(likely_failure=LikelyFailure("its device is lost"))
    small = loaded("small", cached=900)._replace(context_length=800)
    assert chosen(failing, loaded("a", load=3), small).name == "a"
    assert chosen(failing, small).name == "failing"
    assert chosen(small).name == "small"
    assert chosen(failing._replace(context_length=800)).name == "failing"
