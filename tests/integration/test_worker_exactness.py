"""Reproducible to the byte: seeded answers across restarts, and answers continued from any token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference import demo
from inference.worker.prompt.prompts import Prompts
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"
QUESTIONS = ("Why is the sky blue?", "Tell me about a mill.", "Say hello in three ways.", "What is 3 + 4?")


@pytest.mark.parametrize("threads", [1, 0], ids=["one thread", "all cores"])
def test_seeded_answer_is_the_same_after_a_restart(tmp_path: Path, threads: int) -> None:
    """Alone and after a reused prefix, at temperature 1; another seed gives another text."""
    bodies: list[dict[str, Any]] = [
        {
            "messages": [{"role": "user", "content": question}],
            "seed": seed,
            "temperature": 1.0,
            "max_tokens": 24,
            **more,
        }
        for question in QUESTIONS[:2]
        for seed, more in ((7, {}), (8, {"top_p": 0.9}), (9, {"n": 2, "frequency_penalty": 0.5}))
    ]
    runs = []
    reused = []
    for number in range(2):
        root = tmp_path / str(number)
        root.mkdir()
        with WorkerRig(root, grant_for(tiny_gguf.generative(), threads=threads)) as rig:
            rig.ready()
            answers = []
            for body in bodies:
                status, response = rig.post(CHAT, body)
                assert status == 200, response
                answers.append([choice["message"]["content"] for choice in response["choices"]])
                reused.append(response["usage"]["prompt_tokens_details"]["cached_tokens"])
            runs.append(answers)
    assert runs[0] == runs[1]
    assert any(reused)
    choices = [choice for answer in runs[0] for choice in answer]
    assert len(set(choices)) == len(choices)


@pytest.fixture(scope="module")
def rig() -> Iterator[EngineRig]:
    with engine_rig(demo.bundled_path("demo"), context_length=512, parallel=2, threads=1) as opened:
        yield opened


def tokens_and_text(rig: EngineRig, prompt: list[int], most: int) -> tuple[list[int], str]:
    """The tokens of a greedy answer without its end, and its text."""
    outputs = rig.answer(prompt, max_tokens=most, logprobs=0)
    text = "".join(output.text for output in outputs)
    pieces = [item.piece for output in outputs for item in output.logprobs]
    by_piece = {rig.model.piece(token): token for token in range(rig.model.n_vocab - 1, -1, -1)}
    return [by_piece[piece] for piece in pieces], text


def test_answer_can_be_continued_from_every_token(rig: EngineRig) -> None:
    """As in the resumption of a broken stream: the text so far is an assistant message that is not closed.

    If the text is tokenized as it was generated, which is nearly always, the rest is the same to the byte.
    """
    prompts = Prompts(rig.model, rig.loaded.template, rig.loaded.facts)
    boundaries = same = 0
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        prompt = prompts.chat(messages, {})
        drawn, text = tokens_and_text(rig, prompt, 32)
        assert drawn
        for count in range(1, len(drawn)):
            head = b"".join(rig.model.piece(token) for token in drawn[:count])
            try:
                shown = head.decode()
            except UnicodeDecodeError:
                continue
            boundaries += 1
            resumed = prompts.chat([*messages, {"role": "assistant", "content": shown}], {}, continue_final=True)
            if resumed != prompt + drawn[:count]:
                continue
            same += 1
            rest = rig.answer(resumed, max_tokens=32 - count)
            assert shown + "".join(output.text for output in rest) == text
    assert same >= 0.9 * boundaries > 0, f"{same} of {boundaries}"
