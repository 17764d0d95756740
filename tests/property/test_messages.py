"""The Messages API: events of any stream are valid and equal the whole answer, and any request becomes a valid
internal request and is sent to Anthropic unchanged.
"""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import RawMessageStreamEvent
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.apis.messages import messages_answer, messages_request
from gateway.apis.messages.messages_answer import Bounds, MessageEvents
from gateway.apis.openai import generation_request
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Comment, Data, DeltaKind, Endpoint, Frame
from gateway.errors import RequestError
from tests.rigs.fake_provider import rules
from tests.rigs.fake_provider.strict import strictly
from tests.rigs.typed_bodies import chat, json_of, to_native

pytestmark = pytest.mark.unmeasured

TEXT = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), max_size=12)
WORD = st.text(st.characters(codec="ascii", categories=("L",)), min_size=1, max_size=6)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=5,
)
HEAD = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 5, "model": "demo"}


def chunk(delta: dict[str, Any], finish: str | None = None) -> Data:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return Data(orjson.dumps({**HEAD, "choices": [choice]}), DeltaKind.OTHER)


@st.composite
def answers(draw: st.DrawFn) -> list[Frame]:
    """The frames of one internal stream: text and reasoning, then calls with interleaved arguments."""
    content = st.fixed_dictionaries({}, optional={"content": TEXT, "reasoning_content": TEXT})
    frames: list[Frame] = [chunk({"role": "assistant", "content": ""})]
    frames += [chunk(delta) for delta in draw(st.lists(content, max_size=5))]
    waiting: list[list[dict[str, Any]]] = []
    for index, (name, input) in enumerate(
        draw(st.lists(st.tuples(WORD, st.dictionaries(TEXT, JSON, max_size=2)), max_size=3))
    ):
        text = json.dumps(input)
        cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=2)))
        first = {"index": index, "id": f"c{index}", "type": "function", "function": {"name": name, "arguments": ""}}
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        waiting.append([first, *({"index": index, "function": {"arguments": piece}} for piece in pieces)])
    while waiting:
        at = draw(st.integers(0, len(waiting) - 1)) if all(len(calls) > 0 for calls in waiting) else 0
        frames.append(chunk({"tool_calls": [waiting[at].pop(0)]}))
        waiting = [calls for calls in waiting if calls]
    frames.append(chunk({}, draw(st.sampled_from(["stop", "length", "tool_calls", "content_filter"]))))
    usage = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}
    frames.append(Data(orjson.dumps({**HEAD, "choices": [], "usage": usage}), DeltaKind.USAGE))
    for at in draw(st.lists(st.integers(0, len(frames)), max_size=2)):
        frames.insert(at, Comment(b": ping\n\n"))
    return frames


def written(frames: list[Frame], sizes: list[int]) -> bytes:
    """The stream with frames joined in groups of these sizes."""
    writer, out, at = MessageEvents(Bounds()), b"", 0
    for size in [*sizes, len(frames)]:
        out += writer.write(frames[at : at + size])
        at += size
    return out + writer.end()


def events(raw: bytes) -> list[Any]:
    """The events; each is known to the official client and in a valid order."""
    found, open_blocks, begun = [], set(), 0
    for frame in raw.decode().split("\n\n")[:-1]:
        name, data = frame.split("\n", 1)
        payload = json.loads(data.removeprefix("data: "))
        assert name == f"event: {payload['type']}"
        if payload["type"] == "ping":
            continue
        found.append(strictly(RawMessageStreamEvent, payload))
        if payload["type"] == "content_block_start":
            assert payload["index"] == begun
            open_blocks.add(begun)
            begun += 1
        elif payload["type"] == "content_block_delta":
            assert payload["index"] in open_blocks
        elif payload["type"] == "content_block_stop":
            open_blocks.remove(payload["index"])
    kinds = [event.type for event in found]
    assert not open_blocks
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("message_start") == kinds.count("message_delta") == 1
    return found


@settings(max_examples=60, deadline=None)
@given(answers(), st.lists(st.integers(0, 4), max_size=6))
def test_events_are_valid_and_equal_the_whole_answer(frames: list[Frame], sizes: list[int]) -> None:
    raw = written(frames, [])
    assert written(frames, sizes) == raw
    message: Any = None
    pieces: dict[int, bytes] = {}
    for event in events(raw):
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=pieces)
    assembly = Assembly()
    for frame in frames:
        if isinstance(frame, Data):
            assembly.add(json.loads(frame.payload))
    whole = messages_answer.whole(assembly.result(), Bounds())
    for kind, field in (("text", "text"), ("thinking", "thinking")):
        streamed = "".join(getattr(block, field) for block in message.content if block.type == kind)
        assert streamed == "".join(block[field] for block in whole["content"] if block["type"] == kind)
    calls = [(block["id"], block["name"], block["input"]) for block in whole["content"] if block["type"] == "tool_use"]
    assert sorted((use.id, use.name, use.input) for use in message.content if use.type == "tool_use") == calls
    assert (message.stop_reason, message.stop_sequence) == (whole["stop_reason"], whole["stop_sequence"])
    assert message.usage.model_dump(exclude_none=True) == whole["usage"]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    """A request of an agent: turns with calls that are answered in any order."""
    some = TEXT.filter(lambda text: bool(text.strip()))
    mark = st.sampled_from([None, {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "5m"}])

    def block(text: str) -> dict[str, Any]:
        marked = draw(mark)
        return {"type": "text", "text": text, **({"cache_control": marked} if marked else {})}

    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(some)}]
    for turn in range(draw(st.integers(0, 3))):
        inputs = draw(st.lists(st.dictionaries(WORD, JSON, max_size=2), min_size=1, max_size=3))
        calls = [
            {"type": "tool_use", "id": f"t{turn}_{at}", "name": "look", "input": input}
            for at, input in enumerate(inputs)
        ]
        thought = [{"type": "thinking", "thinking": draw(TEXT), "signature": "c2ln"}] if draw(st.booleans()) else []
        messages.append({"role": "assistant", "content": [*thought, block(draw(some)), *calls]})
        results: list[dict[str, Any]] = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": draw(TEXT), "is_error": draw(st.booleans())}
            for call in draw(st.permutations(calls))
        ]
        messages.append({"role": "user", "content": [*results, *([block(draw(some))] if draw(st.booleans()) else [])]})
    body: dict[str, Any] = {"model": "demo", "max_tokens": 9, "messages": messages, "system": [block(draw(some))]}
    return {**body, "tools": [{"name": "look", "input_schema": {"type": "object"}}]}


@settings(max_examples=40, deadline=None)
@given(conversations())
def test_request_is_valid_internally_and_unchanged_for_anthropic(fields: dict[str, Any]) -> None:
    inner = messages_request.parse(json.dumps(fields).encode())
    generation_request.parse(Endpoint.CHAT, orjson.dumps(json_of(inner.body)))
    pending: list[str] = []
    for message in json_of(inner.body)["messages"]:
        if message["role"] == "tool":
            assert message["tool_call_id"] == pending.pop(0)
        else:
            assert not pending
            pending = [call["id"] for call in message.get("tool_calls") or ()]
    origin = chat(inner.body).origin
    assert origin is not None
    sent = to_native(origin, "claude-opus-5")
    rules.anthropic(sent, "2026-10-21")
    assert sent == {**fields, "model": "claude-opus-5", "stream": True}


def _places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All positions in a body."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, item in inner for place in _places(item, (*at, key)))][at == () :]


@pytest.mark.unmeasured
@settings(max_examples=150, deadline=None)
@given(conversations(), st.data())
def test_damaged_request_is_valid_internally_or_the_error_names_a_parameter(
    fields: dict[str, Any], data: st.DataObject
) -> None:
    words = st.sampled_from(["text", "tool_use", "tool_result", "thinking", "image", "user", "assistant", "auto"])
    place = data.draw(st.sampled_from(_places(fields)))
    holder: Any = fields
    for key in place[:-1]:
        holder = holder[key]
    if data.draw(st.booleans()) or isinstance(holder, list):
        holder[place[-1]] = data.draw(JSON | words)
    else:
        holder[data.draw(WORD | words)] = data.draw(JSON)
    try:
        inner = messages_request.parse(orjson.dumps(fields))
    except RequestError as error:
        assert error.param is not None and error.status == 400
        return
    generation_request.parse(Endpoint.CHAT, orjson.dumps(json_of(inner.body)))
    origin = chat(inner.body).origin
    assert origin is not None
    orjson.dumps(to_native(origin, "claude-haiku-4-5"))
