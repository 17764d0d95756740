"""The dashboard over several nodes: their devices, models and actions, and a node that does not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs import page_records
from tests.rigs.dashboard_pages import Watched, sign_in
from tests.rigs.fake_dashboard import FakeDashboard


@pytest.fixture
def page(watched: Watched, gateway: FakeDashboard) -> Iterator[Any]:
    """The page with a snapshot of two nodes."""
    gateway.snapshot = page_records.snapshot_of_nodes(time.time())
    yield sign_in(watched.page(), gateway.url, view="memory")


def test_memory_map_has_a_group_per_node_and_a_node_that_dies_and_returns_is_shown(page: Any, gateway: Any) -> None:
    west = page.get_by_role("region", name="west", exact=True)
    assert west.get_by_role("img").count() == 2
    assert page.get_by_role("region", name="east", exact=True).get_by_role("img", name="east gpu-0,").count() == 1
    west.get_by_role("button", name="Recover …").click()
    page.get_by_role("dialog").get_by_role("button", name="Recover west gpu-0").click()
    page.get_by_text("Done.").wait_for()
    page.keyboard.press("Escape")
    assert gateway.done == [("recover", "gpu-0", "west")]
    now = time.time()
    dead = [page_records.node("east", now), page_records.node("west", now, reachable=False)]
    gateway.push("inference", {"reachable": True, "since": now, "nodes": dead})
    page.get_by_text("The node west does not answer").wait_for()
    west.get_by_text("does not answer").wait_for()
    gateway.push("devices", {"node": "west", "devices": []})  # it returns with no device
    gateway.push(
        "inference",
        {"reachable": True, "since": now, "nodes": [page_records.node(name, now) for name in ("east", "west")]},
    )
    page.get_by_text("The node west does not answer").wait_for(state="hidden")
    assert west.get_by_role("img").count() == 0
    assert page.get_by_role("img", name="east gpu-0,").count() == 1


def test_models_have_their_node_and_actions_go_to_it(page: Any, gateway: Any) -> None:
    page.locator('nav a[href="#/models"]').click()
    table = page.get_by_role("table", name="Models")
    table.get_by_role("row", name="demo ready").filter(has_text="east").wait_for()
    table.get_by_role("button", name="Load … demo on west", exact=True).click()
    dialog = page.get_by_role("dialog", name="demo on west")
    dialog.get_by_text("Would load demo.").wait_for()
    assert gateway.planned[-1] == {"model": "demo", "action": "load", "node": "west"}
    dialog.get_by_role("button", name="Load demo").click()
    dialog.get_by_text("Load: done.").wait_for()
    assert gateway.done == [("demo", "load", "west")]
    dialog.get_by_text("Move", exact=True).click()
    assert dialog.locator("option").all_inner_texts() == ["gpu-1"]  # the other of its node
    page.keyboard.press("Escape")
    table.get_by_role("row", name="demo ready").filter(has_text="west").wait_for()
    page.get_by_label("Filter").fill("east")
    page.get_by_text("1 of 2").wait_for()
    now = time.time()
    east = page_records.node("east", now, reachable=False)
    gateway.push("inference", {"reachable": True, "since": now, "nodes": [east, page_records.node("west", now)]})
    table.get_by_text("does not answer").wait_for()
    gateway.push("removed", {"id": "demo", "node": "east"})
    page.get_by_text("0 of 1").wait_for()
