"""Measures one and two replicas of a model on two simulated devices that compute at a paced rate.

    python -m benchmarks.replicas      ROUNDS=5 PACE=0.06 SECONDS=20; QUICK=1: three rounds of 12 seconds

Each computation of a device takes at least PACE seconds without use of the CPU, so that two workers on two cores do not
take time from each other. Four times as many clients as a replica has slots hold conversations through the gateway
without a pause, each of three turns with answers of different lengths. Rounds alternate between `replicas: 1` and 2.
The throughput counts the tokens that arrived within SECONDS.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar, Middle, TimedAnswer, is_quick, ratios
from headgate.cli.bench import percentile
from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.worker.cpu_cores import usable_cores
from inference.workers.os_api import socket_directory
from tests.rigs.stack import Stack

DEVICES = "sim:2x600MiB"
PARALLEL = 4
CLIENTS = 16
TURNS = 3
ANSWER_TOKENS = (8, 24)
"""The shortest and the longest answer."""
TIMEOUT_SECONDS = 300.0
ROUTES = "routes:\n  demo: {chain: [local/demo]}\n"
RAW = Path("benchmarks/results/replicas.json")
MIN_SPEEDUP = 1.8


@dataclass(slots=True)
class Round:
    """One round: generated tokens per second, seconds to the first token of each turn, and the devices of each
    conversation.
    """

    replicas: int
    tokens_per_second: float
    first_token_seconds: list[float]
    devices: list[list[str]]


@dataclass(frozen=True, slots=True)
class Turn(TimedAnswer):
    """One answer, with the seconds to its first token."""

    first_token_seconds: float
    device: str


@dataclass(slots=True)
class Samples:
    """All rounds, by number of replicas."""

    pace_seconds: float
    rounds: dict[int, list[Round]] = field(default_factory=dict)

    def throughput(self, replicas: int) -> list[float]:
        """Tokens per second of each round."""
        return [found.tokens_per_second for found in self.rounds[replicas]]

    def first_tokens(self, replicas: int, share: float) -> list[float]:
        """A percentile of the seconds to the first token, of each round."""
        return [percentile(found.first_token_seconds, share) for found in self.rounds[replicas]]

    def moved(self, replicas: int) -> float:
        """The share of conversations that more than one replica served."""
        found = [devices for item in self.rounds[replicas] for devices in item.devices]
        return sum(len(set(devices)) > 1 for devices in found) / max(1, len(found))


class Bench:
    """A complete stack with one model and its replicas."""

    def __init__(self, root: Path, replicas: int, pace_seconds: float) -> None:
        entry = {"path": "bundled:demo", "context_length": 512, "parallel": PARALLEL, "replicas": replicas}
        models = json.dumps({"models": {"demo": {**entry, "idle_timeout": "never"}}})
        self._stack = Stack(root, models, ROUTES, inference_env={"INFERENCE_DEVICES": DEVICES})
        self._replicas, self._pace_seconds = replicas, pace_seconds

    def __enter__(self) -> Bench:
        self._stack.start()
        self._stack.ask("/models/demo/load", {}, direct=True, seconds=120)
        self.turn([{"role": "user", "content": "Hello!"}])
        with Control(socket_directory(self._stack.state) / SOCKET_NAME) as rig:
            rig.send("pace", seconds=self._pace_seconds)
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.kill()

    def turn(self, messages: Sequence[Mapping[str, str]], tokens: int = 8) -> Turn:
        """Streams one answer of this length."""
        body = {
            "model": "demo", "messages": messages, "temperature": 0, "max_tokens": tokens, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        headers = {"Authorization": f"Bearer {self._stack.key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection("127.0.0.1", self._stack.front.port, timeout=TIMEOUT_SECONDS)
        began = time.perf_counter()
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"a request failed: {answer.status} {answer.read()[:300]!r}")
        device, first, text, tokens = answer.headers.get("x-headgate-device", ""), 0.0, "", 0
        for line in answer:
            if line.startswith(b": headgate device "):
                device = line.split()[-1].decode()
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if piece := "".join(choice["delta"].get("content") or "" for choice in chunk["choices"]):
                first = first or time.perf_counter() - began
                text += piece
            tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        connection.close()
        return Turn(text, tokens, began + first, time.perf_counter(), first, device)

    def client(self, number: int, until: float) -> list[list[Turn]]:
        """Conversations, one after the other."""
        found: list[list[Turn]] = []
        while time.perf_counter() < until:
            found.append(self.conversation(f"{number}.{len(found)}", until))
        return found

    def conversation(self, name: str, until: float) -> list[Turn]:
        """The turns of one conversation, one after the other; none begins after `until`."""
        messages = [{"role": "user", "content": f"{name}: tell me a story about a water mill."}]
        turns: list[Turn] = []
        chance = random.Random(name)
        while len(turns) < TURNS and time.perf_counter() < until:
            turns.append(self.turn(messages, chance.randint(*ANSWER_TOKENS)))
            messages += [{"role": "assistant", "content": turns[-1].text}, {"role": "user", "content": "Go on."}]
        return turns

    def measure(self, seconds: float) -> Round:
        """All clients at once."""
        until = time.perf_counter() + seconds
        with ThreadPoolExecutor(CLIENTS) as pool:
            clients = list(pool.map(lambda number: self.client(number, until), range(CLIENTS)))
        conversations = [conversation for client in clients for conversation in client]
        turns = [turn for conversation in conversations for turn in conversation]
        return Round(
            self._replicas,
            sum(turn.tokens_until(until) for turn in turns) / seconds,
            [turn.first_token_seconds for turn in turns],
            [[turn.device for turn in turns] for turns in conversations if len(turns) == TURNS],
        )


def run(rounds: int, pace_seconds: float, seconds: float) -> Samples:
    """Measures all rounds; every other one begins with two replicas."""
    samples = Samples(pace_seconds, {1: [], 2: []})
    with tempfile.TemporaryDirectory() as there:
        for number in range(rounds):
            for replicas in (1, 2) if number % 2 == 0 else (2, 1):
                with Bench(Path(there) / f"{number}-{replicas}", replicas, pace_seconds) as bench:
                    samples.rounds[replicas].append(bench.measure(seconds))
    return samples


def table(samples: Samples) -> Iterator[str]:
    """Medians over rounds, with the smallest and the largest value."""
    least, most = ANSWER_TOKENS
    load = f"{CLIENTS} clients, {TURNS} turns per conversation, {least} to {most} tokens, {PARALLEL} slots per replica"
    yield f"{load}, {samples.pace_seconds * 1000:g} ms per computation: median [least .. most] of rounds"
    for replicas in samples.rounds:
        tokens = Middle.of(samples.throughput(replicas))
        p50, p99 = (Middle.of(samples.first_tokens(replicas, share)) for share in (0.5, 0.99))
        yield (
            f"  replicas {replicas}   {tokens.text(1)} tokens/s   first token p50 {p50.text(2)} s, p99 {p99.text(2)} s"
            f"   conversations on two devices {samples.moved(replicas):.0%}"
        )


def bars(samples: Samples) -> Iterator[Bar]:
    """Two replicas against one, in the same round."""
    speedup = Middle.of(ratios(samples.throughput(2), samples.throughput(1)))
    yield Bar("replicas-throughput", speedup.value, "x", ">=", MIN_SPEEDUP)
    first = Middle.of(ratios(samples.first_tokens(2, 0.99), samples.first_tokens(1, 0.99)))
    yield Bar("replicas-first-token-p99", first.value, "x", "<=", 1.0)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark, prints the table and bars, and writes the raw samples."""
    quick = is_quick(environ)
    rounds = int(environ.get("ROUNDS", "3" if quick else "5"))
    seconds = float(environ.get("SECONDS", "12" if quick else "20"))
    samples = run(rounds, float(environ.get("PACE", "0.06")), seconds)
    raw: dict[str, Any] = {"cores": usable_cores(), **asdict(samples)}
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps(raw))
    sys.stdout.write("\n".join([*table(samples), "", *(bar.line() for bar in bars(samples))]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
