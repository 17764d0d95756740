"""The nodes in use: membership, additions, removals, and the merged view of their models."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import generate_latest

from gateway.nodes.fleet import ONLY, Fleet, Member
from gateway.nodes.fleet_view import FEW_NODES, MERGE_SECONDS, FleetView
from gateway.nodes.membership import Address, Membership
from gateway.nodes.node import Node
from gateway.providers.local.candidate_facts import LikelyFailure
from gateway.settings import NodeSettings
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import ModelState, ModelStatus
from tests.rigs.stack import until


class FakeNode:
    """A node without a service. `view.age`: seconds since its last answer."""

    def __init__(self, name: str, member: Member = Member("", None)) -> None:  # noqa: B008 - it is immutable
        self.name, self.url, self.key = name, member.url, f"local@{name}"
        self.is_listed = True
        self.is_stopped = False
        self.failures: dict[str, LikelyFailure] = {}
        self.view = SimpleNamespace(
            age=0.0, is_fresh=True, reachable=True, reachable_since=1.0, was_seen=True, models={},
            likely_failure=self.failures.get, polls=0,
        )  # fmt: skip

    def stop(self) -> None:
        self.is_stopped = True

    def lists(self, *statuses: ModelStatus) -> None:
        self.view.models = {status.id: status for status in statuses}


def make(name: str, member: Member) -> Node:
    return cast(Node, FakeNode(name, member))


def members(**urls: str) -> dict[str, Member]:
    return {name: Member(url, "t") for name, url in urls.items()}


def names(nodes: Any) -> list[str]:
    return sorted(node.name for node in nodes)


# --- fleet ------------------------------------------------------------------------------------------------------------
def test_unchanged_nodes_are_kept_and_changed_ones_replaced() -> None:
    fleet = Fleet(make)
    first = fleet.use(members(a="1", b="2"), is_final=True)
    assert (names(first.added), first.removed, fleet.is_single) == (["a", "b"], (), False)
    before = dict(fleet.nodes)
    second = fleet.use(members(a="1", b="3", c="4"), is_final=True)
    assert (names(second.added), names(second.removed)) == (["b", "c"], ["b"])
    assert fleet.nodes["a"] is before["a"]
    assert cast(FakeNode, before["b"]).is_stopped
    view = fleet.view
    assert fleet.use(members(a="1", b="3", c="4"), is_final=True) == ((), ())
    assert fleet.view is view


def test_node_that_left_stays_until_it_is_silent() -> None:
    fleet = Fleet(make)
    fleet.use(members(a="1", b="2"), is_final=True)
    b: Any = fleet.nodes["b"]
    assert fleet.use(members(a="1"), is_final=False) == ((), ())
    assert fleet.sweep() == ((), ())
    fleet.use(members(a="1", b="2"), is_final=False)
    assert b.is_listed
    fleet.use(members(a="1"), is_final=False)
    b.view.age = 16.0
    assert names(fleet.sweep().removed) == ["b"]
    assert list(fleet.nodes) == ["a"]


def test_silent_node_that_is_listed_stays() -> None:
    fleet = Fleet(make)
    fleet.use(members(a="1", b="2"), is_final=True)
    cast(Any, fleet.nodes["b"]).view.age = 100.0
    assert fleet.sweep() == ((), ())


def test_single_service_is_replaced_by_listed_nodes() -> None:
    fleet = Fleet(make)
    fleet.use({ONLY: Member("1", "t")}, is_final=True)
    assert fleet.is_single
    assert fleet.view is fleet.nodes[ONLY].view
    change = fleet.use(members(a="1"), is_final=False)
    assert (names(change.added), names(change.removed)) == (["a"], [""])
    assert isinstance(fleet.view, FleetView)


# --- the merged view --------------------------------------------------------------------------------------------------
def status(model: str = "m", state: ModelState = ModelState.READY, **more: Any) -> ModelStatus:
    return ModelStatus(model, state, capabilities=("chat",), context_length=64, **more)


def view_of(*nodes: FakeNode, clock: list[float] | None = None) -> FleetView:
    return FleetView(cast(Any, {node.name: node for node in nodes}), lambda: (clock or [0.0])[0])


def test_models_appear_change_and_disappear_with_their_nodes() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    view = view_of(a, b)
    assert (dict(view.models), view.aliases, "m" in view.models) == ({}, {}, False)
    a.lists(status(in_flight=1, aliases=("n",)))
    b.lists(status(in_flight=2), status("only"))
    assert dict(view.models) == {}, "the change is not known yet"
    view.note_change("a")
    view.note_change("b")
    assert {name: one.in_flight for name, one in view.models.items()} == {"m": 3, "only": 0}
    assert (view.aliases, len(view.models), "m" in view.models) == ({"n": "m"}, 2, True)
    b.lists()
    view.note_change("b")
    assert ([*view.models], view.models["m"].in_flight) == (["m"], 1)
    assert view.models.get("only") is None
    view.note_change("unknown")
    assert [*view.models] == ["m"]


def test_model_on_many_nodes_is_merged_at_intervals() -> None:
    nodes = [FakeNode(f"n{number}") for number in range(FEW_NODES + 1)]
    clock = [0.0]
    view = view_of(*nodes, clock=clock)
    for node in nodes:
        node.lists(status(in_flight=1))
    assert view.models["m"].in_flight == len(nodes)
    nodes[0].lists(status(in_flight=5))
    view.note_change("n0")
    assert view.models["m"].in_flight == len(nodes)
    clock[0] += MERGE_SECONDS
    assert view.models["m"].in_flight == len(nodes) + 4


def test_view_is_complete_when_all_nodes_answer() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    view = view_of(a, b)
    assert (view.is_fresh, view.is_complete, view.reachable, view.was_seen) == (True, True, True, True)
    a.view.is_fresh, a.view.reachable = False, False
    assert (view.is_fresh, view.is_complete, view.reachable) == (True, False, True)
    b.view.is_fresh, b.view.reachable = False, None
    assert (view.is_fresh, view.reachable) == (False, False)
    assert (view_of().is_complete, view_of().reachable, view_of().was_seen) == (False, None, False)


def test_failure_of_a_model_is_likely_only_if_it_is_likely_on_every_node() -> None:
    a, b = FakeNode("a"), FakeNode("b")
    view = view_of(a, b)
    a.lists(status())
    b.lists(status())
    assert view.likely_failure("m") is None
    a.failures["m"] = LikelyFailure("a failed")
    assert view.likely_failure("m") is None
    b.failures["m"] = LikelyFailure("b failed", 2.0)
    assert view.likely_failure("m") == LikelyFailure("b failed", 2.0)
    assert view.likely_failure("other") is None


# --- membership -------------------------------------------------------------------------------------------------------
def settings(*nodes: str, **more: Any) -> NodeSettings:
    return NodeSettings.model_validate({"nodes": nodes, **more})


async def test_urls_and_addresses_of_dns_names_are_members() -> None:
    membership = Membership(settings("http://gpu-1:8085", "b=https://gpu-2/", "dns:127.0.0.1:99"))
    assert not membership.is_complete
    await membership.first()
    assert membership.is_complete
    assert membership.addresses == {
        "127.0.0.1:99": Address("http://127.0.0.1:99", "127.0.0.1"),
        "gpu-1:8085": Address("http://gpu-1:8085"),
        "b": Address("https://gpu-2"),
    }
    later = Membership(settings("dns:127.0.0.1:99", "ray:"), membership)
    assert [*later.addresses] == ["127.0.0.1:99"]


@pytest.mark.parametrize("name", ["does-not-exist.invalid", "does-not-exist..invalid"])
async def test_name_without_an_address_is_reported_once(caplog: pytest.LogCaptureFixture, name: str) -> None:
    membership = Membership(settings(f"dns:{name}:99"))
    await membership.first()
    await membership.first()
    assert (dict(membership.addresses), membership.is_complete) == ({}, False)
    assert len(caplog.messages) == 1
    assert f"the nodes of dns:{name}:99 cannot be read" in caplog.text


async def test_name_server_that_hangs_holds_one_thread_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of look-ups cannot be cancelled; without a bound they would use up those of the gateway."""
    monkeypatch.setattr("gateway.nodes.membership.FIRST_SECONDS", 0.01)
    answers, asked = asyncio.Event(), 0

    async def hang(*_args: Any, **_options: Any) -> Any:
        nonlocal asked
        asked += 1
        await answers.wait()
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.1", 99))]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", hang)
    membership = Membership(settings("dns:nodes:99"))
    for _ in range(3):
        await membership.first()
    assert (asked, membership.is_complete) == (1, False)
    answers.set()
    await membership.first()
    assert (asked, [*membership.addresses]) == (1, ["10.0.0.1:99"])
    await membership.first()
    assert asked == 2


async def test_members_of_a_cluster_are_those_that_its_helper_prints(caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"nodes": [{"name": "n1", "url": "http://10.0.0.1:8085/", "epoch": "e"}]})
    membership = Membership(settings("ray:head:1"), helper=(sys.executable, "-c", f"print('{line}', flush=True)"))
    changes: list[dict[str, Address]] = []
    task = asyncio.create_task(membership.run(lambda: changes.append(dict(membership.addresses))))
    try:
        await until("the end of the helper is logged", lambda: "its helper ended with status 0" in caplog.text)
        assert changes == [{"n1": Address("http://10.0.0.1:8085")}]
        assert membership.addresses == changes[0], "the last list stays"
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_same_name_in_two_sources_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    line = json.dumps({"nodes": [{"name": name, "url": f"http://10.0.0.1:808{name}"} for name in "56"]})
    helper = (sys.executable, "-c", f"print('{line}', flush=True); input()")
    membership = Membership(settings("ray:a", "5=http://10.0.0.2:8085", "6=http://10.0.0.1:8086"), helper=helper)
    task = asyncio.create_task(membership.run(lambda: None))
    try:
        await until("it is logged", lambda: "two nodes are named 5" in caplog.text)
        assert "only http://10.0.0.2:8085 is used" in caplog.text
        assert "two nodes are named 6" not in caplog.text
    finally:
        task.cancel()
        await asyncio.wait({task})


async def test_invalid_line_of_the_helper_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    membership = Membership(settings("ray:"), helper=(sys.executable, "-c", "print('[]', flush=True); input()"))
    task = asyncio.create_task(membership.run(lambda: None))
    try:
        await until("it is logged", lambda: "the nodes of ray: cannot be read: TypeError" in caplog.text)
    finally:
        task.cancel()
        await asyncio.wait({task})


def test_questions_about_a_model_go_to_a_loaded_node() -> None:
    """A node that never loaded it reports no time."""
    fleet = Fleet(make)
    fleet.use(members(a="1", b="2", c="3"), is_final=True)
    times = {"a": None, "b": 0.0, "c": 3.0}
    for name, seconds in times.items():
        node = cast(Any, fleet.nodes[name])
        node.provider = SimpleNamespace(post_json=name)
        node.lists(ModelStatus("m", ModelState.COLD, load_seconds=seconds))
    assert fleet.ask_about("m") == "b"


def test_metrics_of_a_removed_node_are_removed() -> None:
    telemetry = Telemetry()
    for node in ("a", "b", ""):
        telemetry.attempts("local" if node else "cloud", node, "m", "success").inc()
        telemetry.probes.labels(node, "recovery", "good").inc()
        telemetry.node_up.labels(node).set(1)
    telemetry.forget_node("a")
    telemetry.attempts("local", "b", "m", "success").inc()
    text = generate_latest(telemetry.registry).decode()
    assert 'node="a"' not in text
    assert 'gateway_attempts_total{model="m",node="b",outcome="success",provider="local"} 2.0' in text
    telemetry.forget_node("")
    assert 'provider="cloud"' in generate_latest(telemetry.registry).decode()
    telemetry.attempts("local", "a", "m", "success").inc()
    assert 'node="a",outcome="success",provider="local"} 1.0' in generate_latest(telemetry.registry).decode()
