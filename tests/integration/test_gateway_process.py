"""The gateway as a process: start, signals, exit."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx2
import pytest

from tests.rigs.fake_inference import Answer, FakeInference
from tests.rigs.gateway_rig import CONFIG, MESSAGES
from tests.rigs.page_rig import Page
from tests.rigs.processes import Service, gateway_service, http_status, private_env
from tests.rigs.stack import until

pytestmark = pytest.mark.timeout(60)

ENDLESS = Answer(words=("word ",) * 1000, pause=0.1)


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    async with FakeInference() as fake:
        yield fake


@pytest.fixture
async def service(tmp_path: Path, fake: FakeInference) -> AsyncIterator[Service]:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gateway.yaml").write_text(CONFIG)
    service = gateway_service(tmp_path, tmp_path / "config", fake.url, {"GATEWAY_DRAIN_SECONDS": "4"})
    await asyncio.to_thread(service.start, wait_for="/readyz")
    yield service
    await asyncio.to_thread(service.kill)


def _key(service: Service) -> str:
    return (service.root / "state" / "gateway.key").read_text().strip()


def _client(service: Service) -> httpx2.AsyncClient:
    headers = {"authorization": f"Bearer {_key(service)}"}
    return httpx2.AsyncClient(base_url=service.url, timeout=20, headers=headers, trust_env=False)


@asynccontextmanager
async def _streaming(
    service: Service, fake: FakeInference, answer: Answer
) -> AsyncIterator[tuple[httpx2.AsyncClient, asyncio.Task[str]]]:
    """A client, and the text of its stream, which has begun."""
    fake.answers["demo"] = answer
    began = asyncio.Event()

    async def read() -> str:
        text = ""
        body = {"model": "demo", "messages": MESSAGES, "stream": True}
        async with client.stream("POST", "/v1/chat/completions", json=body) as got:
            async for piece in got.aiter_text():
                text += piece
                began.set()
        return text

    async with _client(service) as client:
        stream = asyncio.create_task(read())
        await began.wait()
        yield client, stream


async def test_sigterm_ends_readiness_and_lets_streams_finish(service: Service, fake: FakeInference) -> None:
    """The endless stream of an open dashboard does not delay the end."""
    async with (
        Page.signed_in(service.url, _key(service)) as page,
        page.listening(),
        _streaming(service, fake, Answer(words=("word ",) * 12, pause=0.2)) as (client, stream),
    ):
        service.signal(signal.SIGTERM)
        await until("readiness is off", lambda: asyncio.to_thread(lambda: http_status(service.url + "/readyz") == 503))
        fake.answers["demo-mini"] = Answer()
        late = await client.post("/v1/chat/completions", json={"model": "demo-mini", "messages": MESSAGES})
        assert late.status_code == 200, "the port still answers"
        text = await stream
        await page.ended()
    assert text.endswith("data: [DONE]\n\n")
    assert text.count("word ") == 12
    assert await asyncio.to_thread(service.wait, 10) == 0
    assert http_status(service.url + "/livez") is None
    assert "Traceback" not in service.log


async def test_stream_longer_than_the_drain_time_ends_in_an_error(service: Service, fake: FakeInference) -> None:
    async with _streaming(service, fake, ENDLESS) as (_, stream):
        service.signal(signal.SIGTERM)
        text = await stream
    error = json.loads(text.rstrip().rpartition("data: ")[2])["error"]
    assert error["code"] == "shutting_down"
    assert "[DONE]" not in text
    assert await asyncio.to_thread(service.wait, 10) == 0
    await asyncio.wait_for(fake.seen[0].closed.wait(), 2)
    assert "Traceback" not in service.log


async def test_second_signal_stops_at_once(service: Service, fake: FakeInference) -> None:
    async with _streaming(service, fake, ENDLESS) as (_, stream):
        service.signal(signal.SIGINT)
        await until("the gateway stops", lambda: "shutting down" in service.log)
        service.signal(signal.SIGINT)
        assert '"shutting_down"' in await stream
    assert await asyncio.to_thread(service.wait, 3) == 0


async def test_sighup_reloads_and_an_invalid_file_changes_nothing(service: Service) -> None:
    path = service.root / "config" / "gateway.yaml"
    path.write_text(CONFIG + "breaker: {failures: 2}\n")
    service.signal(signal.SIGHUP)
    await until("the change is logged", lambda: "reload: breaker.failures: 5 -> 2" in service.log)
    path.write_text("routes: [")
    service.signal(signal.SIGHUP)
    await until("the mistake is logged", lambda: "reload failed; the old configuration stays in force" in service.log)
    assert http_status(service.url + "/readyz") == 200


def _run(tmp_path: Path, *words: str, text: str = CONFIG) -> subprocess.CompletedProcess[str]:
    (tmp_path / "gateway.yaml").write_text(text)
    argv = [sys.executable, "-m", "gateway", "--config-dir", str(tmp_path), *words]
    return subprocess.run(
        argv, env=private_env(tmp_path), cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False
    )


def test_port_in_use_is_reported_with_its_owner(tmp_path: Path) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        ended = _run(tmp_path, "--port", str(sock.getsockname()[1]))
    assert ended.returncode == 1
    assert "is in use by pid" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_invalid_configuration_is_reported_with_status_2(tmp_path: Path) -> None:
    ended = _run(tmp_path, text="breaker: {opne: 3s}\n")
    assert ended.returncode == 2
    assert "gateway.yaml:1: breaker.opne: unknown key; did you mean 'open'?" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_generated_key_is_not_in_the_log(tmp_path: Path) -> None:
    service = gateway_service(tmp_path, tmp_path, "http://127.0.0.1:9")
    (tmp_path / "gateway.yaml").write_text(CONFIG)
    service.start()
    key = (tmp_path / "state" / "gateway.key").read_text().strip()
    assert service.stop() == 0
    assert key not in service.log
    assert str(tmp_path / "state" / "gateway.key") in service.log
