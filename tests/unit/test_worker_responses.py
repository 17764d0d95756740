"""Streams, unary answers and log probabilities in the format of OpenAI, byte for byte."""

from __future__ import annotations

import json
import re
from typing import Any

import openai.types.chat as types
import pytest
from openai.lib.streaming.chat import ChatCompletionStreamState

from inference.worker.answers.answer_shape import new_call_id
from inference.worker.answers.generation import Output, TokenLogprob
from inference.worker.api import response_writer
from inference.worker.api.response_writer import Answer, Logprobs, Stream, Usage
from inference.worker.dialects.answer_parts import CallArguments, CallBegin, Content, Part, Reasoning

CALLS = [
    Output(0, "", 1, parts=(Reasoning("Why"),)),
    Output(0, "", 2, parts=(Reasoning(" not?\n"),), reasoning_tokens=2),
    Output(0, "", 3, parts=(Content("So:"),), reasoning_tokens=2),
    Output(0, "", 5, parts=(CallBegin(0, "add", "call_a"), CallArguments(0, '{"x":')), reasoning_tokens=2),
    Output(0, "", 6, parts=(CallArguments(0, " 1}"), CallBegin(1, "sub", "call_b")), reasoning_tokens=2),
    Output(0, "", 7, parts=(CallArguments(1, "{}"),), finish="tool_calls", reasoning_tokens=2),
]
LOGGED = [
    Output(0, "", 1, logprobs=(TokenLogprob(b"(", -0.5, (), 0),), parts=(Reasoning("a"),)),
    Output(0, "", 2, logprobs=(TokenLogprob(b")", -0.25, ((b")", -0.25),), 1),)),
    Output(0, "", 3, parts=(Content("b"),), finish="stop"),
]


def lines(outputs: list[Output], **options: Any) -> list[str]:
    """The chunks without their common head, which is checked."""
    stream = Stream("chat", "tiny", 1700000000, **{"with_usage": False, "has_parts": True, **options})
    raw = b"".join(stream.frames(output) for output in outputs).decode()
    head = r'data: \{"id":"chatcmpl-[0-9a-f]{24}","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
    frames = raw.split("\n\n")
    assert frames.pop() == ""
    assert all(re.match(head, frame) for frame in frames)
    return [re.sub(head, "", frame) for frame in frames]


def choice(delta: str, *, finish: str = "null", logprobs: str = "null") -> str:
    return f'"choices":[{{"index":0,"delta":{delta},"logprobs":{logprobs},"finish_reason":{finish}}}]}}'


def test_stream_of_reasoning_content_and_calls() -> None:
    """The role is first; a call starts with its id and name."""
    assert lines(CALLS) == [
        choice('{"role":"assistant","content":null}'),
        choice('{"reasoning_content":"Why"}'),
        choice('{"reasoning_content":" not?\\n"}'),
        choice('{"content":"So:"}'),
        choice('{"tool_calls":[{"index":0,"id":"call_a","type":"function","function":{"name":"add","arguments":""}}]}'),
        choice('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"x\\":"}}]}'),
        choice('{"tool_calls":[{"index":0,"function":{"arguments":" 1}"}}]}'),
        choice('{"tool_calls":[{"index":1,"id":"call_b","type":"function","function":{"name":"sub","arguments":""}}]}'),
        choice('{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}'),
        choice("{}", finish='"tool_calls"'),
    ]


def test_tokens_without_content_have_log_probabilities() -> None:
    first = '{"token":"(","logprob":-0.5,"bytes":[40],"top_logprobs":[]}'
    second = '{"token":")","logprob":-0.25,"bytes":[41],"top_logprobs":[{"token":")","logprob":-0.25,"bytes":[41]}]}'
    assert lines(LOGGED) == [
        choice('{"role":"assistant","content":null}'),
        choice('{"reasoning_content":"a"}'),
        choice("{}", logprobs=f'{{"content":[{first}],"refusal":null}}'),
        choice("{}", logprobs=f'{{"content":[{second}],"refusal":null}}'),
        choice('{"content":"b"}'),
        choice("{}", finish='"stop"'),
    ]


@pytest.mark.parametrize("parts", [(), (Reasoning("hm"),)])
def test_stream_without_text_has_empty_content_like_the_unary_answer(parts: tuple[Part, ...]) -> None:
    """null is valid only beside calls."""
    ended = Output(0, "", 1, parts=parts, finish="length")
    assert lines([ended])[-1] == choice('{"content":""}', finish='"length"')
    answer = Answer("chat")
    answer.add(ended)
    assert answer.message["content"] == ""


def test_plain_text_is_streamed_as_content() -> None:
    assert lines([Output(0, "hi", 1), Output(0, "", 2, finish="stop")], has_parts=False) == [
        choice('{"role":"assistant","content":""}'),
        choice('{"content":"hi"}'),
        choice("{}", finish='"stop"'),
    ]


def test_choices_start_in_their_order() -> None:
    """The official client keeps choices in a list and takes each new one as the next."""
    for has_parts in (False, True):
        stream = Stream("chat", "tiny", 1700000000, with_usage=False, choices=3, has_parts=has_parts)
        texts = [(2, "c"), (0, "a"), (2, "C"), (1, "b")]
        outputs = [
            Output(choice, "", 1, parts=(Content(text),)) if has_parts else Output(choice, text, 1)
            for choice, text in texts
        ]
        ends = [Output(choice, "", 2, finish="stop") for choice in (1, 2, 0)]
        raw = b"".join(map(stream.frames, [*outputs, *ends])).decode()
        state = ChatCompletionStreamState()
        roles = []
        for frame in raw.split("\n\n")[:-1]:
            chunk = types.ChatCompletionChunk.model_validate_json(frame.removeprefix("data: "))
            roles += [item.index for item in chunk.choices if item.delta.role is not None]
            state.handle_chunk(chunk)
        whole = state.get_final_completion()
        assert [(item.index, item.message.content) for item in whole.choices] == [(0, "a"), (1, "b"), (2, "cC")]
        assert roles == [0, 1, 2]


def test_each_choice_of_a_completion_starts_with_its_echo() -> None:
    echoes = [response_writer.Echo("one "), response_writer.Echo("two ")]
    stream = Stream("completion", "tiny", 1700000000, with_usage=False, choices=2, echo=echoes)
    raw = b"".join(map(stream.frames, [Output(1, "b", 1), Output(0, "a", 1), Output(1, "c", 2)])).decode()
    chunks = [json.loads(frame.removeprefix("data: "))["choices"][0] for frame in raw.split("\n\n")[:-1]]
    assert [(item["index"], item["text"]) for item in chunks] == [(1, "two b"), (0, "one a"), (1, "c")]


def test_chunks_have_the_official_type() -> None:
    stream = Stream("chat", "tiny", 1700000000, with_usage=True, has_parts=True)
    raw = b"".join(stream.frames(output) for output in [*CALLS, *LOGGED]) + stream.usage(Usage(1, 2, 0, 1))
    for frame in raw.decode().split("\n\n")[:-1]:
        types.ChatCompletionChunk.model_validate_json(frame.removeprefix("data: "), strict=True)


def test_log_probabilities_are_in_the_last_content_of_a_chunk() -> None:
    scored = TokenLogprob(b"x", -0.5, (), 0)
    parts = (Content("a"), Reasoning("b"), Content("c"), Reasoning("d"))
    logprobs = '{"content":[{"token":"x","logprob":-0.5,"bytes":[120],"top_logprobs":[]}],"refusal":null}'
    assert lines([Output(0, "", 1, logprobs=(scored,), parts=parts)])[1:] == [
        choice('{"content":"a"}'),
        choice('{"reasoning_content":"b"}'),
        choice('{"content":"c"}', logprobs=logprobs),
        choice('{"reasoning_content":"d"}'),
    ]


def whole(*outputs: Output) -> Any:
    answer = Answer("chat")
    for output in outputs:
        answer.add(output)
    usage = Usage(5, answer.tokens, 0, answer.reasoning_tokens)
    raw = response_writer.whole("chat", "tiny", 1700000000, [answer], usage, with_logprobs=False)
    types.ChatCompletion.model_validate_json(raw, strict=True)
    return json.loads(raw)


def test_unary_answer_contains_reasoning_and_calls() -> None:
    answer = whole(*CALLS)
    assert answer["choices"] == [
        {
            "index": 0,
            "finish_reason": "tool_calls",
            "logprobs": None,
            "message": {
                "role": "assistant",
                "content": "So:",
                "refusal": None,
                "reasoning_content": "Why not?\n",
                "tool_calls": [
                    {"id": "call_a", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}},
                    {"id": "call_b", "type": "function", "function": {"name": "sub", "arguments": "{}"}},
                ],
            },
        }
    ]
    assert answer["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 2},
    }


def test_content_is_null_only_beside_calls() -> None:
    called = whole(Output(0, "", 1, parts=(CallBegin(0, "f", "c"),), finish="tool_calls"))
    assert called["choices"][0]["message"]["content"] is None
    silent = whole(Output(0, "", 1, finish="stop"))
    assert silent["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}
    assert "completion_tokens_details" not in silent["usage"]


def test_ids_of_calls_differ() -> None:
    ids = {new_call_id() for _ in range(100)}
    assert len(ids) == 100
    assert all(re.fullmatch(r"call_[0-9a-f]{24}", id) for id in ids)


def test_stop_string_is_reported() -> None:
    ended = Output(0, "", 2, finish="stop", stop='"END"')
    assert lines([ended], has_parts=False)[-1] == choice("{}", finish='"stop","stop_reason":"\\"END\\""')
    assert whole(Output(0, "hi", 1), ended)["choices"][0]["stop_reason"] == '"END"'
    assert "stop_reason" not in whole(Output(0, "hi", 1, finish="stop"))["choices"][0]


def completion(*items: TokenLogprob) -> dict[str, Any]:
    writer = Logprobs("completion")
    writer.add(items)
    return dict(json.loads(writer.json()))


def test_parts_of_characters_have_different_keys() -> None:
    """With the replacement character as key, one of them would overwrite the others."""
    top = ((b"\xe2", -0.1), (b"\xf0\x9f", -2.0), (b" \xc3", -3.0), ("é".encode(), -4.0))
    found = completion(TokenLogprob(b"\xe2", -0.1, top, 0))
    assert found["tokens"] == ["bytes:\\xe2"]
    assert found["top_logprobs"] == [{"bytes:\\xe2": -0.1, "bytes:\\xf0\\x9f": -2.0, "bytes: \\xc3": -3.0, "é": -4.0}]


def test_token_with_the_text_of_an_escaped_one_has_its_own_key() -> None:
    top = ((b"\\xe2\xe3", -0.1), (b"\xe2\xe3", -0.2))
    assert list(completion(TokenLogprob(b"a", -1.0, top, 0))["top_logprobs"][0].values()) == [-0.1, -0.2, -1.0]


def test_drawn_token_is_listed_beside_the_most_likely_ones() -> None:
    """Of tokens with the same text, the most likely one is listed."""
    top = ((b"a", -0.5), (b"b", -1.0))
    assert completion(TokenLogprob(b"c", -7.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0, "c": -7.0}]
    assert completion(TokenLogprob(b"b", -1.0, top, 0))["top_logprobs"] == [{"a": -0.5, "b": -1.0}]
    assert completion(TokenLogprob(b"c", -7.0, (), 0))["top_logprobs"] == [{"c": -7.0}]
    alike = ((b"a", -0.5), (b"a", -3.0))
    assert completion(TokenLogprob(b"a", -9.0, alike, 0))["top_logprobs"] == [{"a": -0.5}]
