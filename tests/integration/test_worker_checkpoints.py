"""Conversations of models with sliding windows or recurrent states continue from checkpoints, equal to a cold run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from headgate.shared.parameters import Sampling
from tests.rigs import tiny_families
from tests.rigs.engine_rig import EngineRig, engine_rig

MESSAGE, ANSWER, TURNS = 100, 24, 20
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=("window", "hybrid", "recurrent"))
def rig(request: pytest.FixtureRequest) -> Iterator[EngineRig]:
    """An engine with two slots, and room for 16 checkpoints in each."""
    path = tiny_families.path(tiny_families.Form(request.param, layers=3, width=128, heads=4, feed=128))
    with engine_rig(path, context_length=8192, parallel=2, batch=512, ubatch=128, checkpoint_bytes=2**26) as opened:
        yield opened


class Conversation:
    """Messages of random tokens in ChatML's frame. `history` are all tokens so far."""

    def __init__(self, rig: EngineRig, seed: int) -> None:
        self._rig = rig
        self._random = random.Random(seed)
        self._begin, self._end = (
            rig.model.tokenize(mark, parse_special=True)[0] for mark in ("<|im_start|>", "<|im_end|>")
        )
        self.history: list[int] = []
        self.computed = 0

    def message(self, count: int = MESSAGE) -> list[int]:
        """A message of a user."""
        return [self._begin, *(self._random.randrange(10, 200) for _ in range(count)), self._end]

    def prompt(self, *message: int) -> list[int]:
        """The history, a message, and the beginning of the answer."""
        return [*self.history, *message, self._begin, 77, 78]

    def ask(self, prompt: list[int], tenant: str = "") -> list[int]:
        """The tokens of the answer; sets `computed` to the number of tokens of the prompt that were computed."""
        before = self._rig.engine.counters.prompt_tokens
        outputs = self._rig.answer(prompt, sampling=GREEDY, max_tokens=ANSWER, tenant=tenant)
        assert outputs[-1].error is None
        self.computed = self._rig.engine.counters.prompt_tokens - before
        newest = max(self._rig.engine._scheduler.slots.held(), key=lambda slot: slot.used_at)
        return list(newest.tokens[len(prompt) : newest.computed])

    def cold(self, prompt: list[int]) -> list[int]:
        """The answer without any reuse."""
        self._rig.engine.forget()
        answer = self.ask(prompt, tenant="another")
        assert self.computed == len(prompt)
        self._rig.engine.forget()
        return answer


def test_edited_message_continues_from_the_message_before(rig: EngineRig) -> None:
    """In each of 20 turns the last message is edited: only it and the answer's beginning are computed again."""
    talk = Conversation(rig, 1)
    for _turn in range(TURNS):
        talk.ask(talk.prompt(*talk.message()))
        edited = talk.message()
        answer = talk.ask(talk.prompt(*edited))
        if talk.history:
            assert talk.computed <= len(edited) + 3 + 16
        talk.history = [*talk.prompt(*edited), *answer]
    last = talk.prompt(*talk.message())
    assert talk.ask(last) == talk.cold(last)


def test_answer_without_its_reasoning_continues_from_its_beginning(rig: EngineRig) -> None:
    """The next prompt has another answer in the history: the part behind the last question is computed."""
    talk = Conversation(rig, 2)
    for turn in range(TURNS):
        prompt = talk.prompt(*talk.message())
        before = len(talk.history)
        talk.ask(prompt)
        if turn:
            assert talk.computed <= len(prompt) - before + ANSWER + 16
        stripped = talk.message(6)[1:]
        talk.history = [*prompt, *stripped]
    last = talk.prompt(*talk.message())
    assert talk.ask(last) == talk.cold(last)


def test_a_repeated_prompt_computes_only_its_end(rig: EngineRig) -> None:
    """A regenerated answer continues from the checkpoint at its beginning and is the same."""
    talk = Conversation(rig, 3)
    prompt = talk.prompt(*talk.message(900))
    first = talk.ask(prompt)
    assert talk.ask(prompt) == first
    assert talk.computed <= 3
    assert talk.cold(prompt) == first


def test_long_prompt_has_checkpoints_before_its_end(rig: EngineRig) -> None:
    """A prompt of one message that departs far before its end computes at most one interval again."""
    talk = Conversation(rig, 4)
    long = talk.message(6000)
    talk.ask(talk.prompt(*long))
    other = [*long[:4500], *talk.message(50)[1:]]
    answer = talk.ask(talk.prompt(*other))
    assert talk.computed <= 4500 % 2048 + 60
    assert answer == talk.cold(talk.prompt(*other))


def test_choices_of_one_prompt_share_it(rig: EngineRig) -> None:
    """The second choice computes only the tokens behind the last checkpoint."""
    talk = Conversation(rig, 5)
    prompt = talk.prompt(*talk.message(400))
    before = rig.engine.counters.prompt_tokens
    outputs = rig.answer(prompt, sampling=replace(GREEDY, seed=7), max_tokens=4, n=2)
    assert rig.engine.counters.prompt_tokens - before <= len(prompt) + 4
    texts = ["".join(one.text for one in outputs if one.choice == choice) for choice in (0, 1)]
    assert texts[0] == texts[1]


def test_a_state_that_cannot_be_restored_is_computed_again(rig: EngineRig, caplog: pytest.LogCaptureFixture) -> None:
    """llama.cpp rejects a damaged checkpoint: the prompt is computed from its beginning, with one log line."""
    talk = Conversation(rig, 6)
    prompt = talk.prompt(*talk.message(700))
    first = talk.ask(prompt)
    for slot in rig.engine._scheduler.slots._slots:
        for checkpoint in slot.checkpoints:
            checkpoint.state = checkpoint.state[: checkpoint.state.size // 2]
    longer = [*prompt, *first, *talk.message(700)]
    talk.ask(longer)
    assert talk.ask(prompt) == first
    assert talk.computed == len(prompt)
    assert "computed again" in caplog.text
