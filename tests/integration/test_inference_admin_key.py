"""Requests that change something need the admin key; requests that use models or read need the token."""

from __future__ import annotations

from inference.app import USE_PATHS
from tests.rigs.asgi import ask, operations
from tests.rigs.authority_rig import Start


async def test_every_route_that_changes_something_needs_the_admin_key(start: Start) -> None:
    service = await start({"a": {}}, ADMIN_KEY="admin")
    changing = [(method, path) for method, path in operations(service.app) if method != "GET" and path not in USE_PATHS]
    assert {("POST", "/models/{model_id}/load"), ("POST", "/models/{model_id}/unload")} <= set(changing)
    for method, path in changing:
        target = path.replace("{model_id}", "a")
        refused = await ask(service.app, method, target, {})
        assert (refused.status, refused.body["error"]["code"]) == (403, "permission_denied"), target
        assert "INFERENCE_ADMIN_KEY" in refused.body["error"]["message"]
        assert (await ask(service.app, method, target, {}, key="wrong")).status == 401
        assert (await ask(service.app, method, target, {}, key=None)).status == 401
    assert service.authority.models["a"].loads == 0


async def test_admin_key_allows_everything_and_the_token_allows_use_and_reading(start: Start) -> None:
    service = await start({"a": {}}, ADMIN_KEY="admin")
    for key in ("token", "admin"):
        assert (await ask(service.app, "GET", "/memory/stats", key=key)).status == 200
        assert (await ask(service.app, "POST", "/memory/plan", {"model": "a"}, key=key)).status == 200
    assert (await ask(service.app, "POST", "/models/a/load", key="admin")).status == 200
    assert (await ask(service.app, "POST", "/models/a/unload", key="admin")).status == 200


async def test_token_is_the_admin_key_if_none_is_configured(start: Start) -> None:
    service = await start({"a": {}})
    assert (await ask(service.app, "POST", "/models/a/load")).status == 200
    assert (await ask(service.app, "POST", "/models/a/load", key="")).status == 401
