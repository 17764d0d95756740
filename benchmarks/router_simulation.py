"""Simulates the routing of requests over nodes: several gateways with outdated views, conversations, churn of nodes.

    NODES=1000 MODELS=10000 SEED=1 python -m benchmarks.router_simulation      QUICK=1 for 200 nodes and 2,000 models

The gateways decide with the product's own code (`gateway/nodes/`); nodes, clients and time are simulated. The models
are used with Zipf's distribution. Each conversation has 20 turns, and each turn goes to a random gateway. A
gateway learns the state of a node every two seconds. Nodes leave and return without their caches.

    decision        the time from a request with its blocks to the name of a node
    load            requests in flight on a node, as the mean over the time; the 99th percentile of all nodes, and the
                    largest, over their mean
    prefix hits     prompt tokens that the caches of the chosen nodes hold, over those that one node would hold that had
                    memory for all conversations
"""

from __future__ import annotations

import heapq
import json
import os
import random
import sys
import time
from bisect import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.figures import Bar, is_quick
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES
from gateway.nodes.node_choice import ChosenNode, NodeFacts, NodeNeeds, choose
from gateway.nodes.node_table import NodeTable
from gateway.nodes.prefix_blocks import PrefixBlocks, prefix_blocks, prefix_salt
from gateway.nodes.prefix_index import PrefixIndex
from gateway.nodes.rebalance import RebalanceState, cheapest, rebalance
from inference.protocol import ModelState, ModelStatus
from inference.worker.kv.labels import MAX_OF_A_SEQUENCE, Labels

RAW = Path("benchmarks/results/router_simulation.json")

GATEWAYS = 3
POLL_SECONDS = 2.0
EVENT_SECONDS = 0.5
"""The delay of a node's `kv` events."""
TURNS = 20
SYSTEM_TOKENS, QUESTION_TOKENS, ANSWER_TOKENS = 400, 150, 600
BYTES_PER_TOKEN = 4
ANSWER_SECONDS, PAUSE_SECONDS = 32.0, 16.0
LOAD_SECONDS = 5.0
PREFILL_RATES = (4000.0,)
REBALANCE_SECONDS = 5.0
RESIDENT = 16
"""Models that a node holds at once."""
PARALLEL = 8
CACHED_CONVERSATIONS = 80
"""Conversations whose KV cache a node keeps."""
MAX_LABELS_OF_A_NODE = 2**20
"""No limit, because that of the service applies to each model."""
MEAN_LOAD = 12.0
"""Requests in flight per node."""
SECONDS_BETWEEN_LOSSES = 10.0
"""Of 1,000 nodes one leaves this often (of fewer more rarely); it returns after AWAY_SECONDS."""
AWAY_SECONDS = 30.0
WARM_UP_SECONDS, MEASURED_SECONDS = 240.0, 120.0
NEEDS = frozenset(("chat",))


# --- nodes ------------------------------------------------------------------------------------------------------------
class Resident:
    """A loaded model of a node: when each of its slots is free, and its requests."""

    def __init__(self, ready_at: float) -> None:
        self.ready_at = ready_at
        self.free_at = [ready_at] * PARALLEL
        self.in_flight = 0
        self.used_at = ready_at


class Node:
    """One inference service."""

    def __init__(self, name: str, models: list[str], rate: float) -> None:
        self.name, self.models, self.rate = name, models, rate
        self.residents: dict[str, Resident] = {}
        self.cache: OrderedDict[str, tuple[int, tuple[str, ...]]] = OrderedDict()
        """Tokens and labels by conversation, or by system prompt."""
        self.labels = Labels(MAX_LABELS_OF_A_NODE)
        self.changed: list[dict[str, None]] = [{} for _ in range(GATEWAYS)]
        self.running: dict[Request, None] = {}
        self.is_up, self.up_since, self.up_seconds = True, 0.0, 0.0
        self.in_flight, self.changed_at, self.area = 0, 0.0, 0.0

    def note(self, model: str) -> None:
        """The state of a model has changed."""
        for models in self.changed:
            models[model] = None

    def add(self, requests: int, now: float, since: float) -> None:
        """Adds to the requests in flight; their integral begins at `since`."""
        self.area += self.in_flight * max(0.0, now - max(since, self.changed_at))
        self.in_flight, self.changed_at = self.in_flight + requests, now

    def status(self, model: str, now: float) -> ModelStatus:
        """The status of a model as the service reports it."""
        held = self.residents.get(model)
        if held is None:
            return cold(model)
        state = ModelState.LOADING if held.ready_at > now else ModelState.BUSY if held.in_flight else ModelState.READY
        running = min(held.in_flight, PARALLEL)
        return ModelStatus(
            model, state, (), 32768, PARALLEL, in_flight=running, queued=held.in_flight - running,
            capabilities=("chat",), fits=True, load_seconds=max(0.0, held.ready_at - now),
            queue_seconds=max(0.0, held.free_at[0] - max(now, held.ready_at)), answer_seconds=ANSWER_SECONDS / PARALLEL,
            prefill_tokens_per_second=self.rate,
        )  # fmt: skip

    def has_room(self, model: str) -> bool:
        """Whether `model` can be loaded without unloading another one."""
        return self.is_up and model not in self.residents and len(self.residents) < RESIDENT

    def make_room(self) -> bool:
        """Unloads the model that is idle for longest, if one more would be too many; False if none is idle."""
        if len(self.residents) < RESIDENT:
            return True
        idle = [(held.used_at, model) for model, held in self.residents.items() if not held.in_flight]
        if not idle:
            return False
        model = min(idle)[1]
        del self.residents[model]
        self.note(model)
        return True


_COLD: dict[str, ModelStatus] = {}


def cold(model: str) -> ModelStatus:
    """The status of a model that is not loaded."""
    if model not in _COLD:
        _COLD[model] = ModelStatus(
            model, ModelState.COLD, (), 32768, PARALLEL, capabilities=("chat",), fits=True, load_seconds=LOAD_SECONDS
        )
    return _COLD[model]


# --- clients ----------------------------------------------------------------------------------------------------------
_numbers = count()


class Conversation:
    """One conversation; `turn` is the next one. `had` are the tokens that a node with all memory would have."""

    def __init__(self, model: str, chance: random.Random, turn: int = 0) -> None:
        self.model, self.turn, self.had = model, turn, 0
        self.system = f"{model}-{chance.randrange(3)}"
        number = next(_numbers)
        self.key = f"c{number}"
        messages = [(f"{self.system:>16}", SYSTEM_TOKENS)]
        for index in range(TURNS):
            messages.append((f"q{number:09d}{index:06d}", QUESTION_TOKENS))
            messages.append((f"a{number:09d}{index:06d}", ANSWER_TOKENS))
        hashes, sizes = zip(*messages, strict=True)
        self._hashes, self._ends = tuple(hashes), tuple(accumulate(size * BYTES_PER_TOKEN for size in sizes))

    @property
    def blocks(self) -> PrefixBlocks:
        """The blocks of the prompt of the next turn."""
        messages = 2 + 2 * self.turn
        return PrefixBlocks(self._hashes[:messages], self._ends[:messages], 2)


@dataclass(slots=True)
class Gateway:
    """The view of one gateway."""

    number: int
    table: NodeTable = field(default_factory=NodeTable)
    index: PrefixIndex = field(default_factory=PrefixIndex)
    outstanding: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Requests of this gateway by node and model."""
    failed: set[str] = field(default_factory=set)
    """Nodes that did not answer; their breaker is open."""

    def facts(
        self, model: str, blocks: PrefixBlocks, tokens: int, excluded: tuple[str, ...], draw: Callable[[], float]
    ) -> list[NodeFacts]:
        """The facts about the nodes to consider for a request."""
        names = self.table.nodes_for(model, draw)
        cached = self.index.best(blocks, names)
        found = []
        for name in dict.fromkeys((*names, *cached)):
            if (status := self.table.status(name, model)) is not None:
                in_flight = max(self.table.in_flight(name, model), self.outstanding[name, model])
                load = self.table.node_load(name)
                known = tokens * cached.get(name, 0) // blocks.size_bytes
                facts = NodeFacts.of(name, status, in_flight, load, known)
                found.append(facts._replace(excluded="failed") if name in self.failed or name in excluded else facts)
        return found


@dataclass(slots=True, eq=False)
class Request:
    """A running request: a turn of a conversation, whose prompt has `tokens`."""

    gateway: Gateway
    node: Node
    held: Resident
    talk: Conversation
    tokens: int


class Simulation:
    """The events of one run."""

    def __init__(self, nodes: int, models: int, seed: int = 1) -> None:
        self.chance = random.Random(seed)
        self.now = 0.0
        self.end = WARM_UP_SECONDS + MEASURED_SECONDS
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self.names = [f"m{number}" for number in range(models)]
        self._weights = list(accumulate(1 / (rank + 1) for rank in range(models)))
        self.nodes = self._placed(nodes)
        self.gateways = [Gateway(number) for number in range(GATEWAYS)]
        self._systems: set[str] = set()
        self.decision_seconds: list[float] = []
        self.ttft_seconds: list[float] = []
        self.considered = self.requests = self.loads = self.copies = self.repeats = self.waits = 0
        self.prompt_tokens = self.hit_tokens = self.ideal_tokens = 0

    def _placed(self, nodes: int) -> dict[str, Node]:
        """The nodes; the first percent of the models is on half of them, the others are on 20 each."""
        on: list[list[str]] = [[] for _ in range(nodes)]
        for rank, model in enumerate(self.names):
            copies = nodes // 2 if rank < len(self.names) // 100 else min(nodes, 20)
            for place in self.chance.sample(range(nodes), copies):
                on[place].append(model)
        return {f"n{i}": Node(f"n{i}", on[i], self.chance.choice(PREFILL_RATES)) for i in range(nodes)}

    @property
    def is_measured(self) -> bool:
        """Whether the warm-up is over."""
        return self.now >= WARM_UP_SECONDS

    # --- the run -----------------------------------------------------------------------------------------------------
    def after(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Runs `act` after some time."""
        heapq.heappush(self._events, (self.now + seconds, next(self._order), act, args))

    def run(self) -> None:
        """Runs all events until the end."""
        chance, number = self.chance, len(self.nodes)
        for node in self.nodes.values():
            for gateway in self.gateways:
                gateway.table.update(node.name, {model: cold(model) for model in node.models})
                self.after(chance.uniform(0, POLL_SECONDS), self.poll, gateway, node)
        both = ANSWER_SECONDS + PAUSE_SECONDS
        for _ in range(int(number * MEAN_LOAD * both / ANSWER_SECONDS)):
            self.after(chance.uniform(0, both), self.ask, self.conversation(chance.randrange(TURNS)), ())
        self.after(0.0, self.begin, number * MEAN_LOAD / ANSWER_SECONDS / TURNS)
        self.after(SECONDS_BETWEEN_LOSSES * 1000 / number, self.lose)
        self.after(REBALANCE_SECONDS, self.rebalance, RebalanceState())
        while self._events and self._events[0][0] < self.end:
            self.now, _, act, args = heapq.heappop(self._events)
            act(*args)
        self.now = self.end
        for node in self.nodes.values():
            node.add(0, self.end, WARM_UP_SECONDS)
            if node.is_up:
                node.up_seconds += self.end - max(WARM_UP_SECONDS, node.up_since)

    def conversation(self, turn: int = 0) -> Conversation:
        """A new conversation with a random model."""
        place = bisect(self._weights, self.chance.random() * self._weights[-1])
        return Conversation(self.names[place], self.chance, turn)

    def begin(self, rate: float) -> None:
        """A conversation begins; the next one follows."""
        self.ask(self.conversation(), ())
        self.after(self.chance.expovariate(rate), self.begin, rate)

    # --- requests ----------------------------------------------------------------------------------------------------
    def ask(self, talk: Conversation, excluded: tuple[str, ...], gateway: Gateway | None = None) -> None:
        """One turn of a conversation, or its repetition by `gateway` on another node than `excluded`."""
        gateway = gateway or self.chance.choice(self.gateways)
        blocks = talk.blocks
        tokens = blocks.size_bytes // BYTES_PER_TOKEN
        began = time.thread_time()
        facts = gateway.facts(talk.model, blocks, tokens, excluded, self.chance.random)
        choice = choose(facts, NodeNeeds(tokens, NEEDS), self.chance.random)
        seconds = time.thread_time() - began
        if self.is_measured:
            self.decision_seconds.append(seconds)
            self.considered += len(facts)
        if not isinstance(choice, ChosenNode):
            self.waits += self.is_measured
            self.after(1.0, self.ask, talk, ())
            return
        node = self.nodes[choice.name]
        held = node.residents.get(talk.model)
        if not node.is_up or (held is None and not node.make_room()):
            if not node.is_up:
                gateway.failed.add(node.name)
            self.repeats += self.is_measured
            self.ask(talk, (*excluded, node.name), gateway)
            return
        if held is None:
            held = self._load(node, talk.model)
            self.loads += self.is_measured
        gateway.outstanding[node.name, talk.model] += 1
        gateway.index.note(node.name, blocks.hashes)
        self._serve(gateway, node, held, talk, tokens)

    def _load(self, node: Node, model: str) -> Resident:
        held = node.residents[model] = Resident(self.now + LOAD_SECONDS)
        node.note(model)
        self.after(LOAD_SECONDS, node.note, model)
        return held

    def _serve(self, gateway: Gateway, node: Node, held: Resident, talk: Conversation, tokens: int) -> None:
        hit = max(node.cache.get(talk.key, (0,))[0], node.cache.get(talk.system, (0,))[0])
        ideal = talk.had or (SYSTEM_TOKENS if talk.system in self._systems else 0)
        self._systems.add(talk.system)
        start = max(self.now, heapq.heappop(held.free_at)) + (tokens - hit) / node.rate
        end = start + self.chance.uniform(0.5, 1.5) * ANSWER_SECONDS
        heapq.heappush(held.free_at, end)
        held.in_flight += 1
        held.used_at = self.now
        node.add(1, self.now, WARM_UP_SECONDS)
        node.note(talk.model)
        if self.is_measured:
            self.requests += 1
            self.prompt_tokens += tokens
            self.hit_tokens += hit
            self.ideal_tokens += ideal
            self.ttft_seconds.append(start - self.now)
        request = Request(gateway, node, held, talk, tokens)
        node.running[request] = None
        self.after(end - self.now, self.done, request)

    def _end(self, request: Request) -> None:
        """A request leaves its node."""
        node, held = request.node, request.held
        del node.running[request]
        request.gateway.outstanding[node.name, request.talk.model] -= 1
        held.in_flight -= 1
        held.used_at = self.now
        node.add(-1, self.now, WARM_UP_SECONDS)
        node.note(request.talk.model)

    def done(self, request: Request) -> None:
        """An answer ends, unless its node has left; the next turn follows after a pause."""
        node, talk = request.node, request.talk
        if request not in node.running:
            return
        self._end(request)
        talk.had = request.tokens + ANSWER_TOKENS
        self._store(node, talk, talk.blocks.hashes[-MAX_OF_A_SEQUENCE:], talk.had)
        talk.turn += 1
        if talk.turn < TURNS:
            self.after(self.chance.expovariate(1 / PAUSE_SECONDS), self.ask, talk, ())

    def _store(self, node: Node, talk: Conversation, labels: tuple[str, ...], tokens: int) -> None:
        """The KV cache of the conversation is stored, and the oldest one is removed."""
        for key, found in ((talk.system, (SYSTEM_TOKENS, talk.blocks.hashes[:1])), (talk.key, (tokens, labels))):
            node.labels.add(found[1])
            node.labels.remove(node.cache.pop(key, (0, ()))[1])
            node.cache[key] = found
        while len(node.cache) > CACHED_CONVERSATIONS:
            node.labels.remove(node.cache.popitem(last=False)[1][1])
        self.after(EVENT_SECONDS, self.report, node, *node.labels.take_changes())

    # --- what gateways learn -----------------------------------------------------------------------------------------
    def poll(self, gateway: Gateway, node: Node) -> None:
        """A gateway gets the state of a node."""
        if node.is_up:
            for model in node.changed[gateway.number]:
                gateway.table.update_model(node.name, node.status(model, self.now))
            node.changed[gateway.number].clear()
        self.after(POLL_SECONDS, self.poll, gateway, node)

    def report(self, node: Node, stored: Sequence[str], removed: Sequence[str]) -> None:
        """The gateways get a `kv` event."""
        if node.is_up:
            for gateway in self.gateways:
                gateway.index.removed(node.name, removed)
                gateway.index.stored(node.name, stored)

    def rebalance(self, state: RebalanceState) -> None:
        """The gateway that holds the lease loads more copies of models."""
        decision = rebalance(self.gateways[0].table, {}, state, self.now, self.gateways[0].failed)
        state = decision.state
        for copy in decision.copies:
            plans = {name: {"result": "FREE"} for name in copy.nodes if self.nodes[name].has_room(copy.model)}
            state = state.after_refusal(copy.model, set(copy.nodes) - plans.keys(), self.now)
            if (name := cheapest(copy, plans, {})) is not None:
                self._load(self.nodes[name], copy.model)
                self.copies += 1
        self.after(REBALANCE_SECONDS, self.rebalance, state)

    def lose(self) -> None:
        """A node leaves, which the gateways learn one after the other; it returns later.

        Its answers begin again on other nodes.
        """
        node = self.chance.choice([node for node in self.nodes.values() if node.is_up])
        node.is_up = False
        node.up_seconds += max(0.0, self.now - max(WARM_UP_SECONDS, node.up_since))
        for request in list(node.running):
            self._end(request)
            self.ask(request.talk, (node.name,), request.gateway)
        node.residents.clear()
        node.cache.clear()
        node.labels = Labels(MAX_LABELS_OF_A_NODE)
        for gateway in self.gateways:
            self.after(self.chance.uniform(0, 2 * POLL_SECONDS), self.forget, gateway, node)
        self.after(AWAY_SECONDS, self.come_back, node)
        self.after(SECONDS_BETWEEN_LOSSES * 1000 / len(self.nodes), self.lose)

    def forget(self, gateway: Gateway, node: Node) -> None:
        """A gateway learns that a node has left."""
        gateway.table.remove(node.name)
        gateway.index.forget(node.name)

    def come_back(self, node: Node) -> None:
        """A node returns with nothing loaded."""
        node.is_up, node.up_since = True, self.now
        for gateway in self.gateways:
            gateway.failed.discard(node.name)
            gateway.table.update(node.name, {model: cold(model) for model in node.models})

    # --- results -----------------------------------------------------------------------------------------------------
    def loads_of_nodes(self) -> list[float]:
        """Mean requests in flight of each node that was up for half of the measured time, in ascending order."""
        up = [node for node in self.nodes.values() if node.up_seconds >= MEASURED_SECONDS / 2]
        return sorted(node.area / node.up_seconds for node in up)


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of `values` are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def blocks_milliseconds(size_bytes: int = 100_000, rounds: int = 50) -> list[float]:
    """Milliseconds for the blocks of a chat with one long and 40 short messages."""
    text = "The quick brown fox jumps over the lazy dog. " * (size_bytes // 45)
    messages = [{"role": "user", "content": text}]
    for number in range(20):
        messages += [{"role": "assistant", "content": f"Answer {number}"}, {"role": "user", "content": "Go on."}]
    body = BODIES[Endpoint.CHAT][1]({"model": "m", "messages": messages})
    salt = prefix_salt(b"secret", "tenant", "m")
    times = []
    for _ in range(rounds):
        began = time.thread_time()
        prefix_blocks(salt, body)
        times.append((time.thread_time() - began) * 1e3)
    return times


def _whole(name: str, otherwise: int) -> int:
    """A positive whole number from the environment."""
    text = os.environ.get(name) or str(otherwise)
    if not text.isdecimal() or int(text) < 1:
        raise SystemExit(f"{name}={text} is not a positive whole number")
    return int(text)


def main() -> int:
    """Runs the simulation, prints the results and writes the raw figures."""
    quick = is_quick(os.environ)
    nodes, models = _whole("NODES", 200 if quick else 1000), _whole("MODELS", 2000 if quick else 10_000)
    seed = _whole("SEED", 1)
    world = Simulation(nodes, models, seed)
    began = time.monotonic()
    world.run()
    decisions = [seconds * 1e3 for seconds in world.decision_seconds]
    p50, p99 = percentile(decisions, 0.5), percentile(decisions, 0.99)
    loads = world.loads_of_nodes()
    mean, high = fmean(loads), percentile(loads, 0.99)
    hits = world.hit_tokens / world.ideal_tokens
    each = world.considered / len(decisions)
    print(
        f"{nodes} nodes, {models} models, {GATEWAYS} gateways, seed {seed}: {world.requests} requests in "
        f"{MEASURED_SECONDS:.0f} s"
    )
    print(f"decision: p50 {p50:.3f} ms, p99 {p99:.3f} ms, worst {max(decisions):.2f} ms, {each:.1f} nodes considered")
    low, most = loads[len(loads) // 100], loads[-1]
    print(f"requests in flight per node: mean {mean:.2f}, p1 {low:.2f}, p99 {high:.2f}, most {most:.2f}")
    print(
        f"prompt tokens: {hits:.3f} of the possible hits; {world.hit_tokens / world.prompt_tokens:.3f} of all are hits"
    )
    ttft = world.ttft_seconds
    print(f"time to first token: p50 {percentile(ttft, 0.5):.2f} s, p99 {percentile(ttft, 0.99):.2f} s")
    print(f"loads for requests {world.loads}, by rebalancing {world.copies}")
    print(f"attempts repeated {world.repeats}, requests without a node {world.waits}")
    blocks = blocks_milliseconds()
    print(f"blocks of a prompt of 100 kB: p50 {percentile(blocks, 0.5):.3f} ms, p99 {percentile(blocks, 0.99):.3f} ms")
    print(f"simulated in {time.monotonic() - began:.0f} s")
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps({"decision_ms": decisions, "node_loads": loads, "ttft_seconds": ttft}))
    print()
    for bar in (
        Bar("router_decision_p99", p99, "ms", "<", 1.0),
        Bar("router_blocks_p50_100kB", percentile(blocks, 0.5), "ms", "<", 1.0),
        Bar("router_load_p99_over_mean", high / mean, "x", "<=", 1.3),
        Bar("router_load_most_over_mean", most / mean, "x", "<=", 1.3),
        Bar("router_prefix_hits_of_ideal", hits, "x", ">=", 0.9),
    ):
        print(bar.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
