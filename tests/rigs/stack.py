"""A whole Headgate in a temporary directory for end-to-end tests: configuration, services, fake cloud."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headgate.shared.state_directory import GATEWAY_KEY, INFERENCE_TOKEN, StateDir
from tests.rigs.processes import Service, free_port, gateway_service, inference_service, private_env

REPOSITORY = Path(__file__).resolve().parents[2]

MODELS = """
models:
  demo:
    path: bundled:demo
    context_length: 2048
    parallel: 4
  demo-mini:
    path: bundled:demo-mini
    context_length: 2048
    parallel: 4
"""

CALLING = MODELS.replace("path: bundled:demo\n", "path: bundled:demo\n    capabilities: [chat, completions, tools]\n")
"""With tools for `demo`, whose template has none."""

LOCAL_ROUTES = """
routes:
  demo: {chain: [local/demo, local/demo-mini]}
  "*": {chain: ["local/*"]}
"""


class Clients(ABC):
    """Clients of a Headgate with private state below `root`."""

    root: Path

    @property
    @abstractmethod
    def gateway_url(self) -> str:
        """Base address of the gateway without a trailing slash."""

    @property
    def state(self) -> StateDir:
        """The private state directory both services share."""
        return StateDir(self.root / "state")

    @property
    def key(self) -> str:
        """The generated API key."""
        key = self.state.read_secret(GATEWAY_KEY)
        assert key is not None
        return key

    @property
    def base_url(self) -> str:
        """The base URL of an OpenAI client."""
        return self.gateway_url + "/v1"


@dataclass
class Stack(Clients):
    """The services of one test; `inference_env` and `gateway_env` reach only that process."""

    root: Path
    models: str = MODELS
    gateway: str = LOCAL_ROUTES
    inference_env: Mapping[str, str] = field(default_factory=dict)
    gateway_env: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.config_dir = self.root / "config"
        self.config_dir.mkdir(parents=True, exist_ok=True)
        self.write_models(self.models)
        (self.config_dir / "gateway.yaml").write_text(self.gateway)
        self.inference = inference_service(self.root, self.config_dir, self.inference_env)
        self.front = gateway_service(self.root, self.config_dir, self.inference.url, self.gateway_env)

    def write_models(self, text: str) -> None:
        """Replaces config/models.yaml; takes effect with a reload."""
        (self.config_dir / "models.yaml").write_text(text)

    def start(self) -> Stack:
        """Starts inference, then the gateway, and returns when both are ready."""
        try:
            self.inference.start(wait_for="/readyz")
            self.front.start(wait_for="/readyz")
        except BaseException:
            self.kill()
            raise
        return self

    def kill(self) -> None:
        """Kills everything in any state."""
        self.front.kill()
        self.inference.kill()

    @property
    def gateway_url(self) -> str:
        """The address of the gateway."""
        return self.front.url

    def ask(self, path: str, body: Any = None, *, direct: bool = False, seconds: float = 30.0) -> Any:
        """JSON from the gateway, or `direct` from the inference service; POST when there is a body.

        Raises urllib.error.HTTPError for statuses from 400 on.
        """
        secret = self.state.read_secret(INFERENCE_TOKEN) if direct else self.key
        request = urllib.request.Request(
            (self.inference.url if direct else self.gateway_url) + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {secret}", "Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return json.load(answer)

    def model(self, name: str) -> dict[str, Any]:
        """The inference service's own status of a model."""
        return dict(self.ask(f"/v1/models/{name}", direct=True)["headgate"])

    def worker_pid(self, name: str) -> int:
        """Process id of the worker that holds `name` now."""
        pid = self.model(name)["pid"]
        assert isinstance(pid, int), f"{name} has no worker"
        return pid

    def breakers(self) -> list[dict[str, Any]]:
        """`/admin/breakers` as the operator sees it."""
        return list(self.ask("/admin/breakers")["breakers"])


def chat_body(text: str, model: str = "demo", **more: Any) -> dict[str, Any]:
    """A greedy chat request with one user message."""
    return {"model": model, "messages": [{"role": "user", "content": text}], "temperature": 0, **more}


def fake_cloud(root: Path) -> Service:
    """The fake provider in a process of its own; not started yet."""
    port = free_port()
    env = private_env(root, {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])})
    return Service(
        [sys.executable, "-m", "tests.rigs.fake_provider", "--port", str(port)], env, root, port, "fake-cloud"
    )


async def until(what: str, probe: Any, *, seconds: float = 10.0, every: float = 0.02) -> Any:
    """Awaits (or calls) `probe` until its result is true and returns it; AssertionError after `seconds`."""
    async with asyncio.timeout(seconds + 5):
        deadline = asyncio.get_running_loop().time() + seconds
        while True:
            value = probe()
            if asyncio.iscoroutine(value):
                value = await value
            if value:
                return value
            assert asyncio.get_running_loop().time() < deadline, f"not within {seconds:g} s: {what}"
            await asyncio.sleep(every)
