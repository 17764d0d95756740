"""Measures a demo model: asks it the questions of the corpus with greedy decoding, and prints the scores.

    python -m inference.tools.demo_check [--model demo | --gguf FILE] [--json] [--wrong]

An answer counts only if it is exactly the trained one. In dialogues the model's own earlier answers are the history.
This development tool loads llama.cpp into its own process.
"""

# ruff: noqa: T201 - a command line prints

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from inference.demo import BUNDLED, bundled_path
from inference.tools import demo_corpus

BARS: dict[str, dict[str, float]] = {"demo": {"questions": 0.90, "dialogues": 0.80}, "demo-mini": {"questions": 0.60}}
"""Minimum share of exact answers for each bundled model; other scores are only reported."""

Message = dict[str, str]
Ask = Callable[[Sequence[Message]], str]
"""Answers a chat with greedy decoding: from messages with `role` and `content` to the text of the answer."""


@dataclass(frozen=True, slots=True)
class Miss:
    """One answer that differs from the trained one."""

    ask: str
    expected: str
    answer: str


@dataclass(frozen=True, slots=True)
class Score:
    """The number of exact answers of `total`, and the other answers."""

    name: str
    right: int
    total: int
    misses: tuple[Miss, ...]

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.right / self.total


def score_questions(ask: Ask, name: str, pairs: Sequence[tuple[str, str]], system: str | None = None) -> Score:
    """Ask each question of `pairs` (question, answer) in its own chat, after the system message if any."""
    opening = [] if system is None else [{"role": "system", "content": system}]
    misses = []
    for question, expected in pairs:
        answer = ask([*opening, {"role": "user", "content": question}])
        if answer != expected:
            misses.append(Miss(question, expected, answer))
    return Score(name, len(pairs) - len(misses), len(pairs), tuple(misses))


def score_dialogues(ask: Ask, name: str, dialogues: Sequence[demo_corpus.Dialogue]) -> Score:
    """Ask the turns of each dialogue in order, with the model's own answers as the history."""
    misses = []
    total = 0
    for dialogue in dialogues:
        messages: list[Message] = []
        for turn in dialogue.turns:
            messages.append({"role": "user", "content": turn.ask})
            answer = ask(messages)
            messages.append({"role": "assistant", "content": answer})
            total += 1
            if answer != turn.answer:
                misses.append(Miss(turn.ask, turn.answer, answer))
    return Score(name, total - len(misses), total, tuple(misses))


def all_scores(ask: Ask) -> tuple[Score, ...]:
    """All scores: those with a minimum first."""
    listed = [(question.ask, question.answer) for question in demo_corpus.listed_questions()]
    trained = [(question.ask, question.answer) for question in demo_corpus.questions() if question.kind != "unknown"]
    reworded = [(question.ask, question.answer) for question in demo_corpus.reworded_questions()]
    return (
        score_questions(ask, "questions", listed),
        score_dialogues(ask, "dialogues", demo_corpus.listed_dialogues()),
        score_questions(ask, "questions after a system message", listed, "You are a helpful assistant."),
        score_questions(ask, "all trained questions", trained),
        score_dialogues(ask, "all trained dialogues", demo_corpus.dialogues()),
        score_questions(ask, "reworded, never trained on", reworded),
    )


def _llama(path: Path, threads: int) -> Ask:
    """Load `path` on the CPU and answer with its own chat template."""
    from llama_cpp import Llama

    model = Llama(str(path), n_ctx=4096, n_threads=threads, n_gpu_layers=0, verbose=False)

    def ask(messages: Sequence[Message]) -> str:
        chat: Any = list(messages)
        answer: Any = model.create_chat_completion(chat, temperature=0.0, repeat_penalty=1.0, max_tokens=1000)
        return str(answer["choices"][0]["message"]["content"])

    return ask


def main(arguments: list[str] | None = None) -> int:
    """Command line; returns 0 if the model reaches every minimum, 1 otherwise."""
    parser = argparse.ArgumentParser(prog="python -m inference.tools.demo_check", description="Measure a demo model.")
    parser.add_argument("--model", choices=BUNDLED, default="demo")
    parser.add_argument(
        "--gguf", type=Path, metavar="FILE", help="measure this file with the minimum scores of --model"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--wrong", action="store_true", help="show the answers that differ, on stderr")
    given = parser.parse_args(arguments)
    scores = all_scores(_llama(given.gguf or bundled_path(given.model), given.threads))
    bars = BARS[given.model]
    if given.json:
        print(json.dumps([asdict(score) for score in scores], ensure_ascii=False, indent=2))
    else:
        for score in scores:
            bar = f"  bar {bars[score.name]:.0%}" if score.name in bars else ""
            print(f"{score.name:34} {score.right:4} of {score.total:<4} {score.share:6.1%}{bar}")
    if given.wrong:
        for score in scores:
            for miss in score.misses:
                print(
                    f"[{score.name}] {miss.ask}\n    wanted {miss.expected}\n    got    {miss.answer}", file=sys.stderr
                )
    return 0 if all(score.share >= bars.get(score.name, 0.0) for score in scores) else 1


if __name__ == "__main__":
    raise SystemExit(main())
