"""Streams of cloud providers as OpenAI frames: golden streams of the documentation, invalid and cut streams."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from anthropic.types.stop_reason import StopReason
from openai.types.chat import ChatCompletionChunk

from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Done, Frame
from gateway.errors import UpstreamError, UpstreamKind
from gateway.providers.anthropic import anthropic_events
from gateway.providers.anthropic.anthropic_events import AnthropicStream
from gateway.providers.openai.openai_events import CallNumbers, OpenAIStream, whole_answer
from headgate.shared.sse import SseFrame, SseSplitter
from tests.rigs.fake_provider import documented
from tests.rigs.fake_provider.strict import strictly


def anthropic(stream: bytes) -> list[Frame]:
    reader = AnthropicStream(created=1700000000)
    frames = [one for frame in SseSplitter().feed(stream) for one in reader.feed(frame)]
    return [*frames, *reader.end()]


def openai(stream: bytes, choices: int = 1) -> list[Frame]:
    reader = OpenAIStream(choices)
    frames = [one for frame in SseSplitter().feed(stream) for one in reader.feed(frame)]
    return [*frames, *reader.end()]


def wire(frames: list[Frame]) -> str:
    """The bytes that a client receives."""
    out = b""
    for frame in frames:
        match frame:
            case Data(payload):
                out += b"data: " + payload + b"\n\n"
            case Comment(raw):
                out += raw
            case Done():
                out += b"data: [DONE]\n\n"
    return out.decode()


def golden(id: str, *parts: str) -> str:
    head = f'{{"id":"chatcmpl-{id}","object":"chat.completion.chunk","created":1700000000,"model":"claude-opus-4-6",'
    frames = [part if part.startswith(":") else f"data: {head}{part}}}" for part in parts]
    return "\n\n".join([*frames, "data: [DONE]", ""])


def choice(delta: str, finish: str = "null") -> str:
    return f'"choices":[{{"index":0,"delta":{delta},"logprobs":null,"finish_reason":{finish}}}]'


def counts(prompt: int, completion: int, cached: int = 0) -> str:
    return (
        f'"choices":[],"usage":{{"prompt_tokens":{prompt},"completion_tokens":{completion},'
        f'"total_tokens":{prompt + completion},'
        f'"prompt_tokens_details":{{"cached_tokens":{cached},"cache_write_tokens":0}}}}'
    )


ROLE = choice('{"role":"assistant","content":""}')


def test_anthropic_text_equals_the_golden_chunks() -> None:
    assert wire(anthropic(documented.ANTHROPIC_TEXT)) == golden(
        "msg_01Text",
        ROLE,
        ": ping",
        choice('{"content":"Water"}'),
        choice('{"content":" turns\\nü"}'),
        choice("{}", '"stop"'),
        counts(25, 15),
    )


def test_anthropic_tool_calls_equal_the_golden_chunks() -> None:
    assert wire(anthropic(documented.ANTHROPIC_TOOL)) == golden(
        "msg_01Tool",
        ROLE,
        choice('{"content":"I look it up:"}'),
        choice(
            '{"tool_calls":[{"index":0,"id":"toolu_01A","type":"function",'
            '"function":{"name":"get_level","arguments":""}}]}'
        ),
        choice('{"tool_calls":[{"index":0,"function":{"arguments":"{\\"river\\":"}}]}'),
        choice('{"tool_calls":[{"index":0,"function":{"arguments":" \\"Iller\\"}"}}]}'),
        choice(
            '{"tool_calls":[{"index":1,"id":"toolu_01B","type":"function",'
            '"function":{"name":"get_time","arguments":""}}]}'
        ),
        choice('{"tool_calls":[{"index":1,"function":{"arguments":"{}"}}]}'),
        choice("{}", '"tool_calls"'),
        counts(572, 89, cached=100),
    )


def test_anthropic_thinking_equals_the_golden_chunks() -> None:
    assert wire(anthropic(documented.ANTHROPIC_THINKING)) == golden(
        "msg_01Think",
        ROLE,
        choice('{"reasoning_content":"Two and two."}'),
        choice('{"content":"4"}'),
        choice("{}", '"length"'),
        counts(9, 20),
    )


@pytest.mark.parametrize("example", ["ANTHROPIC_TEXT", "ANTHROPIC_TOOL"])
def test_translated_chunks_have_the_official_type(example: str) -> None:
    for frame in anthropic(getattr(documented, example)):
        if isinstance(frame, Data):
            strictly(ChatCompletionChunk, json.loads(frame.payload))


def test_openai_stream_is_relayed_unchanged() -> None:
    assert wire(openai(documented.OPENAI_TEXT)).encode() == documented.OPENAI_TEXT
    kinds = [frame.kind for frame in openai(documented.OPENAI_TEXT) if isinstance(frame, Data)]
    assert kinds == [DeltaKind.OTHER, DeltaKind.CONTENT, DeltaKind.FINISH]


# --- Anthropic's events -----------------------------------------------------------------------------------------------
def events(*items: dict[str, Any]) -> bytes:
    return b"".join(b"event: x\ndata: " + json.dumps(item).encode() + b"\n\n" for item in items)


START = {"type": "message_start", "message": {"id": "msg_1", "model": "m", "usage": {"input_tokens": 3}}}
TEXT = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "A"}}
STOP = {"type": "message_stop"}


def finish(reason: str | None, **more: Any) -> dict[str, Any]:
    return {"type": "message_delta", "delta": {"stop_reason": reason, **more}, "usage": {"output_tokens": 2}}


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("end_turn", "stop"),
        ("stop_sequence", "stop"),
        ("tool_use", "tool_calls"),
        ("max_tokens", "length"),
        ("model_context_window_exceeded", "length"),
        ("pause_turn", "length"),
        ("refusal", "content_filter"),
        ("a_reason_of_tomorrow", "stop"),
    ],
)
def test_stop_reasons_are_translated(reason: str, expected: str) -> None:
    frames = anthropic(events(START, TEXT, finish(reason), STOP))
    ended = [frame for frame in frames if isinstance(frame, Data) and frame.kind is DeltaKind.FINISH]
    assert [json.loads(frame.payload)["choices"][0]["finish_reason"] for frame in ended] == [expected]
    assert frames[-1] == Done()


def test_stop_reasons_of_the_sdk_have_a_finish_reason() -> None:
    assert set(get_args(StopReason)) == set(anthropic_events.FINISH_REASONS)


def test_refusal_has_its_explanation() -> None:
    details = {"type": "refusal", "category": None, "explanation": "Not this."}
    frames = anthropic(events(START, finish("refusal", stop_details=details), STOP))
    assert b'"refusal":"Not this."' in frames[1].payload  # type: ignore[union-attr]


def test_usage_is_cumulative_and_null_does_not_overwrite() -> None:
    late = {
        "type": "message_delta",
        "delta": {},
        "usage": {
            "output_tokens": 9,
            "input_tokens": None,
            "cache_read_input_tokens": 5,
            "output_tokens_details": {"thinking_tokens": 4},
        },
    }
    usage = json.loads(anthropic(events(START, TEXT, finish("end_turn"), late, STOP))[-2].payload)["usage"]  # type: ignore[union-attr]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (8, 9)
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 4}


def test_incomplete_usage_is_left_out() -> None:
    for usage in ({}, {"output_tokens": 3}, {"input_tokens": 3}, {"input_tokens": True, "output_tokens": -1}):
        assert anthropic_events.openai_usage(usage) is None


def test_unknown_events_and_blocks_are_ignored() -> None:
    server = {"type": "content_block_start", "index": 5, "content_block": {"type": "server_tool_use", "id": "s"}}
    piece = {"type": "content_block_delta", "index": 5, "delta": {"type": "input_json_delta", "partial_json": "{"}}
    signature = {"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "x"}}
    unknown = {"type": "tomorrow", "anything": 1}
    odd = [server, piece, signature, unknown, {"type": "content_block_stop", "index": 5}]
    assert anthropic(events(START, *odd, TEXT, finish("end_turn"), STOP)) == anthropic(
        events(START, TEXT, finish("end_turn"), STOP)
    )


def test_tool_input_in_the_start_of_a_block_is_kept() -> None:
    block = {"type": "tool_use", "id": "t", "name": "n", "input": {"a": 1}}
    start = {"type": "content_block_start", "index": 0, "content_block": block}
    frames = anthropic(events(START, start, {"type": "content_block_stop", "index": 0}, finish("tool_use"), STOP))
    assert b'"arguments":"{\\"a\\":1}"' in frames[2].payload  # type: ignore[union-attr]


def test_error_event_raises() -> None:
    with pytest.raises(UpstreamError) as caught:
        anthropic(events(START, TEXT) + documented.ANTHROPIC_ERROR)
    assert caught.value.kind is UpstreamKind.ERROR_FRAME
    assert (caught.value.status, caught.value.type, caught.value.message) == (529, "overloaded_error", "Overloaded")


@pytest.mark.parametrize(
    "stream",
    [
        b"data: {broken\n\n",
        b"data: [1]\n\n",
        events(TEXT),
        events({"type": "message_start"}),
        events(START, START),
        events(START, {"type": "content_block_start", "index": 0}),
        events(START, {"type": "content_block_delta", "index": 0}),
        events(START, {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": 5}}),
        events(START, {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta"}}),
        b'data: {"type": "message_start", "message": {"id": "\\ud83d"}}\n\n',
        events(START, {**TEXT, "index": [], "delta": {"type": "input_json_delta", "partial_json": "x"}}),
    ],
)
def test_invalid_anthropic_stream_is_malformed(stream: bytes) -> None:
    with pytest.raises(UpstreamError) as caught:
        anthropic(stream)
    assert caught.value.kind is UpstreamKind.MALFORMED


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"", UpstreamKind.EMPTY),
        (events(START), UpstreamKind.EMPTY),
        (events(START, STOP), UpstreamKind.EMPTY),
        (events(START, TEXT), UpstreamKind.READ),
        (events(START, TEXT, finish(None), STOP), UpstreamKind.READ),
    ],
)
def test_anthropic_stream_without_a_stop_reason_is_cut(stream: bytes, kind: UpstreamKind) -> None:
    with pytest.raises(UpstreamError) as caught:
        anthropic(stream)
    assert caught.value.kind is kind


# --- OpenAI's chunks --------------------------------------------------------------------------------------------------
def chunk(*choices: dict[str, Any], **more: Any) -> bytes:
    body = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": list(choices), **more}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def part(delta: dict[str, Any], finish: str | None = None, index: int = 0) -> dict[str, Any]:
    return {"index": index, "delta": delta, "finish_reason": finish}


END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ([part({"role": "assistant", "content": ""})], DeltaKind.OTHER),
        ([part({"content": None})], DeltaKind.OTHER),
        ([part({"content": "x"})], DeltaKind.CONTENT),
        ([part({"reasoning_content": "x"})], DeltaKind.CONTENT),
        ([part({"reasoning": "x"})], DeltaKind.CONTENT),
        ([part({"refusal": "x"})], DeltaKind.CONTENT),
        ([part({"tool_calls": [{"index": 0}]})], DeltaKind.CONTENT),
        ([{"index": 0, "text": "x", "finish_reason": None}], DeltaKind.CONTENT),
        ([part({"content": "x"}, "stop")], DeltaKind.FINISH),
        ([part({}, "length")], DeltaKind.FINISH),
        ([part({}), part({"content": "x"}, index=1)], DeltaKind.CONTENT),
        ([part({}, "stop"), part({"content": "x"}, index=1)], DeltaKind.FINISH),
    ],
)
def test_each_chunk_has_its_kind(choices: list[dict[str, Any]], kind: DeltaKind) -> None:
    frames = OpenAIStream().feed(SseSplitter().feed(chunk(*choices))[0])
    assert [frame.kind for frame in frames if isinstance(frame, Data)] == [kind]


def test_usage_chunk_has_no_choices() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    frames = openai(chunk(part({}, "stop"), usage=None) + chunk(usage=usage) + END)
    assert [frame.kind for frame in frames[:-1]] == [DeltaKind.FINISH, DeltaKind.USAGE]  # type: ignore[union-attr]


def test_usage_in_the_last_chunk_becomes_a_usage_chunk() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    frames = openai(chunk(part({"content": "x"}), usage={}) + chunk(part({}, "stop"), usage=usage) + END)
    last = frames[-2]
    assert isinstance(last, Data)
    assert last.kind is DeltaKind.USAGE
    assert (json.loads(last.payload)["choices"], json.loads(last.payload)["usage"]) == ([], usage)


def test_comments_are_relayed_and_other_fields_are_not() -> None:
    stream = b": OPENROUTER PROCESSING\n\nevent: hello\n\n" + chunk(part({}, "stop")) + END
    assert openai(stream)[0] == Comment(b": OPENROUTER PROCESSING\n\n")
    assert len(openai(stream)) == 3


def test_chunk_of_several_lines_becomes_one_line() -> None:
    stream = (
        b'data: {"id":"c",\ndata: "choices":[{"index":0,"delta":{"content":"x"},"finish_reason":"stop"}]}\n\n' + END
    )
    payload = openai(stream)[0].payload  # type: ignore[union-attr]
    assert b"\n" not in payload
    assert json.loads(payload)["choices"][0]["delta"] == {"content": "x"}


def test_all_requested_choices_must_finish() -> None:
    one = chunk(part({"content": "x"}, "stop"))
    both = one + chunk(part({"content": "y"}, "stop", index=1))
    assert openai(both, 2)[-1] == Done()
    with pytest.raises(UpstreamError, match="finish"):
        openai(one, 2)
    with pytest.raises(UpstreamError, match="finish"):
        openai(one + chunk(part({"content": "y"}, index=1)) + END, 2)
    assert openai(one + END, 2)[-1] == Done()  # a provider that gives fewer choices and ends the stream


@pytest.mark.parametrize(
    ("stream", "kind"),
    [
        (b"", UpstreamKind.EMPTY),
        (END, UpstreamKind.EMPTY),
        (chunk(part({"role": "assistant"})) + END, UpstreamKind.EMPTY),
        (chunk(part({"content": "x"})), UpstreamKind.READ),
        (chunk(part({"content": "x"})) + END, UpstreamKind.READ),
        (b"data: {broken\n\n", UpstreamKind.MALFORMED),
        (b'data: {"id": 1}\n\n', UpstreamKind.MALFORMED),
        (b"data: 5\n\n", UpstreamKind.MALFORMED),
        (b'data: {"choices": [1]}\n\n', UpstreamKind.MALFORMED),
        (b'data: {"choices": [{"index": {}}]}\n\n', UpstreamKind.MALFORMED),
        (b'data: {"error": {"message": "no"}}\n\n', UpstreamKind.ERROR_FRAME),
        (b'data: {"error": "no"}\n\n', UpstreamKind.ERROR_FRAME),
        (b'data: [{"error": {"code": 503, "message": "no", "status": "UNAVAILABLE"}}]\n\n', UpstreamKind.ERROR_FRAME),
        (b'data: {"choices": [], "error": {"code": 502, "message": "no"}}\n\n', UpstreamKind.ERROR_FRAME),
    ],
)
def test_invalid_or_cut_openai_stream_raises(stream: bytes, kind: UpstreamKind) -> None:
    with pytest.raises(UpstreamError) as caught:
        openai(stream)
    assert caught.value.kind is kind


def test_lone_surrogate_is_relayed_unchanged() -> None:
    half = b'data: {"choices":[{"index":0,"delta":{"content":"\\ud83d"},"finish_reason":null}]}\n\n'
    frames = openai(half + chunk(part({}, "stop")) + END)
    assert isinstance(frames[0], Data)
    assert frames[0][:2] == (half[6:-2], DeltaKind.CONTENT)


def test_frames_after_the_end_are_ignored() -> None:
    assert openai(chunk(part({}, "stop")) + END + b"data: junk\n\n") == openai(chunk(part({}, "stop")) + END)
    assert anthropic(documented.ANTHROPIC_TEXT + b"data: junk\n\n") == anthropic(documented.ANTHROPIC_TEXT)


def test_comment_in_an_anthropic_stream_is_relayed() -> None:
    assert AnthropicStream(1).feed(SseFrame(comment=b": hm\n\n")) == [Comment(b": hm\n\n")]


def test_anthropic_stream_without_usage_is_complete() -> None:
    start = {"type": "message_start", "message": {"id": "msg_1", "model": "m"}}
    frames = anthropic(events(start, TEXT, finish("end_turn"), STOP))
    assert frames[-1] == Done()
    assert not [frame for frame in frames if isinstance(frame, Data) and frame.kind is DeltaKind.USAGE]


def test_stream_is_finished_before_its_end_mark_arrives() -> None:
    claude = AnthropicStream(1)
    seen = []
    for frame in SseSplitter().feed(events(START, TEXT, finish("end_turn"), STOP)):
        claude.feed(frame)
        seen.append((claude.is_finished, claude.is_complete))
    assert seen == [(False, False), (False, False), (True, False), (True, True)]
    gpt = OpenAIStream(1)
    seen = []
    for frame in SseSplitter().feed(chunk(part({"content": "A"})) + chunk(part({}, "stop")) + END):
        gpt.feed(frame)
        seen.append((gpt.is_finished, gpt.is_complete))
    assert seen == [(False, False), (True, False), (True, True)]


def indices(*pieces: dict[str, Any]) -> list[int]:
    """The indices of the pieces after numbering."""
    numbers = CallNumbers()
    for piece in pieces:
        numbers.number([piece])
    return [piece["index"] for piece in pieces]


def piece(index: int | None = None, id: str | None = None, name: str | None = None) -> dict[str, Any]:
    function: dict[str, Any] = {"function": {"name": name, "arguments": "x"}}
    return {**({} if index is None else {"index": index}), **({} if id is None else {"id": id}), **function}


def test_unique_indices_are_kept() -> None:
    assert not CallNumbers().number([piece(0, "a", "f"), piece(0), piece(1, "b", "g"), piece(1), piece(0)])
    assert indices(piece(1, "a", "f"), piece(1), piece(2, "b")) == [1, 1, 2]


def test_each_call_without_an_index_gets_its_own_index() -> None:
    pieces = piece(None, "a", "f"), piece(None), piece(None, "b", "g"), piece(), piece(None, "a")
    assert indices(*pieces) == [0, 0, 1, 1, 0]
    assert indices(piece(None, None, "f"), piece(), piece(None, None, "g")) == [0, 0, 1]


def test_calls_with_the_same_index_are_separated() -> None:
    assert indices(piece(0, "a", "f"), piece(0, "b", "g"), piece(0), piece(0, "c", "h")) == [0, 1, 1, 2]


def test_late_id_belongs_to_the_call_without_one() -> None:
    assert indices(piece(0, None, "f"), piece(0, "a"), piece(0), piece(0, "b", "g")) == [0, 0, 0, 1]


def test_invalid_pieces_are_not_changed() -> None:
    pieces: list[Any] = ["x", {"index": "y", "function": 5}]
    raw = b"data: " + json.dumps({"choices": [{"delta": {"tool_calls": pieces}}]}).encode() + b"\n\n"
    (frame,) = OpenAIStream().feed(SseSplitter().feed(raw)[0])
    assert isinstance(frame, Data)
    assert json.loads(frame.payload)["choices"][0]["delta"]["tool_calls"] == ["x", {"index": 0, "function": 5}]


def test_choice_with_an_invalid_index_is_malformed() -> None:
    choice = {"index": ["x"], "delta": {"tool_calls": [piece(0, "a", "f")]}}
    raw = b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"
    with pytest.raises(UpstreamError, match="not a number"):
        OpenAIStream(1).feed(SseSplitter().feed(raw)[0])


def test_parallel_calls_of_google_are_separate_calls() -> None:
    head = {"id": "c", "object": "chat.completion.chunk", "created": 5, "model": "gemini"}
    deltas: list[Any] = [
        {"role": "assistant", "content": "I look."},
        {"tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x":1}'}}]},
        {"tool_calls": [{"id": "b", "type": "function", "function": {"name": "f", "arguments": '{"x":2}'}}]},
        {"tool_calls": None},
        None,
    ]
    chunks = [{**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks[1]["choices"].append({"index": 1, "delta": {"content": "Me too."}, "finish_reason": "stop"})
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    raw = b"".join(b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"
    reader = OpenAIStream(2)
    frames = [one for frame in SseSplitter().feed(raw) for one in reader.feed(frame)]
    assembly = Assembly()
    for one in frames:
        if isinstance(one, Data):
            assembly.add(json.loads(one.payload))
    calls = assembly.result()["choices"][0]["message"]["tool_calls"]
    assert [(call["id"], call["function"]["arguments"]) for call in calls] == [("a", '{"x":1}'), ("b", '{"x":2}')]


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"<html>", UpstreamKind.MALFORMED),
        (b"[]", UpstreamKind.MALFORMED),
        (b'{"object": "chat.completion"}', UpstreamKind.MALFORMED),
        (b'{"choices": []}', UpstreamKind.EMPTY),
        (b'{"choices": [1]}', UpstreamKind.MALFORMED),
        (b'{"choices": [{"finish_reason": "stop"}]}', UpstreamKind.MALFORMED),
        (b'{"choices": [{"message": {"content": "x"}}]}', UpstreamKind.READ),
        (b'{"error": {"message": "no"}, "choices": []}', UpstreamKind.ERROR_FRAME),
        (b'{"error": "no"}', UpstreamKind.ERROR_FRAME),
    ],
)
def test_incomplete_answer_in_one_piece_is_an_error(body: bytes, kind: UpstreamKind) -> None:
    with pytest.raises(UpstreamError) as caught:
        whole_answer(body)
    assert caught.value.kind is kind


def test_complete_answer_in_one_piece_is_taken_as_it_is() -> None:
    for choice in ({"message": {"content": ""}, "finish_reason": "stop"}, {"text": "x", "finish_reason": "length"}):
        answer = {"choices": [choice], "error": None}
        assert whole_answer(json.dumps(answer).encode()) == answer
