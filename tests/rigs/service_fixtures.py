"""Fixtures of several test folders: inference services, fake ones and with fake workers, a fake cloud, Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.rigs.authority_rig import Start, services
from tests.rigs.fake_inference import FakeInference
from tests.rigs.fake_provider import FakeProvider
from tests.rigs.redis_server import RedisServer


@pytest.fixture
async def fake() -> AsyncIterator[FakeInference]:
    """The service behind a gateway; it requires a token and has the models `demo` and `demo-mini`."""
    async with FakeInference("token") as fake:
        yield fake


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    """A function that starts inference services with fake workers."""
    async with services(tmp_path, monkeypatch) as make:
        yield make


@pytest.fixture
async def cloud() -> AsyncIterator[FakeProvider]:
    """A cloud that speaks the APIs of all providers."""
    async with FakeProvider() as cloud:
        yield cloud


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A Redis or Valkey server; without one the test is skipped."""
    server = RedisServer(tmp_path_factory.mktemp("redis"))
    yield server
    server.kill()
