"""Which inference services start and end on the nodes of a Ray cluster; what gateways get to know of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.settings import node_source
from headgate.ray_cluster.node_report import NodeReport, ServiceSettings, State, membership
from headgate.ray_cluster.service_placement import RayNode, base_name, changes

IDS = ("aaaaaaaa1", "aaaaaaaa2", "bbbbbbbb1", "cccccccc1", "dddddddd1")
NAMES = ("", "gpu", "gpu-aaaaaaaa", "10.0.0.1", "rack 1/gpu ü", "-")
NODES = st.lists(
    st.builds(
        RayNode,
        id=st.sampled_from(IDS),
        address=st.just("10.0.0.1"),
        hostname=st.sampled_from(("", "host", "gpu")),
        name=st.sampled_from(NAMES),
        is_off=st.booleans(),
    ),
    unique_by=lambda node: node.id,
)


@pytest.mark.unmeasured
@given(st.lists(NODES, min_size=1, max_size=6))
def test_each_wanted_node_has_one_service_whose_name_is_unique_and_stays(clusters: list[list[RayNode]]) -> None:
    """For every sequence of clusters: after the changes, the services are those of the wanted nodes."""
    known: dict[str, str] = {}
    for alive in clusters:
        todo = changes(alive, known)
        before = dict(known)
        for id in todo.forget:
            del known[id]
        for node, name in todo.start:
            assert node.id not in known, "a second service on a node"
            known[node.id] = name
        assert known.keys() == {node.id for node in alive if not node.is_off}
        assert len(set(known.values())) == len(known)
        assert all(known[id] == before[id] for id in known.keys() & before.keys() - set(todo.forget))
        assert changes(alive, known) == changes(reversed(alive), known)
        assert not changes(alive, known).start
        assert not changes(alive, known).forget
        for name in known.values():  # gateways accept it
            assert node_source(f"{name}=http://10.0.0.1:8085").name == name


def test_node_that_returns_gets_its_name_again() -> None:
    """A restarted Ray node has another id; the service keeps the name."""
    first, second = RayNode("a1", "10.0.0.1", "gpu-1"), RayNode("a2", "10.0.0.1", "gpu-1")
    todo = changes([second], {first.id: "gpu-1"})
    assert (todo.forget, todo.start) == (("a1",), ((second, "gpu-1"),))


def test_name_is_given_or_the_host_name_or_the_address() -> None:
    assert base_name(RayNode("a1", "10.0.0.1", "vm", "gpu-1")) == "gpu-1"
    assert base_name(RayNode("a1", "10.0.0.1", "vm", "10.0.0.1")) == "vm"
    assert base_name(RayNode("a1", "10.0.0.1")) == "10.0.0.1"
    assert base_name(RayNode("a1", "10.0.0.1", "", "!!")) == "a1"


def test_gateways_get_services_that_were_ready_once() -> None:
    """A service that restarts stays in the list: breakers decide about it."""
    reports = [
        NodeReport("b", "http://b:1", State.STARTING, "e1", was_ready=True),
        NodeReport("c", "http://c:1", State.FAILED),
        NodeReport("a", "http://a:1", State.READY, "e2", was_ready=True),
    ]
    assert membership(reports) == [
        {"name": "a", "url": "http://a:1", "epoch": "e2"},
        {"name": "b", "url": "http://b:1", "epoch": "e1"},
    ]


def test_token_is_not_part_of_the_text_of_the_settings() -> None:
    assert "geheim" not in repr(ServiceSettings("1", token="geheim"))


def test_node_whose_short_name_is_taken_too_gets_its_whole_id() -> None:
    """Two nodes with the same name, whose ids begin alike, beside one with the name that the second would get."""
    known = {"bbbbbbbb1": "gpu", "cccccccc1": "gpu-aaaaaaaa"}
    nodes = [RayNode(id, "10.0.0.1", "host", "gpu", False) for id in (*known, "aaaaaaaa1")]
    assert [name for _, name in changes(nodes, known).start] == ["aaaaaaaa1"]
