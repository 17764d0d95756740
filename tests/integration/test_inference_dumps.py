"""A dump has everything about memory at one moment; two dumps can be compared."""

from __future__ import annotations

from inference.authority.views.dumps import MAX_DUMPS, differences
from tests.rigs.asgi import ask
from tests.rigs.authority_rig import Start


async def test_difference_of_two_dumps_lists_changes_by_path(start: Start) -> None:
    service = await start({"a": {}, "b": {}})
    before = (await ask(service.app, "POST", "/memory/dump")).body
    assert await service.authority.ask(service.authority.resolve("a")).wait(10)
    after = (await ask(service.app, "POST", "/memory/dump", {"large_objects": 5})).body
    assert len(after["large_objects"]) == 5
    assert "large_objects" not in before
    (worker,) = after["workers"].values()
    assert worker["pid"] > 0
    assert after["ledger"]["holdings"][worker["holding"]]["devices_mb"] == {"cpu": 100}
    assert after["python"]["threads"] >= 1
    answer = (
        await ask(service.app, "POST", "/memory/dump/compare", {"before": before["id"], "after": after["id"]})
    ).body
    changed = answer["changed"]
    assert changed["models/a/state"] == {"before": "cold", "after": "busy"}
    assert changed["models/a/ref_count"] == {"before": 0, "after": 1, "difference": 1}
    assert changed["devices/cpu/allocated_mb"]["difference"] == 100
    assert f"ledger/holdings/{worker['holding']}/owner" in changed
    assert "models/b/state" not in changed
    assert answer["seconds"] >= 0


async def test_dump_has_backoffs_after_a_failure(start: Start) -> None:
    service = await start({"a": {}}, {"a": {"fail": "startup"}})
    model = service.authority.resolve("a")
    service.authority.ask(model)
    await service.authority.reached(lambda: model.backoff.failures > 0)
    recovery = (await ask(service.app, "POST", "/memory/dump")).body["recovery"]["a"]
    assert recovery["failures"] >= 1
    assert recovery["crashes"] >= 1
    assert "startup" in recovery["failure"]


async def test_latest_dumps_are_kept(start: Start) -> None:
    service = await start({"a": {}})
    ids = [(await ask(service.app, "POST", "/memory/dump")).body["id"] for _ in range(MAX_DUMPS + 1)]
    gone = await ask(service.app, "POST", "/memory/dump/compare", {"before": ids[0], "after": ids[-1]})
    assert (gone.status, gone.body["error"]["param"]) == (404, "before")
    assert ids[1] in gone.body["error"]["message"]


def test_differences_are_found_at_any_depth() -> None:
    before = {"id": "x", "a": {"b": 1, "c": True, "d": {}}, "e": None}
    after = {"id": "y", "a": {"b": 3.5, "c": False, "d": {"f": "new"}}}
    assert differences(before, after) == {
        "a/b": {"before": 1, "after": 3.5, "difference": 2.5},
        "a/c": {"before": True, "after": False},
        "a/d": {"before": {}, "after": None},
        "a/d/f": {"before": None, "after": "new"},
        "e": {"before": None, "after": None},
    }
