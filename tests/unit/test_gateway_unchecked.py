"""Invalid parts of chunks are treated as absent; lone surrogates are read and written."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.lenient_json import dumps, loads, mapping, objects, text
from gateway.apis.messages.messages_answer import Bounds, MessageEvents
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, DeltaKind

HALVES = ("\ud83d", "\ude00")


def test_lone_surrogate_stays_an_escape() -> None:
    assert loads(b'{"a":"\\ud83d"}') == {"a": "\ud83d"}
    assert dumps({"a": "\ud83d"}) == b'{"a":"\\ud83d"}'
    assert loads(dumps({"a": "ü"})) == {"a": "ü"}


@pytest.mark.parametrize("payload", [b"{", b"", b"[" * 100_000])
def test_invalid_json_is_a_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):
        loads(payload)


@pytest.mark.parametrize("odd", [None, 7, "a", ["a"], {"b": 1}])
def test_parts_of_other_types_are_absent(odd: Any) -> None:
    holder = {"a": odd}
    assert text(holder, "a") == (odd if isinstance(odd, str) else "")
    assert mapping(holder, "a") == (odd if isinstance(odd, dict) else {})
    assert objects(holder, "a") == []
    assert objects({"a": [odd, {"c": 1}]}, "a")[-1] == {"c": 1}


def _text(body: bytes) -> str:
    events = [json.loads(line.removeprefix("data: ")) for line in body.decode().splitlines() if line.startswith("data")]
    return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")


def test_emoji_in_two_chunks_is_complete_in_streams_and_unary_answers() -> None:
    chunks = [_chunk({"content": half}) for half in HALVES] + [_chunk({}, "stop")]
    writer = MessageEvents(Bounds())
    streamed = _text(writer.write([Data(chunk, DeltaKind.CONTENT) for chunk in chunks]) + writer.end())
    assert streamed.encode("utf-16", "surrogatepass").decode("utf-16") == "😀"
    assembly = Assembly()
    for chunk in chunks:
        assembly.add(loads(chunk))
    content = json.loads(dumps(assembly.result()))["choices"][0]["message"]["content"]
    assert content == "😀"


@pytest.mark.parametrize("delta", [7, {"content": ["a"]}, {"tool_calls": ["a"]}, {"tool_calls": [{"function": 7}]}])
def test_invalid_parts_do_not_end_a_message(delta: Any) -> None:
    writer = MessageEvents(Bounds())
    body = writer.write([Data(_chunk(delta), DeltaKind.CONTENT), Data(_chunk({}, "stop"), DeltaKind.FINISH)])
    assert (body + writer.end()).endswith(b'event: message_stop\ndata: {"type":"message_stop"}\n\n')


def _chunk(delta: Any, finish: str | None = None) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return json.dumps({"id": "x", "object": "chat.completion.chunk", "choices": [choice]}).encode()
