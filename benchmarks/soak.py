"""A long run of the complete stack under load, which measures the growth of memory, descriptors, threads and tasks.

    python -m benchmarks.soak      MINUTES=20, HOURS=24; QUICK=1: four minutes

Two simulated GPUs have memory for some of five models; one model is pinned. Clients use the official SDK: streams that
are read or aborted, whole answers, and embeddings, in three priorities. Every half minute the clients pause, all models
but the pinned one are unloaded, and a sample is taken; further samples are taken under load. The first fifth is warm-
up. At the end one model is loaded, used and unloaded a hundred times.

For each process that runs from the warm-up to the end: the rise of its memory (RSS) in percent of the median, and the
growth of descriptors, threads and tasks at rest. Consecutive workers of a model are compared with each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import platform
import random
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import openai

from benchmarks import footprints
from benchmarks.figures import Bar, is_quick
from benchmarks.footprints import Footprint, Look
from headgate.shared.state_directory import GATEWAY_KEY, INFERENCE_TOKEN, StateDir
from inference.worker.cpu_cores import usable_cores
from tests.rigs import tiny_gguf
from tests.rigs.processes import Service, descendants_of, free_port, private_env

PINNED = "demo-mini"
CHATS = ("demo", PINNED, "tiny", "tiny-deep")
VECTORS = "vectors"
DEVICES = "sim:2x64MiB"
USERS = 4
PERIOD_SECONDS, LOOK_SECONDS = 30.0, 5.0
WARM_UP_SHARE = 0.2
CYCLES, CYCLED = 100, "tiny"
TIMEOUT_SECONDS = 60.0
GROWTH_PERCENT, CYCLES_MB = 5.0, 100.0
RAW = Path("benchmarks/results/soak.json")
_COMMON: dict[str, Any] = {"parallel": 4, "memory_overhead": "16MiB", "min_residency": "500ms", "context_length": 512}
_EVICTIONS = re.compile(r'^inference_evictions_total\{[^}]*reason="([^"]*)"[^}]*\} ([0-9.e+]+)$', re.MULTILINE)
_TEXTS = ("What is a mill?", "Tell me about water.", "How does a gate work?", "Name three rivers.")


@dataclass(slots=True)
class Results:
    """Raw samples: all processes over time, ends of requests, memory of the inference service around the cycles."""

    seconds: float
    looks: list[Look] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    evictions: dict[str, int] = field(default_factory=dict)
    """Evictions by reason; `by hand` are the unloads in the pauses."""
    cycles: int = 0
    before_cycles_bytes: int = 0
    after_cycles_bytes: int = 0


class Soak:
    """`headgate up` in its own directory, and the load."""

    def __init__(self, root: Path, results: Results) -> None:
        self._root, self._results = root, results
        self._ports = free_port(), free_port()
        config = root / "config"
        config.mkdir()
        (config / "models.yaml").write_text(json.dumps({"models": _models()}))
        routes = {name: {"chain": [f"local/{name}"], "load_wait": "50s"} for name in (*CHATS, VECTORS)}
        (config / "gateway.yaml").write_text(json.dumps({"routes": routes, "deadlines": {"first_token": "60s"}}))
        options = ("--port", self._ports[0], "--inference-port", self._ports[1], "--config-dir", config)
        argv = [sys.executable, "-m", "headgate", "up", *map(str, options)]
        env = private_env(root, {"INFERENCE_DEVICES": DEVICES, "PYTHONPATH": str(Path(__file__).resolve().parents[1])})
        self._up = Service(argv, env, root, self._ports[0], "up")
        self._state = StateDir(root / "state")
        self._began = time.monotonic()
        self._random = random.Random(5)

    async def __aenter__(self) -> Soak:
        self._up.start(wait_for="/readyz")
        self._http = httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, trust_env=False)
        self._began = time.monotonic()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()
        self._up.kill()

    @property
    def at(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self._began

    # --- load --------------------------------------------------------------------------------------------------------
    async def run(self) -> None:
        """Alternates load and rest until the time is over, then runs the cycles."""
        while self.at < self._results.seconds:
            end = min(self.at + PERIOD_SECONDS, self._results.seconds)
            async with self._client() as client, asyncio.TaskGroup() as users:
                for _ in range(USERS):
                    users.create_task(self._user(client, end))
                users.create_task(self._watch(end))
            await self._rest()
            tell(f"{self.at:.0f} of {self._results.seconds:.0f} s, {self._results.ends}")
        text = (await self._http.get(f"http://127.0.0.1:{self._ports[1]}/metrics")).text
        for reason, count in _EVICTIONS.findall(text):
            self._results.evictions[reason] = self._results.evictions.get(reason, 0) + int(float(count))
        await self._cycles()

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[openai.AsyncOpenAI]:
        key = self._state.read_secret(GATEWAY_KEY)
        url = f"http://127.0.0.1:{self._ports[0]}/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0, timeout=TIMEOUT_SECONDS) as client:
            yield client

    async def _user(self, client: openai.AsyncOpenAI, end: float) -> None:
        while self.at < end:
            try:
                how = await self._ask(client)
            except openai.OpenAIError as error:
                how = "failed"
                self._results.failures.append(f"{self.at:.0f} s: {error}"[:500])
            self._results.ends[how] = self._results.ends.get(how, 0) + 1
            await asyncio.sleep(self._random.uniform(0, 0.2))

    async def _ask(self, client: openai.AsyncOpenAI) -> str:
        chance = self._random.random()
        text = f"{self._random.choice(_TEXTS)} {self._random.randrange(10_000)}"
        if chance < 0.1:
            await client.embeddings.create(model=VECTORS, input=[text] * 3)
            return "embedded"
        asked: dict[str, Any] = {
            "model": self._random.choice(CHATS),
            "messages": [{"role": "user", "content": text}],
            "max_tokens": self._random.choice((4, 32, 128)),
            "extra_headers": {"x-headgate-priority": self._random.choice(("high", "normal", "low"))},
        }
        if chance < 0.3:
            await client.chat.completions.create(**asked)
            return "answered"
        leaves_after = self._random.randrange(1, 20) if chance < 0.5 else None
        stream = await client.chat.completions.create(**asked, stream=True)
        count = 0
        async with stream:
            async for _ in stream:
                count += 1
                if count == leaves_after:
                    return "left"
        return "streamed"

    async def _rest(self) -> None:
        """Waits for the last request, unloads all models but the pinned one, and takes a sample."""
        for name in (*CHATS, VECTORS):
            if name != PINNED:
                await self._inference("POST", f"/models/{name}/unload")
        async with asyncio.timeout(TIMEOUT_SECONDS):
            while await self._is_in_use():  # noqa: ASYNC110 - the state is in another process
                await asyncio.sleep(0.1)
        await self._look(at_rest=True)

    async def _is_in_use(self) -> bool:
        models = (await self._inference("GET", "/memory/models"))["models"]
        return any(
            model["ref_count"] or (model["state"] != "cold" and model["model_name"] != PINNED) for model in models
        )

    async def _cycles(self) -> None:
        own = next(one for one in self._processes() if one.kind == "inference")
        self._results.before_cycles_bytes = own.rss_bytes
        for _ in range(CYCLES):
            await self._inference("POST", f"/models/{CYCLED}/load")
            await self._inference("POST", "/v1/completions", {"model": CYCLED, "prompt": "the mill", "max_tokens": 4})
            await self._inference("POST", f"/models/{CYCLED}/unload")
            self._results.cycles += 1
        self._results.after_cycles_bytes = next(one for one in self._processes() if one.pid == own.pid).rss_bytes

    # --- samples -----------------------------------------------------------------------------------------------------
    async def _watch(self, end: float) -> None:
        while self.at + LOOK_SECONDS < end:
            await asyncio.sleep(LOOK_SECONDS)
            await self._look(at_rest=False)

    async def _look(self, *, at_rest: bool) -> None:
        dump = await self._inference("POST", "/memory/dump")
        health = await self._ask_json("GET", f"http://127.0.0.1:{self._ports[0]}/health", GATEWAY_KEY, None)
        tasks = {"inference": int(dump["python"]["tasks"]), "gateway": int(health["tasks"])}
        self._results.looks.append(Look(round(self.at, 2), at_rest, list(self._processes()), tasks))

    def _processes(self) -> Iterator[Footprint]:
        for pid in (self._up.pid, *descendants_of(self._up.pid)):
            if (found := footprints.footprint(pid)) is not None:
                yield found

    async def _inference(self, method: str, path: str, body: Any = None) -> Any:
        return await self._ask_json(method, f"http://127.0.0.1:{self._ports[1]}{path}", INFERENCE_TOKEN, body)

    async def _ask_json(self, method: str, url: str, secret: str, body: Any) -> Any:
        headers = {"authorization": f"Bearer {self._state.read_secret(secret)}"}
        answer = await self._http.request(method, url, json=body, headers=headers)
        answer.raise_for_status()
        return answer.json()


def _models() -> dict[str, Any]:
    paths = {
        "demo": "bundled:demo",
        PINNED: "bundled:demo-mini",
        "tiny": str(tiny_gguf.generative()),
        "tiny-deep": str(tiny_gguf.generative(seed=2, layers=4)),
        VECTORS: str(tiny_gguf.embedding()),
    }
    return {name: {"path": path, **_COMMON, "pinned": name == PINNED} for name, path in paths.items()}


def tables(results: Results) -> Iterator[str]:
    """The table."""
    rests = sum(look.at_rest for look in results.looks)
    yield f"{results.seconds / 60:.0f} minutes, {len(results.looks)} looks, {rests} of them at rest"
    yield f"requests: {results.ends}; evictions: {results.evictions}"
    yield from (f"  failed at {line}" for line in results.failures[:10])
    yield f"{'':<14}{'RSS MiB':>9}{'private':>9}{'rises %':>9}{'most %':>9}  descriptors and threads at rest"
    for line in footprints.lifelines(results.looks, WARM_UP_SHARE * results.seconds):
        rss, private = (values[len(values) // 2][1] / 2**20 for values in (sorted(line.rss), sorted(line.private)))
        rises, most = footprints.growth_percent(line.rss), footprints.spread_percent(line.rss)
        counts = f"{line.descriptors[0]} {line.descriptors[-1]}, {line.threads[0]} {line.threads[-1]}"
        yield f"{line.name:<14}{rss:>9.1f}{private:>9.1f}{rises:>9.2f}{most:>9.2f}  {counts}"


def bars(results: Results) -> list[Bar]:
    """The bars that this run allows."""
    since = WARM_UP_SHARE * results.seconds
    made = []
    for line in footprints.lifelines(results.looks, since):
        made.append(Bar(f"rss_rises_{line.name}", footprints.growth_percent(line.rss), "percent", "<=", GROWTH_PERCENT))
        for what, counts in ("descriptors", line.descriptors), ("threads", line.threads):
            made.append(Bar(f"{what}_grew_{line.name}", footprints.growth_count(counts), "number", "<=", 0))
    for service in ("inference", "gateway"):
        tasks = [look.tasks[service] for look in results.looks if look.at_rest and look.at >= since]
        made.append(Bar(f"tasks_grew_{service}", footprints.growth_count(tasks), "number", "<=", 0))
    for kind in ("worker", "rpc-server"):
        lives = footprints.generations(results.looks, since, kind)
        rises = footprints.growth_percent(lives)
        made.append(Bar(f"rss_rises_from_{kind}_to_{kind}", rises, "percent", "<=", GROWTH_PERCENT))
    grown = (results.after_cycles_bytes - results.before_cycles_bytes) / 1e6
    made.append(Bar(f"authority_grew_in_{results.cycles}_cycles", grown, "MB", "<", CYCLES_MB))
    wanted = results.evictions.get("memory wanted", 0)
    made.append(Bar("evictions_for_memory", wanted, "number", ">=", results.seconds / 60))
    made.append(Bar("failed_requests", results.ends.get("failed", 0), "number", "<=", 0))
    return made


def tell(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)


async def measure(seconds: float) -> Results:
    """Runs the load and returns the samples."""
    results = Results(seconds)
    with tempfile.TemporaryDirectory(prefix="hgs") as root:
        async with Soak(Path(root), results) as soak:
            await soak.run()
    return results


def main() -> int:
    """Runs the benchmark, prints a table and bars, and writes the samples."""
    minutes = 4.0 if is_quick(os.environ) else float(os.environ.get("MINUTES") or 20)
    hours = os.environ.get("HOURS")
    results = asyncio.run(measure(60 * (60 * float(hours) if hours else minutes)))
    RAW.parent.mkdir(parents=True, exist_ok=True)
    machine = {"machine": platform.platform(), "cores": usable_cores(), "at": time.time()}
    RAW.write_text(json.dumps({**machine, **asdict(results)}))
    print(*tables(results), sep="\n")
    print()
    print(*(bar.line() for bar in bars(results)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
