"""Starts the measured systems, all with the same model, threads, batch sizes and KV cells."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import Order
from benchmarks.peers import Peers
from benchmarks.samples import CHAIN, LLAMA_CPP_SERVER, LLAMA_SERVER, WORKER
from inference import worker_link
from inference.worker.cpu_cores import usable_cores
from tests.rigs.processes import Service, descendants_of, free_port, private_env
from tests.rigs.worker_rig import CPU, WorkerRig

MODEL_ID = "bench"
KEY = "key-of-a-benchmark"
BATCH, UBATCH = 2048, 512
START_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of all systems. `context`: tokens of each of `parallel` sequences."""

    model: Path
    parallel: int = 32
    context: int = 512
    threads: int = field(default_factory=usable_cores)

    @property
    def cells(self) -> int:
        """Total number of KV cells."""
        return self.context * self.parallel


@dataclass(frozen=True, slots=True)
class System:
    """A system that serves /v1/completions. `pid`: its topmost process."""

    name: str
    address: tuple[Any, ...]
    pid: int
    headers: Mapping[str, str] = field(default_factory=dict)

    def order(self, bodies: Sequence[Mapping[str, Any]]) -> Order:
        """A burst of completions."""
        named = [{"model": MODEL_ID, **body} for body in bodies]
        return Order(self.address, "/v1/completions", self.headers, named)

    def cpu_seconds(self) -> float:
        """CPU seconds of its processes so far."""
        ticks = sum(_ticks(pid) for pid in (self.pid, *descendants_of(self.pid)))
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def worker(setting: Setting, root: Path) -> Iterator[tuple[System, worker_link.Ready]]:
    """A worker alone on its Unix socket, started as by the authority."""
    grant = worker_link.Grant(
        model_id=MODEL_ID,
        path=str(setting.model),
        devices=(CPU,),
        gpu_layers=0,
        context_length=setting.context,
        parallel=setting.parallel,
        batch=BATCH,
        ubatch=UBATCH,
        threads=setting.threads,
    )
    with WorkerRig(_made(root / WORKER), grant) as rig:
        ready = rig.expect(worker_link.Ready, START_SECONDS)
        yield System(WORKER, ("unix", rig.socket_path), rig.process.pid), ready


@contextlib.contextmanager
def chain(setting: Setting, root: Path) -> Iterator[System]:
    """Gateway, inference service and worker, started as by `headgate up`. The client uses the gateway."""
    root = _made(root / CHAIN)
    config = _made(root / "config")
    model = {
        "path": str(setting.model),
        "context_length": setting.context,
        "parallel": setting.parallel,
        "threads": setting.threads,
        "gpu_layers": 0,
        "batch": BATCH,
        "ubatch": UBATCH,
        "idle_timeout": "never",
    }
    (config / "models.yaml").write_text(json.dumps({"models": {MODEL_ID: model}}))
    (config / "gateway.yaml").write_text(json.dumps({"routes": {"*": {"chain": ["local/*"]}}}))
    port, behind = free_port(), free_port()
    env = private_env(root, {"GATEWAY_API_KEY": KEY})
    ports = ["--port", str(port), "--inference-port", str(behind)]
    argv = [sys.executable, "-m", "headgate", "up", "--config-dir", str(config), *ports]
    with _running(Service(argv, env, root, port, CHAIN), "/readyz") as service:
        headers = {"Authorization": f"Bearer {KEY}"}
        _ask_once(service.url, headers)
        yield System(CHAIN, ("tcp", "127.0.0.1", port), service.pid, headers)


@contextlib.contextmanager
def llama_server(setting: Setting, root: Path, peers: Peers, *options: str) -> Iterator[System]:
    """llama.cpp's server. `options` follow the default ones."""
    port = free_port()
    argv = [
        *(str(peers.llama_server), "--model", str(setting.model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(setting.threads), "--threads-batch", str(setting.threads)),
        *("--parallel", str(setting.parallel), "--ctx-size", str(setting.cells), "--gpu-layers", "0"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(UBATCH), "--flash-attn", "on"),
        *options,
    ]
    root = _made(root / LLAMA_SERVER)
    with _running(Service(argv, private_env(root), root, port, LLAMA_SERVER), "/health") as service:
        _ask_once(service.url, {})
        yield System(LLAMA_SERVER, ("tcp", "127.0.0.1", port), service.pid)


@contextlib.contextmanager
def llama_cpp_server(setting: Setting, root: Path, peers: Peers) -> Iterator[System]:
    """The server of llama-cpp-python. It serves one request at a time. By default a new request would interrupt the
    running one; this is switched off.
    """
    port = free_port()
    argv = [
        *(str(peers.python), "-m", "llama_cpp.server", "--model", str(setting.model), "--model_alias", MODEL_ID),
        *("--host", "127.0.0.1", "--port", str(port), "--interrupt_requests", "false", "--n_gpu_layers", "0"),
        *("--n_threads", str(setting.threads), "--n_threads_batch", str(setting.threads)),
        *("--n_ctx", str(setting.context), "--n_batch", str(BATCH), "--n_ubatch", str(UBATCH), "--flash_attn", "true"),
    ]
    root = _made(root / LLAMA_CPP_SERVER)
    with _running(Service(argv, private_env(root), root, port, LLAMA_CPP_SERVER), "/v1/models") as service:
        _ask_once(service.url, {})
        yield System(LLAMA_CPP_SERVER, ("tcp", "127.0.0.1", port), service.pid)


def batched_bench(
    setting: Setting, peers: Peers, prompt_tokens: int, answer_tokens: int, streams: Sequence[int]
) -> dict[int, tuple[float, float]]:
    """llama-batched-bench's prefill and decode rates, tokens per second of all sequences together, per stream count."""
    argv = [
        *(str(peers.batched_bench), "--model", str(setting.model), "--ctx-size", str(setting.cells)),
        *("--threads", str(setting.threads), "--threads-batch", str(setting.threads), "--gpu-layers", "0"),
        *("--batch-size", str(BATCH), "--ubatch-size", str(UBATCH), "--flash-attn", "on"),
        *("-npp", str(prompt_tokens), "-ntg", str(answer_tokens), "-npl", ",".join(map(str, streams))),
        *("--output-format", "jsonl"),
    ]
    output = subprocess.run(argv, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True).stdout
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {row["pl"]: (row["speed_pp"], row["speed_tg"]) for row in rows}


def pss_bytes(pid: int) -> int:
    """Proportional set size of a process (Linux)."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no Pss of {pid}")


@contextlib.contextmanager
def _running(service: Service, answers: str) -> Iterator[Service]:
    try:
        yield service.start(wait_for=answers, seconds=START_SECONDS)
    finally:
        service.kill()


def _ask_once(url: str, headers: Mapping[str, str]) -> None:
    """Sends a first request, so that lazy initialization is done."""
    body = {"model": MODEL_ID, "prompt": "hello", "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        url + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json", **headers}
    )
    with urllib.request.urlopen(request, timeout=START_SECONDS) as answer:
        answer.read()


def _made(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    return path


def _ticks(pid: int) -> int:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return int(fields[11]) + int(fields[12])
