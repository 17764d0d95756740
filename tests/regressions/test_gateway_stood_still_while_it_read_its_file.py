"""A reload read and checked the whole configuration between two tokens: a file of 500 routes held up all streams."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.fake_inference import FakeInference
from tests.rigs.gateway_rig import CONFIG, Gateway

pytestmark = pytest.mark.timeout(60)


class _Slow(dict[str, str]):
    """An environment that is read only once somebody was answered."""

    def __init__(self, environ: dict[str, str]) -> None:
        super().__init__(environ)
        self.begun, self.answered = threading.Event(), threading.Event()

    def get(self, name: str, default: Any = None) -> Any:
        self.begun.set()
        assert self.answered.wait(20), "nobody was answered while the configuration was read"
        return super().get(name, default)


async def test_requests_go_on_while_a_file_is_read(tmp_path: Path) -> None:
    """What it says is applied all the same."""
    async with FakeInference("token") as fake, Gateway(tmp_path, fake.url) as gateway:
        gateway.environ = slow = _Slow(gateway.environ)
        gateway.write(CONFIG + "drain_seconds: 7s\n")
        reload = asyncio.create_task(gateway.admin("POST", "/admin/reload"))
        await asyncio.to_thread(slow.begun.wait, 20)
        assert (await gateway.client.get("/livez")).status_code == 200
        slow.answered.set()
        assert (await reload).json()["changed"] == ["drain_seconds: 30.0 -> 7.0"]
