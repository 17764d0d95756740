"""A fleet on one machine: three gateways, four inference services with simulated GPUs, and a Redis server.

Each gateway has a TCP proxy to each node and to the Redis server, so that single links can fail.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from headgate.shared import child_process
from headgate.shared.state_directory import StateDir
from inference.devices.simgpu.control import SOCKET_NAME, Control, SimulatorError
from inference.workers.os_api import socket_directory
from tests.fleet.launcher import CLOCK_ENV, write_clock
from tests.rigs.link_proxy import Link
from tests.rigs.processes import Service, free_port, inference_service, private_env
from tests.rigs.redis_server import SERVER
from tests.rigs.stack import REPOSITORY, until

GATEWAYS, NODES = 3, 4
MODEL = "demo"
DEVICE = "gpu-0"
OPEN_SECONDS = 1.0
KEY, ADMIN = "fleet-user", "fleet-admin"
LIMITED_KEYS = 60
"""Keys with a limit, one for each check, so that none is used twice within a minute."""
LIMIT_PER_MINUTE = 12
TOKEN, PASSWORD = "token-of-the-fleet", "password-of-the-store"
TOTAL_SECONDS = 30.0
START_SECONDS = 90.0

MODELS = {
    MODEL: {"path": "bundled:demo", "context_length": 512, "parallel": 4, "idle_timeout": "never"},
}
INFERENCE_ENV = {
    "INFERENCE_DEVICES": "sim:1x300MiB",
    "INFERENCE_DRAIN_SECONDS": "3",
    "INFERENCE_KV_RAM_GB": "0.02",
    "INFERENCE_TOKEN": TOKEN,
}


def limited_key(number: int) -> str:
    """A key with LIMIT_PER_MINUTE."""
    return f"fleet-limited-{number}"


@dataclass(frozen=True, slots=True)
class Node:
    """An inference service with a simulated GPU that takes `pace_seconds` for each computation."""

    name: str
    service: Service
    pace_seconds: float

    async def simulator(self, do: str, device: str | None = None, **amount: float) -> Mapping[str, Any]:
        """Sends a command to its simulator; raises SimulatorError."""
        path = socket_directory(StateDir(self.service.root / "state")) / SOCKET_NAME

        def send() -> Mapping[str, Any]:
            with Control(path) as control:
                return control.send(do, device, **amount)

        return await asyncio.to_thread(send)


@dataclass(frozen=True, slots=True)
class Gateway:
    """A gateway, its links by the name of a node, its link to the Redis server, and the file of its wall clock."""

    number: int
    service: Service
    links: Mapping[str, Link]
    store_link: Link
    clock: Path


class Fleet:
    """Everything is below `root`. `plants` are names of defects (`tests.fleet.defects`)."""

    def __init__(
        self,
        root: Path,
        plants: Sequence[str] = (),
        *,
        gateways: int = GATEWAYS,
        nodes: int = NODES,
        pace_seconds: float = 0.02,
        models: Mapping[str, Any] = MODELS,
        inference_env: Mapping[str, str] | None = None,
        settings: Mapping[str, Any] | None = None,
        with_store: bool = True,
    ) -> None:
        """`settings` replace those of gateway.yaml, `inference_env` variables of the nodes."""
        self.root = root
        self.models = models
        self._inference_env = inference_env or {}
        self._ports: set[int] = set()
        self._settings = settings or {}
        self._plants = ",".join(plants) or "none"
        self.nodes = {f"node-{number}": self._node(number, pace_seconds) for number in range(1, nodes + 1)}
        self._store = self._redis() if with_store else None
        self.gateways = [self._gateway(number) for number in range(gateways)]
        self._http = httpx2.AsyncClient(timeout=10.0)

    # --- processes -----------------------------------------------------------------------------------------------
    def _port(self) -> int:
        """A free port that no other service of this fleet has."""
        while (port := free_port()) in self._ports:
            pass
        self._ports.add(port)
        return port

    def _env(self, root: Path, extra: Mapping[str, str]) -> dict[str, str]:
        path = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
        return private_env(root, {"PYTHONPATH": path, child_process.PARENT_ENV: str(os.getpid()), **extra})

    def _node(self, number: int, pace_seconds: float) -> Node:
        name = f"node-{number}"
        root = self.root / name
        config = root / "config"
        config.mkdir(parents=True)
        (config / "models.yaml").write_text(json.dumps({"models": self.models}))
        named = {"INFERENCE_NODE": name, child_process.PARENT_ENV: str(os.getpid())}
        env = {**INFERENCE_ENV, **self._inference_env, **named}
        service = inference_service(root, config, env, self._port())
        service.name = name
        return Node(name, service, pace_seconds)

    @property
    def store(self) -> Service:
        """The Redis server."""
        assert self._store is not None, "a fleet without a store"
        return self._store

    def _redis(self) -> Service:
        root = self.root / "store"
        (root / "data").mkdir(parents=True)
        port = self._port()
        assert SERVER is not None, "no redis-server"
        argv = [
            SERVER, "--port", str(port), "--bind", "127.0.0.1", "--requirepass", PASSWORD, "--dir", str(root / "data"),
            "--save", "", "--appendonly", "yes", "--appendfsync", "no",
        ]  # fmt: skip
        return Service(argv, dict(os.environ), root, port, "store")

    def _gateway(self, number: int) -> Gateway:
        root = self.root / f"gateway-{number}"
        (root / "config").mkdir(parents=True)
        clock, port = root / "clock", self._port()
        write_clock(clock, 0.0)
        argv = [
            sys.executable, "-m", "tests.fleet.launcher", self._plants, "gateway",
            "--config-dir", str(root / "config"), "--port", str(port),
        ]  # fmt: skip
        env = self._env(root, {CLOCK_ENV: str(clock), "INFERENCE_TOKEN": TOKEN})
        links = {name: Link(node.service.port) for name, node in self.nodes.items()}
        store_link = Link(self._store.port if self._store else 0)
        return Gateway(number, Service(argv, env, root, port, f"gateway-{number}"), links, store_link, clock)

    def _configuration(self, gateway: Gateway) -> dict[str, Any]:
        limited = [
            {**_key(limited_key(number)), "limits": {"requests_per_minute": LIMIT_PER_MINUTE}}
            for number in range(LIMITED_KEYS)
        ]
        nodes = [f"{name}=http://127.0.0.1:{link.port}" for name, link in gateway.links.items()]
        store = {"state": f"redis://:{PASSWORD}@127.0.0.1:{gateway.store_link.port}/0"} if self._store else {}
        return {
            "inference": {"nodes": nodes},
            **store,
            "routes": {"*": {"chain": ["local/*"], "load_wait": "10s"}},
            "stream_interval": "2ms",
            "breaker": {"failures": 3, "open": f"{OPEN_SECONDS}s", "min_requests": 1000},
            "deadlines": {"connect": "1s", "first_token": "4s", "inter_token": "4s", "total": f"{TOTAL_SECONDS}s"},
            "attempts": {"max": 8},
            "drain_seconds": 10,
            "usage": {"store": False},
            "keys": [_key(KEY), {**_key(ADMIN), "scopes": ["use", "admin"]}, *limited],
            **self._settings,
        }

    async def start(self) -> Fleet:
        """Returns when every service is ready and each node has the model."""
        try:
            for gateway in self.gateways:
                for link in (*gateway.links.values(), gateway.store_link):
                    await link.start()
                text = json.dumps(self._configuration(gateway))
                (gateway.service.root / "config" / "gateway.yaml").write_text(text)
            if self._store:
                await self.start_store()
            await asyncio.gather(*(self.start_node(name) for name in self.nodes))
            await asyncio.gather(*(self.start_gateway(number) for number in range(len(self.gateways))))
        except BaseException:
            await self.close()
            raise
        return self

    async def close(self) -> None:
        """Ends everything."""
        services = [*(gateway.service for gateway in self.gateways), *(node.service for node in self.nodes.values())]
        for service in (*services, *([self._store] if self._store else [])):
            service.kill()
        for gateway in self.gateways:
            for link in (*gateway.links.values(), gateway.store_link):
                await link.close()
        await self._http.aclose()

    async def start_store(self, *, empty: bool = False) -> None:
        """Starts the Redis server with its earlier data, or `empty`."""
        if empty:
            shutil.rmtree(self.store.root / "data")
            (self.store.root / "data").mkdir()
        self.store.spawn()
        await until("the store answers", self._store_answers, seconds=20.0)

    async def start_node(self, name: str, model: str = MODEL) -> None:
        """Starts a node that has ended, and loads its model."""
        node = self.nodes[name]
        node.service.spawn()
        await self._is_up(node.service)
        await self.heal_device(name)
        await self.node(name, f"/models/{model}/load?seconds=30", "POST", seconds=40.0)

    async def heal_device(self, name: str) -> None:
        """The device of a node works, at its pace."""
        node = self.nodes[name]

        async def healed() -> bool:
            try:
                await node.simulator("heal")
                await node.simulator("pace", seconds=node.pace_seconds)
            except SimulatorError:
                return False
            return True

        await until(f"the simulator of {name} answers", healed, seconds=20.0)

    async def start_gateway(self, number: int) -> None:
        """Starts a gateway that has ended."""
        service = self.gateways[number].service
        service.spawn()
        await self._is_up(service)

    async def stop(self, service: Service, number: int = signal.SIGKILL, seconds: float = 30.0) -> None:
        """Ends a service with a signal; its simulator and workers end with it."""
        if service.exit_status() is None:
            service.signal(number)
        await until(f"{service.name} has ended", lambda: service.exit_status() is not None, seconds=seconds)

    async def _is_up(self, service: Service) -> None:
        async def ready() -> bool:
            if (status := service.exit_status()) is not None:
                raise AssertionError(f"{service.name} ended with status {status} at start:\n{service.log[-3000:]}")
            try:
                return bool((await self._http.get(service.url + "/readyz", timeout=2.0)).status_code == 200)
            except httpx2.HTTPError:
                return False

        await until(f"{service.name} is ready", ready, seconds=START_SECONDS)

    async def _store_answers(self) -> bool:
        try:
            async with asyncio.timeout(2.0):
                reader, writer = await asyncio.open_connection("127.0.0.1", self.store.port)
                writer.write(f"AUTH {PASSWORD}\r\nPING\r\n".encode())
                answer = await reader.readuntil(b"PONG\r\n")
                writer.close()
        except (OSError, asyncio.IncompleteReadError):
            return False
        return answer.startswith(b"+OK")

    # --- asking --------------------------------------------------------------------------------------------------
    async def node(self, name: str, path: str, method: str = "GET", body: Any = None, seconds: float = 10.0) -> Any:
        """JSON of a node, not through a link; raises httpx2.HTTPError."""
        return await self._ask(self.nodes[name].service.url + path, TOKEN, method, body, seconds)

    async def gateway(self, number: int, path: str, method: str = "GET", body: Any = None) -> Any:
        """JSON, or text, of a gateway; raises httpx2.HTTPError."""
        return await self._ask(self.gateways[number].service.url + path, ADMIN, method, body, 10.0)

    async def breakers(self, number: int) -> list[dict[str, Any]]:
        """The breakers of a gateway; raises httpx2.HTTPError."""
        return list((await self.gateway(number, "/admin/breakers"))["breakers"])

    async def _ask(self, url: str, secret: str, method: str, body: Any, seconds: float) -> Any:
        headers = {"authorization": f"Bearer {secret}"}
        answer = await self._http.request(method, url, json=body, headers=headers, timeout=seconds)
        answer.raise_for_status()
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text


def _key(key: str) -> dict[str, Any]:
    return {"name": key, "hash": f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"}
