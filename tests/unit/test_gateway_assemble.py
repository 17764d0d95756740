"""Chunks of a stream are assembled into a unary answer."""

from __future__ import annotations

from typing import Any, cast

import orjson
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, DeltaKind, Done, Endpoint, Finishes, Frame
from gateway.apis.openai.generation_request import choices_of
from gateway.errors import UpstreamError, UpstreamKind
from gateway.routing.resume_runner import Answer, Sink, assemble
from tests.rigs.typed_bodies import decoded

HEAD = {"id": "c1", "object": "chat.completion.chunk", "created": 5, "model": "demo", "system_fingerprint": "fp"}


def _chunk(
    delta: dict[str, Any] | None = None, index: int = 0, finish: str | None = None, **more: Any
) -> dict[str, Any]:
    return {**HEAD, "choices": [{"index": index, "delta": delta or {}, "finish_reason": finish, **more}]}


def _sum(*chunks: Any) -> dict[str, Any]:
    assembly = Assembly()
    for chunk in chunks:
        assembly.add(chunk)
    return assembly.result()


def test_head_of_the_first_chunk_is_kept() -> None:
    """A resumed answer keeps its first id."""
    later = {**_chunk({"content": "b"}, finish="stop"), "id": "c2", "model": "other", "created": 6}
    answer = _sum({**_chunk({"content": "a"}), "system_fingerprint": None}, later)
    assert (answer["id"], answer["model"], answer["created"]) == ("c1", "demo", 5)
    assert answer["system_fingerprint"] == "fp", "null is ignored"


EMPTY_HEAD = {"id": "", "object": "", "created": 0, "model": "", "choices": [], "prompt_filter_results": []}
"""The first chunk of Azure."""


def test_chunk_with_an_empty_head_is_skipped() -> None:
    answer = _sum(EMPTY_HEAD, _chunk({"content": "a"}, content_filter_results={}), _chunk(finish="stop"))
    assert (answer["id"], answer["object"], answer["created"], answer["model"]) == ("c1", "chat.completion", 5, "demo")
    assert answer["choices"][0]["message"]["content"] == "a"


@pytest.mark.parametrize(
    ("choice", "kind"), [({"delta": {"content": "a"}}, "chat.completion"), ({"text": "a"}, "text_completion")]
)
def test_object_type_follows_from_the_choices(choice: dict[str, Any], kind: str) -> None:
    answer = _sum(EMPTY_HEAD, {"choices": [{"index": 0, **choice, "finish_reason": "stop"}]})
    assert answer["object"] == kind
    assert (answer["id"], answer["model"]) == ("", "")


def test_text_usage_and_head_are_assembled() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    answer = _sum(
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": "Hel"}),
        _chunk({"content": "lo", "reasoning_content": None}),
        _chunk(finish="stop"),
        {**HEAD, "choices": [], "usage": usage},
    )
    assert answer == {
        "id": "c1",
        "object": "chat.completion",
        "created": 5,
        "model": "demo",
        "system_fingerprint": "fp",
        "usage": usage,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
    }
    ChatCompletion.model_validate(answer)


def test_tool_calls_are_joined_by_index() -> None:
    answer = _sum(
        _chunk({"role": "assistant"}),
        _chunk(
            {"tool_calls": [{"index": 1, "id": "b", "type": "function", "function": {"name": "g", "arguments": ""}}]}
        ),
        _chunk({"tool_calls": [{"index": 0, "id": "a", "function": {"name": "f", "arguments": '{"x"'}}]}),
        _chunk(
            {
                "tool_calls": [
                    {"index": 0, "function": {"arguments": ":1}"}},
                    {"index": 1, "function": {"arguments": "{}"}},
                ]
            }
        ),
        _chunk({"tool_calls": [{"index": 1, "function": None}]}),
        _chunk(finish="tool_calls"),
    )
    message = answer["choices"][0]["message"]
    assert message["content"] is None
    assert message["tool_calls"] == [
        {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}},
        {"id": "b", "type": "function", "function": {"name": "g", "arguments": "{}"}},
    ]
    ChatCompletion.model_validate(answer)


def test_all_fields_of_a_delta_are_assembled() -> None:
    answer = _sum(
        _chunk({"content": "b"}, 1, logprobs={"content": [{"token": "b"}], "refusal": None}),
        _chunk({"content": "c", "annotations": [1]}, 1, logprobs={"content": [{"token": "c"}]}),
        _chunk({"reasoning_content": "hm"}, 0),
        _chunk({"refusal": "no"}, 0, logprobs={"content": None, "refusal": None}),
        _chunk({"function_call": {"name": "f"}}, 2),
        _chunk({"function_call": {"arguments": "{}"}}, 2),
        _chunk(index=1, finish="length"),
    )
    zero, one, two = answer["choices"]
    assert zero["message"] == {"role": "assistant", "content": None, "refusal": "no", "reasoning_content": "hm"}
    assert (one["message"]["content"], one["message"]["annotations"], one["finish_reason"]) == ("bc", [1], "length")
    assert one["logprobs"] == {"content": [{"token": "b"}, {"token": "c"}], "refusal": None}
    assert (zero["logprobs"], two["logprobs"]) == ({"content": None, "refusal": None}, None)
    assert two["message"]["function_call"] == {"name": "f", "arguments": "{}"}


@pytest.mark.parametrize("thought", [None, "hm"])
def test_answer_without_text_has_empty_content(thought: str | None) -> None:
    chunks = [_chunk({"reasoning_content": thought})] if thought else []
    message = _sum(*chunks, _chunk(finish="stop"))["choices"][0]["message"]
    assert (message["content"], message.get("reasoning_content")) == ("", thought)


def test_text_completions_are_assembled() -> None:
    head = {"id": "x", "object": "text_completion", "created": 1, "model": "m"}
    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0]}
    answer = _sum(
        {**head, "choices": [{"index": 0, "text": "a", "logprobs": logprobs, "finish_reason": None}]},
        {**head, "choices": [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "stop"}]},
    )
    choice = {"index": 0, "text": "ab", "logprobs": logprobs, "finish_reason": "stop"}
    assert answer["choices"] == [choice]
    Completion.model_validate({**answer, "choices": [{**choice, "logprobs": None}]})


@pytest.mark.parametrize(
    "chunk",
    [
        7,
        {},
        {**HEAD, "choices": [3]},
        {**HEAD, "choices": [{"index": "0"}]},
        {**HEAD, "object": "ping", "choices": []},
        _chunk({"tool_calls": ["x"]}),
        _chunk({"tool_calls": [{"index": None}]}),
    ],
)
def test_invalid_chunk_is_rejected(chunk: Any) -> None:
    with pytest.raises(ValueError, match=r"chunk|choice|tool call"):
        _sum(chunk)


@pytest.mark.parametrize("chunks", [[], [EMPTY_HEAD]])
def test_stream_without_a_chunk_is_an_error(chunks: list[Any]) -> None:
    with pytest.raises(ValueError, match="no chunk"):
        _sum(*chunks)


def test_signature_belongs_to_the_reasoning_since_the_last_one() -> None:
    hidden = {"type": "redacted_thinking", "data": "x"}
    answer = _sum(
        _chunk({"reasoning_content": "a"}),
        _chunk({"reasoning_content": "b"}),
        _chunk({"thinking_blocks": [{"type": "thinking", "signature": "s1"}, hidden]}),
        _chunk({"thinking_blocks": [{"type": "thinking", "signature": "s2"}]}),
        _chunk({"thinking_blocks": [{"type": "thinking", "thinking": "whole", "signature": "s3"}]}),
        _chunk(finish="stop"),
    )
    assert answer["choices"][0]["message"]["thinking_blocks"] == [
        {"type": "thinking", "thinking": "ab", "signature": "s1"},
        hidden,
        {"type": "thinking", "thinking": "", "signature": "s2"},
        {"type": "thinking", "thinking": "whole", "signature": "s3"},
    ]
    with pytest.raises(ValueError, match="not an object"):
        _sum(_chunk({"thinking_blocks": ["x"]}))


def test_stop_fields_of_a_choice_are_kept() -> None:
    answer = _sum(_chunk({"content": "a"}), _chunk(finish="stop", stop_reason="END", stop_details=None))
    assert answer["choices"][0]["stop_reason"] == "END"
    assert "stop_details" not in answer["choices"][0]


def test_thought_signature_of_google_is_kept() -> None:
    extra = {"google": {"thought_signature": "s"}}
    call = {"index": 0, "id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    answer = _sum(_chunk({"tool_calls": [{**call, "extra_content": extra}]}), _chunk(finish="tool_calls"))
    assert answer["choices"][0]["message"]["tool_calls"][0]["extra_content"] == extra


def test_parts_of_audio_and_transcript_are_joined() -> None:
    pieces: list[dict[str, Any]] = [
        {"id": "audio_1"}, {"transcript": "Hel"}, {"data": "AAAA"}, {"data": "BBBB", "transcript": "lo"},
        {"data": None, "expires_at": 9},
    ]  # fmt: skip
    chunks = [_chunk({"role": "assistant", "content": None}), *(_chunk({"audio": piece}) for piece in pieces)]
    message = _sum(*chunks, _chunk(finish="stop"))["choices"][0]["message"]
    assert message["audio"] == {"id": "audio_1", "transcript": "Hello", "data": "AAAABBBB", "expires_at": 9}
    assert message["content"] is None, "the answer has audio instead of text"


def test_annotations_of_several_chunks_are_joined() -> None:
    first, second = (
        {"type": "url_citation", "url_citation": {"url": url, "title": "", "start_index": 0, "end_index": 1}}
        for url in ("https://a", "https://b")
    )
    text = _chunk({"content": "x", "annotations": [first]})
    chunks = (text, _chunk({"annotations": [second]}), _chunk(finish="stop"))
    message = _sum(*chunks)["choices"][0]["message"]
    assert message["annotations"] == [first, second]
    ChatCompletion.model_validate(_sum(*chunks))


def test_moderation_of_the_last_chunk_is_kept() -> None:
    moderation = {"input": {"type": "moderation_results", "results": []}}
    plain = _chunk({"content": "a"}, finish="stop", logprobs=None)
    del plain["system_fingerprint"]
    answer = _sum(plain, {**plain, "choices": [], "moderation": moderation})
    assert answer["moderation"] == moderation


def finished(*choices: tuple[Any, str | None]) -> Data:
    chunk = {"choices": [{"index": index, "finish_reason": reason} for index, reason in choices]}
    return Data(orjson.dumps(chunk), DeltaKind.FINISH)


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
def test_number_of_choices_follows_from_n_and_the_prompts(body: dict[str, Any], choices: int) -> None:
    endpoint = Endpoint.COMPLETIONS if "prompt" in body else Endpoint.CHAT
    assert choices_of(decoded(body, endpoint)) == choices


def test_answer_of_one_choice_is_complete_at_its_first_finish_reason() -> None:
    finishes = Finishes()
    assert not (finishes.are_any or finishes.are_all)
    finishes.note(Data(b"any frame with a finish reason", DeltaKind.FINISH))
    assert finishes.are_any and finishes.are_all


def test_answer_of_several_choices_is_complete_when_all_have_finished() -> None:
    finishes = Finishes(3)
    oops = Data(b"{oops", DeltaKind.FINISH)
    for frame in (finished((1, "stop"), (0, None)), finished((1, "stop")), oops, finished(([], "stop"))):
        finishes.note(frame)
        assert not finishes.are_all
    assert finishes.are_any
    finishes.note(finished((2, "length"), (0, "stop")))
    assert finishes.are_all


def _data(delta: dict[str, Any], finish: str | None = None) -> Data:
    chunk = {
        "id": "c1", "object": "chat.completion.chunk", "created": 1, "model": "demo",
        "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
    }  # fmt: skip
    return Data(orjson.dumps(chunk), DeltaKind.FINISH if finish else DeltaKind.CONTENT)


class _Coming:
    """An answer whose `pieces` arrive while a task waits for its end; counts the wake-ups of the task."""

    def __init__(self, *pieces: Data) -> None:
        self._pieces = list(pieces)
        self._sink: Sink = lambda _: False
        self.wakes = 0
        self.last: list[Frame] = [_data({}, "stop")]

    def first_frames(self) -> list[Frame]:
        return [_data({"role": "assistant", "content": ""})]

    def pass_on(self, sink: Sink) -> None:
        self._sink = sink

    async def next(self) -> list[Frame]:
        self.wakes += 1
        while self._pieces:
            piece = self._pieces.pop(0)
            if not self._sink([piece]):
                return [piece]
        return [*self.last, Done()]


async def test_task_that_waits_for_a_unary_answer_wakes_once() -> None:
    coming = _Coming(*(_data({"content": word}) for word in ("one ", "two ", "three")))
    whole = await assemble(cast(Answer, coming))
    assert whole["choices"][0]["message"]["content"] == "one two three"
    assert coming.wakes == 1


async def test_malformed_chunk_ends_the_wait_with_an_error() -> None:
    coming = _Coming(_data({"content": "one"}), Data(b'{"choices":7}', DeltaKind.OTHER))
    with pytest.raises(UpstreamError) as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.MALFORMED


async def test_answer_without_finish_reason_is_an_error() -> None:
    """Also with an end marker: the client of a unary answer could not tell it from a complete one."""
    coming = _Coming(_data({"content": "one"}))
    coming.last.clear()
    with pytest.raises(UpstreamError, match="finish reason") as raised:
        await assemble(cast(Answer, coming))
    assert raised.value.kind is UpstreamKind.READ
