"""`make bench-fleet`: several nodes behind one gateway, and what shared state costs.

    PARTS=throughput,shared,prefix ROUNDS=5 PACE=0.06 SECONDS=20; QUICK=1: at most five minutes

`throughput`: one and four nodes, whose simulated devices take PACE seconds for each computation without use of the CPU,
so that the cores of this machine do not matter. The number of clients is twice the slots of the four nodes.
`shared`: one connection at a fixed rate to gateways with and without `state:`, in short samples in random order.
`prefix`: conversations of 20 turns with one and four nodes; a hit is a token of earlier turns that was not computed.

The last lines are one BAR per target. Raw samples go to benchmarks/results/fleet.json. The parts `throughput` and
`prefix` need no Redis server; without one `shared` is skipped.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx2

from benchmarks import asking
from benchmarks.figures import Bar, Middle, TimedAnswer, is_quick, ratios
from benchmarks.gateway import ALONE_PER_SECOND, chat
from benchmarks.gateway_samples import WHOLE
from benchmarks.gateways import CONFIG, cores, headgate
from benchmarks.upstream import Upstream
from headgate.cli.bench import percentile
from inference.worker.cpu_cores import usable_cores
from tests.fleet.system import KEY, MODEL, Fleet
from tests.rigs.redis_server import SERVER, RedisServer

RAW = Path(__file__).parent / "results" / "fleet.json"
PARTS = ("throughput", "shared", "prefix")
NODES, PARALLEL = 4, 4
CLIENTS = 2 * NODES * PARALLEL
TURNS, ANSWER_TOKENS = 3, (8, 24)
LONG_TURNS, LONG_ANSWER_TOKENS = 20, 8
CONVERSATIONS = 8
"""At once, in the part `prefix`: twice the slots of one node, half of those of four."""
TIMEOUT_SECONDS = 300.0
MIN_SPEEDUP, MAX_ADDED_MS, MIN_HITS = 3.5, 0.15, 0.9
ALONE, SHARED, LIMITED, SHARED_LIMITED = "alone", "shared", "limits", "shared limits"
"""The gateways of the part `shared`: without and with `state:`, each with a key without and with limits."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Sizes of a run: `rounds` of throughput, half of them of prefix; `samples` of `sample_seconds` of `shared`."""

    rounds: int = 5
    pace_seconds: float = 0.06
    seconds: float = 20.0
    samples: int = 30
    sample_seconds: float = 2.0


QUICK = Plan(rounds=2, seconds=10.0, samples=12, sample_seconds=1.5)


@dataclass(frozen=True, slots=True)
class Turn(TimedAnswer):
    """One answer."""

    prompt_tokens: int
    cached_tokens: int
    node: str


@dataclass(frozen=True, slots=True)
class Hits:
    """Tokens of earlier turns in the prompts of conversations: all, and those that were not computed."""

    nodes: int
    reusable: int
    cached: int
    moves: int
    """Turns on another node than the turn before."""

    @property
    def share(self) -> float:
        """The share of these tokens that were not computed."""
        return self.cached / max(1, self.reusable)


@dataclass(slots=True)
class Found:
    """All raw samples: tokens per second by number of nodes and round; p50 in seconds by gateway and round; hits."""

    throughput: dict[int, list[float]] = field(default_factory=lambda: {1: [], NODES: []})
    used: list[dict[str, int]] = field(default_factory=list)
    p50_seconds: dict[str, list[float]] = field(default_factory=dict)
    hits: list[Hits] = field(default_factory=list)

    def added_ms(self, with_it: str, without: str) -> list[float]:
        """Milliseconds that one gateway takes more than another in the same round."""
        pairs = zip(self.p50_seconds[with_it], self.p50_seconds[without], strict=True)
        return [1000 * (ours - theirs) for ours, theirs in pairs]

    def shares(self, nodes: int) -> list[float]:
        """The shares of hits by round."""
        return [one.share for one in self.hits if one.nodes == nodes]


class Talk:
    """Conversations with a fleet of one gateway. An asynchronous context manager."""

    def __init__(self, root: Path, nodes: int, pace_seconds: float, context: int, kv_ram_gb: float = 0.02) -> None:
        model = {"path": "bundled:demo", "context_length": context, "parallel": PARALLEL, "idle_timeout": "never"}
        self._fleet = Fleet(
            root,
            gateways=1,
            nodes=nodes,
            pace_seconds=pace_seconds,
            models={MODEL: model},
            inference_env={"INFERENCE_DEVICES": "sim:1x800MiB", "INFERENCE_KV_RAM_GB": str(kv_ram_gb)},
            settings={
                "stream_interval": "16ms",
                "deadlines": {"first_token": "300s", "inter_token": "60s", "total": "300s"},
            },
            with_store=False,
        )
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=CLIENTS)
        self._http = httpx2.AsyncClient(timeout=TIMEOUT_SECONDS, limits=limits)

    async def __aenter__(self) -> Talk:
        await self._fleet.start()
        await asyncio.gather(*(self.turn([{"role": "user", "content": f"{n}: hello!"}]) for n in range(2 * NODES)))
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._http.aclose()
        await self._fleet.close()

    async def turn(self, messages: Sequence[Mapping[str, str]], tokens: int = 8) -> Turn:
        """Streams one answer of this length."""
        body = {
            "model": MODEL, "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        url = self._fleet.gateways[0].service.url + "/v1/chat/completions"
        first, text = 0.0, ""
        usage: dict[str, Any] = {}
        async with self._http.stream("POST", url, json=body, headers={"authorization": f"Bearer {KEY}"}) as answer:
            if answer.status_code != 200:
                raise SystemExit(f"a request failed: {answer.status_code} {(await answer.aread())[:300]!r}")
            node = answer.headers.get("x-headgate-node", "")
            async for line in answer.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                chunk = json.loads(line[6:])
                if "error" in chunk:
                    raise SystemExit(f"an answer broke: {chunk['error']}")
                if piece := "".join(choice["delta"].get("content") or "" for choice in chunk["choices"]):
                    first = first or time.perf_counter()
                    text += piece
                usage = chunk.get("usage") or usage
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        return Turn(
            text, usage["completion_tokens"], first, time.perf_counter(), usage["prompt_tokens"], cached, node
        )  # fmt: skip

    async def conversation(self, name: str, turns: int, lengths: tuple[int, int], until: float) -> list[Turn]:
        """The turns of one conversation, one after the other; none begins after `until`."""
        messages = [{"role": "user", "content": f"{name}: tell me a story about a water mill."}]
        found: list[Turn] = []
        chance = random.Random(name)
        while len(found) < turns and time.perf_counter() < until:
            found.append(await self.turn(messages, chance.randint(*lengths)))
            messages += [{"role": "assistant", "content": found[-1].text}, {"role": "user", "content": "Go on."}]
        return found

    async def throughput(self, seconds: float) -> tuple[float, dict[str, int]]:
        """Tokens per second with all clients at once, and the number of answers by node."""
        until = time.perf_counter() + seconds

        async def client(number: int) -> list[Turn]:
            found: list[Turn] = []
            while time.perf_counter() < until:
                found += await self.conversation(f"{number}.{len(found)}", TURNS, ANSWER_TOKENS, until)
            return found

        turns = [turn for found in await asyncio.gather(*map(client, range(CLIENTS))) for turn in found]
        used: dict[str, int] = {}
        for turn in turns:
            used[turn.node] = used.get(turn.node, 0) + 1
        return sum(turn.tokens_until(until) for turn in turns) / seconds, used

    async def hits(self, nodes: int) -> Hits:
        """The hits of many concurrent conversations."""
        lengths = (LONG_ANSWER_TOKENS, LONG_ANSWER_TOKENS)
        talks = (self.conversation(f"talk {n}", LONG_TURNS, lengths, float("inf")) for n in range(CONVERSATIONS))
        reusable = cached = moves = 0
        for turns in await asyncio.gather(*talks):
            for before, after in itertools.pairwise(turns):
                reusable += before.prompt_tokens + before.tokens
                cached += after.cached_tokens
                moves += before.node != after.node
        return Hits(nodes, reusable, cached, moves)


async def throughput(plan: Plan, root: Path, found: Found) -> None:
    """One node and four, alternately."""
    for number in range(plan.rounds):
        for nodes in (1, NODES) if number % 2 == 0 else (NODES, 1):
            say(f"throughput: round {number + 1} of {plan.rounds}, {nodes} nodes")
            async with Talk(root / f"throughput-{number}-{nodes}", nodes, plan.pace_seconds, 512) as talk:
                rate, used = await talk.throughput(plan.seconds)
            found.throughput[nodes].append(rate)
            if nodes == NODES:
                found.used.append(used)


async def prefix(plan: Plan, root: Path, found: Found) -> None:
    """One node and four, alternately."""
    for number in range(max(1, plan.rounds // 2)):
        for nodes in (1, NODES):
            say(f"prefix: round {number + 1}, {nodes} nodes")
            async with Talk(root / f"prefix-{number}-{nodes}", nodes, 0.005, 2048, 0.25) as talk:
                found.hits.append(await talk.hits(nodes))


async def shared(plan: Plan, root: Path, found: Found) -> None:
    """Gateways with and without a store, before an upstream that answers at once."""
    if SERVER is None:
        say("shared: skipped, neither redis-server nor valkey-server is installed")
        return
    own, core = cores()
    limits = {"limits": {"requests_per_minute": 10**9}}
    with contextlib.ExitStack() as stack:
        store = RedisServer(root)
        stack.callback(store.kill)
        state = {"state": store.url}
        async with Upstream(8) as service:
            targets = {}
            for name, more in ((ALONE, {}), (SHARED, state), (LIMITED, limits), (SHARED_LIMITED, {**state, **limits})):
                start = headgate(service.url, root / "shared", core, {**CONFIG, **more}, name.replace(" ", "-"))
                targets[name] = await asyncio.to_thread(stack.enter_context, start)
            if hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, {own})
            await asyncio.sleep(2.0)  # the work after their start is done
            chance = random.Random(20261126)
            for number in range(plan.samples + 1):
                if number % 5 == 1:
                    say(f"shared: sample {number} of {plan.samples}")
                for name in chance.sample(list(targets), len(targets)):
                    port, sent = targets[name].port, chat(targets[name], WHOLE)
                    spans = await asking.at_rate(port, sent, ALONE_PER_SECOND, plan.sample_seconds)
                    if number:  # the first one warms up
                        found.p50_seconds.setdefault(name, []).append(percentile(spans.whole, 0.5))
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {own, core})


def table(found: Found) -> Iterator[str]:
    """Medians over rounds, with the smallest and the largest value."""
    for nodes, rates in found.throughput.items():
        if rates:
            yield f"  throughput, {nodes} nodes: {Middle.of(rates).text(1)} tokens/s"
    if found.used:
        yield f"  answers by node in the first round: {found.used[0]}"
    for name, values in found.p50_seconds.items():
        yield f"  shared, {name}: p50 {Middle.of(values).text(3, 1000)} ms"
    for nodes in (1, NODES):
        if mine := [one for one in found.hits if one.nodes == nodes]:
            moves = sum(one.moves for one in mine)
            yield f"  prefix, {nodes} nodes: hits {Middle.of(found.shares(nodes)).text(3)}, {moves} moves"


def bars(found: Found) -> Iterator[Bar]:
    """One per target that was measured."""
    if found.throughput[NODES]:
        speedup = Middle.of(ratios(found.throughput[NODES], found.throughput[1]))
        yield Bar("fleet-throughput", speedup.value, "x", ">=", MIN_SPEEDUP)
    if found.p50_seconds:
        added = Middle.of(found.added_ms(SHARED, ALONE))
        yield Bar("fleet-shared-added-p50", added.value, "ms", "<=", MAX_ADDED_MS)
    if found.hits:
        share = Middle.of(ratios(found.shares(NODES), found.shares(1)))
        yield Bar("fleet-prefix-hits", share.value, "ratio", ">=", MIN_HITS)


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


async def run(plan: Plan, parts: Sequence[str], root: Path, found: Found) -> None:
    """Measures the parts in their order."""
    measures = {"throughput": throughput, "shared": shared, "prefix": prefix}
    for part in PARTS:
        if part in parts:
            (root / part).mkdir()
            await measures[part](plan, root / part, found)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark, prints the table and bars, and writes the raw samples."""
    plan = QUICK if is_quick(environ) else Plan()
    plan = Plan(
        int(environ.get("ROUNDS", plan.rounds)), float(environ.get("PACE", plan.pace_seconds)),
        float(environ.get("SECONDS", plan.seconds)), plan.samples, plan.sample_seconds,
    )  # fmt: skip
    parts = tuple((environ.get("PARTS") or ",".join(PARTS)).split(","))
    if unknown := [part for part in parts if part not in PARTS]:
        raise SystemExit(f"unknown parts {unknown}; there are {', '.join(PARTS)}")
    found = Found()
    with tempfile.TemporaryDirectory(prefix="hg-bench-") as root:
        asyncio.run(run(plan, parts, Path(root), found))
    raw: dict[str, Any] = {"cores": usable_cores(), "plan": asdict(plan), **asdict(found)}
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps(raw))
    lines = [*table(found)]
    if found.p50_seconds:
        more = Middle.of(found.added_ms(SHARED_LIMITED, LIMITED)).text(3)
        lines.append(f"  shared, added p50 with limits: {more} ms")
    sys.stdout.write("\n".join([*lines, "", *(bar.line() for bar in bars(found))]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
