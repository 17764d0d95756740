"""Measures answers with and without proposed tokens, from earlier text (`speculation: ngram`) or from a draft model.

    python -m benchmarks.speculation         MODELS=15m,135m STREAMS=1,8,32
    python -m benchmarks.speculation         SOURCE=draft MODELS=135m,demo STREAMS=1,8 RIGHT=0.9,0.7,0.3

Two engines of one model take turns with the same prompts. The model computes every step, and its sampler draws, but the
drawn tokens are replaced by those of a given answer: no model at hand quotes well, and the speed depends only on which
tokens were proposed. A word, a number or a run of punctuation is one token, so that the figures do not depend on a
vocabulary. Prompts are computed before the measurement.

A draft model computes as well, and RIGHT is the share of its tokens that are those of the answer. The model `demo` with
the draft model `demo-mini` is not changed: it answers questions that both have learned.

Environment: SOURCE (ngram, draft), MODELS (15m,135m), STREAMS (1,8,32), TEXTS (edit,json,quote,prose; prose for a draft
model), RIGHT (0.9,0.7,0.3), ROUNDS, ANSWER (tokens of an answer), THREADS (all cores; with 1 all times are CPU times,
which other load of the machine changes less).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import yaml

from benchmarks import models
from benchmarks.figures import Bar, Middle, ratios
from headgate.shared.parameters import Sampling
from inference import demo
from inference.protocol import Code
from inference.worker import llama
from inference.worker.backend import Constraint, TokenSampler
from inference.worker.engine.draft_model import DraftModel
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.ngram_lookup import NgramSource
from inference.worker.engine.output_tickets import Delivery, Ticket
from inference.worker.engine.speculation import Speculation
from inference.worker.llama.draft_loading import open_draft
from inference.worker.llama.llama_process import LogTail
from inference.worker.sampling import ChainSampler
from inference.worker.steps import Candidate, Limits
from inference.worker.worker_errors import WorkerError
from inference.worker_link import DeviceGrant, Grant

ROOT = Path(__file__).parent.parent
PROMPT_TOKENS = 240
FIRST_TOKEN = 1000
"""Tokens below are control tokens and single bytes."""
REST_SECONDS = 0.2
"""Pause before every sample, so that the threads of the other engine are asleep."""
MIN_GAIN, MAX_LOSS = 1.5, 0.97
REPETITIVE = ("edit", "json", "quote")
DRAFTS = {"135m": "20m", "demo": "demo-mini"}
LEARNED = "learned"
"""The text of a model whose own answers are measured."""


def edit(turn: int) -> tuple[str, str]:
    """A file, and the same file with another name for a variable and without some lines."""
    source = (ROOT / "benchmarks" / "figures.py").read_text()
    lines = source.splitlines(keepends=True)[14 + turn :]
    names = (("value", "number"), ("target", "limit"), ("ratios", "quotients"), ("least", "smallest"))
    old, new = names[turn % len(names)]
    changed = [re.sub(rf"\b{old}\b", new, line) for line in lines if "smallest" not in line]
    return f"Rename {old} to {new}:\n" + "".join(lines), "".join(changed)


def as_json(turn: int) -> tuple[str, str]:
    """A task, and a list of objects with the same keys."""
    chance = random.Random(turn)
    names = ["mill", "gate", "water", "stream", "wheel", "stone", "flour", "river", "grain", "sluice"]
    items = [
        {
            "id": chance.randrange(10_000),
            "name": " ".join(chance.sample(names, 2)),
            "state": chance.choice(["open", "closed", "broken"]),
            "position": {"x": chance.randrange(500), "y": chance.randrange(500)},
            "tags": chance.sample(names, 2),
        }
        for _ in range(60)
    ]
    return f"List all gates as JSON, as in {json.dumps(items[:3], indent=2)}\n", json.dumps(items[3:], indent=2)


def _sentences(turn: int) -> list[str]:
    """The answers that the demo models learn, in another order for each turn."""
    questions = yaml.safe_load((demo.bundled_path("demo").parent.parent / "corpus" / "questions.yaml").read_text())
    answers = [question["answer"] for question in questions]
    return random.Random(turn).sample(answers, len(answers))


def quote(turn: int) -> tuple[str, str]:
    """A text, and an answer that quotes three sentences at a time and adds a few words."""
    sentences = _sentences(turn)
    answer = [
        f'You wrote: "{" ".join(sentences[at : at + 3])}" {" ".join(sentences[20 + at].split()[:6])}. '
        for at in range(0, 20, 3)
    ]
    return "Comment on this text:\n\n" + " ".join(sentences[:20]), "".join(answer)


def prose(turn: int) -> tuple[str, str]:
    """A text, and another text."""
    sentences = _sentences(turn)
    return "Go on:\n\n" + " ".join(sentences[:20]), " ".join(sentences[20:])


def learned(turn: int) -> str:
    """A question that the demo models answer by heart, those with the longest answers first."""
    questions = yaml.safe_load((demo.bundled_path("demo").parent.parent / "corpus" / "questions.yaml").read_text())
    return str(sorted(questions, key=lambda question: -len(question["answer"]))[turn]["ask"][0])


TEXTS = {"edit": edit, "json": as_json, "quote": quote, "prose": prose}


class Tokens:
    """Numbers of words, in the order of their first use."""

    def __init__(self, size: int) -> None:
        self._ids: dict[str, int] = {}
        self._size = size

    def of(self, text: str) -> list[int]:
        """The tokens of a text."""
        pieces = re.findall(r" ?\w+| ?[^\w\s]+|\s+", text)
        return [FIRST_TOKEN + self._ids.setdefault(piece, len(self._ids)) % self._size for piece in pieces]


class GivenAnswer:
    """A sampler that draws like another one, but returns given tokens."""

    def __init__(self, inner: ChainSampler, answer: Sequence[int]) -> None:
        self._inner = inner
        self._left = iter(answer)

    def sample(self, index: int) -> int:
        """The next token of the answer."""
        self._inner.sample(index)
        return next(self._left)

    def accept(self, tokens: Sequence[int]) -> None:
        """Unused."""

    def close(self) -> None:
        """Frees the other sampler."""
        self._inner.close()


class GivenDraft(DraftModel):
    """A draft model that computes as another one, but proposes tokens of given answers; `right` is their share."""

    right = 1.0
    work: Sequence[tuple[list[int], list[int]]] = ()
    _chance = random.Random(1)

    def _choose(self, item: Candidate, proposed: Sequence[int], index: int) -> int:
        wrong = super()._choose(item, proposed, index)
        for prompt, answer in self.work:
            if item.tokens[: len(prompt)] == array("i", prompt):
                place = len(item.tokens) - len(prompt) + len(proposed)
                return answer[place] if place < len(answer) and self._chance.random() < self.right else wrong
        return wrong


class Bench:
    """A context and an engine of their own, with or without proposals."""

    def __init__(self, model: llama.Model, grant: Grant, make: Callable[[Bench], Speculation | None]) -> None:
        self.model = model
        self.grant = grant
        self.clock = time.process_time if grant.threads == 1 else time.perf_counter
        self.context = llama.Context(self.model, llama.context_params(grant, pooling=None))
        self.draft: GivenDraft | None = None
        self._closing = contextlib.ExitStack()
        self._closing.callback(self.context.close)
        warm_up(self.context)
        context = self.context
        limits = Limits(
            context.n_slots, grant.context_length, context.n_batch, 64, context.can_trim, context.n_outputs,
            context.min_copied,
        )  # fmt: skip
        self._loop = asyncio.new_event_loop()
        self._ended = threading.Semaphore(0)
        self._answers: dict[int, list[int]] = {}
        self.engine = Engine(
            context, model, self._sampler, limits, self._deliver, print, self.clock, speculation=make(self)
        )
        self.engine.start()

    def open_draft(self) -> Speculation:
        """Proposals of the draft model of the grant."""
        draft = open_draft(self.grant, self.model, self.context)
        self._closing.callback(draft.model.close)
        self._closing.callback(draft.context.close)
        warm_up(draft.context)
        self.draft = GivenDraft(
            draft.context, slots=self.context.n_slots, context=draft.context_length, batch=draft.context.n_batch,
            vocabulary=draft.n_vocab, cells=0, clock=self.clock,
        )  # fmt: skip
        return Speculation(self.draft)

    def answer(self, work: Sequence[tuple[list[int], list[int]]], *, only_prompts: bool = False) -> float:
        """Tokens per second of concurrent answers (prompt, answer). An empty answer is that of the model."""
        time.sleep(REST_SECONDS)
        self._answers = {number: answer for number, (_prompt, answer) in enumerate(work)}
        if self.draft is not None:
            self.draft.work = [pair for pair in work if pair[1]]
        counters = self.engine.counters
        started, before = self.clock(), counters.generated_tokens
        for number, (prompt, answer) in enumerate(work):
            most = 1 if only_prompts else len(answer) or self.grant.context_length - len(prompt)
            sampling = Sampling(temperature=0.0, seed=number)
            self.engine.submit(Work([prompt], 1, sampling, most), Ticket(self._loop))
        for _ in work:
            assert self._ended.acquire(timeout=300), "an answer did not end"
        return (counters.generated_tokens - before) / (self.clock() - started)

    def close(self) -> None:
        """Stops the engine and frees the contexts."""
        self.engine.stop(WorkerError(Code.MODEL_FAILED, "the benchmark has ended"))
        self._closing.close()
        self._loop.close()

    def _sampler(self, sampling: Sampling, choice: int, _constraint: Constraint | None) -> TokenSampler:
        assert sampling.seed is not None
        own = ChainSampler(self.model, self.context, sampling, choice)
        return GivenAnswer(own, answer) if (answer := self._answers[sampling.seed]) else own

    def _deliver(self, deliveries: list[Delivery]) -> None:
        for _ticket, output in deliveries:
            if output.error is not None:
                raise output.error
            if output.finish is not None:
                self._ended.release()


def warm_up(context: llama.Context) -> None:
    """Computes the first step on a thread that ends (`inference.worker.loading.load`)."""
    thread = threading.Thread(target=context.warm_up)
    thread.start()
    thread.join()


SOURCES: dict[str, Callable[[Bench], Speculation]] = {
    "ngram": lambda _bench: Speculation(NgramSource()),
    "draft": Bench.open_draft,
}


@contextlib.contextmanager
def benches(
    path: Path, draft: Path | None, source: str, streams: int, context_length: int, threads: int | None
) -> Iterator[tuple[Bench, Bench]]:
    """The engine without and the engine with proposals; both use the same weights."""
    grant = Grant(
        model_id="bench",
        path=str(path),
        draft=None if draft is None else str(draft),
        devices=(DeviceGrant("cpu", "cpu"),),
        gpu_layers=0,
        context_length=context_length,
        parallel=max(4, streams),
        threads=threads,
    )
    model = llama.Model(str(path), llama.model_params(grant))
    with contextlib.ExitStack() as stack:
        stack.callback(model.close)
        found = []
        for make in (lambda _bench: None, SOURCES[source]):
            found.append(Bench(model, grant, make))
            stack.callback(found[-1].close)
        yield found[0], found[1]


def path_of(name: str) -> Path:
    """The file of a random model or of a bundled one."""
    return demo.bundled_path(name) if name in demo.BUNDLED else models.path_of(models.SHAPES[name])


def work_of(
    name: str, text: str, streams: int, answer_tokens: int, model: llama.Model
) -> list[tuple[list[int], list[int]]]:
    """A prompt and an answer per stream; the answer is empty if the model gives it."""
    work: list[tuple[list[int], list[int]]] = []
    if text == LEARNED:
        for turn in range(streams):
            chat = f"<|im_start|>user\n{learned(turn)}<|im_end|>\n<|im_start|>assistant\n"
            work.append((model.tokenize(chat, parse_special=True), []))
        return work
    tokens = Tokens(models.SHAPES[name].vocabulary - FIRST_TOKEN)
    for turn in range(streams):
        prompt, answer = (tokens.of(part) for part in TEXTS[text](turn))
        work.append((prompt[:PROMPT_TOKENS], answer[:answer_tokens]))
    return work


def measure(
    name: str, source: str, streams: int, texts: Sequence[str], rounds: int, answer_tokens: int, threads: int | None
) -> list[Bar]:
    """Measures one model with a number of streams; prints a row per text. `texts` of a draft model may be shares."""
    draft = path_of(DRAFTS[name]) if source == "draft" else None
    bars = []
    with benches(path_of(name), draft, source, streams, PROMPT_TOKENS + answer_tokens, threads) as (plain, proposing):
        for text in texts:
            if proposing.draft is not None and text != LEARNED:
                proposing.draft.right = float(text)
            written = text if text in TEXTS or text == LEARNED else "prose"
            work = work_of(name, written, streams, answer_tokens, plain.model)
            rates: tuple[list[float], list[float]] = ([], [])
            before = _counts(proposing)
            for bench in (plain, proposing):
                bench.answer(work, only_prompts=True)
            for number in range(rounds):
                order = (0, 1) if number % 2 else (1, 0)
                for which in order:
                    rates[which].append((plain, proposing)[which].answer(work))
            proposed, accepted = (now - then for now, then in zip(_counts(proposing), before, strict=True))
            gain = Middle.of(ratios(rates[1], rates[0]))
            share = f"{accepted / proposed:.2f} of {proposed}" if proposed else "none proposed"
            sys.stdout.write(
                f"{name}, {streams} streams, {text}: off {Middle.of(rates[0]).text()} tok/s, "
                f"{source} {Middle.of(rates[1]).text()} tok/s, ratio {gain.text(2)}, accepted {share}\n"
            )
            sys.stdout.flush()
            target = MIN_GAIN if streams == 1 and text in REPETITIVE else MAX_LOSS
            bars.append(Bar(f"speculation-{name}-{streams}-{text}", gain.value, "ratio", ">=", target))
    return bars


def _counts(bench: Bench) -> tuple[int, int]:
    counters = bench.engine.counters
    return counters.proposed_tokens, counters.accepted_tokens


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs the benchmark."""
    llama.start(LogTail(lambda _line: None))
    bars = []
    source = environ.get("SOURCE", "ngram")
    for name in environ.get("MODELS", "15m,135m" if source == "ngram" else "135m,demo").split(","):
        for streams in map(int, environ.get("STREAMS", "1,8,32").split(",")):
            texts = environ.get("TEXTS", ",".join(TEXTS)) if source == "ngram" else environ.get("RIGHT", "0.9,0.7,0.3")
            if name in demo.BUNDLED:
                texts = LEARNED
            rounds, answer = int(environ.get("ROUNDS", "5")), int(environ.get("ANSWER", "192"))
            threads = int(environ.get("THREADS", "0")) or None
            bars += measure(name, source, streams, texts.split(","), rounds, answer, threads)
    sys.stdout.write("".join(bar.line() + "\n" for bar in bars))
    return 0


if __name__ == "__main__":
    sys.exit(main())
