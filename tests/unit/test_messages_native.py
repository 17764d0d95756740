"""Messages API in front of an Anthropic provider: fields pass unchanged except those that the model rejects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from anthropic.types import Message
from anthropic.types.beta import BetaThinkingConfigParam
from anthropic.types.message_create_params import MessageCreateParamsStreaming

from gateway.apis.messages import messages_answer
from gateway.apis.messages.messages_answer import Bounds, MessageEvents
from gateway.apis.messages.messages_request import parse
from gateway.apis.messages_body import decode_messages
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, Done, Frame
from gateway.providers.anthropic.anthropic_events import AnthropicStream
from gateway.providers.anthropic.anthropic_models import effort_for, takes_prefill, takes_sampling
from headgate.shared.sse import SseSplitter
from tests.rigs.fake_provider import anthropic_wire, rules
from tests.rigs.fake_provider.answers import Answer, ToolUse
from tests.rigs.fake_provider.strict import request_of, strictly
from tests.rigs.typed_bodies import chat, needs_sampling_version, thinking_for, to_native

MARK = {"type": "ephemeral", "ttl": "1h"}
PNG = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
SIGNED = {"type": "thinking", "thinking": "Two.", "signature": "c2ln"}
TOOL = {
    "name": "look", "description": "Looks.", "strict": True, "cache_control": MARK,
    "input_schema": {"type": "object", "properties": {}, "additionalProperties": False},
}  # fmt: skip
HI = {"role": "user", "content": "Hi"}


def native(model: str = "claude-opus-5", **more: Any) -> dict[str, Any]:
    """The body for an Anthropic provider; it passes the API's rules and the types of the official client."""
    body = {"model": "demo", "max_tokens": 2000, "messages": [HI], **more}
    origin = chat(parse(json.dumps(body).encode()).body).origin
    assert origin is not None
    request = to_native(origin, model)
    rules.anthropic(
        {name: value for name, value in request.items() if name != "thinking" or value["type"] != "between_tools"},
        "2023-06-01" if needs_sampling_version(request) else "2026-10-21",
    )
    sampling = ("temperature", "top_p", "top_k")
    request_of(MessageCreateParamsStreaming, {key: value for key, value in request.items() if key not in sampling})
    return request


def test_request_of_an_agent_is_sent_unchanged() -> None:
    agents: dict[str, Any] = {
        "max_tokens": 32_000,
        "system": [{"type": "text", "text": "You mill."}, {"type": "text", "text": "Be brief.", "cache_control": MARK}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look.", "cache_control": {"type": "ephemeral"}}]},
            {
                "role": "assistant",
                "content": [
                    SIGNED,
                    {"type": "text", "text": "I look."},
                    {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {"at": "x"}},
                    {"type": "tool_use", "id": "toolu_2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "toolu_2", "content": [PNG], "is_error": False},
                    {"type": "tool_result", "tool_use_id": "toolu_1", "content": "no", "is_error": True},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
        "metadata": {"user_id": "u" * 200},
        "stop_sequences": ["END"],
        "thinking": {"type": "adaptive", "display": "summarized"},
        "output_config": {
            "effort": "xhigh",
            "format": {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}},
        },
        "service_tier": "auto",
        "cache_control": {"type": "ephemeral"},
    }
    assert native(**agents) == {**agents, "model": "claude-opus-5", "stream": True}


def test_fields_that_the_plain_api_rejects_are_left_out() -> None:
    sent = native(
        system=[{"type": "text", "text": " "}, {"type": "text", "text": "x", "cache_control": None}],
        messages=[
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": ""},
                    {"type": "text", "text": "Hi", "citations": [], "cache_control": {**MARK, "scope": "global"}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Local.", "signature": "headgate"},
                    {"type": "tool_use", "id": "functions.look:0", "name": "look", "input": {}, "caller": None},
                ],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "functions.look:0",
                        "content": [{"type": "text", "text": ""}, {"type": "text", "text": "seen"}],
                    }
                ],
            },
        ],
        tools=[{"name": "look", "input_schema": {}, "defer_loading": True, "type": None}],
        betas=["x"],
        context_management={"edits": []},
        thinking={"type": "enabled", "budget_tokens": 1024},
    )
    assert sent["system"] == [{"type": "text", "text": "x"}]
    assert sent["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Hi", "cache_control": MARK}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "functions_look_0", "name": "look", "input": {}}]},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "functions_look_0",
                    "content": [{"type": "text", "text": "seen"}],
                }
            ],
        },
    ]
    assert sent["tools"] == [{"name": "look", "input_schema": {"type": "object"}}]
    assert set(sent) == {"model", "max_tokens", "messages", "stream", "system", "tools", "thinking"}


def test_empty_turns_are_left_out_and_a_prefill_is_trimmed() -> None:
    local = {"type": "thinking", "thinking": "Local."}
    empty = [{"role": "user", "content": " "}, {"role": "assistant", "content": [local]}, HI]
    assert native("claude-haiku-4-5", messages=empty)["messages"] == [HI]
    begun = [HI, {"role": "assistant", "content": "The mill "}]
    assert native("claude-haiku-4-5", messages=begun)["messages"][-1]["content"] == "The mill"
    blocks = [HI, {"role": "assistant", "content": [{"type": "text", "text": "The mill "}]}]
    assert native("claude-haiku-4-5", messages=blocks)["messages"][-1]["content"][0]["text"] == "The mill"
    hidden = [HI, {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]
    origin = decode_messages({"model": "m", "max_tokens": 1, "messages": hidden})
    assert to_native(origin, "claude-haiku-4-5")["messages"] == hidden


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


def test_later_system_messages_become_a_part_of_the_users_turn_for_older_models() -> None:
    """Claude Code sends them; models up to 4.7 answer 400."""
    later = {"role": "system", "content": [text("Agents: none.")]}
    messages = [HI, later, {"role": "assistant", "content": "Yes"}, HI]
    assert native("claude-opus-4-8", messages=messages)["messages"] == messages
    joined = {"role": "user", "content": [text("Hi"), text("Agents: none.")]}
    assert native("claude-haiku-4-5", messages=messages)["messages"] == [joined, *messages[2:]]


def test_system_message_after_an_answer_becomes_a_turn_of_the_user() -> None:
    answer = {"role": "assistant", "content": "Yes"}
    later = {"role": "system", "content": "Be brief."}
    messages = [HI, answer, later, HI]
    turns = [HI, answer, {"role": "user", "content": [text("Be brief."), text("Hi")]}]
    assert native("claude-haiku-4-5", messages=messages)["messages"] == turns


def test_system_message_after_tool_results_follows_them() -> None:
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "look", "input": {}}]}
    result = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
    messages = [HI, call, {"role": "user", "content": [result]}, {"role": "system", "content": "Be brief."}]
    turns = native("claude-haiku-4-5", messages=messages, tools=[TOOL])["messages"]
    assert turns[-1] == {"role": "user", "content": [result, text("Be brief.")]}


def test_thinking_with_a_budget_is_left_out_in_a_turn_without_signed_thinking() -> None:
    call = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
    answered = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "x"}]}
    thinking = {"type": "enabled", "budget_tokens": 1024}

    def thinks(*blocks: dict[str, Any]) -> bool:
        messages = [HI, {"role": "assistant", "content": list(blocks)}, answered]
        return "thinking" in native("claude-haiku-4-5", messages=messages, tools=[TOOL], thinking=thinking)

    assert not thinks(call)
    assert thinks(SIGNED, call)
    plain = [HI, {"role": "assistant", "content": "Yes"}, HI]
    assert "thinking" in native("claude-haiku-4-5", messages=plain, thinking=thinking)


def test_sampling_and_output_format_depend_on_the_model() -> None:
    shape = {"type": "json_schema", "schema": {"type": "object", "additionalProperties": False}}
    early = native("claude-sonnet-4-5", temperature=0.5, top_k=5, output_format=shape)
    assert (early["temperature"], early["top_k"], early["output_config"]) == (0.5, 5, {"format": shape})
    late = native("claude-opus-5", temperature=0.5, top_p=0.5, top_k=5)
    assert not {"temperature", "top_p", "top_k", "output_config"} & set(late)
    assert "tool_choice" not in native(tool_choice={"type": "none"})
    assert native(system="Mill.")["system"] == "Mill."


@pytest.mark.parametrize(
    ("model", "given", "sent"),
    [
        ("claude-opus-5", {"type": "enabled", "budget_tokens": 1024}, {"type": "adaptive"}),
        (
            "claude-opus-4-7",
            {"type": "enabled", "budget_tokens": 1024, "display": "omitted"},
            {"type": "adaptive", "display": "omitted"},
        ),
        ("claude-opus-4-6", {"type": "enabled", "budget_tokens": 1024}, {"type": "enabled", "budget_tokens": 1024}),
        ("claude-opus-4-6", {"type": "adaptive"}, {"type": "adaptive"}),
        ("claude-haiku-4-5", {"type": "adaptive"}, None),
        ("claude-opus-4-6", {"type": "between_tools"}, None),
        ("claude-opus-5-5", {"type": "between_tools"}, {"type": "between_tools"}),
        ("claude-opus-5", {"type": "disabled"}, {"type": "disabled"}),
        ("claude-fable-5", {"type": "disabled"}, None),
        ("claude", {"type": "adaptive"}, {"type": "adaptive"}),
    ],
)
def test_thinking_is_adapted_to_the_model(model: str, given: dict[str, Any], sent: dict[str, Any] | None) -> None:
    assert thinking_for(given, model) == sent
    assert native(model, thinking=given).get("thinking") == sent


@pytest.mark.parametrize("kind", ["adaptive", "enabled"])
def test_thinking_of_the_official_beta_client_is_translated(kind: str) -> None:
    """The plain API rejects `updates` and `block_binding`."""
    thinking = {"type": kind, "display": "updates", "block_binding": {"prefix_mismatch_behavior": "drop_block"}}
    given = thinking | ({"budget_tokens": 1024} if kind == "enabled" else {})
    body = native("claude-opus-4-6", thinking=request_of(BetaThinkingConfigParam, given), max_tokens=2000)
    assert body["thinking"] == {name: given[name] for name in given if name != "block_binding"} | {
        "display": "summarized"
    }
    rules.anthropic(body, rules.ANTHROPIC_VERSIONS[0])


def test_effort_is_adapted_to_the_model() -> None:
    assert effort_for("max", "claude-opus-5") == "max"
    assert effort_for("max", "claude-opus-4-6") == "high"
    assert effort_for("low", "claude-opus-4-6") == "low"
    assert effort_for("low", "claude-haiku-4-5") is None
    assert "output_config" not in native("claude-haiku-4-5", output_config={"effort": "low"})
    assert takes_sampling("claude-opus-4-6") and not takes_sampling("claude-opus-5")
    assert takes_prefill("claude-opus-4-5") and not takes_prefill("claude-opus-4-6")


# --- answers ----------------------------------------------------------------------------------------------------------
def frames_of(raw: bytes) -> list[Frame]:
    """The inner frames of an Anthropic provider for a request of the Messages API."""
    reader = AnthropicStream(created=5, native=True)
    frames = [one for frame in SseSplitter().feed(raw) for one in reader.feed(frame)]
    return [*frames, *reader.end()]


def there_and_back(answer: Answer) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The events of the provider and those for the client, without pings."""
    raw = b"".join(frame for _, frame in anthropic_wire.stream(1, {"model": "claude-opus-5"}, answer, 9))
    frames = frames_of(raw)
    assert isinstance(frames[-1], Done)
    writer = MessageEvents(Bounds([answer.stop_sequence] if answer.stop_sequence else [], 10**6))
    back = writer.write(frames[:-1]) + writer.end()
    return _events(raw), _events(back)


def _events(raw: bytes) -> list[dict[str, Any]]:
    found = [json.loads(frame.split("data: ")[1]) for frame in raw.decode().split("\n\n")[:-1]]
    return [event for event in found if event["type"] != "ping" and event.get("delta", {}).get("partial_json") != ""]


@pytest.mark.parametrize(
    "answer",
    [
        Answer(text="Water turns it.", cached_tokens=3, cache_write_tokens=2),
        Answer(
            text="I look.",
            reasoning="Hm. Two of them.",
            tools=(ToolUse("look", {"at": "a long enough place"}), ToolUse("hear", {"n": 1})),
            stop="tool_calls",
        ),
        Answer(text="a", stop="stop_sequence", stop_sequence="END"),
        Answer(text="a", stop="pause_turn"),
        Answer(text="a", stop="context"),
        Answer(text="a", stop="length"),
        Answer(text="a", refusal="Not this.", stop="content_filter"),
    ],
    ids=["text", "tools", "stop-sequence", "pause", "context", "length", "refusal"],
)
def test_stream_of_anthropic_is_returned_unchanged(answer: Answer) -> None:
    sent, got = there_and_back(answer)
    started, first = sent[0]["message"].pop("usage"), got[0]["message"].pop("usage")
    assert first == started
    counted, last = sent[-2].pop("usage"), got[-2].pop("usage")
    assert last == {**{name: started[name] for name in last if name in started}, **counted}
    assert got == sent


def test_unary_answer_of_anthropic_is_returned_unchanged() -> None:
    answer = Answer(
        text="I look.",
        reasoning="Hm. Two of them.",
        tools=(ToolUse("look", {"at": "x"}),),
        stop="tool_calls",
        cached_tokens=3,
    )
    body = {"model": "claude-opus-5"}
    sent = anthropic_wire.message(1, body, answer, 9)
    raw = b"".join(frame for _, frame in anthropic_wire.stream(1, body, answer, 9))
    assembly = Assembly()
    for frame in frames_of(raw):
        if isinstance(frame, Data):
            assembly.add(json.loads(frame.payload))
    got = messages_answer.whole(assembly.result(), Bounds())
    strictly(Message, got)
    counted, usage = sent.pop("usage"), got.pop("usage")
    assert got == sent
    assert usage == {**counted, "output_tokens_details": {"thinking_tokens": answer.reasoning_tokens}}


def test_redacted_thinking_is_returned() -> None:
    hidden = {"type": "redacted_thinking", "data": "aGlk"}
    events = [
        {"type": "message_start", "message": {"id": "msg_1", "model": "claude", "usage": {"input_tokens": 1}}},
        {"type": "content_block_start", "index": 0, "content_block": hidden},
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "citations_delta", "citation": {}}},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ]
    raw = b"".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n".encode() for event in events)
    writer = MessageEvents(Bounds())
    got = _events(writer.write(frames_of(raw)[:-1]) + writer.end())
    assert got[1]["content_block"] == hidden
    plain = AnthropicStream(created=5)
    for frame in SseSplitter().feed(raw):
        assert not any(b"thinking" in one.payload for one in plain.feed(frame) if isinstance(one, Data))
