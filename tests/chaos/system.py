"""A whole Headgate for chaos runs: `headgate up` on two simulated GPUs, four models, a fake cloud.

One model has two replicas, and one has a part of its experts in host memory.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx2

from headgate.shared import child_process
from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.protocol import ModelStatus
from tests.chaos.machine import Machine
from tests.rigs import tiny_families, tiny_gguf
from tests.rigs.fulldisk import FullDisk
from tests.rigs.processes import Service, descendants_of, free_port, is_alive, private_env
from tests.rigs.stack import REPOSITORY, Clients, fake_cloud

DEVICES = ("gpu-0", "gpu-1")
DEVICE_MIB = 160
MODELS = ("demo", "demo-mini", "tiny", "tiny-experts")
REPLICATED = "tiny"
"""The model with two replicas."""
EXPERTS = tiny_families.Form("moe", layers=4, width=64, heads=4, heads_kv=4, feed=128)
BACKED = (*MODELS, "shaky")
"""Routes that end in a cloud that never fails."""
ALONE = "alone"
"""A route to the model with replicas, without a second tier."""
OPEN_SECONDS = 2.0

MODELS_YAML = """
models:
  demo:      {{path: "bundled:demo", context_length: 512, {common}}}
  demo-mini: {{path: "bundled:demo-mini", context_length: 512, {common}}}
  tiny:      {{path: {tiny}, context_length: 1024, replicas: 2, {common}}}
  tiny-experts: {{path: {experts}, context_length: 1024, experts: 2, {common}{more}}}
"""
COMMON = "parallel: 4, memory_overhead: 16MiB, min_residency: 500ms"
GATEWAY_YAML = """
providers:
  cloud: {{kind: openai, api_key: "${{env:CLOUD_KEY}}", base_url: {cloud}/v1}}
  shaky: {{kind: openai, api_key: "${{env:CLOUD_KEY}}", base_url: {cloud}/v1beta/openai/}}
routes:
  demo:      {{chain: [local/demo, local/demo-mini, cloud/gpt-test], load_wait: 8s}}
  demo-mini: {{chain: [local/demo-mini, cloud/gpt-test], load_wait: 8s}}
  tiny:      {{chain: [local/tiny, cloud/gpt-test], load_wait: 8s}}
  tiny-experts: {{chain: [local/tiny-experts, local/tiny, cloud/gpt-test], load_wait: 8s}}
  shaky:     {{chain: [shaky/gemini-test, cloud/gpt-test]}}
  alone:     {{chain: [local/tiny], load_wait: 8s}}
stream_interval: 2ms
breaker: {{failures: 5, open: {open}s, probes: 1, window: 60s, failure_ratio: 0.5, min_requests: 1000}}
deadlines: {{connect: 2s, first_token: 6s, inter_token: 6s, total: 40s}}
drain_seconds: {drain}
keys:
  - {{name: first, hash: "{first}", scopes: [use, admin], priority: high}}
  - {{name: second, hash: "{second}", scopes: [use]}}
"""
KEYS = ("chaos-first", "chaos-second")
"""Of two tenants."""
KV_RAM_GB = 1 / 64
"""The smallest amount that is divided among models."""
KV_DISK_BYTES = 12 * 2**20
SERVICE_ENV = {
    "INFERENCE_WORKER_SILENCE_SECONDS": "6",
    "INFERENCE_STEP_TIMEOUT_SECONDS": "20",
    "INFERENCE_DRAIN_SECONDS": "5",
    "INFERENCE_PRESSURE_CHECK_INTERVAL_SECONDS": "1",
    "INFERENCE_KV_DISK_GB": str(KV_DISK_BYTES / 2**30),
    "CLOUD_KEY": "fake-cloud",
}


class System(Clients):
    """Everything is below `root`. `plants` are names of defects (`tests.chaos.defects`)."""

    def __init__(self, root: Path, plants: Sequence[str] = (), kv_ram_gb: float = KV_RAM_GB) -> None:
        self.root = root
        self.config_dir = root / "config"
        self.config_dir.mkdir(parents=True)
        self.cloud = fake_cloud(root)
        self.disk = FullDisk(root / "state", root / "disk")
        self.gateway_port, self.inference_port = free_port(), free_port()
        self.kv_ram_gb = kv_ram_gb
        self.configure()
        self.machine = Machine(root / "machine", [DEVICE_MIB * 2**20] * len(DEVICES))
        self._words = ("-m", "tests.chaos.launcher", ",".join(plants) or "none", "up")
        self._http = httpx2.AsyncClient(timeout=10.0)

    def _up(self) -> Service:
        options = (
            "--port",
            self.gateway_port,
            "--inference-port",
            self.inference_port,
            "--config-dir",
            self.config_dir,
        )
        tied = {child_process.PARENT_ENV: str(os.getpid())}
        path = {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
        env = private_env(self.root, {**SERVICE_ENV, **self.disk.env, **self.machine.env, **path, **tied})
        argv = [sys.executable, *self._words, *map(str, options)]
        return Service(argv, env, self.root, self.gateway_port, "up")

    def configure(self, *, more: str = "", drain: int = 5) -> None:
        """Writes both configuration files; `more` is for one of the models."""
        tiny, experts = tiny_gguf.generative(), tiny_families.path(EXPERTS)
        models = MODELS_YAML.format(common=COMMON, tiny=tiny, experts=experts, more=more)
        first, second = (f"sha256:{hashlib.sha256(key.encode()).hexdigest()}" for key in KEYS)
        gateway = GATEWAY_YAML.format(cloud=self.cloud.url, open=OPEN_SECONDS, drain=drain, first=first, second=second)
        settings = f"INFERENCE_KV_RAM_GB={self.kv_ram_gb}\n"
        for path, text in (
            (self.config_dir / "models.yaml", models),
            (self.config_dir / "gateway.yaml", gateway),
            (self.root / ".env", settings),
        ):
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_text(text)
            fresh.replace(path)

    async def start(self) -> System:
        """Returns when both services are ready."""
        try:
            self.cloud.start()
            await asyncio.to_thread(self.machine.__enter__)
            self.up = self._up()
            self.up.start(wait_for="/readyz")  # not in a thread: it ends with the thread that started it
        except BaseException:
            self.kill()
            raise
        return self

    async def close(self) -> None:
        """Ends everything."""
        await self._http.aclose()
        await asyncio.to_thread(self.kill)

    def kill(self) -> None:
        """Kills everything."""
        self.disk.clear()
        if hasattr(self, "up"):
            self.up.kill()
            self.machine.__exit__()
        self.cloud.kill()

    # --- stored sequences --------------------------------------------------------------------------------------------
    @property
    def kv_directory(self) -> Path:
        """The directory of stored sequences."""
        return self.root / "state" / "kv"

    def kv_files(self, suffix: str = ".kv") -> list[Path]:
        """Files of stored sequences; they may be removed at any time."""
        return sorted(path for path in self.kv_directory.rglob(f"*{suffix}") if path.is_file())

    @property
    def key(self) -> str:
        """The key of the first tenant and of the operator."""
        return KEYS[0]

    # --- asking ------------------------------------------------------------------------------------------------------
    @property
    def gateway_url(self) -> str:
        """The address of the gateway."""
        return f"http://127.0.0.1:{self.gateway_port}"

    async def inference(self, path: str, method: str = "GET", body: Any = None, seconds: float = 10.0) -> Any:
        """JSON of the inference service; raises httpx2.HTTPError for errors and missing answers."""
        token = self.state.read_secret(INFERENCE_TOKEN)
        return await self._ask(f"http://127.0.0.1:{self.inference_port}{path}", token, method, body, seconds)

    async def gateway(self, path: str, method: str = "GET", body: Any = None, seconds: float = 10.0) -> Any:
        """JSON (or the text of /metrics) of the gateway; raises httpx2.HTTPError."""
        return await self._ask(f"{self.gateway_url}{path}", self.key, method, body, seconds)

    async def provider(self, path: str, method: str = "GET", body: Any = None) -> Any:
        """JSON of the controls of the fake cloud."""
        return await self._ask(f"{self.cloud.url}{path}", None, method, body, 10.0)

    async def _ask(self, url: str, secret: str | None, method: str, body: Any, seconds: float) -> Any:
        headers = {} if secret is None else {"authorization": f"Bearer {secret}"}
        answer = await self._http.request(method, url, json=body, headers=headers, timeout=seconds)
        answer.raise_for_status()
        return answer.json() if "json" in answer.headers.get("content-type", "") else answer.text

    async def is_ready(self, port: int) -> bool:
        """Whether the service at `port` answers /readyz with 200."""
        try:
            return bool((await self._http.get(f"http://127.0.0.1:{port}/readyz", timeout=2.0)).status_code == 200)
        except httpx2.HTTPError:
            return False

    async def models(self) -> Mapping[str, ModelStatus]:
        """The status of every model; raises httpx2.HTTPError while the service is away."""
        answer = await self.inference("/v1/models")
        return {entry["id"]: ModelStatus.from_json(entry) for entry in answer["data"]}

    async def simulator(self, do: str, device: str | None = None, **amount: float) -> Mapping[str, Mapping[str, Any]]:
        """Sends a command to the simulator; returns the status of every device. Raises SimulatorError without one."""
        return await asyncio.to_thread(lambda: self.machine.send(do, device, **amount))

    async def devices(self) -> Mapping[str, Mapping[str, Any]]:
        """The devices as the inference service shows them; raises httpx2.HTTPError."""
        return {device["id"]: device for device in (await self.inference("/devices"))["devices"]}

    @property
    def log_offset(self) -> int:
        """Bytes that both services have logged so far."""
        return self.up.log_path.stat().st_size

    def logged_since(self, offset: int) -> str:
        """What the services logged after `offset`."""
        with self.up.log_path.open("rb") as log:
            log.seek(offset)
            return log.read().decode("utf-8", "replace")

    # --- processes ---------------------------------------------------------------------------------------------------
    def service_pid(self, name: str) -> int | None:
        """The process of `inference` or `gateway` that `up` runs now."""
        for pid in descendants_of(self.up.pid):
            words = _words(pid)
            if name in words and "--config-dir" in words and _parent(pid) == self.up.pid:
                return pid
        return None

    def strays(self) -> dict[int, str]:
        """Processes of this system that are not descendants of `up` or the fake cloud."""
        family = {
            self.up.pid,
            self.cloud.pid,
            os.getpid(),
            *descendants_of(self.up.pid),
            *descendants_of(self.cloud.pid),
        }
        mark = f"HEADGATE_STATE_DIR={self.root / 'state'}".encode()
        found = {}
        for entry in Path("/proc").iterdir():
            if not entry.name.isdigit() or int(entry.name) in family:
                continue
            try:
                is_ours = mark in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if is_ours and is_alive(int(entry.name)):
                found[int(entry.name)] = " ".join(_words(int(entry.name)))[-80:]
        return found


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "replace").split("\0")
    except OSError:
        return []


def _parent(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return None
