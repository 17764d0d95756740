"""When a model gets another copy, on which node, and which copies are kept."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.nodes.node_table import NodeTable
from gateway.nodes.rebalance import (
    HOLD_SECONDS,
    REFUSED_SECONDS,
    REST_SECONDS,
    Copy,
    RebalanceState,
    Rebalancing,
    cheapest,
    protected,
    rebalance,
    shortages,
)
from inference.protocol import ModelState, ModelStatus

COLD, LOADING, READY, FAILED = ModelState.COLD, ModelState.LOADING, ModelState.READY, ModelState.FAILED


def table_of(states: Mapping[str, ModelState], in_flight: int = 0, parallel: int = 4) -> NodeTable:
    """The model `m` on nodes with these states; each loaded one has `in_flight` requests."""
    table = NodeTable()
    for node, state in states.items():
        requests = in_flight if state is READY else 0
        table.update_model(node, ModelStatus("m", state, in_flight=requests, parallel=parallel))
    return table


def settled(table: NodeTable, replicas: Mapping[str, int], **more: set[str]) -> Rebalancing:
    """The decision when the state of the nodes has lasted for long enough."""
    first = rebalance(table, replicas, RebalanceState(), 0.0, **more)
    assert first.copies == ()
    return rebalance(table, replicas, first.state, HOLD_SECONDS, **more)


def test_a_model_gets_the_configured_number_of_copies() -> None:
    table = table_of({"a": READY, "b": COLD, "c": COLD, "d": FAILED})
    found = settled(table, {"m": 2})
    assert found.copies == (Copy("m", "it is loaded on 1 of 2 nodes", ("b", "c"), True),)
    assert rebalance(table, {"m": 2}, found.state, HOLD_SECONDS + 1).copies == ()  # it begins to load
    assert rebalance(table, {"m": 2}, found.state, HOLD_SECONDS + REST_SECONDS).copies == found.copies
    assert settled(table_of({"a": READY, "b": LOADING}), {"m": 2}).copies == ()
    assert settled(table_of({"a": READY, "b": READY}), {"m": 9}).copies == ()  # no other node has the model
    assert settled(NodeTable(), {"m": 1}).copies == ()


def test_replicas_that_too_few_nodes_can_load_are_named() -> None:
    table = table_of({"a": READY, "b": COLD})
    assert shortages(table, {"m": 2}) == []
    assert shortages(table, {"m": 3, "x": 1}) == [
        "m is to be loaded on 3 nodes; nodes with the model: 2",
        "x is to be loaded on 1 nodes; nodes with the model: 0",
    ]


def test_copies_on_nodes_that_do_not_answer_are_replaced() -> None:
    table = table_of({"a": READY, "b": READY, "c": COLD})
    assert settled(table, {"m": 2}).copies == ()
    assert [copy.nodes for copy in settled(table, {"m": 2}, unavailable={"a"}).copies] == [("c",)]
    assert settled(table, {"m": 2}, unavailable={"a", "c"}).copies == ()


def test_nodes_with_the_fewest_kept_models_come_first() -> None:
    table = table_of({"a": COLD, "b": COLD, "c": COLD})
    for model in "xy":
        table.update_model("a", ModelStatus(model, READY))
    table.update_model("b", ModelStatus("x", READY))
    table.update_model("c", ModelStatus("z", READY, in_flight=9))
    assert settled(table, {"m": 1, "x": 2, "y": 1}).copies[0].nodes == ("c", "b", "a")
    table.update_model("c", ModelStatus("m", COLD, fits=False))
    assert settled(table, {"m": 1, "x": 2, "y": 1}).copies[0].nodes == ("b", "a")


def test_a_model_whose_slots_are_used_gets_a_copy_on_a_node_without_more_load() -> None:
    (copy,) = settled(table_of({"a": READY, "b": COLD}, in_flight=3), {}).copies
    assert copy == Copy("m", "its 1 nodes have 3 requests for 4 slots", ("b",), False)
    assert settled(table_of({"a": READY, "b": COLD}, in_flight=2), {}).copies == ()
    assert settled(table_of({"a": READY, "b": COLD}, in_flight=1, parallel=1), {}).copies == ()
    assert settled(table_of({"a": READY, "b": LOADING, "c": COLD}, in_flight=9), {}).copies == ()
    table = table_of({"a": READY, "b": COLD}, in_flight=3)
    table.update_model("b", ModelStatus("other", READY, in_flight=9, parallel=32))
    assert settled(table, {}).copies == ()


def test_a_model_on_busy_nodes_gets_a_copy_on_another() -> None:
    table = table_of({"a": READY, "b": COLD}, in_flight=1)
    table.update_model("a", ModelStatus("other", READY, in_flight=11, parallel=32))
    (copy,) = settled(table, {}).copies
    assert copy == Copy("m", "each of its 1 nodes has over 9.0 requests; the mean of all nodes is 6.0", ("b",), False)
    idle = table_of({"a": READY, "b": COLD})
    idle.update_model("a", ModelStatus("other", READY, in_flight=11, parallel=32))
    assert settled(idle, {}).copies == ()


def test_a_model_with_many_copies_gets_several_at_a_time() -> None:
    states = {f"a{number:02}": READY for number in range(16)} | {f"b{number}": COLD for number in range(9)}
    found = settled(table_of(states, in_flight=3), {}).copies
    assert [copy.nodes for copy in found] == [("b0", "b1", "b2", "b3"), ("b4", "b5", "b6", "b7")]
    table = table_of(states, in_flight=2)
    for number in range(6):
        table.update_model(f"a{number:02}", ModelStatus("m", READY, in_flight=4, parallel=4))
    assert len(settled(table, {}).copies) == 2
    table.update_model("b0", ModelStatus("m", LOADING, parallel=4))
    assert len(settled(table, {}).copies) == 1
    table.update_model("b1", ModelStatus("m", LOADING, parallel=4))
    assert settled(table, {}).copies == ()


def test_a_busy_node_is_relieved_of_one_model_at_a_time() -> None:
    table = NodeTable()
    for node in "abc":
        for model, requests in (("x", 5), ("y", 6), ("z", 1)):
            state = READY if node == "a" else COLD
            table.update_model(node, ModelStatus(model, state, in_flight=requests if node == "a" else 0, parallel=32))
    found = settled(table, {})
    assert [copy.model for copy in found.copies] == ["y"]
    assert rebalance(table, {}, found.state, HOLD_SECONDS + 1).copies == ()
    later = rebalance(table, {}, found.state, HOLD_SECONDS + REST_SECONDS)
    assert [copy.model for copy in later.copies] == ["y"]


def test_copies_of_one_decision_go_to_different_nodes() -> None:
    table = NodeTable()
    for model in ("x", "y"):
        table.update_model("a", ModelStatus(model, READY, in_flight=4, parallel=4))
        for node in "bc":
            table.update_model(node, ModelStatus(model, COLD))
    assert [copy.nodes for copy in settled(table, {}).copies] == [("b", "c"), ("c", "b")]


def test_a_need_that_ends_begins_anew() -> None:
    table = table_of({"a": READY, "b": COLD}, in_flight=3)
    state = rebalance(table, {}, RebalanceState(), 0.0).state
    state = rebalance(table_of({"a": READY, "b": COLD}), {}, state, 5.0).state
    state = rebalance(table, {}, state, 10.0).state
    assert rebalance(table, {}, state, 10.0 + HOLD_SECONDS - 1).copies == ()
    assert rebalance(table, {}, state, 10.0 + HOLD_SECONDS).copies != ()


def test_a_node_without_room_is_not_asked_again_for_a_while() -> None:
    table = table_of({"a": READY, "b": COLD, "c": COLD})
    state = settled(table, {"m": 2}).state.after_refusal("m", ["b"], HOLD_SECONDS)
    later = HOLD_SECONDS + REST_SECONDS
    assert [copy.nodes for copy in rebalance(table, {"m": 2}, state, later).copies] == [("c",)]
    later = HOLD_SECONDS + REFUSED_SECONDS
    assert [copy.nodes for copy in rebalance(table, {"m": 2}, state, later).copies] == [("b", "c")]


def test_the_cheapest_plan_that_evicts_no_kept_model_wins() -> None:
    free, evicting = {"result": "FREE"}, {"result": "FULL", "evict": ["x"]}
    copy = Copy("m", "", ("a", "b", "c"), True)
    assert cheapest(copy, {"b": free, "c": free}, {}) == "b"
    assert cheapest(copy, {"a": evicting, "c": free}, {}) == "c"
    assert cheapest(copy, {"a": evicting, "b": evicting}, {"a": {"x"}, "b": {"y"}}) == "b"
    assert cheapest(copy, {"a": evicting}, {"a": {"x"}}) is None
    assert cheapest(copy, {"a": {"result": "NO_FIT"}}, {}) is None
    assert cheapest(copy._replace(may_evict=False), {"a": evicting}, {}) is None


def test_copies_that_are_not_superfluous_are_protected() -> None:
    table = table_of({"a": READY, "b": READY, "c": COLD})
    assert protected(table, {"m": 2}) == {"a": {"m"}, "b": {"m"}}
    assert protected(table, {"m": 1}) == {}


def test_idle_kept_copy_gets_a_load_request_so_that_its_node_does_not_unload_it() -> None:
    table = NodeTable()
    for node, idle in (("a", 90.0), ("b", 30.0), ("c", 5.0), ("d", None)):
        table.update_model(node, ModelStatus("m", READY, idle_seconds=idle))
    table.update_model("e", ModelStatus("m", LOADING))
    assert rebalance(table, {"m": 3}, RebalanceState(), 0.0).kept == (("m", "b"),)
    assert rebalance(table, {"m": 1}, RebalanceState(), 0.0).kept == ()
