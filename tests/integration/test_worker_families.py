"""Models with other memory than a plain KV cache: which prefixes are reused, and that answers do not change."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from inference.worker.answers.generation import Output, TokenLogprob
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.tiny_families import WINDOW_TOKENS, Form, path

PROMPT = [3 + (7 * number) % 230 for number in range(WINDOW_TOKENS + 100)]
"""Longer than a window, so that layers with a window have dropped its beginning."""
SHARED = WINDOW_TOKENS + 40


@pytest.fixture(scope="module", params=["window", "hybrid"])
def family(request: pytest.FixtureRequest) -> str:
    """Sliding-window attention, or recurrent layers beside attention."""
    return str(request.param)


@pytest.fixture(scope="module")
def rig(family: str) -> Iterator[EngineRig]:
    form = Form(family, width=64, heads=4, feed=128)
    with engine_rig(path(form), parallel=3, context_length=2048) as opened:
        yield opened


def first_token(outputs: list[Output]) -> TokenLogprob:
    return next(item for output in outputs for item in output.logprobs)


def fresh(rig: EngineRig, prompt: list[int]) -> TokenLogprob:
    """The answer to a prompt without reuse."""
    rig.engine.forget()
    outputs = rig.answer(prompt, logprobs=20)
    assert outputs[-1].cached == 0
    return first_token(outputs)


def is_the_same(actual: TokenLogprob, known: TokenLogprob) -> bool:
    """Up to rounding, which may change the order of two nearly equal tokens."""
    values = dict(known.top)
    return all(value == pytest.approx(values.get(piece), abs=0.02) for piece, value in actual.top)


def test_partial_prefix_is_reused_if_the_memory_can_be_cut(rig: EngineRig, family: str) -> None:
    """A recurrent state cannot be cut, so it is computed again. The answer is that of a fresh prompt."""
    other = [*PROMPT[:SHARED], *reversed(PROMPT[SHARED:])]
    known = fresh(rig, other)
    rig.engine.forget()
    rig.answer(PROMPT)
    outputs = rig.answer(other, logprobs=5)
    assert outputs[-1].cached == {"window": SHARED, "hybrid": 0}[family]
    assert is_the_same(first_token(outputs), known)


def test_next_turn_reuses_the_whole_conversation(rig: EngineRig) -> None:
    rig.engine.forget()
    outputs = rig.answer(PROMPT, logprobs=0)
    pieces = [item.piece for output in outputs for item in output.logprobs]
    by_piece = {rig.model.piece(token, special=True): token for token in range(rig.model.n_vocab)}
    longer = [*PROMPT, *(by_piece[piece] for piece in pieces), 60, 61, 62]
    outputs = rig.answer(longer, logprobs=5)
    assert outputs[-1].cached >= len(PROMPT)
    assert is_the_same(first_token(outputs), fresh(rig, longer))


def test_answers_are_the_same_in_a_batch(rig: EngineRig) -> None:
    """Three prompts of different lengths in the same steps."""
    prompts = [PROMPT[at:] for at in (0, 100, 500)]
    alone = [fresh(rig, prompt) for prompt in prompts]
    rig.engine.forget()
    tickets = [rig.ask(prompt, logprobs=5) for prompt in prompts]
    rig.run()
    for ticket, known in zip(tickets, alone, strict=True):
        assert is_the_same(first_token(rig.outputs(ticket)), known)
