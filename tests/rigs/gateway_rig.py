"""A gateway in the process and event loop of the test, on a real port, with private state and a client."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import uvicorn

from gateway.app import make_app
from gateway.http.connection_limits import BoundedHttp
from gateway.runtime import Runtime, Source
from headgate.shared import ports
from headgate.shared.state_directory import StateDir
from headgate.shared.wire import QuietServer

KEY = "test-key"
ADMIN = "test-admin"

CONFIG = """
routes:
  demo: {chain: [local/demo, local/demo-mini]}
  "*": {chain: ["local/*"]}
"""
MESSAGES = [{"role": "user", "content": "Hello!"}]


class _QuickServer(QuietServer):
    """Ends at once when requested. uvicorn's own server polls every 0.1 s, and takes 0.1 s more to end."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._signalled = asyncio.Event()

    def end(self) -> None:
        """Begins to end."""
        self.should_exit = True
        self._signalled.set()

    async def main_loop(self) -> None:
        """Runs until the end is requested; keeps the date header current like the original."""
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._signalled.wait()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """The steps of the original: no new connections, then the open ones, then the application."""
        for listening in (*self.servers, *(sockets or ())):
            listening.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(self.config.timeout_graceful_shutdown):
                while self.server_state.connections or self.server_state.tasks:
                    await asyncio.sleep(0.002)
                for server in self.servers:
                    await server.wait_closed()
        except TimeoutError:
            for task in self.server_state.tasks:
                task.cancel()
        await self.lifespan.shutdown()


class Gateway:
    """An async context manager. `config` is the text of gateway.yaml; `write` and `reload` change it."""

    def __init__(
        self,
        root: Path,
        inference_url: str,
        config: str = CONFIG,
        environ: Mapping[str, str] | None = None,
        http: type[BoundedHttp] = BoundedHttp,
    ) -> None:
        self._http = http
        self.root = root
        self.environ = {
            "GATEWAY_INFERENCE__URL": inference_url,
            "GATEWAY_API_KEY": KEY,
            "GATEWAY_ADMIN_KEY": ADMIN,
            "INFERENCE_TOKEN": "token",
            **(environ or {}),
        }
        self.write(config)
        state = root / "state"
        state.mkdir(exist_ok=True)
        source = Source(root, lambda: self.environ, {"port": 0})
        self.runtime = Runtime(source, source.load(), StateDir(state))
        self.client: httpx2.AsyncClient
        self.url = ""

    def write(self, config: str) -> None:
        """Replaces gateway.yaml; takes effect with a reload."""
        (self.root / "gateway.yaml").write_text(config)

    async def look(self) -> None:
        """Polls the models of the inference service now; the result of an earlier poll is not used."""
        await self.runtime.view.refresh()
        await self.runtime.view.refresh()

    async def __aenter__(self) -> Gateway:
        sock = ports.listen("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        options: dict[str, Any] = {
            "http": self._http, "ws": "none", "lifespan": "on", "log_config": None, "access_log": False,
            "timeout_graceful_shutdown": 1,
        }  # fmt: skip
        self._server = _QuickServer(uvicorn.Config(make_app(self.runtime), **options))
        self._task = asyncio.create_task(self._server.serve(sockets=[sock]))
        self.client = httpx2.AsyncClient(
            base_url=self.url, timeout=20, headers={"authorization": f"Bearer {KEY}"}, trust_env=False
        )
        async with asyncio.timeout(20):
            while not self._server.started:
                await asyncio.sleep(0.005)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.client.aclose()
        self._server.end()
        async with asyncio.timeout(20):
            await self._task

    async def chat(self, model: str = "demo", **more: Any) -> httpx2.Response:
        """A chat request; `headers` go into the request, everything else into its body."""
        headers = more.pop("headers", {})
        body = {"model": model, "messages": MESSAGES, **more}
        return await self.client.post("/v1/chat/completions", content=json.dumps(body), headers=headers)

    async def admin(self, method: str, path: str) -> httpx2.Response:
        """A request with the admin key."""
        return await self.client.request(method, path, headers={"authorization": f"Bearer {ADMIN}"})

    async def breaker(self, name: str) -> dict[str, Any]:
        """One entry of `/admin/breakers`."""
        entries = (await self.admin("GET", "/admin/breakers")).json()["breakers"]
        return next(
            (entry for entry in entries if entry["name"] == name), {"name": name, "state": "closed", "failures": 0}
        )
