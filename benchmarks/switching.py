"""How long a model takes to answer again: from its file, from the warm pool, and with what it had computed kept.

    python -m benchmarks.switching      MODELS=135m,1b PLACES=cpu,sim,sim-resident ROUNDS=5; QUICK=1: 135m, three rounds

Places are the CPU, a simulated device whose models are kept by a checkpoint of their process (the default there), and
one whose models are kept by their file (the default on real GPUs). All times are from a request to its first token,
taken by one client of the inference service. Cold is a request for a model that is not loaded and whose file is in no
page cache (it is dropped with posix_fadvise and mincore says so); its process is gone before, the device shows nothing
of it, and another process takes it up. Cached is the same with the file in the page cache, which Headgate does not
call warm. Warm is a request for a model that was offloaded, device bytes read meanwhile from the device itself. Kept is
a conversation of 2,000 tokens that goes on after its model was offloaded, restore included, beside the time that
computing it takes with the model ready. On the CPU llama-server is stopped and started for each request instead.
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

from benchmarks.figures import Bar, Middle
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
PLACES = {"cpu": ("cpu", "off"), "sim": (SIM, "simulated"), "sim-resident": (SIM, "off")}
"""INFERENCE_DEVICES and INFERENCE_WARM_CHECKPOINT."""
MECHANISMS = {"cpu": "standby", "sim": "checkpoint", "sim-resident": "resident"}
WAIT_SECONDS = 600.0
GONE_SECONDS = 10.0
RAW = Path("benchmarks/results/switching.json")
WARM_RATIO, KEPT_RATIO = 0.35, 0.25


@dataclass(slots=True)
class Samples:
    """Seconds to the first token, one of each per round; `device_bytes` are what the device held while it was warm."""

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


class Bench:
    """One model in one place, behind an inference service of its own."""

    def __init__(self, root: Path, model: Path, place: str) -> None:
        models = {
            MODEL_ID: {"path": str(model), "context_length": CONTEXT, "parallel": 1, "idle_timeout": "never"},
        }
        devices, checkpoint = PLACES[place]
        environment = {"INFERENCE_DEVICES": devices, "INFERENCE_WARM_CHECKPOINT": checkpoint}
        self._stack = Stack(root, models=json.dumps({"models": models}), inference_env=environment)
        self._place = place
        self._words = one_token_words(model)
        self._chance = random.Random(7)

    def __enter__(self) -> Bench:
        self._stack.inference.start(wait_for="/readyz")
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.kill()

    def prompt(self, tokens: int) -> str:
        """Words of one token each that no prompt before began with."""
        return " " + " ".join(self._chance.choices(self._words, k=tokens))

    def ask(self, prompt: str) -> float:
        """Seconds to the first token."""
        body = {"model": MODEL_ID, "prompt": prompt, "max_tokens": 1, "temperature": 0}
        began = time.monotonic()
        self._post("/v1/completions", body)
        return time.monotonic() - began

    def load(self) -> None:
        """Ready, and warmed up with one request."""
        self._post(f"/models/{MODEL_ID}/load", {})
        self.ask(self.prompt(8))

    def unload(self) -> None:
        """Cold: its process is gone, and nothing of it is on the device or suspended."""
        pid = self.pid
        said = self._post(f"/models/{MODEL_ID}/unload", {})
        if said["headgate"]["state"] != "cold" or Path(f"/proc/{pid}").exists():
            raise SystemExit(f"the model is {said['headgate']['state']}, and its process {pid} may be there")
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
        """What the simulated device says is in use, and suspended."""
        if self._place == "cpu":
            return 0, 0
        with Control(socket_directory(self._stack.state) / SOCKET_NAME) as rig:
            status = rig.tell("status")["gpu-0"]
            return int(status["used_bytes"]), int(status["suspended_bytes"])

    def offload(self) -> int:
        """Warm; returns what its device still holds then."""
        said = self._post(f"/models/{MODEL_ID}/offload", {})
        if said["headgate"]["state"] != "warm":
            raise SystemExit(f"the model is {said['headgate']['state']} and not warm")
        (kept,) = self._stack.ask("/memory/offloaded", direct=True)["offloaded"]
        if kept["mechanism"] != MECHANISMS[self._place]:
            raise SystemExit(f"the model is kept by {kept['mechanism']}, not {MECHANISMS[self._place]}")
        return self.device_bytes()[0]

    def _post(self, path: str, body: Any) -> dict[str, Any]:
        return dict(self._stack.ask(path, body, direct=True, seconds=WAIT_SECONDS))


def drop_from_cache(path: Path) -> None:
    """Takes a file out of the page cache; raises SystemExit where that does not succeed."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
    if pages := cached_pages(path):
        raise SystemExit(f"{pages} pages of {path} stay in the page cache; nothing cold can be measured here")


def read_into_cache(path: Path) -> None:
    """Puts a file into the page cache."""
    with path.open("rb") as file:
        while file.read(2**24):
            pass


def cached_pages(path: Path) -> int:
    """How many pages of a file are in memory (mincore)."""
    libc = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=3) as memory:
        count = -(-len(memory) // mmap.PAGESIZE)
        said = (ctypes.c_ubyte * count)()
        view = ctypes.c_char.from_buffer(memory)
        if libc.mincore(ctypes.c_void_p(ctypes.addressof(view)), ctypes.c_size_t(len(memory)), said):
            raise OSError(ctypes.get_errno(), "mincore")
        del view
        return sum(byte & 1 for byte in said)


def measure(found: Samples, model: Path, rounds: int) -> None:
    """All figures of one model in one place."""
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
                except OSError:  # it does not listen yet, or says that it is loading
                    if process.poll() is not None:
                        raise SystemExit(f"llama-server ended with status {process.returncode}") from None
                    time.sleep(0.01)
        finally:
            process.kill()
            process.wait()


def tables(results: Sequence[Samples]) -> Iterator[str]:
    """For people: medians over rounds with the least and the largest, in seconds."""
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
        yield f"  device bytes while warm: {max(found.device_bytes)}"


def bars(results: Sequence[Samples]) -> list[Bar]:
    """Every promise that these samples can judge; ratios of medians of paired rounds."""
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
    """Progress, to stderr."""
    print(line, file=sys.stderr, flush=True)


def main() -> int:
    """Measures, prints tables and bars, keeps the samples in a file."""
    quick = bool(os.environ.get("QUICK"))
    names = os.environ.get("MODELS", "135m" if quick else "135m,1b").split(",")
    places = os.environ.get("PLACES", ",".join(PLACES)).split(",")
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
