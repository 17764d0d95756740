"""The dashboard and `/admin/nodes` of a gateway in front of two inference services."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import ADMIN, Gateway
from tests.rigs.page_rig import Page
from tests.rigs.stack import until

CONFIG = """
inference: {{nodes: [a={a}, b={b}]}}
routes: {{"*": {{chain: ["local/*"]}}}}
"""


class Fleet:
    """A gateway and its two services."""

    def __init__(self, gateway: Gateway, a: FakeInference, b: FakeInference) -> None:
        self.gateway, self.a, self.b = gateway, a, b


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    async with contextlib.AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(FakeInference("token")) for _ in range(2)]
        for name, service in (("a", a), ("b", b)):
            service.figures = {"devices": [{"id": "gpu-0", "name": f"card of {name}"}], "models": {}}
        gateway = await stack.enter_async_context(Gateway(tmp_path, a.url, CONFIG.format(a=a.url, b=b.url)))
        await until("both answer", lambda: gateway.runtime.view.is_complete)
        yield Fleet(gateway, a, b)


async def test_admin_nodes_lists_what_the_gateway_knows(fleet: Fleet) -> None:
    path = "/admin/nodes"
    assert (await fleet.gateway.client.get(path)).status_code == 403
    answer = await fleet.gateway.client.get(path, headers={"authorization": f"Bearer {ADMIN}"})
    found = answer.json()
    assert found["sources"] == [f"a={fleet.a.url}", f"b={fleet.b.url}"]
    first, second = found["nodes"]
    assert (first["name"], first["url"], first["reachable"], first["listed"]) == ("a", fleet.a.url, True, True)
    assert second["name"] == "b"
    assert first["models"] >= len(first["loaded"]) > 0
    assert first["in_flight"] == 0
    await fleet.b.stop()
    await until("it is missed", lambda: fleet.gateway.runtime.fleet.nodes["b"].view.reachable is False)
    answer = await fleet.gateway.client.get(path, headers={"authorization": f"Bearer {ADMIN}"})
    assert [node["reachable"] for node in answer.json()["nodes"]] == [True, False]


def _of(page: Page, kind: str) -> list[dict[str, Any]]:
    return [data for found, data in page.events if found == kind]


async def test_page_has_the_models_and_devices_of_each_node(fleet: Fleet) -> None:
    async with Page.signed_in(fleet.gateway.url, ADMIN) as page, page.listening() as snapshot:
        assert [node["name"] for node in snapshot["inference"]["nodes"]] == ["a", "b"]
        places = {(model["node"], model["id"]) for model in snapshot["models"]}
        assert {("a", "demo"), ("b", "demo")} <= places
        await until("devices", lambda: {data["node"] for data in _of(page, "devices")} == {"a", "b"})
        devices = [device for data in _of(page, "devices") for device in data["devices"]]
        assert {(device["node"], device["name"]) for device in devices} == {("a", "card of a"), ("b", "card of b")}
        fleet.gateway.write(CONFIG.format(a=fleet.a.url, b=fleet.b.url).replace(f", b={fleet.b.url}", ""))
        await fleet.gateway.runtime.reload()
        await until("its models are gone", lambda: {"b"} == {data["node"] for data in _of(page, "removed")})
        await until("its devices are gone", lambda: _of(page, "devices")[-1]["devices"] == [])
        assert _of(page, "devices")[-1]["node"] == "b"


async def test_node_that_dies_and_returns_is_shown(fleet: Fleet) -> None:
    async with Page.signed_in(fleet.gateway.url, ADMIN) as page, page.listening():
        await fleet.b.stop()
        down = ("a", True), ("b", False)
        await until("it is missed", lambda: down in [_reachable(data) for data in _of(page, "inference")])
        await until("an entry", lambda: "The node b does not answer" in _texts(page))
        await fleet.b.start()
        await until("it is back", lambda: _reachable(_of(page, "inference")[-1]) == (("a", True), ("b", True)))
        await until("an entry", lambda: "The node b answers again" in _texts(page))


def _reachable(data: dict[str, Any]) -> tuple[tuple[str, bool], ...]:
    return tuple((node["name"], node["reachable"]) for node in data["nodes"])


def _texts(page: Page) -> list[str]:
    return [data["entry"]["text"] for data in _of(page, "timeline")]


async def test_actions_need_the_node_and_reach_it(fleet: Fleet) -> None:
    async with Page.signed_in(fleet.gateway.url, ADMIN) as page:
        answer = await page.post("/ui/api/models/demo/unload")
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "node")
        assert "nodes: a, b" in answer.json()["error"]["message"]
        answer = await page.post("/ui/api/plan", {"model": "demo", "action": "unload", "node": "b"})
        assert answer.json()["allowed"] is True
        answer = await page.post("/ui/api/models/demo/unload", {"node": "b"})
        assert answer.json()["node"] == "b"
        assert (fleet.a.operated[0], fleet.b.operated[0]) == ("", "/models/demo/unload")
