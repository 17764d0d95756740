"""`make bench-gateway`: the cost of the gateway, beside a bare proxy, LiteLLM's proxy and Portkey's gateway.

Upstream and load generator share one core in this process; the measured system has the other core. Every round measures
all systems in random order; ratios and differences are taken within a round. The last lines are one BAR per target. Raw
samples go to benchmarks/results/gateway.json.

Environment: QUICK=1 (at most five minutes), ROUNDS, PARTS (alone,crowds,clouds,paced,nodes,failover,memory,departures),
HEADGATE_PEERS_DIR.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import uvloop

from benchmarks import asking, departures, failover, gateway_peers, gateway_report, gateways, upstream
from benchmarks.figures import is_quick
from benchmarks.gateway_samples import (
    CLOUD_STREAM,
    CLOUD_STREAMS,
    CLOUD_WHOLE,
    STREAMED,
    WHOLE,
    Alone,
    Crowd,
    Paced,
    Results,
)
from benchmarks.gateways import DIRECT, GATEWAY, PASS_THROUGH, Target
from benchmarks.upstream import Upstream
from headgate.cli.bench import percentile

RESULTS = Path(__file__).parent / "results" / "gateway.json"
PARTS = ("alone", "crowds", "clouds", "paced", "nodes", "failover", "memory", "departures")
ALONE_PER_SECOND = 250.0
CLOUD_PER_SECOND = 100.0
"""Less than ALONE_PER_SECOND, because a stream of 100 chunks takes longer."""
CONNECTIONS, STREAMS = 32, 256
NODES = (4, 32)
REST_SECONDS = 0.2
"""Pause before every sample, so that the sample before has no effect."""
WARM_UP_REQUESTS = 200
STREAMS_APART_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run. `alone` and `crowd`: seconds per sample. `tokens`: tokens of a paced stream."""

    rounds: int = 7
    alone: float = 4.0
    crowd: float = 3.0
    tokens: int = 250
    requests: int = 100_000
    failures: int = 40
    departures: int = 100


QUICK = Plan(rounds=3, alone=2.0, crowd=2.0, tokens=150, requests=20_000, failures=15, departures=20)


class Bench:
    """The upstream in this process and the measured systems."""

    def __init__(self, plan: Plan, service: Upstream, found: Results) -> None:
        self.plan = plan
        self.found = found
        self.direct = Target(DIRECT, service.port)
        self.targets: dict[str, Target] = {}
        self.fleets: list[Target] = []
        """Gateways with several nodes."""
        self._random = random.Random(20261122)

    def shuffled(self, targets: list[Target]) -> list[Target]:
        """A random order."""
        return self._random.sample(targets, len(targets))

    async def alone(self) -> None:
        """One connection at a fixed rate, whole answers and streams. The bare proxy shows what the machine allows."""
        for number in range(self.plan.rounds):
            say(f"one connection: round {number + 1} of {self.plan.rounds}")
            for kind in (WHOLE, STREAMED):
                await self._at_rate(kind, number)

    async def crowds(self) -> None:
        """The throughput of many connections."""
        for number in range(self.plan.rounds):
            say(f"{CONNECTIONS} connections: round {number + 1} of {self.plan.rounds}")
            for kind in (WHOLE, STREAMED):
                targets = [
                    target for target in self.targets.values() if kind == WHOLE or target.name != gateway_peers.PORTKEY
                ]
                for target in self.shuffled(targets):
                    await self._settle(target, kind, CONNECTIONS)
                    self.found.crowds.append(await self._crowd(target, kind, number))
        self.found.memory = {name: target.rss_bytes() for name, target in self.targets.items()}

    async def clouds(self) -> None:
        """Models of a cloud, with a chunk for each token: one connection, and the throughput of many."""
        kinds = dict(zip(CLOUD_STREAMS, upstream.CLOUD_MODELS, strict=True)) | {CLOUD_WHOLE: upstream.CLOUD_SHORT}
        for number in range(self.plan.rounds):
            say(f"clouds: round {number + 1} of {self.plan.rounds}")
            await self._at_rate(CLOUD_WHOLE, number, upstream.CLOUD_SHORT)
            await self._at_rate(CLOUD_STREAM, number, upstream.CLOUD_BEGUN, CLOUD_PER_SECOND)
            for kind, model in kinds.items():
                missing = {gateway_peers.PORTKEY} if kind != CLOUD_WHOLE else set()
                if model == upstream.CLOUD_LONG:
                    missing.add(gateway_peers.LITELLM)  # it would take minutes: half a second of CPU time per answer
                targets = [target for target in self.targets.values() if target.name not in missing]
                for target in self.shuffled(targets):
                    await self._settle(target, kind, CONNECTIONS, model)
                    self.found.crowds.append(await self._crowd(target, kind, number, model))

    async def _at_rate(
        self, kind: str, number: int, model: str = upstream.AT_ONCE, per_second: float = ALONE_PER_SECOND
    ) -> None:
        for target in self.shuffled([self.direct, self.targets[GATEWAY], self.targets[PASS_THROUGH]]):
            await self._settle(target, kind, 1, model)
            spans = await asking.at_rate(target.port, chat(target, kind, model), per_second, self.plan.alone)
            self.found.alone.append(Alone(target.name, kind, number, spans.first, spans.whole))

    async def _crowd(self, target: Target, kind: str, number: int, model: str = upstream.AT_ONCE) -> Crowd:
        used, own = target.cpu_seconds(), time.process_time()
        rush = await asking.as_they_come(target.port, chat(target, kind, model), CONNECTIONS, self.plan.crowd)
        used, own = target.cpu_seconds() - used, time.process_time() - own
        p50, p99 = (percentile(rush.whole, share) for share in (0.5, 0.99))
        shares = (used / rush.seconds, own / rush.seconds)
        return Crowd(target.name, kind, number, CONNECTIONS, len(rush.whole), rush.seconds, p50, p99, *shares)

    async def nodes(self) -> None:
        """The throughput with one service and with several nodes, and many slow streams."""
        targets = [replace(self.targets[GATEWAY], name="1 service"), *self.fleets]
        for number in range(self.plan.rounds):
            say(f"nodes: round {number + 1} of {self.plan.rounds}")
            for kind in (WHOLE, STREAMED):
                for target in self.shuffled(targets):
                    await self._settle(target, kind, CONNECTIONS)
                    self.found.crowds.append(await self._crowd(target, kind, number))
        await self._streams(targets)

    async def paced(self) -> None:
        """Many slow streams at once."""
        await self._streams([self.direct, self.targets[GATEWAY]])

    async def _streams(self, targets: list[Target]) -> None:
        for number in range(self.plan.rounds):
            say(f"{STREAMS} streams: round {number + 1} of {self.plan.rounds}")
            for target in self.shuffled(targets):
                await asyncio.sleep(REST_SECONDS)
                used, begun = target.cpu_seconds(), time.perf_counter()
                sent = chat(target, STREAMED, upstream.PACED)
                pieces = await asking.streams(target.port, sent, STREAMS, STREAMS_APART_SECONDS)
                share = (target.cpu_seconds() - used) / (time.perf_counter() - begun)
                self.found.paced.append(_paced(target.name, number, self.plan.tokens, pieces, share))

    async def memory(self) -> None:
        """The memory after many requests, whole answers and streams in turn."""
        target, tenth = self.targets[GATEWAY], self.plan.requests // 10
        for number in range(11):  # the first tenth fills records, caches and the allocator's arenas
            say(f"memory: {number * tenth:,} of {self.plan.requests:,} requests")
            await asking.as_they_come(
                target.port, chat(target, WHOLE), CONNECTIONS, 600.0, most=tenth, others=chat(target, STREAMED)
            )
            self.found.held.after.append((number * tenth, target.rss_bytes()))

    async def _settle(self, target: Target, kind: str, connections: int, model: str = upstream.AT_ONCE) -> None:
        await asyncio.sleep(REST_SECONDS)
        most = WARM_UP_REQUESTS if target.name != gateway_peers.LITELLM else connections
        await asking.as_they_come(target.port, chat(target, kind, model), connections, 0.5, most=most)
        gc.collect()


def _paced(name: str, number: int, tokens: int, pieces: list[list[float]], share: float) -> Paced:
    gaps = [[after - before for before, after in itertools.pairwise(one)] for one in pieces]
    every = [gap for one in gaps for gap in one]
    longest = [max(one) for one in gaps]
    p50, p99 = percentile(every, 0.5), percentile(every, 0.99)
    return Paced(name, number, len(pieces), tokens, p50, p99, longest, share)


def chat(target: Target, kind: str, model: str = upstream.AT_ONCE) -> bytes:
    """The same request for all systems."""
    body: dict[str, Any] = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You answer in one sentence."},
            {"role": "user", "content": "What does a headgate do for the mill behind it?"},
        ],
        "max_tokens": 64,
        "temperature": 0.7,
    }
    if kind in (STREAMED, *CLOUD_STREAMS):
        body["stream"] = True
    return asking.request(target.port, body, target.headers)


async def run(plan: Plan, parts: tuple[str, ...], root: Path) -> Results:
    """Runs all selected parts."""
    found = Results(load=[os.getloadavg()[0]])
    own, core = gateways.cores()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {own})
    async with AsyncExitStack() as stack:
        service = await stack.enter_async_context(Upstream(plan.tokens))
        bench = Bench(plan, service, found)
        starts = _systems(service.url, root, core, found, with_peers=bool({"crowds", "clouds"}.intersection(parts)))
        for name, start in starts.items():
            say(f"starting {name}")
            bench.targets[name] = await asyncio.to_thread(stack.enter_context, start())
            if name == GATEWAY:
                await asyncio.sleep(2.0)  # the work after its start is done
                found.held.idle_bytes = bench.targets[name].rss_bytes()
        for count in NODES if "nodes" in parts else ():
            say(f"starting a gateway with {count} nodes")
            config = gateways.with_nodes(service.url, count)
            running = gateways.headgate(service.url, root, core, config, f"{count} nodes")
            bench.fleets.append(await asyncio.to_thread(running.__enter__))
            stack.push(running)
        gc.freeze()
        for part in PARTS:
            if part not in parts:
                continue
            if part == "failover":
                found.failed = await failover.measure(service, root, core, plan.failures)
            elif part != "departures":
                await getattr(bench, part)()
            found.write(RESULTS)
    if "departures" in parts:
        say("departures")
        if hasattr(os, "sched_setaffinity"):
            os.sched_setaffinity(0, {own, core})  # a worker uses both
        found.gone = await departures.measure(root / "departures", plan.departures)
    found.load.append(os.getloadavg()[0])
    found.write(RESULTS)
    return found


def _systems(
    url: str, root: Path, core: int, found: Results, *, with_peers: bool
) -> dict[str, Callable[[], AbstractContextManager[Target]]]:
    """The measured systems and how each starts."""
    found.versions = {GATEWAY: version("headgate"), "fastapi": version("fastapi"), "aiohttp": version("aiohttp")}
    starts: dict[str, Callable[[], AbstractContextManager[Target]]] = {
        GATEWAY: lambda: gateways.headgate(url, root, core, gateways.with_cloud(url)),
        PASS_THROUGH: lambda: gateways.pass_through(url, root, core),
    }
    if not with_peers:
        return starts
    if (portkey := gateway_peers.portkey()) is not None:
        found.versions[portkey.name] = portkey.version
        starts[portkey.name] = lambda: gateways.portkey(portkey, url, root, core)
    if (litellm := gateway_peers.litellm()) is not None:
        found.versions[litellm.name] = litellm.version
        starts[litellm.name] = lambda: gateways.litellm(litellm, url, root, core)
    return starts


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark."""
    plan = QUICK if is_quick(environ) else Plan()
    if rounds := environ.get("ROUNDS"):
        plan = Plan(**{**{name: getattr(plan, name) for name in Plan.__dataclass_fields__}, "rounds": int(rounds)})
    parts = tuple((environ.get("PARTS") or ",".join(PARTS)).split(","))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that context managers end their processes
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as root, contextlib.suppress(KeyboardInterrupt):
        gateway_report.show(uvloop.run(run(plan, parts, Path(root))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
