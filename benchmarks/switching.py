"""Measures the time to the first token of a model that was not loaded: cold, cached, warm, and with a kept
conversation.

    python -m benchmarks.switching      MODELS=135m,1b PLACES=cpu,sim,sim-resident ROUNDS=5; QUICK=1: 135m, three rounds

Places: the CPU; a simulated device with warm models as checkpoints of their process (the default there); one with warm
models as files in memory (the default on real GPUs); and a real GPU with both (gpu, gpu-checkpoint). All times are from
a request to its first token, measured by one client of the inference service.

Cold: the model is not loaded and its file is not in the page cache (posix_fadvise, checked with mincore). Its earlier
process has ended and the device shows no use. Cached: the same with the file in the page cache. Warm: the model was
offloaded; the use of the device is read meanwhile. Kept: a conversation of 2,000 tokens continues after its model was
offloaded, including the restore, beside the time of its prefill with a loaded model. The peer on the CPU is a
llama-server that is stopped and started for each request.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.figures import Bar, Middle, is_quick
from benchmarks.models import SHAPES, one_token_words, path_of
from benchmarks.peers import ensure
from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.worker.cpu_cores import usable_cores
from inference.workers.os_api import socket_directory
from tests.rigs.processes import free_port, private_env
from tests.rigs.stack import Stack

MODEL_ID = "bench"
CONVERSATION_TOKENS = 2000
CONTEXT = 2560
SIM = "sim:1x4GiB"
PLACES = {
    "cpu": ("cpu", "off"),
    "sim": (SIM, "simulated"),
    "sim-resident": (SIM, "off"),
    "gpu": ("auto", "off"),
    "gpu-checkpoint": ("auto", "auto"),
}
"""Values of INFERENCE_DEVICES and INFERENCE_WARM_CHECKPOINT."""
MECHANISMS = {
    "cpu": "standby",
    "sim": "checkpoint",
    "sim-resident": "resident",
    "gpu": "resident",
    "gpu-checkpoint": "checkpoint",
}
WAIT_SECONDS = 600.0
GONE_SECONDS = 10.0
RAW = Path("benchmarks/results/switching.json")
WARM_RATIO, KEPT_RATIO = 0.35, 0.25


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, one of each per round. `device_bytes`: use of the device by the warm model.

    `locked_bytes` of its copy cannot be written to swap.
    """

    model: str
    place: str
    cold: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    server_cold: list[float] = field(default_factory=list)
    server_cached: list[float] = field(default_factory=list)
    device_bytes: list[int] = field(default_factory=list)
    locked_bytes: int = 0


class Bench:
    """One model in one place with its own inference service."""

    def __init__(self, root: Path, model: Path, place: str) -> None:
        models = {
            MODEL_ID: {"path": str(model), "context_length": CONTEXT, "parallel": 1, "idle_timeout": "never"},
        }
        devices, checkpoint = PLACES[place]
        environment = {"INFERENCE_DEVICES": devices, "INFERENCE_WARM_CHECKPOINT": checkpoint}
        self._stack = Stack(root, models=json.dumps({"models": models}), inference_env=environment)
        self._place = place
        self._before_bytes = 0
        self.locked_bytes = 0
        self._words = one_token_words(model)
        self._chance = random.Random(7)

    def __enter__(self) -> Bench:
        self._stack.inference.start(wait_for="/readyz")
        if self._place.startswith("gpu"):
            self._before_bytes = self._observed_bytes()
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.kill()

    def prompt(self, tokens: int) -> str:
        """Words of one token each, with a new beginning."""
        return " " + " ".join(self._chance.choices(self._words, k=tokens))

    def ask(self, prompt: str) -> float:
        """Seconds to the first token."""
        body = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.monotonic()
        self._post("/v1/completions", body)
        return time.monotonic() - began

    def load(self) -> None:
        """Loads the model and sends one warm-up request."""
        self._post(f"/models/{MODEL_ID}/load", {})
        self.ask(self.prompt(8))

    def unload(self) -> None:
        """Unloads the model. Checks that its process has ended and the device shows no use of it."""
        pid = self.pid
        status = self._post(f"/models/{MODEL_ID}/unload", {})
        if status["headgate"]["state"] != "cold" or Path(f"/proc/{pid}").exists():
            raise SystemExit(f"the model is {status['headgate']['state']}, and its process {pid} may be there")
        deadline = time.monotonic() + GONE_SECONDS
        while any(self.device_bytes()):
            if time.monotonic() > deadline:
                raise SystemExit("the device still holds something of an unloaded model")
            time.sleep(0.01)

    @property
    def pid(self) -> int:
        """The model's process."""
        return self._stack.worker_pid(MODEL_ID)

    def device_bytes(self) -> tuple[int, int]:
        """Used and suspended bytes of the device; of a real one, the driver's figure beyond that at the start."""
        if self._place == "cpu":
            return 0, 0
        if self._place.startswith("gpu"):
            return max(0, self._observed_bytes() - self._before_bytes), 0
        with Control(socket_directory(self._stack.state) / SOCKET_NAME) as rig:
            status = rig.send("status")["gpu-0"]
            return int(status["used_bytes"]), int(status["suspended_bytes"])

    def _observed_bytes(self) -> int:
        devices = self._stack.ask("/memory/fragmentation", direct=True)["devices"]
        return int(sum(one["observed_mb"] for id, one in devices.items() if id != "cpu") * 2**20)

    def offload(self) -> int:
        """Offloads the model. Returns the bytes that its device still holds."""
        status = self._post(f"/models/{MODEL_ID}/offload", {})
        if status["headgate"]["state"] != "warm":
            raise SystemExit(f"the model is {status['headgate']['state']} and not warm")
        (kept,) = self._stack.ask("/memory/offloaded", direct=True)["offloaded"]
        if kept["mechanism"] != MECHANISMS[self._place]:
            raise SystemExit(f"the model is kept by {kept['mechanism']}, not {MECHANISMS[self._place]}")
        self.locked_bytes = kept["locked_bytes"]
        return self.device_bytes()[0]

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        return dict(self._stack.ask(path, body, direct=True, seconds=WAIT_SECONDS))


def drop_from_cache(path: Path) -> None:
    """Removes a file from the page cache. Raises SystemExit on failure."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    if pages := cached_pages(path):
        raise SystemExit(f"{pages} pages of {path} stay in the page cache; nothing cold can be measured here")


def read_into_cache(path: Path) -> None:
    """Reads a file into the page cache."""
    with path.open("rb") as file:
        while file.read(2**24):
            pass


def cached_pages(path: Path) -> int:
    """Number of pages of a file in memory (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as memory:
        count = -(-len(memory) // mmap.PAGESIZE)
        pages = (ctypes.c_ubyte * count)()
        view = ctypes.c_char.from_buffer(memory)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory)), pages):
            raise OSError(ctypes.get_errno(), "mincore")
        del view
        return sum(byte & 1 for byte in pages)


def measure(found: Samples, model: Path, rounds: int) -> None:
    """Measures one model in one place."""
    with tempfile.TemporaryDirectory(prefix="hgb") as root, Bench(Path(root), model, found.place) as bench:
        bench.load()
        for number in range(rounds):
            tell(f"{found.model} {found.place} round {number + 1} of {rounds}")
            before = bench.pid
            bench.unload()
            drop_from_cache(model)
            found.cold.append(bench.ask(bench.prompt(8)))
            if bench.pid == before:
                raise SystemExit("a model that should have been cold is in the process that it had")
            bench.unload()
            read_into_cache(model)
            found.cached.append(bench.ask(bench.prompt(8)))
            found.device_bytes.append(bench.offload())
            found.warm.append(bench.ask(bench.prompt(8)))
            conversation = bench.prompt(CONVERSATION_TOKENS)
            found.prefill.append(bench.ask(conversation))
            found.device_bytes.append(bench.offload())
            found.kept.append(bench.ask(conversation + bench.prompt(8)))
            found.locked_bytes = bench.locked_bytes


def measure_server(found: Samples, model: Path, rounds: int) -> None:
    """llama-server, stopped and started."""
    server = ensure().llama_server
    for number in range(rounds):
        tell(f"{found.model} llama-server round {number + 1} of {rounds}")
        drop_from_cache(model)
        found.server_cold.append(start_server(server, model))
        read_into_cache(model)
        found.server_cached.append(start_server(server, model))


def start_server(server: Path, model: Path) -> float:
    """Seconds from the start of a llama-server to its first token."""
    port, threads = free_port(), str(usable_cores())
    argv = [
        *(str(server), "--model", str(model), "--host", "127.0.0.1", "--port", str(port), "--parallel", "1"),
        *("--threads", threads, "--threads-batch", threads, "--ctx-size", str(CONTEXT), "--gpu-layers", "0"),
        *("--flash-attn", "on"),
    ]
    with tempfile.TemporaryDirectory() as root:
        began = time.monotonic()
        process = subprocess.Popen(
            argv, env=private_env(Path(root)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            body = json.dumps({"prompt": " hello", "max_tokens": 1, "temperature": 0}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
            )
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
                        answer.read()
                    return time.monotonic() - began
                except OSError:  # it does not listen yet, or is loading
                    if process.poll() is not None:
                        raise SystemExit(f"llama-server ended with status {process.returncode}") from None
                    time.sleep(0.01)
        finally:
            process.kill()
            process.wait()


def tables(results: Sequence[Samples]) -> Iterator[str]:
    """Tables of medians over rounds in seconds, with the smallest and the largest value."""
    for found in results:
        yield ""
        rounds = f"{len(found.cold)} rounds, seconds to the first token: median [least .. most]"
        yield f"{found.model} on {found.place}, {rounds}"
        for name, values in (
            ("cold, file evicted", found.cold),
            ("cold, file in page cache", found.cached),
            ("warm", found.warm),
            (f"{CONVERSATION_TOKENS} tokens computed", found.prefill),
            (f"{CONVERSATION_TOKENS} tokens kept, restored", found.kept),
            ("llama-server, file evicted", found.server_cold),
            ("llama-server, file in page cache", found.server_cached),
        ):
            if values:
                yield f"  {name:<34}{Middle.of(values).text(3):>28}"
        yield f"  while warm: {max(found.device_bytes)} bytes of the device, {found.locked_bytes} bytes locked in RAM"


def bars(results: Sequence[Samples]) -> list[Bar]:
    """The bars that these samples allow, from ratios of paired rounds."""
    made = []
    for found in results:
        where = f"{found.model}_{found.place}"
        made.append(Bar(f"warm_vs_cold_{where}", _ratio(found.warm, found.cold), "ratio", "<=", WARM_RATIO))
        made.append(Bar(f"kept_vs_prefill_{where}", _ratio(found.kept, found.prefill), "ratio", "<=", KEPT_RATIO))
        if found.server_cold:
            made.append(Bar(f"warm_vs_llama_server_{where}", _ratio(found.warm, found.server_cold), "ratio", "<", 1.0))
        if found.place != "cpu":
            made.append(Bar(f"device_bytes_warm_{where}", max(found.device_bytes), "bytes", "<=", 0))
    return made


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return median(our / their for our, their in zip(ours, theirs, strict=True))


def tell(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Runs the benchmark, prints tables and bars, and writes the samples."""
    quick = is_quick(os.environ)
    names = os.environ.get("MODELS", "135m" if quick else "135m,1b").split(",")
    places = os.environ.get("PLACES", "cpu,sim,sim-resident").split(",")
    rounds = int(os.environ.get("ROUNDS", "3" if quick else "5"))
    results = []
    for name in names:
        model = path_of(SHAPES[name])
        for place in places:
            found = Samples(name, place)
            measure(found, model, rounds)
            if place == "cpu":
                measure_server(found, model, rounds)
            results.append(found)
    RAW.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.platform(), "cores": usable_cores(), "at": time.time()}
    RAW.write_text(json.dumps({**machine, "samples": [asdict(found) for found in results]}, indent=1))
    print(*tables(results), sep="\n")
    print()
    print(*(bar.line() for bar in bars(results)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
