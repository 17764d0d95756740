"""No secret appears in answers, logs, records, metrics or files.

The provider is hostile: its errors quote the credentials and the prompt. Clients may read their own prompt in the
message of a provider; logs, records, metrics and files must not contain it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest
from aiohttp import web

from inference.protocol import Code
from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.processes import Service, gateway_service
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(90)

SECRETS = {
    "GATEWAY_API_KEY": "canary-use-5f1d",
    "GATEWAY_ADMIN_KEY": "canary-admin-77ab",
    "INFERENCE_TOKEN": "canary-token-90c2",
    "CLOUD_A": "canary-cloud-a-1234",
    "CLOUD_B": "canary-cloud-b-5678",
}
SHOWN = "canary-mistyped-4711"
PASSWORD = "canary-password-31"
PROMPT = "canary prompt: the mill by the river has a secret name"
LOUD = {"OPENAI_LOG": "debug", "ANTHROPIC_LOG": "debug", "HEADGATE_LOG_LEVEL": "debug"}

CONFIG = """
providers:
  a: {{kind: openai, api_key: "${{env:CLOUD_A}}", base_url: "http://{host}/v1"}}
  b: {{kind: anthropic, api_key: "${{env:CLOUD_B}}", base_url: "http://{host}"}}
routes:
  demo: {{chain: [local/demo]}}
  "*": {{chain: ["a/*", "b/*"], resume: "off"}}
breaker: {{failures: 1000, failure_ratio: 1}}
keys: [{{name: team, hash: "sha256:{hash}", limits: {{requests_per_minute: 1}}}}]
"""
MODELS = ("whole", "400", "401", "429", "500", "frame", "garbage", "html", "cut", "redirect")


async def _hostile(request: web.Request) -> web.StreamResponse:
    """Fails as the name of the model says, and quotes everything it was sent."""
    body = await request.json()
    echo = f"headers {dict(request.headers)!r} body {json.dumps(body)}"
    how = body["model"]
    if how.isdigit():
        return web.json_response({"error": {"message": echo, "type": "t", "code": echo[:90]}}, status=int(how))
    if how == "redirect":
        return web.Response(status=307, headers={"location": f"/elsewhere?{request.headers.get('authorization')}"})
    if how == "html":
        return web.Response(text=f"<html>{echo}</html>", content_type="text/html")
    stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await stream.prepare(request)
    choice = {"index": 0, "delta": {"content": "well"}}
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": how, "choices": [choice]}
    if how in ("frame", "cut"):
        await stream.write(b"data: " + json.dumps(chunk).encode() + b"\n\n")
    if how == "frame":
        await stream.write(b"data: " + json.dumps({"error": {"message": echo, "code": echo}}).encode() + b"\n\n")
    if how == "garbage":
        await stream.write(f"data: {{{echo}\n\nevent: {echo}\ndata: {echo}\n\n".encode())
    return stream


@pytest.fixture
async def hostile() -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", _hostile)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    yield "{}:{}".format(*runner.addresses[0])
    await runner.cleanup()


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def _drive(service: Service, fake: FakeInference) -> tuple[list[str], list[str]]:
    """What the gateway answered to clients, and to its operator."""
    to_clients: list[str] = []
    ids: list[str] = []
    to_operator: list[str] = []
    async with httpx2.AsyncClient(base_url=service.url, timeout=20, trust_env=False) as client:

        async def ask(model: str, stream: bool, key: str = SECRETS["GATEWAY_API_KEY"], **more: object) -> None:
            body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "stream": stream, **more}
            answer = await client.post("/v1/chat/completions", json=body, headers=_bearer(key))
            to_clients.append(f"{answer.headers} {answer.text}")
            ids.append(answer.headers["x-request-id"])

        for stream in (False, True):
            for model in ("demo", *(MODELS if stream else ("400", "500", "frame"))):
                await ask(model, stream)
            for answer in (
                Answer(refuse=Code.MODEL_FAILED, message=f"it failed at {PROMPT}"),
                Answer(garbage=b"data: {" + PROMPT.encode() + b"\n\n", finish=None),
                Answer(error=Code.MODEL_FAILED, message=f"it failed at {PROMPT}"),
                Answer(cut=True),
            ):
                fake.queue["demo"] = [answer]
                await ask("demo", stream)
        for more in ({"temprature": PROMPT}, {"tool_choice": PROMPT}, {"response_format": {"type": PROMPT}}):
            await ask("demo", False, **more)
        for key in (SHOWN, "team-secret", "team-secret"):
            await ask("demo", False, key=key)
        use = _bearer(SECRETS["GATEWAY_API_KEY"])
        for model in ("demo", "400", "frame"):
            for path, more in (
                ("messages", {"max_tokens": 9, "messages": [{"role": "user", "content": PROMPT}]}),
                ("messages/count_tokens", {"messages": [{"role": "user", "content": PROMPT}]}),
                ("responses", {"input": PROMPT, "stream": True}),
                ("embeddings", {"input": PROMPT}),
            ):
                answer = await client.post(f"/v1/{path}", json={"model": model, **more}, headers=use)
                to_clients.append(f"{answer.headers} {answer.text}")
                ids.append(answer.headers["x-request-id"])
        raw = await client.post("/v1/chat/completions", content=b"{" + PROMPT.encode())
        to_clients.append(f"{raw.headers} {raw.text}")
        for path in ("/health", "/metrics", "/v1/models", "/readyz", f"/nothing?key={SHOWN}"):
            answer = await client.get(path, headers=_bearer(SECRETS["GATEWAY_API_KEY"]))
            to_operator.append(f"{answer.headers} {answer.text}")
        admin = _bearer(SECRETS["GATEWAY_ADMIN_KEY"])
        path = service.root / "config" / "gateway.yaml"
        good = path.read_text()
        for text in (
            good.replace("http://", f"http://user:{PASSWORD}@"),
            good + f"nonsense: {PASSWORD}\n",
            good.replace("sha256:", f"{PASSWORD}:"),
            good.replace('"${env:CLOUD_A}"', f'"{PASSWORD} {PASSWORD}"'),
            good.replace("http://", f"{PASSWORD}://"),
            good,
        ):
            path.write_text(text)
            answer = await client.post("/admin/reload", headers=admin)
            to_operator.append(f"{answer.headers} {answer.text}")
        for path_ in ("/admin/breakers", *(f"/admin/requests/{one}" for one in ids)):
            answer = await client.get(path_, headers=admin)
            to_operator.append(f"{answer.headers} {answer.text}")
    return to_clients, to_operator


def _occurrences(text: str, *canaries: str) -> list[str]:
    """Each canary in `text` with the text around it."""
    return [f"...{text[max(0, at - 80) : at + 80]}..." for one in canaries if (at := text.find(one)) >= 0]


async def test_no_canary_is_found_anywhere(tmp_path: Path, hostile: str) -> None:
    config = CONFIG.format(host=hostile, hash=hashlib.sha256(b"team-secret").hexdigest())
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gateway.yaml").write_text(config)
    async with FakeInference(SECRETS["INFERENCE_TOKEN"]) as fake:
        service = gateway_service(tmp_path, tmp_path / "config", fake.url, {**SECRETS, **LOUD})
        await asyncio.to_thread(service.start, wait_for="/readyz")
        try:
            to_clients, to_operator = await _drive(service, fake)
            reloads = service.log.count("reload: ")
            service.signal(signal.SIGHUP)
            await until("the reload is logged", lambda: service.log.count("reload: ") > reloads)
        finally:
            await asyncio.to_thread(service.stop)
    secrets = (*SECRETS.values(), SHOWN, PASSWORD, "team-secret")
    assert len(to_clients) > 35
    assert _occurrences("\n".join(to_clients), *secrets) == []
    assert _occurrences("\n".join(to_operator), *secrets, PROMPT[:24], "mill by the river") == []
    assert _occurrences(service.log, *secrets, PROMPT[:24], "mill by the river") == []
    files = [path for path in (tmp_path / "state").rglob("*") if path.is_file()]
    assert files
    for path in files:
        private = path.name.endswith((".key", ".token", ".secret"))
        assert not private or path.stat().st_mode & 0o777 == 0o600
        assert private or _occurrences(path.read_text(errors="replace"), *secrets, PROMPT[:24]) == []
    assert os.stat(tmp_path / "state").st_mode & 0o777 == 0o700
