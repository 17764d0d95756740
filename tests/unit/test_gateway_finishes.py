"""An answer is whole once every choice that was asked for has its finish reason."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from gateway.apis.openai.finish_reasons import Finishes, choices_of
from gateway.apis.openai.frames import Endpoint
from tests.rigs.typed_bodies import decoded


def chunk(*choices: tuple[Any, str | None]) -> bytes:
    return orjson.dumps({"choices": [{"index": index, "finish_reason": reason} for index, reason in choices]})


@pytest.mark.parametrize(
    ("body", "choices"),
    [
        ({}, 1),
        ({"n": None}, 1),
        ({"n": 3}, 3),
        ({"prompt": "a"}, 1),
        ({"prompt": ["a"]}, 1),
        ({"prompt": ["a", "b"], "n": 2}, 4),
        ({"prompt": [1, 2, 3]}, 1),
        ({"prompt": [[1, 2], [3]]}, 2),
        ({"prompt": "a", "best_of": 4, "n": 2}, 2),
    ],
)
def test_each_prompt_is_answered_n_times(body: dict[str, Any], choices: int) -> None:
    endpoint = Endpoint.COMPLETIONS if "prompt" in body else Endpoint.CHAT
    assert choices_of(decoded(body, endpoint)) == choices


def test_one_choice_has_one_finish_and_is_not_looked_into() -> None:
    finishes = Finishes()
    assert not (finishes.are_any or finishes.are_all)
    finishes.note(b"whatever a provider calls a finish")
    assert finishes.are_any and finishes.are_all


def test_several_choices_finish_each_by_itself() -> None:
    finishes = Finishes(3)
    for payload in (chunk((1, "stop"), (0, None)), chunk((1, "stop")), b"{oops", chunk(([], "stop"))):
        finishes.note(payload)
        assert not finishes.are_all
    assert finishes.are_any
    finishes.note(chunk((2, "length"), (0, "stop")))
    assert finishes.are_all
