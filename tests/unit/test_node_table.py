"""The table of nodes follows their reports, and a request considers few of them."""

from __future__ import annotations

import random

from gateway.nodes.node_table import MAX_COLD, MAX_LOADED, NameSet, NodeTable
from inference.protocol import ModelState, ModelStatus

READY, COLD = ModelState.READY, ModelState.COLD


def statuses(state: ModelState, *ids: str, in_flight: int = 0) -> dict[str, ModelStatus]:
    return {id: ModelStatus(id, state, in_flight=in_flight) for id in ids}


def test_updates_replace_what_a_node_reported_before() -> None:
    table = NodeTable()
    table.update("a", statuses(READY, "m", "n", in_flight=2))
    table.update("b", cold := statuses(COLD, "m"))
    assert (set(table.nodes), set(table.loaded_models)) == ({"a", "b"}, {"m", "n"})
    assert set(table.models) == {"m", "n"}
    assert (list(table.listed("m")), list(table.loaded("m")), table.in_flight("a", "m")) == (["a", "b"], ["a"], 2)

    table.update("b", cold)
    table.update("a", statuses(COLD, "m", in_flight=1))
    assert (list(table.loaded("m")), list(table.listed("n")), table.in_flight("a", "m")) == ([], [], 1)
    assert table.status("a", "n") is None
    assert (status := table.status("a", "m")) is not None
    assert status.state is COLD

    table.update_model("b", ModelStatus("m", READY))
    table.update_model("b", ModelStatus("m", ModelState.BUSY))
    table.update_model("c", ModelStatus("m", COLD))
    table.update_model("c", ModelStatus("m", ModelState.FAILED))
    assert list(table.loaded("m")) == ["b"]


def test_a_node_that_leaves_is_forgotten() -> None:
    table = NodeTable()
    table.update("a", statuses(READY, "m", in_flight=2))
    table.update("b", statuses(READY, "m"))
    table.update("c", statuses(COLD, "m"))
    table.remove("a")
    table.remove("c")
    table.remove("unknown")
    assert (list(table.nodes), list(table.listed("m")), list(table.loaded("m"))) == (["b"], ["b"], ["b"])
    assert (table.in_flight("a", "m"), table.node_load("a"), dict(table.models_of("a"))) == (0, 0.0, {})
    assert table.nodes_for("m", random.Random(1).random) == ["b"]


def test_a_request_considers_few_nodes() -> None:
    table = NodeTable()
    for number in range(200):
        table.update(f"n{number}", statuses(READY if number < 100 else COLD, "m", "n"))
    found = table.nodes_for("m", random.Random(1).random)
    assert 5 < len(set(found)) == len(found) <= MAX_LOADED + MAX_COLD
    assert table.nodes_for("unknown", random.Random(1).random) == []
    for number in range(100):
        table.update_model(f"n{number}", ModelStatus("n", COLD))
    assert 0 < len(table.nodes_for("n", random.Random(1).random)) <= MAX_COLD


def test_requests_of_a_node_are_those_of_all_its_models() -> None:
    table = NodeTable()
    for model in "mn":
        status = ModelStatus(model, READY, devices=(f"gpu-{model}",), in_flight=1, queued=1)
        table.update_model("a", status)
        table.update_model("a", status)
    assert (table.in_flight("a", "m"), table.in_flight("a", "unknown"), table.in_flight("b", "m")) == (2, 0, 0)
    assert table.node_load("a") == 4 / 2
    table.update("a", {"m": ModelStatus("m", READY, in_flight=5)})
    assert (table.in_flight("a", "m"), table.in_flight("a", "n"), table.node_load("a")) == (5, 0, 5 / 2)


def test_every_name_of_a_set_is_drawn() -> None:
    names = NameSet()
    for name in "abcdb":
        names.add(name)
    names.discard("a")
    names.discard("a")
    names.discard("d")
    assert (len(names), sorted(names), "b" in names, "a" in names) == (2, ["b", "c"], True, False)
    chance = random.Random(1)
    assert {names.sample(1, chance.random)[0] for _ in range(50)} == {"b", "c"}
    assert names.sample(1, lambda: 1.0) != []
