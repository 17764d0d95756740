"""Sequences and their cells in llama.cpp: copies are exact, and slots between the rows of a step are unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from inference.worker.backend import Decode
from inference.worker.llama import Context
from inference.worker.llama.binding import lib
from inference.worker.llama.context import WIDEST_GAP
from inference.worker.steps import Row
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig

PARALLEL, CONTEXT = 8, 256
PROMPT = [3 + number % 50 for number in range(40)]


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    with engine_rig(tiny_gguf.generative(), parallel=PARALLEL, context_length=CONTEXT) as opened:
        yield opened


@pytest.fixture
def context(rig: EngineRig) -> Context:
    rig.context.forget_all()
    return rig.context


def fill(context: Context, slot: int, tokens: Sequence[int], start: int = 0) -> np.ndarray:
    """Logits after the last of `tokens`, computed alone."""
    status, last = context.decode([Row(slot, slot, start, tokens, True)])
    assert status is Decode.OK
    return context.logits(last[0]).copy()


def held(context: Context) -> list[int]:
    return [int(lib.llama_memory_seq_pos_max(context.memory, slot)) + 1 for slot in range(PARALLEL)]


@pytest.mark.parametrize("slots", [(0, 2, 4, 6), (1, 5), (0, 1, 7), (0, 7)])
def test_slots_between_the_rows_of_a_step_are_unchanged(context: Context, slots: tuple[int, ...]) -> None:
    """The slots between are empty, in use, or too many to be computed with the step."""
    alone = {}
    for slot in slots:
        fill(context, slot, PROMPT)
        alone[slot] = fill(context, slot, [60 + slot], len(PROMPT))
        context.remove(slot, len(PROMPT))
    between = 3
    if between not in slots:
        fill(context, between, PROMPT[:10])
    before = held(context)
    status, last = context.decode([Row(slot, slot, len(PROMPT), [60 + slot], True) for slot in slots])
    assert status is Decode.OK
    assert len(last) == len(slots)
    for slot, index in zip(slots, last, strict=True):
        np.testing.assert_allclose(context.logits(index), alone[slot], atol=1e-3)
    assert held(context) == [count + (slot in slots) for slot, count in enumerate(before)]


def test_full_slot_between_the_rows_of_a_step_is_not_computed(context: Context) -> None:
    """It has no cell for another token, and the step succeeds nevertheless."""
    assert WIDEST_GAP >= 1
    for slot, tokens in ((0, PROMPT), (1, (PROMPT * 7)[:CONTEXT]), (2, PROMPT)):
        fill(context, slot, tokens)
    status, last = context.decode([Row(slot, slot, len(PROMPT), [9], True) for slot in (0, 2)])
    assert status is Decode.OK
    np.testing.assert_allclose(context.logits(last[0]), context.logits(last[1]), atol=1e-3)
    assert held(context)[:3] == [len(PROMPT) + 1, CONTEXT, len(PROMPT) + 1]


def test_copied_prefix_gives_the_same_logits(context: Context) -> None:
    """Also a copy of a copy, and one whose source is cleared before the next step."""
    fill(context, 0, [*PROMPT, 7, 8, 9])
    context.copy(0, 5, len(PROMPT))
    context.copy(5, 2, len(PROMPT))
    context.remove(0)
    assert held(context) == [0, 0, 40, 0, 0, 40, 0, 0]
    status, last = context.decode([Row(slot, slot, 40, [11], True) for slot in (2, 5)])
    assert status is Decode.OK
    copied = [context.logits(index).copy() for index in last]
    context.forget_all()
    fill(context, 0, PROMPT)
    alone = fill(context, 0, [11], 40)
    for logits in copied:
        np.testing.assert_allclose(logits, alone, atol=1e-3)


def test_rows_of_prompts_and_answers_in_one_step_get_their_own_logits(context: Context) -> None:
    """llama.cpp computes such a step in several passes."""
    tokens = [[5 + slot, *PROMPT[: 3 * slot]] for slot in range(5)]
    alone = [fill(context, 0, tokens[slot]) for slot in range(5) if context.remove(0)]
    context.forget_all()
    status, last = context.decode([Row(slot, slot, 0, tokens[slot], True) for slot in range(5)])
    assert status is Decode.OK
    for logits, index in zip(alone, last, strict=True):
        np.testing.assert_allclose(context.logits(index), logits, atol=1e-3)


@pytest.mark.parametrize(("context_length", "worth"), [(256, 16), (2048, 16), (8192, 64)])
def test_prefix_is_copied_if_it_has_a_128th_of_the_context_and_16_tokens(context_length: int, worth: int) -> None:
    """A shorter one is computed again. The request with the prefix still runs, so that its slot cannot be reused."""
    with engine_rig(tiny_gguf.generative(), parallel=3, context_length=context_length) as rig:
        prompt = [3 + number % 50 for number in range(worth)]
        owner = rig.ask([*prompt, 60], max_tokens=30)
        while not rig.outputs(owner):
            rig.engine._iterate()
        others = [rig.ask([*prompt[:count], 70, 71]) for count in (worth - 1, worth)]
        rig.run()
        assert [rig.outputs(ticket)[-1].cached for ticket in (owner, *others)] == [0, 0, worth]
