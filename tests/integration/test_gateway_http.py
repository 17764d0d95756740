"""HTTP interface of the gateway: headers, keys, bad input, limits, models, admin endpoints, reload."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from gateway.errors import RequestError
from gateway.http.connection_limits import BoundedHttp
from gateway.http.http_exchange import read_body
from headgate.shared.state_directory import packaged_defaults
from inference.protocol import Code, ModelState, ModelStatus
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import ADMIN, CONFIG, KEY, MESSAGES, Gateway
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

HEADERS = (
    "x-request-id", "x-headgate-tier", "x-headgate-model", "x-headgate-attempts", "x-headgate-reason",
    "x-headgate-overhead-ms",
)  # fmt: skip


@pytest.fixture
async def gateway(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Gateway]:
    async with Gateway(tmp_path, fake.url) as gateway:
        yield gateway


async def _raw(gateway: Gateway, request: bytes) -> bytes:
    """The bytes that the port answers to `request` until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    writer.write(request)
    async with asyncio.timeout(5):
        answer = await reader.read()
    writer.close()
    return answer


# --- headers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("comments", [0, 2])
async def test_local_answer_has_a_header_with_its_device(gateway: Gateway, fake: FakeInference, comments: int) -> None:
    """From a header of the service, or from a comment if it had already begun."""
    fake.answers["demo"] = Answer(device="gpu-0,gpu-1", comments=comments)
    for stream in (False, True):
        answer = await gateway.chat(stream=stream)
        assert answer.headers["x-headgate-device"] == "gpu-0,gpu-1"
    fake.answers["demo"] = Answer(refuse=Code.DEVICE_LOST)
    assert "x-headgate-device" not in (await gateway.chat()).headers


async def test_every_response_has_the_headers_of_the_gateway(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo-mini"] = Answer(refuse=Code.DEVICE_LOST)
    client = gateway.client
    answers = [
        await gateway.chat(),
        await gateway.chat(stream=True),
        await gateway.chat("demo-mini"),
        await gateway.chat("demo-mini", stream=True),
        await gateway.chat(headers={"authorization": "Bearer wrong"}),
        await gateway.chat(temprature=1),
        await client.get("/nope"),
        await client.put("/v1/chat/completions"),
        await client.get("/v1/models"),
        await client.get("/v1/models/nope"),
        await client.get("/livez"),
        await client.get("/readyz"),
        await client.get("/health"),
        await client.get("/metrics"),
        await client.get("/admin/breakers"),
        await gateway.admin("GET", "/admin/breakers"),
        await gateway.admin("GET", "/admin/requests/none"),
        await client.get("/livez", headers={"host": "evil.example"}),
        await client.head("/livez"),
        await client.request("OPTIONS", "/v1/models"),
    ]
    assert [answer.status_code for answer in answers] == [
        200, 200, 503, 503, 401, 400, 404, 405, 200, 404, 200, 200, 200, 200, 403, 200, 404, 403, 405, 405,
    ]  # fmt: skip
    for answer in answers:
        assert [name for name in HEADERS if not answer.headers.get(name)] == [], (answer.request.url, answer.headers)
        assert float(answer.headers["x-headgate-overhead-ms"]) < 5000
        if answer.status_code >= 400 and answer.request.method != "HEAD":
            assert set(answer.json()["error"]) >= {"message", "type", "param", "code"}
    assert len({answer.headers["x-request-id"] for answer in answers}) == len(answers)


@pytest.mark.parametrize(
    ("sent", "kept"), [("abc-1.2:3_4", True), ("x" * 128, True), ("x" * 129, False), ("a b", False), ("", False)]
)
async def test_valid_request_id_is_kept(gateway: Gateway, sent: str, kept: bool) -> None:
    answer = await gateway.client.get("/livez", headers={"x-request-id": sent})
    assert (answer.headers["x-request-id"] == sent) is kept
    assert answer.headers["x-request-id"]


# --- keys and hosts ---------------------------------------------------------------------------------------------------
async def test_keys_give_access_to_their_endpoints_and_health_needs_none(gateway: Gateway) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url, trust_env=False) as stranger:
        assert (await stranger.get("/livez")).status_code == 200
        assert (await stranger.get("/metrics")).status_code == 200
        refused = await stranger.get("/v1/models")
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert (await stranger.get("/v1/models", headers={"x-api-key": KEY})).status_code == 200
        assert (await stranger.get("/v1/models", headers={"x-api-key": ADMIN})).status_code == 200
        assert (await stranger.get("/admin/breakers", headers={"x-api-key": KEY})).status_code == 403
        assert (await stranger.post("/admin/reload")).status_code == 401


async def test_health_without_a_key_shows_only_the_status(gateway: Gateway) -> None:
    async with httpx2.AsyncClient(base_url=gateway.url, trust_env=False) as stranger:
        for headers in ({}, {"authorization": "Bearer wrong"}):
            assert (await stranger.get("/health", headers=headers)).json() == {"status": "ok"}
        assert "inference" in (await stranger.get("/health", headers={"x-api-key": KEY})).json()


async def test_invalid_key_is_refused_before_the_body_is_read(gateway: Gateway) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000\r\nconnection: close\r\n\r\n"
    assert (await _raw(gateway, head)).startswith(b"HTTP/1.1 401 ")


@pytest.mark.parametrize(
    ("host", "status"),
    [("localhost", 200), ("127.0.0.1:99", 200), ("[::1]:80", 200), ("app.localhost", 200), ("evil.example", 403),
     ("127.0.0.1.evil.example", 403), ("localhost@evil", 403)],
)  # fmt: skip
async def test_only_loopback_host_names_are_served_on_loopback(gateway: Gateway, host: str, status: int) -> None:
    answer = await gateway.client.get("/livez", headers={"host": host})
    assert answer.status_code == status
    assert ("let the proxy in front send `Host: localhost`" in answer.text) == (status == 403)


# --- bad input and bounds ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"", 400, None),
        (b"{", 400, None),
        (b"\xff", 400, None),
        (b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}', 400, "temperature"),
        (json.dumps({"model": "demo"}).encode(), 400, "messages"),
        (json.dumps({"model": "demo", "messages": []}).encode(), 400, "messages"),
        (json.dumps({"model": "nope", "messages": MESSAGES}).encode(), 404, "model"),
        (json.dumps({"model": "demo", "messages": MESSAGES, "n": 0}).encode(), 400, "n"),
        (b"[" * 200_000, 400, None),
    ],
    ids=["empty", "broken", "not UTF-8", "NaN", "missing", "no messages", "unknown model", "range", "nesting"],
)
async def test_invalid_input_is_a_4xx_with_the_parameter(
    gateway: Gateway, fake: FakeInference, body: bytes, status: int, param: str | None
) -> None:
    answer = await gateway.client.post("/v1/chat/completions", content=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)
    assert answer.headers["x-should-retry"] == "false"
    assert fake.seen == []
    assert gateway.runtime.admission.in_flight == 0


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-headgate-priority", "urgent"),
        ("x-headgate-policy", "maybe"),
        ("x-headgate-kv", "forever"),
        ("x-headgate-kv", "pin:2h"),
    ],
)
async def test_invalid_header_values_are_refused(gateway: Gateway, fake: FakeInference, name: str, value: str) -> None:
    answer = await gateway.chat(headers={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    answer = await gateway.client.post("/v1/messages", json=body, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert name in answer.json()["error"]["message"]
    answer = await gateway.client.post("/v1/responses", json={"model": "demo", "input": "Hi"}, headers={name: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)
    assert fake.seen == []


async def test_body_beyond_the_limit_is_413_with_and_without_a_content_length(
    tmp_path: Path, fake: FakeInference
) -> None:
    async with Gateway(tmp_path, fake.url, CONFIG + "max_body: 100KB\n") as gateway:
        big = json.dumps({"model": "demo", "messages": [{"role": "user", "content": "x" * 200_000}]}).encode()
        detail = await gateway.client.post("/v1/chat/completions", content=big)

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(big), 10_000):
                yield big[at : at + 10_000]

        chunked = await gateway.client.post("/v1/chat/completions", content=pieces())
        for answer in (detail, chunked):
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")
            message = answer.json()["error"]["message"]
            assert message == "the body is longer than the limit of 100000 bytes (max_body); send less"
        assert (await gateway.chat()).status_code == 200


async def test_headers_beyond_the_limit_are_refused(gateway: Gateway) -> None:
    request = b"GET /livez HTTP/1.1\r\nhost: localhost\r\n" + b"x-a: " + b"y" * 70_000 + b"\r\n\r\n"
    assert (await _raw(gateway, request)).startswith(b"HTTP/1.1 431 ")
    assert (await gateway.client.get("/livez")).status_code == 200


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("br, gzip", 415), ("identity", 200), ("", 200)])
async def test_compressed_body_is_refused_with_a_message(gateway: Gateway, encoding: str, status: int) -> None:
    answer = await gateway.chat(headers={"content-encoding": encoding})
    assert answer.status_code == status
    if status == 415:
        assert answer.json()["error"]["code"] == "unsupported_media_type"
        assert answer.json()["error"]["param"] == "content-encoding"


async def test_chunked_body_is_accepted_and_the_last_of_duplicate_keys_counts(
    gateway: Gateway, fake: FakeInference
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'{"model": "demo", "messages": [{"role": "user", "content": "a", '
        yield b'"content": "b"}], "temperature": 0, "temperature": 1}'

    answer = await gateway.client.post("/v1/chat/completions", content=pieces())
    assert answer.status_code == 200
    assert fake.seen[0].body["messages"] == [{"role": "user", "content": "b"}]
    assert fake.seen[0].body["temperature"] == 1


async def test_last_of_two_model_fields_is_the_model_of_the_request(gateway: Gateway, fake: FakeInference) -> None:
    raw = b'{"model": "demo-mini", "model": "demo", "messages": [{"role": "user", "content": "a"}]}'
    assert (await gateway.client.post("/v1/chat/completions", content=raw)).status_code == 200
    assert [seen.model for seen in fake.seen] == ["demo"]


class _ShortHeadTimeout(BoundedHttp):
    head_seconds = 0.3


@pytest.mark.parametrize(
    "pieces",
    [[], [b"\r\n"] * 40, [b"GET /livez HTTP/1.1\r\n", *[b"x: y\r\n"] * 40]],
    ids=["nothing", "empty lines", "headers without end"],
)
async def test_connection_with_an_incomplete_head_is_closed(
    tmp_path: Path, fake: FakeInference, pieces: list[bytes]
) -> None:
    async with Gateway(tmp_path, fake.url, http=_ShortHeadTimeout) as gateway:
        for before in (b"", b"GET /livez HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
            if before:
                writer.write(before)
                assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200 ")
                if not pieces:
                    writer.close()
                    continue  # uvicorn closes idle connections
            closed = asyncio.create_task(reader.read())
            for piece in pieces:
                if closed.done():
                    break
                writer.write(piece)
                await asyncio.sleep(0.05)
            assert await asyncio.wait_for(closed, 3) == b""
            writer.close()


async def test_head_timeout_does_not_affect_long_answers_and_slow_bodies(tmp_path: Path, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(words=("word ",) * 4, pause=0.2)
    async with Gateway(tmp_path, fake.url, http=_ShortHeadTimeout) as gateway:
        body = json.dumps({"model": "demo", "messages": MESSAGES, "stream": True}).encode()

        async def pieces() -> AsyncIterator[bytes]:
            for at in range(0, len(body), 20):
                await asyncio.sleep(0.1)
                yield body[at : at + 20]

        for _ in range(2):
            answer = await gateway.client.post("/v1/chat/completions", content=pieces())
            assert answer.text.endswith("data: [DONE]\n\n")


async def test_body_has_a_total_and_an_idle_timeout() -> None:
    async def trickle() -> dict[str, object]:
        await asyncio.sleep(0.02)
        return {"type": "http.request", "body": b"x", "more_body": True}

    async def silence() -> dict[str, object]:
        await asyncio.Event().wait()
        raise AssertionError

    for receive, message in ((trickle, "took over 0.3 s"), (silence, "stopped for 0.1 s")):
        with pytest.raises(RequestError, match=message):
            await read_body(receive, {}, 10_000, silence_seconds=0.1, total_seconds=0.3)


async def test_client_disconnect_during_the_body_is_counted_and_sends_nothing(
    gateway: Gateway, fake: FakeInference
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(gateway.url.rpartition(":")[2]))
    key = KEY.encode()
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nx-api-key: " + key)
    writer.write(b"\r\ncontent-length: 1000\r\n\r\n{")
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.close()
    await until(
        "the disconnect was counted",
        lambda: b"gateway_client_disconnect_total 1.0" in gateway.runtime.telemetry.render(),
    )
    assert fake.seen == []


# --- models and policy ------------------------------------------------------------------------------------------------
async def test_list_of_models_has_routes_and_local_models(gateway: Gateway, fake: FakeInference) -> None:
    fake.models["org/big"] = ModelStatus(id="org/big", state=ModelState.COLD, aliases=("big",), context_length=8192)
    await gateway.look()
    listed = (await gateway.client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["demo", "demo-mini", "org/big"]
    one = (await gateway.client.get("/v1/models/org/big")).json()
    assert (one["headgate"]["state"], one["headgate"]["context_length"]) == ("cold", 8192)
    assert (await gateway.client.get("/v1/models/big")).json()["id"] == "org/big"
    assert (await gateway.chat("big")).json()["model"] == "org/big"


async def test_provider_without_a_key_is_skipped_and_local_only_requests_stay_local(
    tmp_path: Path, fake: FakeInference, caplog: pytest.LogCaptureFixture
) -> None:
    config = """
providers: {openai: {kind: openai, api_key: "${env:NO_SUCH_KEY}"}}
routes:
  both: {chain: [openai/gpt, local/demo]}
  cloud: {chain: [openai/gpt]}
  never: {chain: [openai/gpt], cloud: never}
"""
    caplog.set_level(logging.INFO, "gateway.providers")
    async with Gateway(tmp_path, fake.url, config) as gateway:
        absent = [record.getMessage() for record in caplog.records if "not available" in record.getMessage()]
        assert absent == ["provider openai is not available: NO_SUCH_KEY is not set; its entries in chains are skipped"]
        both = await gateway.chat("both")
        assert (both.headers["x-headgate-tier"], both.headers["x-headgate-reason"]) == (
            "local-fallback", "provider_absent",
        )  # fmt: skip
        local = await gateway.chat("both", headers={"x-headgate-policy": "local-only"})
        assert local.headers["x-headgate-reason"] == "policy"
        for name in ("cloud", "never"):
            none = await gateway.chat(name)
            assert (none.status_code, none.headers["x-should-retry"]) == (503, "false")
            assert "retry-after" not in none.headers
        assert (await gateway.chat("demo")).status_code == 404, "this configuration has no route for other names"


async def test_default_configuration_runs_without_keys_and_its_commented_chains_are_valid(
    tmp_path: Path, fake: FakeInference, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gateway.providers")
    shipped = (packaged_defaults() / "gateway.yaml").read_text()
    chains = re.findall(r"^    # chain: (\[.*?\])", shipped, re.MULTILINE)
    assert len(chains) == 2
    for chain in ("", *chains):
        config = shipped if not chain else re.sub(r"^    chain: .*", f"    chain: {chain}", shipped, flags=re.MULTILINE)
        caplog.clear()
        async with Gateway(tmp_path, fake.url, config) as gateway:
            lines = [record for record in caplog.records if "is not available" in record.getMessage()]
            assert [line.getMessage().split()[1] for line in lines] == ["anthropic", "openai", "google"]
            assert {line.levelno for line in lines} == {logging.INFO}
            assert (await gateway.chat()).json()["model"] == "demo"
            fake.queue = {name: [Answer(refuse=Code.DEVICE_LOST)] for name in ("demo", "demo-mini")}
            answer = await gateway.chat()
            assert (answer.status_code, answer.headers["x-headgate-attempts"]) == (503, "2")
            assert ("has no API key" in answer.json()["error"]["message"]) is bool(chain)


# --- admin ------------------------------------------------------------------------------------------------------------
async def test_explain_record_has_no_prompt(gateway: Gateway, fake: FakeInference) -> None:
    fake.answers["demo"] = Answer(refuse=Code.MEMORY_LIMIT_EXCEEDED, message="needs 5 MiB")
    answer = await gateway.chat(messages=[{"role": "user", "content": "a secret"}])
    detail = (await gateway.admin("GET", f"/admin/requests/{answer.headers['x-request-id']}")).json()
    assert detail["chain"] == ["local/demo", "local/demo-mini"]
    assert [(tried["name"], tried["outcome"]) for tried in detail["attempts"]] == [
        ("local/demo", "memory_limit_exceeded"), ("local/demo-mini", "success"),
    ]  # fmt: skip
    assert (detail["answered_by"], detail["tier"], detail["outcome"]) == (
        "local/demo-mini",
        "local-fallback",
        "success",
    )
    assert detail["first_token_seconds"] <= detail["total_seconds"]
    assert "secret" not in json.dumps(detail)


async def test_metrics_have_tiers_attempts_fallbacks_and_breakers(gateway: Gateway, fake: FakeInference) -> None:
    fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)] * 5
    for _ in range(6):
        await gateway.chat(stream=True)
    text = (await gateway.client.get("/metrics")).text
    for line in (
        'gateway_requests_total{outcome="success",route="demo",tier="local-fallback"} 6.0',
        'gateway_attempts_total{model="demo",node="",outcome="model_failed",provider="local"} 5.0',
        'gateway_attempts_total{model="demo-mini",node="",outcome="success",provider="local"} 6.0',
        'gateway_breaker_state{model="demo",node="",provider="local"} 2.0',
        'gateway_breaker_state{model="",node="",provider="local"} 0.0',
        'gateway_fallback_total{from="local/demo",reason="breaker_open",to="local/demo-mini"} 1.0',
        "gateway_ttft_seconds_count 6.0",
        "gateway_overhead_seconds_count 6.0",
        "gateway_in_flight 0.0",
        "gateway_queue_depth 0.0",
        "gateway_client_disconnect_total 0.0",
    ):
        assert line in text.splitlines()
    for name in ("gateway_inter_token_seconds", "gateway_resume_total"):
        assert f"# TYPE {name}" in text


async def test_reload_applies_everything_or_nothing(gateway: Gateway, fake: FakeInference) -> None:
    gateway.write(CONFIG + "breaker: {failures: 1, open: 60s}\nport: 1234\n")
    answer = await gateway.admin("POST", "/admin/reload")
    assert answer.status_code == 200
    assert set(answer.json()["changed"]) == {"breaker.failures: 5 -> 1", "breaker.open: 30.0 -> 60.0"}
    fake.queue["demo"] = [Answer(refuse=Code.MODEL_FAILED)]
    await gateway.chat()
    assert (await gateway.breaker("local/demo"))["state"] == "open"
    gateway.write(CONFIG + "breaker: {failurs: 1}\n")
    refused = await gateway.admin("POST", "/admin/reload")
    assert refused.status_code == 400
    assert "did you mean 'failures'?" in refused.json()["error"]["message"]
    assert "gateway.yaml:5" in refused.json()["error"]["headgate"]["problems"][0]
    assert gateway.runtime.config.breaker.open == 60.0
    assert (await gateway.admin("POST", "/admin/reload")).status_code == 400


async def test_reload_with_another_service_address_lets_open_streams_finish(tmp_path: Path) -> None:
    gate = asyncio.Event()
    async with FakeInference("token") as old, FakeInference("token") as new, Gateway(tmp_path, old.url) as gateway:
        old.answers["demo"] = Answer(hold=gate)
        running = asyncio.create_task(gateway.chat())
        await until("the old service has the request", lambda: old.seen)
        gateway.environ["GATEWAY_INFERENCE__URL"] = new.url
        changed = (await gateway.admin("POST", "/admin/reload")).json()["changed"]
        assert changed == [f"inference.url: '{old.url}' -> '{new.url}'"]
        assert (await gateway.chat()).status_code == 200
        assert len(new.seen) == 1
        gate.set()
        assert (await running).status_code == 200
        assert len(old.seen) == 1


async def test_health_names_the_failing_parts(gateway: Gateway, fake: FakeInference) -> None:
    await gateway.look()
    detail = (await gateway.client.get("/health")).json()
    assert detail["status"] == "ok"
    assert detail["inference"]["models"] == {"demo": "ready", "demo-mini": "ready"}
    await fake.stop()
    await gateway.look()
    answer = await gateway.client.get("/health")
    assert (answer.status_code, answer.json()["status"], answer.json()["inference"]["reachable"]) == (
        200, "degraded", False,
    )  # fmt: skip
    assert (await gateway.client.get("/readyz")).status_code == 200
