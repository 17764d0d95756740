"""Measures requests for two models with memory for one of them, under load without a pause: failures and waits.

    python -m benchmarks.turns      SWAPS=50 PLACES=cpu,sim KEPT=no,yes; QUICK=1: ten swaps, on the CPU

A complete stack with the two bundled models and a memory limit that allows one of them. Each model has three clients
that send the next request at once: two read streams, one reads whole answers, with different lengths and priorities. A
swap is a model that becomes ready again after it was unloaded, as reported by the events of the service. With KEPT=yes
unloaded models may stay warm. A wait is the time from a request to its first token, or to the whole answer without
streaming. An absence is the time from the moment a model takes no new requests until it is ready again. With fair turns
a request waits for at most one absence and the requests served before it.
"""

from __future__ import annotations

import http.client
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Bar, Middle, is_quick
from headgate.cli.bench import percentile
from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.worker.cpu_cores import usable_cores
from tests.rigs.stack import LOCAL_ROUTES, Stack, chat_body

MODELS = ("demo", "demo-mini")
LIMIT_GB = "0.1"
"""The models need about 79 and 70 MiB, including 64 MiB for each process."""
CLIENTS = ((True, 32, "normal"), (True, 8, "high"), (False, 4, "low"))
"""The clients of each model: streaming, tokens of an answer, priority."""
TIMEOUT_SECONDS = 300.0
MAX_SECONDS = 1800.0
"""Maximum time of one situation."""
MAX_ABSENCES = 1.5
"""Target for the longest wait, in units of the longest absence; the half is for requests that are answered first."""
RAW = Path("benchmarks/results/turns.json")
_THERE = ("ready", "busy")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request; seconds of the benchmark's clock and since the request. `error` is empty for a complete answer."""

    model: str
    streams: bool
    began: float
    wait_seconds: float
    seconds: float
    error: str = ""


@dataclass(slots=True)
class Samples:
    """One situation: requests and state changes (time, model, state)."""

    place: str
    kept: bool
    seconds: float = 0.0
    answers: list[Answer] = field(default_factory=list)
    states: list[tuple[float, str, str]] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The name in the bars."""
        return f"{self.place}_{'warm' if self.kept else 'cold'}"

    @property
    def failed(self) -> list[Answer]:
        """Requests without a complete answer."""
        return [answer for answer in self.answers if answer.error]

    @property
    def waits(self) -> list[float]:
        """Seconds to the first token of all requests that got one."""
        return [answer.wait_seconds for answer in self.answers if not answer.error]

    @property
    def absences(self) -> list[float]:
        """Seconds from the moment a model took no new requests until it was ready again; one per swap."""
        return [there - gone for model in MODELS for gone, there in _absences(self.states, model)]

    @property
    def longest_silence_seconds(self) -> float:
        """The longest time without any answer."""
        ends = sorted(answer.began + answer.seconds for answer in self.answers)
        return max((later - sooner for sooner, later in itertools.pairwise(ends)), default=float("nan"))


def _absences(states: Sequence[tuple[float, str, str]], model: str) -> Iterator[tuple[float, float]]:
    gone: float | None = None
    was_there = False
    for at, name, state in states:
        if name != model:
            continue
        if state in _THERE:
            if gone is not None:
                yield gone, at
            gone, was_there = None, True
        elif was_there and gone is None:
            gone = at


class Bench:
    """A complete stack, its clients, and a reader of its events."""

    def __init__(self, root: Path, samples: Samples) -> None:
        entry = {"context_length": 512, "parallel": 2, "min_residency": 1, "warm": samples.kept}
        models = {name: {"path": f"bundled:{name}", **entry} for name in MODELS}
        env = {
            "INFERENCE_MEMORY_LIMIT_GB": LIMIT_GB,
            "INFERENCE_DEVICES": "sim:600MiB" if samples.place == "sim" else "cpu",
            "INFERENCE_WARM_CHECKPOINT": "off",  # the default of GPUs
        }
        routes = LOCAL_ROUTES.replace(", local/demo-mini", "")
        self._stack = Stack(root, json.dumps({"models": models}), routes, env)
        self._samples = samples
        self._over = threading.Event()
        self._began = 0.0

    def run(self, swaps: int) -> None:
        """Runs until the number of swaps or MAX_SECONDS is reached. Clients finish their running requests."""
        self._stack.start()
        self._began = time.monotonic()
        threading.Thread(target=self._listen, daemon=True).start()
        clients = [
            threading.Thread(target=self._ask_again, args=(model, number, *how))
            for model in MODELS
            for number, how in enumerate(CLIENTS)
        ]
        try:
            for client in clients:
                client.start()
            while len(self._samples.absences) < swaps and self._now() < MAX_SECONDS:
                time.sleep(0.5)
            self._samples.seconds = self._now()
            self._over.set()
            for client in clients:
                client.join(TIMEOUT_SECONDS)
        finally:
            self._over.set()
            self._stack.kill()

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _listen(self) -> None:
        """Records the state changes of all models until the service ends."""
        port = self._stack.inference.port
        token = self._stack.state.read_secret(INFERENCE_TOKEN)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_SECONDS)
        try:
            connection.request("GET", "/events", headers={"Authorization": f"Bearer {token}"})
            for line in connection.getresponse():
                if line.startswith(b"data:") and b'"state"' in line:
                    data = json.loads(line[5:])
                    for model in data.get("models", [data["model"]] if "model" in data else []):
                        self._samples.states.append((self._now(), model["id"], model["headgate"]["state"]))
        except (OSError, http.client.HTTPException):
            return  # the service has ended

    def _ask_again(self, model: str, number: int, streams: bool, tokens: int, priority: str) -> None:
        for turn in itertools.count():
            if self._over.is_set():
                return
            body = chat_body(f"{number} {turn} hello there", model, max_tokens=tokens, stream=streams)
            self._samples.answers.append(self._ask(model, body, priority))

    def _ask(self, model: str, body: Mapping[str, Any], priority: str) -> Answer:
        began = self._now()
        first: float | None = None
        connection = http.client.HTTPConnection("127.0.0.1", self._stack.front.port, timeout=TIMEOUT_SECONDS)
        headers = {
            "Authorization": f"Bearer {self._stack.key}",
            "Content-Type": "application/json",
            "x-headgate-priority": priority,
        }
        error = "the answer had no end"
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
            answer = connection.getresponse()
            for line in answer:
                if answer.status != 200 or b'"error"' in line:
                    error = f"{answer.status}: {line[:300]!r}"
                elif line.startswith(b"data: [DONE]"):
                    error = ""
                elif b'"content"' in line:
                    first = self._now() if first is None else first
                    error = error if body["stream"] else ""
        except (OSError, http.client.HTTPException) as problem:
            error = repr(problem)
        finally:
            connection.close()
        if first is None:
            first, error = self._now(), error or "the answer had no content"
        return Answer(model, bool(body["stream"]), began, first - began, self._now() - began, error)


def tables(found: Sequence[Samples]) -> Iterator[str]:
    """The tables."""
    for samples in found:
        waits, absences = samples.waits, samples.absences
        yield ""
        yield (
            f"{samples.name}: {len(absences)} swaps in {samples.seconds:.0f} s, {len(samples.answers)} requests, "
            f"{len(samples.failed)} failed"
        )
        yield (
            f"  wait for the first token, s: p50 {percentile(waits, 0.5):.3f}, p99 {percentile(waits, 0.99):.2f}, "
            f"longest {max(waits, default=float('nan')):.2f}"
        )
        yield f"  absence of a model, s: {Middle.of(absences).text(2)}"
        yield f"  longest time without an answer: {samples.longest_silence_seconds:.2f} s"
        yield from (f"  failed: {answer.model}, {answer.error}" for answer in samples.failed[:5])


def bars(found: Sequence[Samples], swaps: int) -> Iterator[Bar]:
    """Bars: no failed request, no wait above MAX_ABSENCES, and no silence longer than an absence."""
    for samples in found:
        longest = max(samples.absences, default=float("nan"))
        yield Bar(f"turns_swaps_{samples.name}", len(samples.absences), "swaps", ">=", swaps)
        yield Bar(f"turns_failed_{samples.name}", len(samples.failed), "requests", "<=", 0)
        wait = max(samples.waits, default=float("nan")) / longest
        yield Bar(f"turns_longest_wait_{samples.name}", wait, "absences", "<=", MAX_ABSENCES)
        silence = samples.longest_silence_seconds / longest
        yield Bar(f"turns_silence_{samples.name}", silence, "absences", "<=", 1.0)


def measure(place: str, kept: bool, swaps: int) -> Samples:
    """Runs one situation."""
    samples = Samples(place, kept)
    with tempfile.TemporaryDirectory(prefix="hgt") as root:
        Bench(Path(root), samples).run(swaps)
    return samples


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark, prints tables and bars, and writes the raw samples."""
    quick = is_quick(environ)
    swaps = int(environ.get("SWAPS", "10" if quick else "50"))
    places = environ.get("PLACES", "cpu" if quick else "cpu,sim").split(",")
    kept = [value == "yes" for value in environ.get("KEPT", "no,yes").split(",")]
    found = []
    for place, keep in itertools.product(places, kept):
        found.append(measure(place, keep, swaps))
        sys.stderr.write(f"{found[-1].name}: {len(found[-1].absences)} swaps in {found[-1].seconds:.0f} s\n")
    raw: dict[str, Any] = {"cores": usable_cores(), "at": time.time(), "samples": [asdict(one) for one in found]}
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps(raw))
    sys.stdout.write("\n".join([*tables(found), "", *(bar.line() for bar in bars(found, swaps))]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
