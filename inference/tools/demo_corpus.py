"""Reads the questions and dialogues for the demo models.

The texts are in `corpus/`: `questions.yaml`, `dialogues.yaml` and `reworded.yaml`. Sums are generated here.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

CORPUS_DIR = Path(__file__).resolve().parents[1] / "demo" / "corpus"

LISTED_SUMS = frozenset({"What is 7 plus 5?", "What is 3 plus 4?", "What is 9 minus 6?"})
"""The sums among the `listed` questions; the others are marked in questions.yaml."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its answer, and other wordings that are trained as well."""

    ask: str
    answer: str
    also: tuple[str, ...] = ()
    listed: bool = False
    """One of the fifty questions that measure the models."""
    kind: str = "plain"
    """`plain`, `sum`, or `unknown` (the many questions that share the answer "I do not know that")."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One user message and the answer to it."""

    ask: str
    answer: str


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Turns of one conversation; a later question may refer to earlier answers."""

    turns: tuple[Turn, ...]
    listed: bool = False
    """One of the ten dialogues that measure the models."""


def _read(name: str) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    with (CORPUS_DIR / name).open(encoding="utf-8") as file:
        return list(yaml.load(file, Loader=loader))  # noqa: S506 - both are safe loaders


def _sums() -> list[Question]:
    """Every a + b with a, b in 1..10, and every a - b with 10 >= a >= b >= 1."""
    made = []
    for a in range(1, 11):
        for b in range(1, 11):
            ask = f"What is {a} plus {b}?"
            also = (f"How much is {a} plus {b}?", f"What is {a} + {b}?", f"{a} + {b}", f"{a}+{b}=?")
            made.append(Question(ask, f"{a} plus {b} is {a + b}.", also, ask in LISTED_SUMS, "sum"))
    for a in range(1, 11):
        for b in range(1, a + 1):
            ask = f"What is {a} minus {b}?"
            also = (f"How much is {a} minus {b}?", f"What is {a} - {b}?", f"{a} - {b}", f"{a}-{b}=?")
            made.append(Question(ask, f"{a} minus {b} is {a - b}.", also, ask in LISTED_SUMS, "sum"))
    return made


@cache
def questions() -> tuple[Question, ...]:
    """Every question with its answer, those of questions.yaml first, then the sums."""
    plain = [
        Question(
            ask=entry["ask"][0],
            answer=entry["answer"],
            also=tuple(entry["ask"][1:]),
            listed=entry.get("listed", False),
            kind="unknown" if entry.get("unknown", False) else "plain",
        )
        for entry in _read("questions.yaml")
    ]
    return (*plain, *_sums())


def _answers() -> dict[str, str]:
    return {ask: question.answer for question in questions() for ask in (question.ask, *question.also)}


@cache
def dialogues() -> tuple[Dialogue, ...]:
    """Every three-turn dialogue. A turn without an answer has that of questions.yaml, or KeyError is raised."""
    known = _answers()
    return tuple(
        Dialogue(
            turns=tuple(Turn(turn["ask"], turn.get("answer") or known[turn["ask"]]) for turn in entry["turns"]),
            listed=entry.get("listed", False),
        )
        for entry in _read("dialogues.yaml")
    )


@cache
def reworded_questions() -> tuple[Question, ...]:
    """Fifty held-out rewordings of the listed questions."""
    known = _answers()
    return tuple(Question(entry["ask"], known[entry["question"]]) for entry in _read("reworded.yaml"))


def listed_questions() -> tuple[Question, ...]:
    """The fifty questions that measure the models, in order."""
    return tuple(question for question in questions() if question.listed)


def listed_dialogues() -> tuple[Dialogue, ...]:
    """The ten dialogues that measure the models, in order."""
    return tuple(dialogue for dialogue in dialogues() if dialogue.listed)
