"""Log probabilities are a log-softmax of the logits of the model; those of a prompt do not depend on how its
computation was divided.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headgate.shared.parameters import Sampling
from inference.worker.answers.generation import Output, TokenLogprob
from inference.worker.steps import Row
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig

PROMPT = [(7 * number) % 250 for number in range(60)]


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    with engine_rig(tiny_gguf.generative(), parallel=2) as opened:
        yield opened


def scores(outputs: list[Output]) -> list[TokenLogprob]:
    return [item for output in outputs for item in output.prompt_logprobs]


def computed(rig: EngineRig, tokens: list[int]) -> np.ndarray:
    """For each token, the log probabilities (double precision) of every next token."""
    rig.context.forget_all()
    found = []
    for position, token in enumerate(tokens):
        _status, last = rig.context.decode([Row(0, 0, position, [token], True)])
        logits = rig.context.logits(last[0]).astype(np.float64)
        found.append(logits - np.log(np.sum(np.exp(logits))))
    rig.context.forget_all()
    rig.engine.forget()
    return np.array(found)


def expected(rig: EngineRig, prompt: list[int]) -> list[float]:
    """Of each token of a prompt after the tokens before it."""
    known = computed(rig, prompt[:-1])
    return [float(line[token]) for line, token in zip(known, prompt[1:], strict=True)]


def token_of(rig: EngineRig, piece: bytes) -> int:
    """The token with this text, control tokens included."""
    (token,) = [token for token in range(rig.model.n_vocab) if rig.model.piece(token, special=True) == piece]
    return token


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(temperature=1.5, top_k=5, seed=4, logit_bias=((40, 3.0),), frequency_penalty=1.0),
    ],
    ids=["greedy", "changed"],
)
def test_generated_token_has_its_log_probability(rig: EngineRig, sampling: Sampling) -> None:
    """For the token and its alternatives, independent of the sampling parameters."""
    outputs = rig.answer(PROMPT, sampling=sampling, logprobs=5, max_tokens=12)
    reported = [item for output in outputs for item in output.logprobs]
    drawn = [token_of(rig, item.piece) for item in reported]
    known = computed(rig, PROMPT + drawn)[len(PROMPT) - 1 : -1]
    assert len(reported) >= 10
    for item, token, line in zip(reported, drawn, known, strict=True):
        assert item.logprob == pytest.approx(line[token], abs=2e-3)
        assert [value for _piece, value in item.top] == pytest.approx(np.sort(line)[:-6:-1], abs=2e-3)
        assert [line[token_of(rig, piece)] for piece, _value in item.top] == pytest.approx(
            [value for _piece, value in item.top], abs=2e-3
        )


def test_scores_of_a_prompt_are_sent_before_the_answer(rig: EngineRig) -> None:
    known = expected(rig, PROMPT)
    outputs = rig.answer(PROMPT, score_prompt=True, logprobs=3)
    found = scores(outputs)
    assert [item.piece for item in found] == [rig.model.piece(token, special=True) for token in PROMPT]
    assert found[0].logprob is None
    assert found[0].top == ()
    assert np.allclose([item.logprob for item in found[1:]], known, atol=2e-3)
    assert all(len(item.top) == 3 and item.top[0][1] >= item.top[1][1] >= item.top[2][1] for item in found[1:])
    texts = [bool(output.text or output.finish) for output in outputs]
    scored = [bool(output.prompt_logprobs) for output in outputs]
    assert scored.index(False) == sum(scored), "a score was sent after the first text"
    assert not any(text and score for text, score in zip(texts, scored, strict=True))
    assert sum(len(output.logprobs) for output in outputs) == 8


def test_scoring_without_an_answer_generates_nothing(rig: EngineRig) -> None:
    before = rig.engine.counters.generated_tokens
    outputs = rig.answer(PROMPT, score_prompt=True, logprobs=0, max_tokens=0)
    assert len(scores(outputs)) == len(PROMPT)
    assert (outputs[-1].finish, outputs[-1].text, outputs[-1].tokens) == ("length", "", 0)
    assert rig.engine.counters.generated_tokens == before


def test_score_of_a_single_token_is_none(rig: EngineRig) -> None:
    outputs = rig.answer([5], score_prompt=True, logprobs=0, max_tokens=0)
    assert [item.logprob for item in scores(outputs)] == [None]


def test_scored_prompt_does_not_reuse_a_prefix_and_can_be_reused(rig: EngineRig) -> None:
    rig.answer(PROMPT)
    scored = rig.answer(PROMPT, score_prompt=True, logprobs=0, max_tokens=1)
    assert scored[-1].cached == 0
    assert len(scores(scored)) == len(PROMPT)
    assert rig.answer(PROMPT)[-1].cached == len(PROMPT) - 1


def test_offsets_of_a_prompt_are_in_characters(rig: EngineRig) -> None:
    """Also if a character is divided between tokens."""
    prompt = list("aé漢b".encode())
    tokens = [token for byte in prompt for token in rig.model.tokenize(bytes([byte]).decode("latin-1"))]
    found = scores(rig.answer(tokens, score_prompt=True, logprobs=0, max_tokens=0))
    text = b"".join(item.piece for item in found).decode()
    assert [item.offset for item in found] == sorted(item.offset for item in found)
    assert found[-1].offset == len(text) - 1


def test_all_choices_and_prompts_have_scores_in_a_batch(rig: EngineRig) -> None:
    busy = rig.ask([9, 8, 7], max_tokens=40)
    ticket = rig.ask([], prompts=[PROMPT, PROMPT[:20]], n=2, score_prompt=True, logprobs=0, max_tokens=2)
    rig.run()
    outputs = rig.outputs(ticket)
    for choice, length in enumerate((60, 60, 20, 20)):
        own = [output for output in outputs if output.choice == choice]
        assert len(scores(own)) == length
        assert own[-1].finish == "length"
    assert rig.outputs(busy)[-1].tokens == 40
