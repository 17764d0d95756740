"""A refused request has an explain record and a log line that name the model and the parameter."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from gateway.routing.explain_record import KEPT_REFUSED
from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import MESSAGES, Gateway

PROMPT = "a secret prompt that no log and no record may hold"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/completions": {"prompt": PROMPT},
    "/v1/embeddings": {"input": PROMPT},
    "/v1/responses": {"input": PROMPT},
    "/v1/responses/input_tokens": {"input": PROMPT},
    "/v1/messages": {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": PROMPT}]},
    "/v1/rerank": {"query": PROMPT, "documents": [PROMPT]},
}
ID = "of-a-refused-request"


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Gateway]:
    caplog.set_level(logging.INFO, "gateway.requests")
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


async def _post(gateway: Gateway, path: str, content: bytes, **headers: str) -> httpx2.Response:
    return await gateway.client.post(path, content=content, headers={"x-request-id": ID, **headers})


async def _record(gateway: Gateway, id: str = ID) -> dict[str, Any]:
    answer = await gateway.admin("GET", f"/admin/requests/{id}")
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("path", BODIES)
async def test_refused_parameter_is_named_in_the_record_and_in_the_log(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    body = {"model": "demo", **BODIES[path], "no_such_parameter": PROMPT}
    answer = await _post(gateway, path, json.dumps(body).encode())
    assert answer.status_code == 400
    record = await _record(gateway)
    fields = {name: record[name] for name in ("endpoint", "model", "param", "status", "key", "attempts", "route")}
    assert fields == {
        "endpoint": path, "model": "demo", "param": "no_such_parameter", "status": 400, "key": "GATEWAY_API_KEY",
        "attempts": [], "route": "",
    }  # fmt: skip
    assert "no_such_parameter" in record["error"]
    line = next(line for line in caplog.messages if ID in line)
    assert line.startswith(f"request {ID}: {path} refused with 400 {record['outcome']} ")
    assert "(model 'demo', parameter 'no_such_parameter')" in line


@pytest.mark.parametrize("path", BODIES)
async def test_record_and_log_of_a_refused_request_hold_no_prompt(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    """Including errors that quote the invalid value."""
    for wrong in ({"stream": PROMPT}, {"temperature": PROMPT}, {"model": PROMPT * 10}, {"tool_choice": PROMPT}):
        answer = await _post(gateway, path, json.dumps({"model": "demo", **BODIES[path], **wrong}).encode())
        assert answer.status_code == 400
        record = await _record(gateway)
        assert record["param"] is not None
        assert "secret prompt" not in json.dumps({**record, "model": ""})
        assert len(record["model"]) <= 256
    assert not [line for line in caplog.messages if "secret prompt" in line and "model 'a secret" not in line]


@pytest.mark.parametrize(
    ("content", "outcome"),
    [(b"{", "invalid_json"), (b"[]", "invalid_json"), (b"[" * 200, "invalid_json"), (b"", "invalid_json")],
)
async def test_body_that_is_not_a_json_object_has_a_record_without_a_model(
    gateway: Gateway, content: bytes, outcome: str
) -> None:
    assert (await _post(gateway, "/v1/chat/completions", content)).status_code == 400
    record = await _record(gateway)
    assert (record["model"], record["outcome"], record["status"]) == ("", outcome, 400)


async def test_long_refused_body_is_not_parsed_again(gateway: Gateway) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": PROMPT * 25_000}], "no_such_parameter": 1}
    assert (await _post(gateway, "/v1/chat/completions", json.dumps(body).encode())).status_code == 400
    record = await _record(gateway)
    assert (record["model"], record["param"]) == ("", "no_such_parameter")
    assert "removed" in record["error"]


async def test_refused_header_and_unknown_model_have_records(gateway: Gateway, fake: FakeInference) -> None:
    body = json.dumps({"model": "demo", "messages": MESSAGES}).encode()
    await _post(gateway, "/v1/chat/completions", body, **{"x-headgate-priority": "soon"})
    assert (await _record(gateway))["param"] == "x-headgate-priority"
    await _post(gateway, "/v1/chat/completions", body.replace(b"demo", b"absent"))
    record = await _record(gateway)
    assert (record["model"], record["param"], record["status"]) == ("absent", "model", 404)
    assert fake.seen == []


async def test_request_over_a_limit_of_its_key_has_a_record(tmp_path: Path, fake: FakeInference) -> None:
    config = "limits: {requests_per_minute: 1}\nroutes: {demo: {chain: [local/demo]}}\n"
    async with Gateway(tmp_path, fake.url, config) as gateway:
        body = json.dumps({"model": "demo", "messages": MESSAGES}).encode()
        assert (await _post(gateway, "/v1/chat/completions", body)).status_code == 200
        assert (await _post(gateway, "/v1/chat/completions", body)).status_code == 429
        record = await _record(gateway)
        assert (record["outcome"], record["status"]) == ("rate_limit_exceeded", 429)


@pytest.mark.parametrize("path", BODIES)
async def test_request_without_a_valid_key_has_no_record(gateway: Gateway, path: str) -> None:
    answer = await _post(gateway, path, b"{}", authorization="Bearer wrong")
    assert answer.status_code == 401
    assert (await gateway.admin("GET", f"/admin/requests/{ID}")).status_code == 404


async def test_records_of_refused_requests_are_limited_and_replace_no_others(gateway: Gateway) -> None:
    served = (await gateway.chat()).headers["x-request-id"]
    for number in range(KEPT_REFUSED + 1):
        await gateway.client.post("/v1/completions", content=b"{", headers={"x-request-id": f"refused-{number}"})
    assert (await _record(gateway, served))["outcome"] == "success"
    assert (await gateway.admin("GET", "/admin/requests/refused-0")).status_code == 404
    assert (await _record(gateway, "refused-1"))["outcome"] == "invalid_json"
