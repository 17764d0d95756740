"""Measures stored sequences: what a conversation costs that lost its slot, and what storing costs the others.

    python -m benchmarks.kv      MODELS=135m,1b PLACES=cpu,sim KV_TYPES=f16,q8_0 ROUNDS=3
                                 PARTS=paths,alternating,gaps,misses,lookup; QUICK=1: 135m, f16, on the CPU, one round

Paths: a conversation of 4,096 tokens is computed, and then continued after it lost its slot, after its model was
unloaded, after `kill -9` of its worker, on another device, from disk, and after a restart of the service. The time to
the first token includes the load of the model after a kill and a restart. Answers and log probabilities are compared
with those of the sequence in its slot: both continue from the same number of cached tokens, so equal bytes give equal
numbers. (A GPU computes the last token of a cold prompt in a larger batch, with other last digits.) Files are removed
from the page cache before they are read.

Alternating: 40 conversations take turns on 8 slots, with stored sequences, without (INFERENCE_KV_ENABLED=false), and at
`llama-server --cache-ram` on the CPU; the systems are interleaved. Gaps: the time between tokens of two streams while
other conversations are restored and saved, against the same requests to a conversation in its slot. Misses: new prompts
with and without stored sequences.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.client import Burst, Client, Seen, run
from benchmarks.figures import Bar, Middle, is_quick, ratios
from benchmarks.models import SHAPES, Shape, one_token_words, path_of
from benchmarks.peers import ensure
from benchmarks.switching import drop_from_cache
from benchmarks.systems import MODEL_ID, Setting, System, llama_server
from headgate.cli.bench import percentile
from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.worker.cpu_cores import usable_cores
from inference.worker.kv.catalog import Catalog
from inference.worker.steps import StoredSequence
from tests.rigs.stack import Stack

TOKENS = 4096
ANSWER_TOKENS = 16
DEVICES = {"cpu": "cpu", "sim": "sim:2x4GiB", "gpu": "auto"}
KV_TYPES = {"f16": 2.0, "q8_0": 34 / 32}
"""Bytes of a value in the KV cache."""
PATHS = {"ram": 0.15, "unloaded": 0.15, "killed": 0.3, "moved": 0.15, "disk": 0.3, "restarted": 0.3}
"""The largest allowed share of the time of a prefill, by path."""
DISK_RATIO = 0.7
"""The smallest allowed rate of restores from disk, relative to reading a file."""
CONVERSATIONS, SLOTS = 40, 8
TURN_TOKENS = {"15m": 1024, "135m": 1024, "1b": 384}
"""Tokens of an alternating conversation: on two cores the prefill of all conversations takes about two minutes."""
QUESTION_TOKENS = 16
RESTORES = 5
"""Restores from host memory in each round."""
MISS_TOKENS, MISSES = 512, 10
PAUSE_SECONDS = 0.2
"""Time between two requests to conversations beside the streams."""
SETTLE_SECONDS = 1.5
"""Heartbeats, and files that are being written, within this time."""
WAIT_SECONDS = 900.0
RAW = Path("benchmarks/results/kv.json")


@dataclass(slots=True)
class Paths:
    """One model in one place: seconds to the first token, also of `cold` ones; RESTORES per round from `ram`, else one.

    `missed`: restored conversations with less than 90 % cached tokens. `texts`, `numbers`: other answers and other
    log probabilities than in the slot. `rates`: bytes per second of restores and of the copies beside them.
    """

    model: str
    place: str
    kv_type: str
    seconds: dict[str, list[float]] = field(default_factory=dict)
    missed: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The end of the names of its bars."""
        return f"{self.kv_type}_{self.model}_{self.place}"

    def share_of_prefill(self, path: str) -> float:
        """Median over the rounds of the seconds on a path, relative to the cold first token of their round."""
        seconds, cold = self.seconds[path], self.seconds["cold"]
        prefills = [one for one in cold for _ in range(len(seconds) // len(cold))]
        return median(ratios(seconds, prefills))


@dataclass(slots=True)
class Samples:
    """One number per round, by `part`, the end of the bar's name, and situation."""

    values: dict[str, dict[str, dict[str, list[float]]]] = field(default_factory=dict)

    def add(self, part: str, situation: str, where: str, value: float) -> None:
        """Adds the number of a round."""
        self.values.setdefault(part, {}).setdefault(where, {}).setdefault(situation, []).append(value)


class Bench:
    """An inference service with one model, and a client of it."""

    def __init__(
        self, root: Path, shape: Shape, place: str, *, context: int, parallel: int, kv_type: str = "f16", **kv: str
    ) -> None:
        """`kv`: settings below INFERENCE_KV_."""
        entry = {
            "path": str(path_of(shape)), "context_length": context, "parallel": parallel, "kv_type": kv_type,
            "idle_timeout": "never",
        }  # fmt: skip
        self.disk = root / "kv"
        environment = {"INFERENCE_DEVICES": DEVICES[place], "INFERENCE_KV_DIR": str(self.disk)}
        environment |= {f"INFERENCE_KV_{name.upper()}": value for name, value in kv.items()}
        self._stack = Stack(root, models=json.dumps({"models": {MODEL_ID: entry}}), inference_env=environment)

    def __enter__(self) -> Bench:
        try:
            self._stack.inference.start(wait_for="/readyz")
            self.post(f"/models/{MODEL_ID}/load", {})
            self.ask(" hello")
        except BaseException:
            self._stack.kill()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.kill()

    @property
    def system(self) -> System:
        """The service as the load generators see it."""
        return system_of(self._stack)

    def post(self, path: str, body: Any) -> dict[str, Any]:
        """JSON of the inference service. Raises SystemExit with its error."""
        try:
            return dict(self._stack.ask(path, body, direct=True, seconds=WAIT_SECONDS))
        except urllib.error.HTTPError as error:
            raise SystemExit(f"{path}: {error.read().decode()}") from error

    def ask(self, prompt: str) -> Seen:
        """One streamed answer."""
        return answers(self.system, [prompt]).streams[0]

    def insist(self, prompt: str) -> tuple[float, Seen]:
        """Repeats the request until it is answered; seconds from the first one to the first token, and the answer."""
        began = time.perf_counter()
        while True:
            sent = time.perf_counter()
            with contextlib.suppress(OSError, SystemExit):  # no worker, or a backoff after its end
                seen = self.ask(prompt)
                return sent - began + seen.times[0], seen
            if sent - began > WAIT_SECONDS:
                raise SystemExit("the model does not answer any more")
            time.sleep(0.02)

    def numbers(self, prompt: str) -> list[float]:
        """Log probabilities of an answer's tokens and of their alternatives."""
        body = {
            "model": MODEL_ID, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "logprobs": 5,
        }  # fmt: skip
        found = self.post("/v1/completions", body)["choices"][0]["logprobs"]
        return [*found["token_logprobs"], *(value for top in found["top_logprobs"] for value in top.values())]

    def displace(self, words: Words) -> None:
        """Another prompt takes the slot."""
        self.ask(words.prompt(64))

    def kill_worker(self) -> None:
        """SIGKILL."""
        os.kill(self._stack.worker_pid(MODEL_ID), signal.SIGKILL)

    def move(self) -> None:
        """Loads the model on the second device or back."""
        (here,) = self._stack.model(MODEL_ID)["devices"]
        self.post(f"/models/{MODEL_ID}/move", {"device": "gpu-1" if here == "gpu-0" else "gpu-0"})

    def settle(self) -> list[Path]:
        """Waits until the files of stored sequences are written; returns them."""
        before: list[tuple[Path, int]] | None = None
        while True:
            now = sorted((path, path.stat().st_size) for path in self.disk.rglob("*") if path.is_file())
            if now == before:
                return [path for path, _ in now if path.suffix == ".kv"]
            before = now
            time.sleep(SETTLE_SECONDS)

    def restart(self) -> None:
        """Ends all processes and starts them again."""
        self._stack.inference.stop()
        for path in self.settle():
            drop_from_cache(path)
        self._stack.inference.start(wait_for="/readyz")

    def counter(self, name: str, label: str) -> float:
        """A counter of the service after the next heartbeat; 0 if it is missing."""
        time.sleep(SETTLE_SECONDS)
        with urllib.request.urlopen(f"{self._stack.inference.url}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        found = re.search(rf'^inference_kv_{name}_total{{[^}}]*"{label}"[^}}]*}} (\S+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def transferred(self, direction: str) -> np.ndarray:
        """Bytes and seconds of transfers so far."""
        return np.array([self.counter(f"transfer_{unit}", direction) for unit in ("bytes", "seconds")])


def system_of(stack: Stack) -> System:
    """An inference service as the load generators see it."""
    token = stack.state.read_secret(INFERENCE_TOKEN)
    service = stack.inference
    return System("headgate", ("tcp", "127.0.0.1", service.port), service.pid, {"Authorization": f"Bearer {token}"})


class Words:
    """Prompts of words with one token each."""

    def __init__(self, shape: Shape, seed: int = 7) -> None:
        self._words = one_token_words(path_of(shape))
        self._chance = random.Random(seed)

    def prompt(self, tokens: int) -> str:
        """A prompt with a new beginning."""
        return " " + " ".join(self._chance.choices(self._words, k=tokens))


def answers(system: System, prompts: Sequence[str], tokens: int = ANSWER_TOKENS) -> Burst:
    """Answers to prompts that are sent at once. Raises SystemExit if one fails."""
    common = {"max_tokens": tokens, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    burst = run(system.order([{"prompt": prompt, "ignore_eos": True, **common} for prompt in prompts]))
    if failed := [seen.error for seen in burst.streams if seen.error]:
        raise SystemExit(f"{system.name}: {failed[0]}")
    return burst


# --- paths -----------------------------------------------------------------------------------------------------------
def measure_paths(found: Paths, rounds: int) -> None:
    """Measures all paths. Host memory has room for one and a half conversations, so that a second one displaces it."""
    shape = SHAPES[found.model]
    count_bytes = 2 * shape.layers * shape.keyed * KV_TYPES[found.kv_type] * TOKENS
    ram_gb = f"{1.6 * count_bytes / 2**30:.4f}"
    words = Words(shape)
    common = {"context": TOKENS + 128, "parallel": 1, "kv_type": found.kv_type}
    with (
        tempfile.TemporaryDirectory(prefix="hgk") as root,
        Bench(Path(root), shape, found.place, **common, ram_gb=ram_gb, disk_gb="16") as bench,  # type: ignore[arg-type]
    ):
        for number in range(rounds):
            tell(f"{found.name}: paths, round {number + 1} of {rounds}")
            _one_round(found, bench, words, int(count_bytes))


def _one_round(found: Paths, bench: Bench, words: Words, count_bytes: int) -> None:
    prompt = words.prompt(TOKENS)
    cold = bench.ask(prompt)
    found.seconds.setdefault("cold", []).append(cold.times[0])
    text, numbers = bench.ask(prompt).text, bench.numbers(prompt)

    def again(path: str) -> None:
        seconds, seen = bench.insist(prompt)
        cached = (seen.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        found.seconds.setdefault(path, []).append(seconds)
        for counts, differs in (
            (found.missed, cached < 0.9 * TOKENS),
            (found.texts, seen.text != text),
            (found.numbers, bench.numbers(prompt) != numbers),
        ):
            counts[path] = counts.get(path, 0) + differs

    for _ in range(RESTORES):
        bench.displace(words)
        before = bench.transferred("load")
        again("ram")
        _rate(found, "ram", bench.transferred("load") - before)
        found.rates.setdefault("memory", []).append(memory_rate(count_bytes))
    bench.displace(words)
    bench.post(f"/models/{MODEL_ID}/unload", {})
    bench.post(f"/models/{MODEL_ID}/load", {})
    again("unloaded")
    bench.displace(words)
    bench.kill_worker()
    again("killed")
    if found.place == "sim":
        bench.displace(words)
        bench.move()
        again("moved")
    bench.displace(words)
    bench.settle()
    bench.ask(words.prompt(TOKENS))
    bench.displace(words)
    for file in (files := bench.settle()):
        drop_from_cache(file)
    large = [file for file in files if file.stat().st_size > count_bytes / 2]
    unread = max(large, key=lambda file: file.stat().st_mtime, default=None)  # a first read is slower than a second one
    before, hits = bench.transferred("read"), bench.counter("hits", "disk")
    again("disk")
    if bench.counter("hits", "disk") == hits:
        found.missed["disk"] += 1
    _rate(found, "disk", bench.transferred("read") - before)
    if unread is not None:
        found.rates.setdefault("file", []).append(file_rate(unread))
    bench.displace(words)
    bench.restart()
    again("restarted")


def _rate(found: Paths, name: str, transferred: np.ndarray) -> None:
    count, seconds = transferred
    found.rates.setdefault(name, []).append(count / seconds if seconds else float("nan"))


def memory_rate(count_bytes: int) -> float:
    """Bytes per second of a copy in memory; the median of five."""
    source, target = (np.ones(count_bytes, np.uint8) for _ in range(2))
    return count_bytes / median(_seconds(lambda: np.copyto(target, source)) for _ in range(5))


def file_rate(path: Path) -> float:
    """Bytes per second of reading a file that is not in the page cache."""
    drop_from_cache(path)
    buffer = bytearray(2**23)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass

    return path.stat().st_size / _seconds(read)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


# --- loads -----------------------------------------------------------------------------------------------------------
def measure_alternating(found: Samples, model: str, place: str, rounds: int, tokens: int) -> None:
    """Turns per second of 40 conversations on 8 slots; each round continues all of them, eight at a time."""
    shape, words = SHAPES[model], Words(SHAPES[model])
    context = tokens + (rounds + 2) * QUESTION_TOKENS + ANSWER_TOKENS
    common: dict[str, Any] = {"context": context, "parallel": SLOTS}
    with contextlib.ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hgk")))
        systems = {
            "stored": stack.enter_context(Bench(root / "on", shape, place, **common, ram_gb="6")).system,
            "dropped": stack.enter_context(Bench(root / "off", shape, place, **common, enabled="false")).system,
        }
        if place == "cpu":
            setting = Setting(path_of(shape), SLOTS, context)
            peer = llama_server(setting, root / "peer", ensure(), "--cache-ram", "6144")
            systems["llama-server"] = stack.enter_context(peer)
        prompts = [words.prompt(tokens) for _ in range(CONVERSATIONS)]
        for number in range(rounds + 1):
            for name in rotated(list(systems), number):
                tell(f"{model} {place}: alternating, round {number} of {rounds}, {name}")
                seconds = sum(answers(systems[name], wave).seconds for wave in waves(prompts))
                if number:  # the first round computes all conversations
                    found.add("alternating", name, f"{model}_{place}", CONVERSATIONS / seconds)
            prompts = [prompt + words.prompt(QUESTION_TOKENS) for prompt in prompts]


def waves(prompts: Sequence[str]) -> Iterator[Sequence[str]]:
    """Prompts that are sent at once."""
    for start in range(0, len(prompts), SLOTS):
        yield prompts[start : start + SLOTS]


def rotated(names: Sequence[str], number: int) -> list[str]:
    """Each round begins with another one."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def measure_gaps(found: Samples, model: str, place: str, rounds: int) -> None:
    """The 99th percentile of the time between tokens of two streams on four slots."""
    shape, words = SHAPES[model], Words(SHAPES[model])
    with (
        tempfile.TemporaryDirectory(prefix="hgk") as root,
        Bench(Path(root), shape, place, context=TOKENS // 2 + 256, parallel=4, ram_gb="4") as bench,
        Client() as client,
    ):
        conversations = [words.prompt(TOKENS // 2) for _ in range(3)]  # one more than the slots beside the streams
        for prompt in conversations:
            bench.ask(prompt)
        cases = {"hot": conversations[:1], "moving": conversations}
        for number in range(rounds):
            for name in rotated(list(cases), number):
                tell(f"{model} {place}: gaps, round {number + 1} of {rounds}, {name}")
                with beside(bench.system, cases[name]):
                    gaps = [gap for seen in streams(client, bench.system, words).streams for gap in seen.gaps]
                found.add("gaps", name, f"{model}_{place}", percentile(gaps, 0.99))


def streams(client: Client, system: System, words: Words) -> Burst:
    """Two long answers to short prompts."""
    common = {"max_tokens": 192, "temperature": 0, "stream": True, "ignore_eos": True}
    burst = client.burst(system.order([{"prompt": words.prompt(16), **common} for _ in range(2)]))
    if failed := [seen.error for seen in burst.streams if seen.error]:
        raise SystemExit(f"a measured stream failed: {failed[0]}")
    return burst


@contextlib.contextmanager
def beside(system: System, prompts: Sequence[str]) -> Iterator[None]:
    """Continues the conversations in turn, a token each."""
    over = threading.Event()

    def work() -> None:
        for prompt in itertools.cycle(prompts):
            answers(system, [prompt], 1)
            if over.wait(PAUSE_SECONDS):
                return

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def measure_misses(found: Samples, model: str, place: str, rounds: int) -> None:
    """Seconds to the first token of new prompts, in turn with stored sequences and without."""
    shape, words = SHAPES[model], Words(SHAPES[model])
    common: dict[str, Any] = {"context": MISS_TOKENS + 64, "parallel": 1}
    with (
        tempfile.TemporaryDirectory(prefix="hgk") as root,
        Bench(Path(root) / "on", shape, place, **common, ram_gb="1") as stores,
        Bench(Path(root) / "off", shape, place, **common, enabled="false") as drops,
    ):
        tell(f"{model} {place}: misses")
        systems = {"stored": stores, "dropped": drops}
        for number in range(MISSES * rounds):
            for name in rotated(list(systems), number):
                found.add("misses", name, f"{model}_{place}", systems[name].ask(words.prompt(MISS_TOKENS)).times[0])


def lookup_seconds(count: int = 10_000, tokens: int = 1024) -> list[float]:
    """Seconds to find the best of `count` sequences for each of 100 prompts, the median of five.

    Sequences and prompts share beginnings of many lengths.
    """
    chance = np.random.default_rng(7)
    common = chance.integers(0, 32_000, tokens, np.int32)

    def made() -> array[int]:
        shared = int(chance.integers(0, tokens))
        rest = chance.integers(0, 32_000, tokens - shared, np.int32)
        return array("i", np.concatenate([common[:shared], rest]).tobytes())

    catalog = Catalog()
    for sequence in {made().tobytes() for _ in range(count)}:
        catalog.add(StoredSequence(array("i", sequence), ""))

    def lookup(prompt: array[int]) -> float:
        return _seconds(lambda: list(catalog.candidates(prompt, "", tokens)))

    return [median(lookup(prompt) for _ in range(5)) for prompt in (made() for _ in range(100))]


# --- report ----------------------------------------------------------------------------------------------------------
def tables(paths: Sequence[Paths], loads: Samples) -> Iterator[str]:
    """Tables of medians over rounds, with the smallest and the largest value."""
    for found in paths:
        yield f"\n{found.name}, {TOKENS} tokens, seconds to the first token: median [least .. most]"
        for path, seconds in found.seconds.items():
            yield f"  {path:<14}{Middle.of(seconds).text(3):>28}"
        for name, rates in found.rates.items():
            yield f"  {name + ', GB/s':<14}{Middle.of(rates).text(2, 1e-9):>28}"
    for part, places in loads.values.items():
        for where, situations in places.items():
            yield f"\n{part} {where}: median [least .. most]"
            yield from (f"  {name:<14}{Middle.of(values).text(4):>34}" for name, values in situations.items())


def bars(paths: Sequence[Paths], loads: Samples) -> Iterator[Bar]:
    """The bars that these samples allow, from ratios of paired rounds. A path that restored too little has no time."""
    for found in paths:
        for path, target in PATHS.items():
            if path not in found.seconds:
                continue
            share = float("nan") if found.missed[path] else found.share_of_prefill(path)
            yield Bar(f"kv_ttft_{path}_over_prefill_{found.name}", share, "ratio", "<=", target)
            yield Bar(f"kv_answers_differ_{path}_{found.name}", found.texts[path], "answers", "<=", 0)
            yield Bar(f"kv_logprobs_differ_{path}_{found.name}", found.numbers[path], "answers", "<=", 0)
        if found.place == "cpu":  # on other devices the link is the limit
            share = median(ratios(found.rates["ram"], found.rates["memory"]))
            yield Bar(f"kv_ram_rate_over_copy_{found.name}", share, "ratio", ">=", 0.7)
        if "file" in found.rates:
            share = median(ratios(found.rates["disk"], found.rates["file"]))
            yield Bar(f"kv_disk_rate_over_read_{found.name}", share, "ratio", ">=", DISK_RATIO)
    for part, above, below, op, target in (
        ("alternating", "stored", "dropped", ">=", 3.0),
        ("alternating", "stored", "llama-server", ">=", 1.3),
        ("gaps", "moving", "hot", "<=", 1.5),
        ("misses", "stored", "dropped", "<=", 1.03),
    ):
        for where, values in loads.values.get(part, {}).items():
            if below in values:
                share = median(ratios(values[above], values[below]))
                yield Bar(f"kv_{part}_{above}_over_{below}_{where}", share, "ratio", op, target)
    for where, values in loads.values.get("lookup", {}).items():
        yield Bar(f"kv_lookup_slowest_{where}", max(values["seconds"]) * 1e3, "ms", "<", 1.0)


def tell(line: str) -> None:
    """Prints progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark, prints tables and bars, and writes the samples."""
    quick = is_quick(environ)
    models = environ.get("MODELS", "135m" if quick else "135m,1b").split(",")
    places = environ.get("PLACES", "cpu" if quick else "cpu,sim").split(",")
    kv_types = environ.get("KV_TYPES", "f16" if quick else "f16,q8_0").split(",")
    rounds = int(environ.get("ROUNDS", "1" if quick else "3"))
    parts = environ.get("PARTS", "paths,alternating,gaps,misses,lookup").split(",")
    paths: list[Paths] = []
    loads = Samples()
    for model, place in itertools.product(models, places):
        for kv_type in kv_types if "paths" in parts else ():
            paths.append(Paths(model, place, kv_type))
            measure_paths(paths[-1], rounds)
        if "alternating" in parts:
            measure_alternating(loads, model, place, rounds, TURN_TOKENS[model] // (4 if quick else 1))
        if "gaps" in parts:
            measure_gaps(loads, model, place, rounds)
        if "misses" in parts:
            measure_misses(loads, model, place, rounds)
    if "lookup" in parts:
        for seconds in lookup_seconds():
            loads.add("lookup", "seconds", "10000", seconds)
    RAW.parent.mkdir(parents=True, exist_ok=True)
    raw = {"cores": usable_cores(), "at": time.time(), "paths": [asdict(one) for one in paths], **asdict(loads)}
    RAW.write_text(json.dumps(raw))
    print(*tables(paths, loads), "", *(bar.line() for bar in bars(paths, loads)), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
