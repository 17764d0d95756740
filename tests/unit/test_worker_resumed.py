"""Continued answers: limits, stop strings and counts are those of the whole answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headgate.shared.bodies.openai_bodies import AnswerSoFar
from headgate.shared.parameters import Sampling
from inference.api.reruns import key_of
from inference.worker.answers.generation import Generation, Output
from inference.worker.answers.structured_answer import Reading, StructuredGeneration
from inference.worker.api import generation_body
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import OutputDispatcher, Ticket
from inference.worker.steps import Limits
from inference.worker.worker_errors import BadRequestError, WorkerError
from inference.worker.worker_requests import AnswerPrefix, Facts
from tests.rigs.fake_backend import END, ByteVocabulary, FakeBackend, SamplerShop
from tests.rigs.fake_dialect import MarkParser

FACTS = Facts("tiny", 128, 300, 64, ("chat", "completions"))
HELLO = [{"role": "user", "content": "hello"}]
LIMITS = Limits(slots=2, context=100, batch=32, queue=4)


def go_on(prefix: str, then: str, *, stops: tuple[str, ...] = (), most: int = 50) -> tuple[str, str | None, int]:
    """Text, finish and tokens of a generation after `prefix`, one token per letter."""
    generation = Generation(0, SamplerShop()(Sampling(), 0), ByteVocabulary(), most, stops)
    generation.resume(AnswerPrefix(len(prefix), 0, prefix))
    text = ""
    for token in [*then.encode(), END]:
        output = generation.accept(token)
        text += output.text if output else ""
        if output is not None and output.finish is not None:
            return text, output.finish, output.tokens
    raise AssertionError("the answer has no end")


def test_tokens_of_the_prefix_count() -> None:
    assert go_on("abc", "defgh", most=5) == ("de", "length", 5)
    assert go_on("abc", "de") == ("de", "stop", 6)


@pytest.mark.parametrize(
    ("prefix", "then", "stop", "rest"),
    [
        ("one tw", "o three", "two", ""),  # the stop string starts in the prefix
        ("one tw", "enty", "two", "enty"),
        ("one", " two three", "two", " "),
        ("a", "aabc", "aab", ""),  # the prefix is the start of the stop string
        ("one t", "", "two", ""),
    ],
)
def test_stop_string_spans_the_end_of_the_prefix(prefix: str, then: str, stop: str, rest: str) -> None:
    """Text of the prefix is neither repeated nor lost."""
    assert go_on(prefix, then, stops=(stop,))[0] == rest


def test_answer_does_not_depend_on_where_it_was_interrupted() -> None:
    """For each text that the first worker may have sent."""
    whole, stops = "abacabadabacaba", ("bad", "caba!", "aca?")
    first = Generation(0, SamplerShop()(Sampling(), 0), ByteVocabulary(), 50, stops)
    shown, seams = "", [""]
    for token in whole.encode():
        output = first.accept(token)
        shown += output.text if output else ""
        seams.append(shown)
        if output is not None and output.finish is not None:
            break
    for seam in seams:
        assert seam + go_on(seam, whole[len(seam) :], stops=stops)[0] == shown == "abaca"


def test_interrupted_reasoning_continues() -> None:
    """Within reasoning its tokens are counted on; after it reasoning is over."""

    def opened(begun: AnswerPrefix, thinking: bool) -> StructuredGeneration:
        reading = Reading(lambda: MarkParser(thinking=thinking), lambda: "call")
        made = StructuredGeneration(
            0, SamplerShop()(Sampling(), 0), ByteVocabulary(), 50, ("xy",), reading, MarkParser(thinking=thinking)
        )
        made.resume(begun)
        return made

    def rest(generation: StructuredGeneration, text: str) -> tuple[list[Any], int]:
        outputs = [generation.accept(token) for token in [*text.encode(), END]]
        found = [output for output in outputs if output is not None]
        return [part for output in found for part in output.parts], found[-1].reasoning_tokens

    parts, reasoning = rest(opened(AnswerPrefix(3, 3), thinking=True), "ab)cd")
    assert ("".join(part.text for part in parts), reasoning) == ("abcd", 6)
    parts, reasoning = rest(opened(AnswerPrefix(5, 4, "x"), thinking=False), "yz")
    assert (parts, reasoning) == ([], 4)


async def test_engine_continues_after_the_prefix() -> None:
    """The sampler gets the tokens of the prefix; an answer that has its maximum length ends at once."""
    samplers = SamplerShop()
    backend = FakeBackend()
    deliver = OutputDispatcher(asyncio.get_running_loop()).deliver
    engine = Engine(backend, ByteVocabulary(), samplers, LIMITS, deliver, lambda _message: None)
    engine.start()

    async def ask(prefix: bytes, most: int) -> tuple[str, Output]:
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        begun = AnswerPrefix(len(prefix), 0, prefix.decode())
        work = Work(prompts=[[*b"hi", *prefix]], n=1, sampling=Sampling(), max_tokens=most, prefix=begun)
        engine.submit(work, ticket)
        text = ""
        while True:
            for output in await ticket.take(10):
                text += output.text
                if output.finish is not None:
                    return text, output

    text, last = await ask(b"abc", 6)
    assert (text, last.finish, last.tokens) == ("def", "length", 6)
    text, last = await ask(b"abc", 3)
    assert (text, last.finish, last.tokens) == ("", "length", 3)
    assert await asyncio.to_thread(engine.stop, WorkerError(generation_body.Code.MODEL_LOADING, "the end"))


def test_answer_so_far_is_decoded() -> None:
    """Options of complete answers are rejected."""
    so_far = {"content": "Hel", "reasoning_content": "hm"}
    request = generation_body.chat({"messages": HELLO, "answer_so_far": so_far}, FACTS)
    assert request.answer_so_far == AnswerSoFar(content="Hel", reasoning_content="hm")
    assert generation_body.chat({"messages": HELLO, "answer_so_far": {}}, FACTS).answer_so_far == AnswerSoFar()
    completion = {"prompt": "a", "answer_so_far": {"content": "b"}}
    assert generation_body.completion(completion, FACTS).answer_so_far == AnswerSoFar(content="b")
    assert generation_body.completion({"prompt": "a"}, FACTS).answer_so_far is None
    tool = {"type": "function", "function": {"name": "f"}}
    tooled = Facts("tiny", 128, 300, 64, ("chat", "completions", "tools"))
    wrong: list[dict[str, Any]] = [
        {"n": 2},
        {"logprobs": True},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool]},
        {"continue_final_message": True, "messages": [*HELLO, {"role": "assistant", "content": "x"}]},
        {"answer_so_far": {"text": "x"}},
        {"answer_so_far": {"content": 5}},
        {"answer_so_far": "x"},
    ]
    for more in wrong:
        with pytest.raises(BadRequestError):
            generation_body.chat({"messages": HELLO, "answer_so_far": so_far, **more}, tooled)
    for more in ({"n": 2}, {"logprobs": 1}, {"echo": True}, {"suffix": "x"}, {"prompt": ["a", "b"]}):
        with pytest.raises(BadRequestError):
            generation_body.completion({**completion, **more}, FACTS)
    with pytest.raises(BadRequestError):
        generation_body.completion({**completion, "answer_so_far": so_far}, FACTS)


def test_continued_answer_is_the_same_request_for_the_quarantine() -> None:
    """Otherwise a poison request would be new each time it is resumed."""
    path = "/v1/completions"
    assert key_of(path, b'{"prompt":"a"}') == key_of(path, b'{"prompt":"a","answer_so_far":{"content":"b"}}')
