"""`make bench-engine`: the worker and the complete stack beside llama-server, llama_cpp.server and llama-batched-bench.

Every round sends the same prompts to all systems in random order, and ratios are taken within a round, so that other
load of the machine affects all systems. The last lines are one BAR per target. Raw samples go to
benchmarks/results/engine.json.

Environment: MODELS (15m,135m,1b), STREAMS (1,8,32), SYSTEMS (worker,chain,llama-server,llama_cpp.server), QUICK=1 (at
most five minutes), ROUNDS, HEADGATE_PEERS_DIR.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import models, peers, report, systems
from benchmarks.client import Burst, Client, Seen
from benchmarks.figures import is_quick
from benchmarks.samples import (
    ANSWER_TOKENS,
    CHAIN,
    LLAMA_CPP_SERVER,
    LLAMA_SERVER,
    MODELS,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    QUESTION_TOKENS,
    WORKER,
    Limit,
    Prefix,
    Results,
    Sample,
)
from benchmarks.systems import Setting, System

RESULTS = Path(__file__).parent / "results" / "engine.json"
ROUNDS = {"15m": 12, "135m": 7, "1b": 3}
QUICK_ROUNDS = {"15m": 4, "135m": 2, "1b": 1}
SAMPLE_TOKENS = {"15m": 1536, "135m": 192, "1b": 192}
"""Minimum number of answer tokens in a sample. Samples of half a second are too noisy."""
SERIAL_STREAMS = 8
"""Maximum number of streams for llama_cpp.server, which answers one after the other."""
WARM_UP_TOKENS, WARM_UP_ANSWER_TOKENS = 32, 8
PREFIX_ROUNDS, PREFIX_QUESTIONS, PREFIX_ANSWER_TOKENS = 3, 16, 8
REST_SECONDS = 0.2
"""Pause before every sample, so that the threads of the sample before are asleep."""


class Prompts:
    """Texts of words with one token each. Their beginnings differ, so that no prefix is reused."""

    def __init__(self, words: Sequence[str], seed: int) -> None:
        self._words = words
        self._random = random.Random(seed)
        self._begun: set[tuple[str, ...]] = set()

    def text(self, tokens: int) -> str:
        """A new text of `tokens` tokens."""
        while True:
            words = self._random.choices(self._words, k=tokens)
            if (beginning := tuple(words[:2])) not in self._begun:
                self._begun.add(beginning)
                return "".join(f" {word}" for word in words)


def body(prompt: str, tokens: int) -> dict[str, Any]:
    """The same request for all systems: greedy, streamed, with usage."""
    return {
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def checked(system: System, burst: Burst, tokens: int, prompt_tokens: int | None = None) -> Burst:
    """Returns the burst if every stream has the requested length and prompt. Raises SystemExit otherwise."""
    for stream in burst.streams:
        wrong = stream.error
        if not wrong and stream.finish != "length":
            wrong = f"ended with {stream.finish}"
        if not wrong and (count := stream.usage.get("completion_tokens", tokens)) != tokens:
            wrong = f"{count} tokens instead of {tokens}"
        if not wrong and prompt_tokens and stream.usage.get("prompt_tokens", prompt_tokens) != prompt_tokens:
            wrong = f"the prompt has {stream.usage['prompt_tokens']} tokens instead of {prompt_tokens}"
        if wrong:
            raise SystemExit(f"{system.name}: {wrong}")
    return burst


def sample_prompts(model: str, streams: int) -> int:
    """Number of prompts in one sample."""
    return streams * max(1, math.ceil(SAMPLE_TOKENS[model] / (streams * ANSWER_TOKENS)))


def measure(client: Client, system: System, model: str, number: int, prompts: Sequence[str], streams: int) -> Sample:
    """Measures one sample: all prompts, `streams` of them at a time."""
    time.sleep(REST_SECONDS)
    groups = [prompts[first : first + streams] for first in range(0, len(prompts), streams)]
    before = system.cpu_seconds()
    bursts = []
    for group in groups:
        order = system.order([body(prompt, ANSWER_TOKENS) for prompt in group])
        bursts.append(checked(system, client.burst(order), ANSWER_TOKENS, PROMPT_TOKENS))
    used = system.cpu_seconds() - before
    seconds = sum(burst.seconds for burst in bursts)
    seen = [stream for burst in bursts for stream in burst.streams]
    return Sample(
        model=model,
        system=system.name,
        streams=streams,
        round=number,
        tokens_per_second=len(seen) * ANSWER_TOKENS / seconds,
        ttft=[stream.times[0] for stream in seen],
        gaps=[gap for stream in seen for gap in stream.gaps],
        client_share=sum(burst.cpu_seconds for burst in bursts) / seconds,
        system_share=used / seconds,
    )


def bench_model(
    name: str, rounds: int, streams: Sequence[int], names: Sequence[str], client: Client, found: Results, root: Path
) -> None:
    """Measures all loads of one model in rounds. Systems and the limit take turns."""
    path = models.path_of(models.SHAPES[name])
    prompts = Prompts(models.one_token_words(path), seed=MODELS.index(name))
    setting = Setting(path)
    built = peers.ensure()
    order = random.Random(MODELS.index(name))
    with contextlib.ExitStack() as stack:
        running = [stack.enter_context(system) for system in _systems(names, setting, root, built)]
        for system in running:  # warm-up
            for count in sorted({1, min(8, *streams), min(8, max(streams))}):
                asked = [body(prompts.text(WARM_UP_TOKENS), WARM_UP_ANSWER_TOKENS) for _ in range(count)]
                checked(system, client.burst(system.order(asked)), WARM_UP_ANSWER_TOKENS)
        for number in range(rounds):
            say(f"{name}: round {number + 1} of {rounds}")
            for count in streams:
                texts = [prompts.text(PROMPT_TOKENS) for _ in range(sample_prompts(name, count))]
                for system in order.sample(running, len(running)):
                    if system.name != LLAMA_CPP_SERVER or count <= SERIAL_STREAMS:
                        found.samples.append(measure(client, system, name, number, texts, count))
            rates = systems.batched_bench(setting, built, PROMPT_TOKENS, ANSWER_TOKENS, streams)
            found.limits += [Limit(name, count, number, *rates[count]) for count in streams]
            found.write(RESULTS)


def _systems(
    names: Sequence[str], setting: Setting, root: Path, built: peers.Peers
) -> list[contextlib.AbstractContextManager[System]]:
    known = {
        WORKER: lambda: _without_ready(setting, root),
        CHAIN: lambda: systems.chain(setting, root),
        LLAMA_SERVER: lambda: systems.llama_server(setting, root, built),
        LLAMA_CPP_SERVER: lambda: systems.llama_cpp_server(setting, root, built),
    }
    return [known[name]() for name in names]


@contextlib.contextmanager
def _without_ready(setting: Setting, root: Path) -> Iterator[System]:
    with systems.worker(setting, root) as (system, _ready):
        yield system


def bench_prefix(name: str, client: Client, found: Results, root: Path) -> None:
    """Measures questions with a shared prefix, and then the memory of the idle worker."""
    path = models.path_of(models.SHAPES[name])
    prompts = Prompts(models.one_token_words(path), seed=len(MODELS))
    setting = Setting(path, parallel=4, context=4096)
    with contextlib.ExitStack() as stack:
        ours, ready = stack.enter_context(systems.worker(setting, root))
        theirs = stack.enter_context(systems.llama_server(setting, root, peers.ensure()))
        for number in range(PREFIX_ROUNDS):
            say(f"{name}: shared prefix, round {number + 1} of {PREFIX_ROUNDS}")
            beginning = prompts.text(PREFIX_TOKENS)
            firsts: dict[str, float] = {}
            for turn in range(1 + PREFIX_QUESTIONS):
                question = beginning + prompts.text(QUESTION_TOKENS)
                for system in (ours, theirs) if (number + turn) % 2 else (theirs, ours):
                    seen = ask_after(client, system, question)
                    first = firsts.setdefault(system.name, seen.times[0])
                    if turn:
                        prefilled = seen.usage["prompt_tokens"] - seen.usage["prompt_tokens_details"]["cached_tokens"]
                        at = number * PREFIX_QUESTIONS + turn - 1
                        found.prefixes.append(Prefix(name, system.name, at, first, seen.times[0], prefilled))
        time.sleep(1.0)
        found.idle["pss"] = systems.pss_bytes(ours.pid)
        for buffer in ready.buffers:
            found.idle[buffer.kind] = found.idle.get(buffer.kind, 0) + buffer.bytes
    found.write(RESULTS)


def ask_after(client: Client, system: System, question: str) -> Seen:
    """Sends one question with a long prefix."""
    time.sleep(REST_SECONDS)
    burst = client.burst(system.order([body(question, PREFIX_ANSWER_TOKENS)]))
    (seen,) = checked(system, burst, PREFIX_ANSWER_TOKENS, PREFIX_TOKENS + QUESTION_TOKENS).streams
    return seen


def say(text: str) -> None:
    """Prints progress to stderr."""
    print(text, file=sys.stderr, flush=True)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark."""
    quick = is_quick(environ)
    rounds = QUICK_ROUNDS if quick else ROUNDS
    names = (environ.get("MODELS") or ("15m,135m" if quick else ",".join(MODELS))).split(",")
    streams = [int(count) for count in (environ.get("STREAMS") or "1,8,32").split(",")]
    measured = (environ.get("SYSTEMS") or ",".join((WORKER, CHAIN, LLAMA_SERVER, LLAMA_CPP_SERVER))).split(",")
    found = Results()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that context managers end their processes
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as root, Client() as client:
        for name in names:
            count = int(environ.get("ROUNDS") or rounds[name])
            bench_model(name, count, streams, measured, client, found, Path(root) / name)
        if WORKER in measured and LLAMA_SERVER in measured:
            bench_prefix(names[0] if quick else names[min(1, len(names) - 1)], client, found, Path(root) / "prefix")
    report.show(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
