"""The demo models give most answers they were trained on, greedily and word for word, through all services."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from inference.demo import bundled_path
from inference.tools.demo_corpus import listed_dialogues, listed_questions
from tests.rigs.stack import Stack


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("demo")).start()
    yield stack
    stack.kill()


async def _answers(stack: Stack, model: str, chats: list[list[str]]) -> list[list[str]]:
    """The answers of `model` to the user turns of each chat, with its earlier answers as history."""
    async with openai.AsyncOpenAI(base_url=stack.base_url, api_key=stack.key, timeout=60) as client:
        gate = asyncio.Semaphore(4)

        async def one(turns: list[str]) -> list[str]:
            history: list[dict[str, str]] = []
            texts_of_chat = []
            async with gate:
                for turn in turns:
                    history.append({"role": "user", "content": turn})
                    answer = await client.chat.completions.create(
                        model=model,
                        messages=history,  # type: ignore[arg-type]
                        temperature=0,
                    )
                    texts_of_chat.append(answer.choices[0].message.content or "")
                    history.append({"role": "assistant", "content": texts_of_chat[-1]})
            return texts_of_chat

        return list(await asyncio.gather(*map(one, chats)))


@pytest.mark.parametrize(("model", "bar"), [("demo", 0.9), ("demo-mini", 0.6)])
async def test_most_listed_questions_get_their_answers_word_for_word(stack: Stack, model: str, bar: float) -> None:
    questions = listed_questions()
    assert len(questions) == 50
    texts_of_chat = await _answers(stack, model, [[question.ask] for question in questions])
    right = sum(text[0] == question.answer for text, question in zip(texts_of_chat, questions, strict=True))
    assert right / len(questions) >= bar, f"{model}: {right} of {len(questions)}"


async def test_most_turns_of_listed_dialogues_get_their_answers_word_for_word(stack: Stack) -> None:
    dialogues = listed_dialogues()
    assert len(dialogues) == 10
    assert all(len(dialogue.turns) == 3 for dialogue in dialogues)
    texts_of_chat = await _answers(stack, "demo", [[turn.ask for turn in dialogue.turns] for dialogue in dialogues])
    right = sum(
        text == turn.answer
        for texts, dialogue in zip(texts_of_chat, dialogues, strict=True)
        for text, turn in zip(texts, dialogue.turns, strict=True)
    )
    assert right >= 24, f"{right} of 30 turns"


@pytest.mark.parametrize(("model", "limit"), [("demo", 8_000_000), ("demo-mini", 2_000_000)])
def test_files_of_the_demo_models_stay_small(model: str, limit: int) -> None:
    assert bundled_path(model).stat().st_size <= limit
