"""Counts which choices of one answer have their finish reason."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from gateway.apis.lenient_json import loads, objects
from gateway.apis.schema.chat_request import AnyRequest, ChatRequest
from headgate.shared.bodies.openai_bodies import CompletionRequest


def choices_of(body: AnyRequest) -> int:
    """The number of choices of an answer: `n` for each prompt."""
    if not isinstance(body, CompletionRequest):
        return (body.n or 1) if isinstance(body, ChatRequest) else 1
    prompt = body.prompt
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return prompts * (body.n or 1)


class Finishes:
    """The finish reasons of one answer of `choices` choices."""

    __slots__ = ("_choices", "_finished")

    def __init__(self, choices: int = 1) -> None:
        self._choices = choices
        self._finished: set[Any] = set()

    def note(self, payload: bytes) -> None:
        """Adds a chunk with a finish reason; it is parsed only if the answer has several choices."""
        if self._choices == 1:
            self._finished.add(0)
            return
        with suppress(ValueError):  # invalid JSON finishes no choice
            for choice in objects(loads(payload), "choices"):
                if choice.get("finish_reason") is not None and isinstance(index := choice.get("index", 0), int):
                    self._finished.add(index)

    @property
    def are_any(self) -> bool:
        """Whether a choice has its finish reason."""
        return bool(self._finished)

    @property
    def are_all(self) -> bool:
        """Whether every choice has its finish reason."""
        return len(self._finished) >= self._choices
