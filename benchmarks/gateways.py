"""Starts Headgate's gateway and its peers on one core, in front of the same upstream."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import upstream
from benchmarks.gateway_peers import Peer
from tests.rigs.processes import Service, descendants_of, free_port, private_env

DIRECT, GATEWAY, PASS_THROUGH = "direct", "headgate", "pass-through"
KEY = "key-of-a-benchmark"
ADMIN_KEY = "admin-of-a-benchmark"
REPOSITORY = Path(__file__).resolve().parents[1]
START_SECONDS = 180.0

CONFIG: Mapping[str, Any] = {"routes": {"*": {"chain": ["local/*"]}}}


def with_cloud(url: str) -> Mapping[str, Any]:
    """`CONFIG` with the upstream as a cloud, too, which is asked for whole answers in one piece."""
    models = (*upstream.CLOUD_MODELS, upstream.CLOUD_BEGUN)
    routes = {model: {"chain": [f"cloud/{model}"], "whole_answers": "whole"} for model in models}
    cloud = {"kind": "openai", "flavor": "openai", "api_key": KEY, "base_url": f"{url}/v1"}
    return {"providers": {"cloud": cloud}, "routes": {**CONFIG["routes"], **routes}}


def with_nodes(url: str, count: int) -> Mapping[str, Any]:
    """`CONFIG` with the upstream as `count` nodes, so that only the gateway's own work differs."""
    return {"inference": {"nodes": [f"n{number}={url}" for number in range(count)]}, **CONFIG}


@dataclass(frozen=True, slots=True)
class Target:
    """The address of a system. `pid`: its topmost process, 0 for the upstream."""

    name: str
    port: int
    pid: int = 0
    headers: Mapping[str, str] = field(default_factory=dict)

    def cpu_seconds(self) -> float:
        """CPU seconds of its processes so far."""
        return sum(_ticks(pid) for pid in _all(self.pid)) / os.sysconf("SC_CLK_TCK")

    def rss_bytes(self) -> int:
        """Memory of its processes in bytes."""
        return sum(_rss(pid) for pid in _all(self.pid))


def cores() -> tuple[int, int]:
    """The core of upstream and generator, and the core of the gateway; equal on a single core."""
    if not hasattr(os, "sched_getaffinity"):
        return 0, 0
    known = sorted(os.sched_getaffinity(0))
    return known[0], known[-1]


def pinned(argv: Sequence[str], core: int) -> list[str]:
    """`argv` restricted to one core with all threads and children, where the system supports it."""
    taskset = shutil.which("taskset")
    return [taskset, "-c", str(core), *argv] if taskset else list(argv)


@contextlib.contextmanager
def headgate(
    url: str, root: Path, core: int, config: Mapping[str, Any] = CONFIG, name: str = GATEWAY
) -> Iterator[Target]:
    """The gateway as `headgate gateway` runs it. `url`: of the inference service."""
    place = root / name
    (place / "config").mkdir(parents=True)
    (place / "config" / "gateway.yaml").write_text(json.dumps(config))
    port = free_port()
    env = private_env(
        place,
        {
            "GATEWAY_INFERENCE__URL": url, "GATEWAY_API_KEY": KEY, "GATEWAY_ADMIN_KEY": ADMIN_KEY,
            "INFERENCE_TOKEN": "token-of-a-benchmark",
        },
    )  # fmt: skip
    argv = [sys.executable, "-m", "gateway", "--config-dir", str(place / "config"), "--port", str(port)]
    headers = {"authorization": f"Bearer {KEY}"}
    with _running(Service(pinned(argv, core), env, place, port, name), "/readyz") as service:
        yield Target(name, port, service.pid, headers)


@contextlib.contextmanager
def pass_through(url: str, root: Path, core: int) -> Iterator[Target]:
    """The bare proxy."""
    port = free_port()
    place = root / PASS_THROUGH
    env = private_env(place, {"PYTHONPATH": str(REPOSITORY)})
    argv = [sys.executable, "-m", "benchmarks.passthrough", url, str(port)]
    with _running(Service(pinned(argv, core), env, place, port, PASS_THROUGH), "/livez") as service:
        yield Target(PASS_THROUGH, port, service.pid)


@contextlib.contextmanager
def litellm(peer: Peer, url: str, root: Path, core: int) -> Iterator[Target]:
    """LiteLLM's proxy with one worker, without logging, with its Rust core where that handles a request."""
    port = free_port()
    place = root / peer.name
    key = f"sk-{secrets.token_hex(32)}"
    env = private_env(
        place,
        {
            "LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": key,
            "LITELLM_RUST": "true",
        },
    )  # fmt: skip
    asked = {"api_base": f"{url}/v1", "api_key": KEY}
    names = (upstream.AT_ONCE, *upstream.CLOUD_MODELS)
    models = [{"model_name": name, "litellm_params": {"model": f"openai/{name}", **asked}} for name in names]
    config = {"model_list": models}
    (place / "config.yaml").write_text(json.dumps(config))
    options = ["--config", str(place / "config.yaml"), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    argv = [*peer.argv, *options, "--telemetry", "False"]
    with _running(Service(pinned(argv, core), env, place, port, peer.name), "/health/liveliness") as service:
        yield Target(peer.name, port, service.pid, {"authorization": f"Bearer {key}"})


@contextlib.contextmanager
def portkey(peer: Peer, url: str, root: Path, core: int) -> Iterator[Target]:
    """Portkey's gateway. Request headers name its upstream."""
    port = free_port()
    place = root / peer.name
    env = private_env(place, {"NODE_ENV": "production"})
    headers = {
        "authorization": f"Bearer {KEY}",
        "x-portkey-provider": "openai",
        "x-portkey-custom-host": f"{url}/v1",
    }
    argv = [*peer.argv, f"--port={port}", "--headless"]
    with _running(Service(pinned(argv, core), env, place, port, peer.name), "/") as service:
        yield Target(peer.name, port, service.pid, headers)


@contextlib.contextmanager
def _running(service: Service, answers: str) -> Iterator[Service]:
    try:
        yield service.start(wait_for=answers, seconds=START_SECONDS)
    finally:
        service.kill()


def _all(pid: int) -> list[int]:
    return [pid, *descendants_of(pid)] if pid else [os.getpid()]


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])


def _rss(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS:")), 0)
