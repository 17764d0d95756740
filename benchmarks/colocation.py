"""Measures what a busy model on the same device costs another one: time between tokens alone, beside it, and unshared.

    python -m benchmarks.colocation      MODELS=15m,135m PLACES=cpu,sim ROUNDS=5; QUICK=1: 15m, three rounds

A client of the inference service measures one stream of one model while another model (the same file) answers two
streams without a pause. "Beside" is Headgate's default: on the CPU the cores are divided among the models in use. In
"unshared" both models have `threads` fixed to all cores, like two independent servers. Each round measures all
situations and begins with another one.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.client import Client, Order
from benchmarks.figures import Bar, Middle, is_quick
from benchmarks.models import SHAPES, path_of
from headgate.cli.bench import percentile
from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.worker.cpu_cores import usable_cores
from tests.rigs.stack import Stack

ANSWER_TOKENS = 64
ANSWERS = 6
"""Answers of the measured stream in each round, one after the other."""
NEIGHBOR_STREAMS = 2
SIM = "sim:1x4GiB"
RAW = Path("benchmarks/results/colocation.json")
ALONE, BESIDE, UNSHARED = "alone", "beside", "unshared"
MAX_TIMES_ALONE = 3.0
"""Two models that share the cores fairly take twice as long per token; the rest is for context switches."""


@dataclass(slots=True)
class Samples:
    """Seconds between tokens of the measured stream, by situation and round, and the rate of the other model."""

    model: str
    place: str
    gaps: dict[str, list[list[float]]] = field(default_factory=dict)
    neighbor_tokens_per_second: dict[str, list[float]] = field(default_factory=dict)

    def p99(self, situation: str) -> list[float]:
        """The 99th percentile of each round."""
        return [percentile(gaps, 0.99) for gaps in self.gaps.get(situation, [])]

    def ratios(self, above: str, below: str) -> Middle:
        """Ratios of the p99 of two situations, round by round."""
        return Middle.of([a / b for a, b in zip(self.p99(above), self.p99(below), strict=True)])


class Bench:
    """An inference service with the same model twice. `threads` None: the service chooses them."""

    def __init__(self, root: Path, model: Path, place: str, threads: int | None) -> None:
        entry = {"path": str(model), "context_length": 512, "parallel": 4, "idle_timeout": "never", "threads": threads}
        env = {"INFERENCE_DEVICES": SIM if place == "sim" else "cpu"}
        self._stack = Stack(root, models=json.dumps({"models": {"here": entry, "there": entry}}), inference_env=env)

    def __enter__(self) -> Bench:
        self._stack.inference.start(wait_for="/readyz")
        for name in ("here", "there"):
            self._stack.ask(f"/models/{name}/load", {}, direct=True, seconds=600)
        self._client, self._other = Client(), Client()
        return self

    def __exit__(self, *_error: object) -> None:
        for client in (self._client, self._other):
            client.__exit__()
        self._stack.kill()

    def order(self, model: str, streams: int, number: int) -> Order:
        """Streams of fixed length with different beginnings."""
        token = self._stack.state.read_secret(INFERENCE_TOKEN)
        bodies = [
            {
                "model": model, "prompt": f"{number} {stream} once upon a time", "max_tokens": ANSWER_TOKENS,
                "temperature": 0, "stream": True,
            }
            for stream in range(streams)
        ]  # fmt: skip
        address = ("tcp", "127.0.0.1", self._stack.inference.port)
        return Order(address, "/v1/completions", {"Authorization": f"Bearer {token}"}, bodies)

    def measure(self, number: int) -> list[float]:
        """Returns the seconds between tokens of several consecutive answers."""
        gaps: list[float] = []
        for answer in range(ANSWERS):
            for stream in self._client.burst(self.order("here", 1, number * 100 + answer)).streams:
                if stream.error:
                    raise SystemExit(f"the measured stream failed: {stream.error}")
                gaps += stream.gaps
        return gaps

    @contextmanager
    def neighbor(self, rates: list[float]) -> Iterator[None]:
        """Keeps the other model busy. Appends its tokens per second to `rates`."""
        over = threading.Event()
        running = threading.Event()

        def work() -> None:
            tokens, number, began = 0, 0, time.monotonic()
            while not over.is_set():
                number += 1
                burst = self._other.burst(self.order("there", NEIGHBOR_STREAMS, number + 100_000))
                tokens += sum(len(stream.times) for stream in burst.streams)
                running.set()
            rates.append(tokens / (time.monotonic() - began))

        thread = threading.Thread(target=work)
        thread.start()
        running.wait(600)
        try:
            yield
        finally:
            over.set()
            thread.join()


def run(model: str, place: str, rounds: int) -> Samples:
    """Measures all situations of one model in one place."""
    samples = Samples(model, place)
    situations = [ALONE, BESIDE] if place == "sim" else [ALONE, BESIDE, UNSHARED]
    with tempfile.TemporaryDirectory() as there:
        for number in range(rounds):
            for situation in situations[number % len(situations) :] + situations[: number % len(situations)]:
                threads = usable_cores() if situation == UNSHARED else None
                with Bench(Path(there) / f"{number}-{situation}", path_of(SHAPES[model]), place, threads) as bench:
                    bench.measure(0)  # warm-up, not counted
                    rates: list[float] = []
                    if situation == ALONE:
                        gaps = bench.measure(1)
                    else:
                        with bench.neighbor(rates):
                            gaps = bench.measure(1)
                samples.gaps.setdefault(situation, []).append(gaps)
                samples.neighbor_tokens_per_second.setdefault(situation, []).extend(rates)
    return samples


def tables(found: Sequence[Samples]) -> Iterator[str]:
    """Tables of medians over rounds, with the smallest and the largest value."""
    for samples in found:
        yield f"\n{samples.model} on {samples.place}, ms between tokens of one stream: median [least .. most] of rounds"
        for situation, rounds in samples.gaps.items():
            middle = Middle.of([percentile(gaps, 0.5) for gaps in rounds])
            p99 = Middle.of(samples.p99(situation))
            line = f"  {situation:<10} p50 {middle.text(2, 1e3):<28} p99 {p99.text(2, 1e3):<28}"
            if rates := samples.neighbor_tokens_per_second.get(situation):
                line += f" neighbor {Middle.of(rates).text(0)} tokens/s"
            yield line


def bars(found: Sequence[Samples]) -> Iterator[Bar]:
    """Bars: beside against alone, and shared against unshared cores."""
    for samples in found:
        where = f"{samples.model}-{samples.place}"
        beside = samples.ratios(BESIDE, ALONE).value
        yield Bar(f"colocation-p99-over-alone-{where}", beside, "x", "<=", MAX_TIMES_ALONE)
        if samples.p99(UNSHARED):
            shared = samples.ratios(BESIDE, UNSHARED).value
            yield Bar(f"colocation-p99-over-unshared-{where}", shared, "x", "<=", 1.0)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark, prints tables and bars, and writes the raw samples."""
    quick = is_quick(environ)
    models = environ.get("MODELS", "15m" if quick else "15m,135m").split(",")
    places = environ.get("PLACES", "cpu,sim").split(",")
    rounds = int(environ.get("ROUNDS", "3" if quick else "5"))
    found = [run(model, place, rounds) for model in models for place in places]
    raw: dict[str, Any] = {"cores": usable_cores(), "samples": [asdict(samples) for samples in found]}
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps(raw))
    lines = [*tables(found), "", *(bar.line() for bar in bars(found))]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
