"""The server side of the dashboard: sessions, rights, live events, and the end of its streams."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway.ui import live_feed
from gateway.ui.live_feed import Viewer
from gateway.ui.ui_routes import PageFiles
from inference.protocol import Code, ModelState, ModelStatus, ReplicaStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import ADMIN, CONFIG, KEY, MESSAGES, Gateway
from tests.rigs.page_rig import Page
from tests.rigs.stack import until

FIGURES: dict[str, Any] = {
    "devices": [{"id": "cpu", "total_bytes": 10, "by_model": {}}],
    "models": {"demo": {"generated_tokens": 5, "in_flight": 0, "blocks": {"cpu": {"weights": 3}}}},
}


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    fake.figures = FIGURES
    async with Gateway(tmp_path, fake.url) as gateway:
        await gateway.look()
        yield gateway


# --- files and headers -----------------------------------------------------------------------------------------------
async def test_page_and_its_files_have_strict_headers(gateway: Gateway) -> None:
    redirect = await gateway.client.get("/ui")
    assert (redirect.status_code, redirect.headers["location"]) == (307, "ui/")
    page = await gateway.client.get("/ui/")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert page.headers["cache-control"] == "no-cache"
    again = await gateway.client.get("/ui/", headers={"if-none-match": page.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    missing = [await gateway.client.get(f"/ui/{path}") for path in ("nothing.js", "..%2fui_routes.py", "%2e%2e/x")]
    assert {answer.status_code for answer in missing} == {404}
    for answer in (redirect, page, again, *missing, await gateway.client.get("/ui/api/keys")):
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"]
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
    assert "content-security-policy" not in (await gateway.client.get("/livez")).headers


async def test_changed_file_with_the_old_time_and_size_is_sent_again(tmp_path: Path) -> None:
    """As after an update from a build that gives all files the same time."""
    files, path = PageFiles(tmp_path), tmp_path / "app.js"

    async def get(**headers: str) -> tuple[int, str]:
        os.utime(path, (1, 1))
        raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        answer = await files.get_response("app.js", {"type": "http", "method": "GET", "path": "/", "headers": raw})
        return answer.status_code, answer.headers["etag"]

    path.write_text("old();")
    _, old = await get()
    assert await get(if_none_match=old) == (304, old)
    path.write_text("new();")
    status, new = await get(if_none_match=old)
    assert (status, new != old) == (200, True)


async def test_other_pages_may_not_call_the_dashboard(tmp_path: Path, fake: FakeInference) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG + "cors: {origins: ['*']}\n") as gateway:
        asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        assert (await gateway.client.options("/ui/session", headers=asked)).status_code == 403
        answer = await gateway.client.post("/ui/session", json={"key": KEY}, headers={"origin": "https://evil.example"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        assert "access-control-allow-origin" not in answer.headers
        assert (await gateway.client.get("/ui/", headers={"host": "evil.example"})).status_code == 403


# --- sessions --------------------------------------------------------------------------------------------------------
async def test_session_begins_with_a_key_and_ends(gateway: Gateway) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page:
        assert page.session["name"] == "GATEWAY_ADMIN_KEY"
        assert page.session["scopes"] == ["use", "admin"]
        answer = await page.client.post("/ui/session", json={"key": ADMIN}, headers={"x-forwarded-proto": "https"})
        cookie = answer.headers["set-cookie"]
        assert re.match(r"headgate_session=[\w-]{40,}; HttpOnly; Path=/ui; SameSite=strict; Secure$", cookie)
        assert answer.json()["csrf"] != page.session["csrf"]
    async with Page.signed_in(gateway.url, ADMIN) as page:
        assert (await page.get("/ui/session")).json() == page.session
        ended = await page.client.delete("/ui/session", headers={"x-csrf-token": page.session["csrf"]})
        assert ended.status_code == 200
        assert (await page.get("/ui/session")).status_code == 401


async def test_wrong_key_is_refused_and_attempts_are_limited(gateway: Gateway) -> None:
    for body, status in (({"key": "wrong"}, 401), ({"key": ""}, 401), ({}, 400), ({"key": 1}, 400)):
        assert (await gateway.client.post("/ui/session", json=body)).status_code == status
    assert (await gateway.client.post("/ui/session", content=b"{")).json()["error"]["code"] == "invalid_json"
    answers = [await gateway.client.post("/ui/session", json={"key": "wrong"}) for _ in range(4)]
    assert [answer.status_code for answer in answers] == [401, 401, 401, 429]
    assert answers[-1].headers["retry-after"] == "1"
    limited = await gateway.client.post("/ui/session", json={"key": KEY})
    assert limited.status_code == 429, "a correct key has to wait too"


async def test_changes_need_the_token_of_the_session(gateway: Gateway) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page:
        path, csrf = "/ui/api/breakers/local/reset", page.session["csrf"]
        refused = [
            await page.client.post(path),
            await page.client.post(path, headers={"x-csrf-token": "wrong"}),
            await page.client.post(path, headers={"x-csrf-token": csrf, "origin": "http://evil.example"}),
            await page.client.post("/ui/v1/chat/completions", json={"model": "demo", "messages": MESSAGES}),
        ]
        assert {answer.status_code for answer in refused} == {403}
        assert {answer.json()["error"]["code"] for answer in refused} == {"permission_denied"}
        await gateway.chat()
        own = {"x-csrf-token": csrf, "origin": gateway.url}
        assert (await page.client.post(path, headers=own)).json() == {"name": "local", "state": "closed"}
        assert (await page.post("/ui/api/breakers/none/reset")).status_code == 404
    assert (await gateway.client.post(path)).status_code == 401, "an API key is no session"


async def test_session_and_stream_end_with_their_key(
    tmp_path: Path, fake: FakeInference, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "BEAT_SECONDS", 0.05)
    digest = hashlib.sha256(b"team-key").hexdigest()

    def config(scopes: str) -> str:
        return f"{CONFIG}keys: [{{name: team, hash: 'sha256:{digest}', scopes: [{scopes}]}}]\n"

    async with (
        Gateway(tmp_path, fake.url, config("use")) as gateway,
        Page.signed_in(gateway.url, "team-key") as page,
    ):
        async with page.listening():
            gateway.write(config("use, admin"))
            await gateway.runtime.reload()
            await page.ended()
        assert (await page.get("/ui/session")).json()["scopes"] == ["use", "admin"]
        async with page.listening():
            gateway.write(CONFIG)
            await gateway.runtime.reload()
            await page.ended()
        assert (await page.get("/ui/session")).status_code == 401


# --- rights ----------------------------------------------------------------------------------------------------------
async def test_key_without_admin_reads_its_own_requests_and_changes_nothing(gateway: Gateway) -> None:
    async with Page.signed_in(gateway.url, KEY) as page, Page.signed_in(gateway.url, ADMIN) as admin:
        others = await gateway.client.post(
            "/v1/chat/completions",
            json={"model": "demo", "messages": MESSAGES},
            headers={"authorization": f"Bearer {ADMIN}", "x-request-id": "of-an-admin"},
        )
        assert others.status_code == 200
        own = await page.post("/ui/v1/chat/completions", {"model": "demo", "messages": MESSAGES})
        assert own.json()["choices"][0]["message"]["content"] == "Hello there!"
        own_id = own.headers["x-request-id"]
        for path in ("/ui/api/keys", "/ui/api/usage?by=key"):
            assert (await page.get(path)).status_code == 403
        for path in ("plan", "models/demo/load", "devices/gpu-0/recover", "breakers/local/reset"):
            assert (await page.post(f"/ui/api/{path}")).status_code == 403
        assert (await page.get(f"/ui/api/requests/{own_id}")).json()["key"] == "GATEWAY_API_KEY"
        assert (await page.get("/ui/api/requests/of-an-admin")).status_code == 404
        assert (await admin.get("/ui/api/requests/of-an-admin")).json()["phase"] == "done"
        assert [model["id"] for model in (await page.get("/ui/v1/models")).json()["data"]] == ["demo", "demo-mini"]
        logging.getLogger("gateway.test").warning("a line")
        async with page.listening() as mine, admin.listening() as all_of_them:
            assert [request["id"] for request in mine["requests"]] == [own_id]
            assert [request["id"] for request in all_of_them["requests"]] == ["of-an-admin", own_id]
            assert mine["log"] == []
            assert all_of_them["log"][-1]["text"] == "a line"
        listed = {key["name"]: key for key in (await admin.get("/ui/api/keys")).json()["keys"]}
        assert listed["GATEWAY_API_KEY"]["requests"] == 1
        assert listed["GATEWAY_API_KEY"]["tokens"] > 0

        async def stored() -> bool:
            rows = (await admin.get("/ui/api/usage?by=key")).json()["rows"]
            return {row["key"]: row["requests"] for row in rows}.get("GATEWAY_API_KEY") == 1

        await until("usage is stored", stored)


# --- live events -----------------------------------------------------------------------------------------------------
async def test_snapshot_has_the_whole_state(gateway: Gateway) -> None:
    await gateway.chat()
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening() as snapshot:
        assert snapshot["inference"]["reachable"] is True
        assert [model["id"] for model in snapshot["models"]] == ["demo", "demo-mini"]
        assert {item["name"] for item in snapshot["breakers"]} == {"local", "local/demo"}
        assert snapshot["requests"][-1]["outcome"] == "success"
        assert len(snapshot["minutes"]) == 60
        assert sum(minute["by_tier"]["local"] for minute in snapshot["minutes"]) == 1
        assert snapshot["gateway"]["in_flight"] == 0
        devices = await page.next("devices")
        assert devices["devices"] == FIGURES["devices"]
        model = await page.next("model", lambda data: data["model"]["blocks"])
        assert model["model"]["blocks"] == {"cpu": {"weights": 3}}


async def test_request_is_followed_through_its_phases_without_its_text(gateway: Gateway, fake: FakeInference) -> None:
    hold = asyncio.Event()
    fake.answers["demo"] = Answer(comments=2, pause=0.3, hold=hold, words=("secret",) * 5)
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening():
        messages = [{"role": "user", "content": "a secret"}]
        asking = asyncio.create_task(gateway.chat(stream=True, messages=messages, headers={"x-request-id": "one"}))
        loading = await page.next("request", lambda data: data["request"]["phase"] == "loading")
        assert (loading["request"]["total"], loading["request"]["outcome"]) == (100, None)
        assert (await page.next("gateway"))["gateway"]["in_flight"] == 1
        hold.set()
        done = await page.next("request", lambda data: data["request"]["phase"] == "done")
        assert (await asking).status_code == 200
        shown = done["request"]
        assert (shown["id"], shown["tier"], shown["outcome"], shown["key"]) == (
            "one", "local", "success", "GATEWAY_API_KEY"
        )  # fmt: skip
        assert shown["completion_tokens"] > 0
        await page.next("minute", lambda data: data["minute"]["by_tier"]["local"] == 1)
        await page.next("breaker", lambda data: data["breaker"]["name"] == "local/demo")
        numbers = [data["number"] for _, data in page.events]
        assert numbers == sorted(numbers)
        assert "secret" not in repr(page.events)


async def test_events_of_the_service_are_entries_of_the_timeline(gateway: Gateway, fake: FakeInference) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening():
        await until("the gateway listens", lambda: len(fake.listeners) == 2)
        failed = ModelStatus("demo", ModelState.FAILED, reason="it aborted")
        fake.models["demo"] = failed
        fake.tell("model", {"model": failed.to_json()})
        entry = await page.next("timeline", lambda data: data["entry"]["subject"] == "demo")
        assert entry["entry"]["text"] == "demo failed: it aborted"
        await page.next("model", lambda data: data["model"]["headgate"]["state"] == "failed")
        fake.tell("log", {"line": {"at": 1.0, "level": "warning", "logger": "inference", "text": "low memory"}})
        assert (await page.next("log"))["line"]["text"] == "low memory"
        fake.tell("eviction", {"eviction": {}})
        assert (
            "eviction"
            in (await page.next("log", lambda data: data["line"]["logger"].startswith("gateway")))["line"]["text"]
        )
        del fake.models["demo-mini"]
        fake.tell("removed", {"id": "demo-mini"})
        assert (await page.next("removed"))["id"] == "demo-mini"


async def test_service_that_ends_keeps_its_models_and_returns(gateway: Gateway, fake: FakeInference) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening():
        await page.next("devices")
        await fake.stop()
        await page.next("inference", lambda data: data["reachable"] is False)
        down = await page.next("timeline", lambda data: data["entry"]["subject"] == "inference")
        assert (down["entry"]["kind"], down["entry"]["severity"]) == ("state", "error")
        await gateway.chat()
        await page.next("breaker", lambda data: data["breaker"]["name"] == "local" and data["breaker"]["failures"])
        refused = await page.post("/ui/api/models/demo/load")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_tier_available")
        fake.models["demo"] = replace(fake.models["demo"], context_length=64)
        fake.figures = {**FIGURES, "devices": [{"id": "gpu-7", "by_model": {}}]}
        await fake.start()
        await page.next("inference", lambda data: data["reachable"] is True)
        await page.next("model", lambda data: data["model"]["headgate"]["context_length"] == 64)
        await page.next("devices", lambda data: data["devices"][0]["id"] == "gpu-7")
        assert not [kind for kind, _ in page.events if kind == "removed"]


async def test_page_that_reads_too_slowly_gets_a_new_snapshot(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_feed, "MAX_WAITING", 10)
    feed = live_feed.LiveFeed(gateway.runtime)
    stream = feed.listen(Viewer("", is_admin=True), lambda: True)
    assert (await anext(stream)).startswith(b"event: snapshot\n")
    entry = {"at": 0.0, "kind": "state", "subject": "x", "text": "", "severity": "info"}
    for _ in range(25):
        feed.add_entry(entry)
    (page,) = feed._pages
    assert len(page.queue) <= 10
    assert (await anext(stream)).startswith(b"event: snapshot\n")
    feed.add_entry(entry)
    assert (await anext(stream)).startswith(b"event: timeline\n")
    await stream.aclose()
    assert not feed._pages
    feed.add_entry(entry)


async def test_live_tasks_run_only_while_a_page_is_open(gateway: Gateway) -> None:
    def names() -> set[str]:
        return {task.get_name() for task in asyncio.all_tasks()} & {"live-feed", "live-figures"}

    async with Page.signed_in(gateway.url, ADMIN) as page:
        assert names() == set()
        async with page.listening():
            assert names() == {"live-feed", "live-figures"}
        await until("the loop has ended", lambda: names() == set())


async def test_streams_end_when_the_gateway_stops(gateway: Gateway) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening():
        gateway.runtime.end_streams()
        await page.ended()
        gateway.runtime.is_draining = True
        answer = await page.get("/ui/api/events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")


async def test_number_of_pages_is_limited(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_feed, "MAX_PAGES", 1)
    async with Page.signed_in(gateway.url, ADMIN) as page, page.listening():
        answer = await page.get("/ui/api/events")
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")


async def test_actions_check_their_arguments(gateway: Gateway) -> None:
    async with Page.signed_in(gateway.url, ADMIN) as page:
        for path, body, status, param in (
            ("models/none/load", {}, 404, "model"),
            ("models/demo%2F..%2Fother/load", {}, 404, "model"),
            ("models/demo/explode", {}, 404, "action"),
            ("models/demo/load", {"model": "x"}, 400, None),
            ("plan", {"model": "demo", "action": "explode"}, 404, "action"),
            ("plan", {"model": "demo"}, 400, None),
        ):
            answer = await page.post(f"/ui/api/{path}", body)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), path
        planned = await page.post("/ui/api/plan", {"model": "demo", "action": "unload"})
        assert planned.json() == {
            "action": "unload", "model": "demo", "allowed": True, "sentences": ["Unloads demo."], "plan": None
        }  # fmt: skip
        refused = await page.post("/ui/api/devices/gpu-0/recover")
        assert refused.status_code == 404, "this service has no such path"
        assert refused.json()["error"]["code"] == Code.INVALID_REQUEST


async def test_plan_for_a_replica_is_about_this_replica(gateway: Gateway, fake: FakeInference) -> None:
    replicas = (
        ReplicaStatus("demo", ModelState.READY, ("gpu-0",), in_flight=2),
        ReplicaStatus("demo@2", ModelState.READY, ("gpu-1",)),
    )
    fake.models["demo"] = replace(
        fake.models["demo"], devices=("gpu-0", "gpu-1"), in_flight=2, replicas=replicas
    )  # fmt: skip
    await gateway.look()
    async with Page.signed_in(gateway.url, ADMIN) as page:
        for name, sentences in (
            ("demo", ["Unloads demo from gpu-0 and gpu-1.", "2 running requests may finish first."]),
            ("demo@1", ["Unloads demo@1 from gpu-0.", "2 running requests may finish first."]),
            ("demo@2", ["Unloads demo@2 from gpu-1."]),
        ):
            planned = await page.post("/ui/api/plan", {"model": name, "action": "unload"})
            assert planned.json()["sentences"] == sentences, planned.text
        unknown = await page.post("/ui/api/plan", {"model": "demo@3", "action": "unload"})
        assert (unknown.status_code, unknown.json()["error"]["param"]) == (404, "model")


async def test_plan_with_a_service_without_models_names_the_model(gateway: Gateway, fake: FakeInference) -> None:
    """The error is not the one of a service that does not answer."""
    fake.models.clear()
    await gateway.look()
    async with Page.signed_in(gateway.url, ADMIN) as page:
        planned = await page.post("/ui/api/plan", {"model": "demo", "action": "unload"})
    assert planned.status_code == 404
    assert planned.json()["error"]["message"] == "unknown local model 'demo'; models: none"


@pytest.mark.parametrize("admin_key", ["", "of-the-service"])
async def test_actions_reach_the_service_with_its_admin_key(
    tmp_path: Path, fake: FakeInference, admin_key: str
) -> None:
    """Also for models with a slash in their name, by an alias."""
    fake.models["org/demo"] = replace(fake.models["demo"], id="org/demo", aliases=("d",))
    async with (
        Gateway(tmp_path, fake.url, environ={"INFERENCE_ADMIN_KEY": admin_key}) as gateway,
        Page.signed_in(gateway.url, ADMIN) as page,
    ):
        await gateway.look()
        for name in ("org/demo", "org%2Fdemo", "d"):
            answer = await page.post(f"/ui/api/models/{name}/move", {"device": "gpu-1"})
            assert answer.json()["id"] == "org/demo", answer.text
            assert answer.json()["figures"]["tokens_per_second"] is None
            assert fake.operated == (
                "/models/org%2Fdemo/move", f"Bearer {admin_key or 'token'}", '{"device":"gpu-1"}'
            )  # fmt: skip
