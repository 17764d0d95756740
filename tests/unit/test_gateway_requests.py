"""What is a request and what is not: every mistake is a 4xx that names the field."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.apis.body_parser import MAX_NESTING, refused_body
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES, parse
from gateway.apis.schema.chat_request import AnyRequest
from gateway.errors import RequestError
from gateway.providers.provider_fields import OPENAI_COMPLETIONS, refused_by_local, token_ids_in
from headgate.shared.bodies.body_decoder import as_json, json_schema
from inference.protocol import Code

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}


def _chat(**more: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": HI, **more}).encode()


def chat(fields: dict[str, Any]) -> AnyRequest:
    return parse(Endpoint.CHAT, json.dumps({"model": "demo", "messages": HI, **fields}).encode()).body


def completion(**fields: Any) -> AnyRequest:
    return parse(Endpoint.COMPLETIONS, json.dumps({"model": "demo", "prompt": "x", **fields}).encode()).body


def _said(*messages: Any) -> bytes:
    return _chat(messages=list(messages))


BAD: list[tuple[Endpoint, bytes, str | None, Code]] = [
    (Endpoint.CHAT, b"", None, Code.INVALID_JSON),
    (Endpoint.CHAT, b"  \n", None, Code.INVALID_JSON),
    (Endpoint.CHAT, b"{", None, Code.INVALID_JSON),
    (Endpoint.CHAT, b"[1]", None, Code.INVALID_JSON),
    (Endpoint.CHAT, b'{"model": "\xff"}', None, Code.INVALID_JSON),
    (Endpoint.CHAT, b'{"a": "\\ud800"}', None, Code.INVALID_JSON),
    (Endpoint.CHAT, _chat(temperature=float("nan")), "temperature", Code.INVALID_JSON),
    (Endpoint.CHAT, _chat(temperature=float("inf")), "temperature", Code.INVALID_JSON),
    (Endpoint.CHAT, b"[NaN]", None, Code.INVALID_JSON),
    (Endpoint.CHAT, b'{"a": [NaN]}', None, Code.INVALID_JSON),
    (Endpoint.CHAT, b"[" * 100_000 + b"]" * 100_000, None, Code.INVALID_JSON),
    (Endpoint.CHAT, json.dumps({"messages": HI}).encode(), "model", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(model=None), "model", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(model=3), "model", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(model=""), "model", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(model="x" * 300), "model", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(messages=None), "messages", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(messages=[]), "messages", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(messages="hi"), "messages", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said("hi"), "messages[0]", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"content": "x"}), "messages[0].role", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "wizard", "content": "x"}), "messages[0].role", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": ["user"], "content": "x"}), "messages[0].role", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "user"}), "messages[0].content", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "assistant"}), "messages[0].content", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "user", "content": 5}), "messages[0].content", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "user", "content": []}), "messages[0].content", Code.INVALID_REQUEST),
    (
        Endpoint.CHAT,
        _said({"role": "user", "content": [{"type": "smell"}]}),
        "messages[0].content[0].type",
        Code.INVALID_REQUEST,
    ),
    (
        Endpoint.CHAT,
        _said({"role": "user", "content": [{"type": "text"}]}),
        "messages[0].content[0].text",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.CHAT, _said({"role": "tool", "content": "x"}), "messages[0].tool_call_id", Code.INVALID_REQUEST),
    (
        Endpoint.CHAT,
        _said({"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}),
        "messages[0].tool_calls[0].function.arguments",
        Code.INVALID_REQUEST,
    ),
    (
        Endpoint.CHAT,
        _said({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}),
        "messages[0].content[0].image_url.url",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.CHAT, _chat(temperature="hot"), "temperature", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(temperature=True), "temperature", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(temperature=-1), "temperature", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(max_tokens=0), "max_tokens", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(max_tokens=1.5), "max_tokens", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(n=10_000), "n", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(n="2"), "n", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(stop={"a": 1}), "stop", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(stop=["x"] * 17), "stop", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(stop=[""]), "stop[0]", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(stream="yes"), "stream", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(stream_options={"include_usage": True}), "stream_options", Code.INVALID_REQUEST),
    (
        Endpoint.CHAT,
        _chat(stream=True, stream_options={"include_usage": 1}),
        "stream_options.include_usage",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.CHAT, _chat(top_logprobs=3), "top_logprobs", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(tool_choice="required"), "tool_choice", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(tools=[], tool_choice="required"), "tool_choice", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(max_tokens=-2), "max_tokens", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _said({"role": "assistant", "tool_calls": []}), "messages[0].content", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(mirostat=3), "mirostat", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(min_tokens=1.5), "min_tokens", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(dry_sequence_breakers=[1]), "dry_sequence_breakers", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(dry_sequence_breakers=["\0"]), "dry_sequence_breakers", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(skip_special_tokens=False), "skip_special_tokens", Code.UNSUPPORTED_PARAMETER),
    (Endpoint.CHAT, _chat(top_a=1), "top_a", Code.UNSUPPORTED_PARAMETER),
    (
        Endpoint.CHAT,
        _chat(tools=[{"type": "function", "function": {}}]),
        "tools[0].function.name",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.CHAT, _chat(response_format={"type": "xml"}), "response_format.type", Code.INVALID_REQUEST),
    (
        Endpoint.CHAT,
        _chat(response_format={"type": "json_schema"}),
        "response_format.json_schema",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.CHAT, _chat(logit_bias=[1]), "logit_bias", Code.INVALID_REQUEST),
    (Endpoint.CHAT, _chat(temprature=1), "temprature", Code.UNSUPPORTED_PARAMETER),
    (Endpoint.CHAT, _chat(zzzzzz=1), "zzzzzz", Code.UNSUPPORTED_PARAMETER),
    (Endpoint.COMPLETIONS, b'{"model":"m"}', "prompt", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":5}', "prompt", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":[]}', "prompt", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":["a",1]}', "prompt[1]", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":[[1,-2]]}', "prompt[0][1]", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","best_of":1,"n":2}', "best_of", Code.INVALID_REQUEST),
    (Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","messages":[]}', "messages", Code.UNSUPPORTED_PARAMETER),
    (Endpoint.EMBEDDINGS, b'{"model":"m"}', "input", Code.INVALID_REQUEST),
    (Endpoint.EMBEDDINGS, b'{"model":"m","input":""}', "input", Code.INVALID_REQUEST),
    (
        Endpoint.EMBEDDINGS,
        b'{"model":"m","input":"x","encoding_format":"hex"}',
        "encoding_format",
        Code.INVALID_REQUEST,
    ),
    (Endpoint.RERANK, b'{"model":"m","documents":["a"]}', "query", Code.INVALID_REQUEST),
    (Endpoint.RERANK, b'{"model":"m","query":"q"}', "documents", Code.INVALID_REQUEST),
    (Endpoint.RERANK, b'{"model":"m","query":"q","documents":[]}', "documents", Code.INVALID_REQUEST),
    (Endpoint.RERANK, b'{"model":"m","query":"q","documents":[{"t":"a"}]}', "documents[0].text", Code.INVALID_REQUEST),
    (Endpoint.RERANK, b'{"model":"m","query":"q","documents":["a"],"top_n":0}', "top_n", Code.INVALID_REQUEST),
    (Endpoint.RERANK, b'{"model":"m","query":"q","documents":["a"],"n":1}', "n", Code.UNSUPPORTED_PARAMETER),
]


@pytest.mark.parametrize(("endpoint", "raw", "param", "code"), BAD, ids=[str(index) for index in range(len(BAD))])
def test_a_mistake_names_its_field(endpoint: Endpoint, raw: bytes, param: str | None, code: Code) -> None:
    with pytest.raises(RequestError) as caught:
        parse(endpoint, raw)
    assert (caught.value.param, caught.value.code) == (param, code), caught.value.message
    assert caught.value.status == 400
    assert len(caught.value.message) > 20


GOOD: list[bytes] = [
    _chat(),
    _chat(temperature=0, max_tokens=5, stop="x", seed=7, user=None, logit_bias={"5": -1}),
    _chat(stream=True, stream_options={"include_usage": True}),
    _chat(tools=[TOOL], tool_choice="auto", parallel_tool_calls=False),
    _chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "f"}}),
    _chat(response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}),
    _said(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ),
    _said({"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}),
    _said({"role": "system", "content": ""}, {"role": "user", "content": "x"}),
    _chat(metadata={"deep": json.loads("[" * (MAX_NESTING - 2) + "]" * (MAX_NESTING - 2))}),
    _said({"role": "user", "content": "[" * 500}),
]


@pytest.mark.parametrize("raw", GOOD, ids=[str(index) for index in range(len(GOOD))])
def test_what_the_api_documents_passes_unchanged(raw: bytes) -> None:
    request = parse(Endpoint.CHAT, raw)
    assert as_json(request.body) == {name: value for name, value in json.loads(raw).items() if value is not None}
    assert request.size_bytes == len(raw)


def test_the_typed_request_says_what_the_chain_must_know() -> None:
    request = parse(
        Endpoint.CHAT,
        _chat(
            tools=[TOOL],
            stream=True,
            stream_options={"include_usage": True},
            max_completion_tokens=9,
            messages=[
                {
                    "role": "user",
                    "content": [IMAGE, {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}],
                }
            ],
        ),
    )
    assert request.needs == {"tools", "vision", "audio"}
    assert (request.stream, request.include_usage, request.max_tokens, request.is_plain) == (True, True, 9, False)
    plain = parse(Endpoint.CHAT, _chat())
    assert (plain.needs, plain.stream, plain.include_usage, plain.max_tokens, plain.is_plain) == (
        frozenset(),
        False,
        False,
        None,
        True,
    )
    assert parse(Endpoint.EMBEDDINGS, b'{"model":"m","input":[[1,2],[3]]}').needs == {"embeddings"}
    assert parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":[1,2]}').is_plain
    reranking = parse(Endpoint.RERANK, b'{"model":"m","query":"q","documents":["a",{"text":"b","id":1}],"top_n":1}')
    assert reranking.needs == {"rerank"}
    assert not reranking.stream


def test_an_unknown_field_comes_with_advice() -> None:
    with pytest.raises(RequestError, match="did you mean `temperature`"):
        parse(Endpoint.CHAT, _chat(temprature=1))


def test_what_a_body_may_hold_is_described() -> None:
    needed = {"chat": ["model", "messages"], "rerank": ["model", "query", "documents"]}
    for endpoint, fields in ((Endpoint.CHAT, needed["chat"]), (Endpoint.RERANK, needed["rerank"])):
        described, _ = json_schema(BODIES[endpoint][0])
        assert sorted(described["required"]) == sorted(fields)
        assert set(fields) <= set(described["properties"])
        assert described["additionalProperties"] is False


def test_a_spoken_answer_is_a_need_like_a_spoken_question() -> None:
    asked = b'{"model":"a","messages":[{"role":"user","content":"x"}],"modalities":["text","audio"],"audio":{}}'
    assert parse(Endpoint.CHAT, asked).needs == {"audio"}


def test_what_no_local_model_takes_is_known_without_asking_it() -> None:
    assert tuple(refused_by_local(chat({"n": 16, "modalities": ["text"], "functions": [], "audio": None}))) == ()
    assert tuple(refused_by_local(chat({"n": 17, "modalities": ["text", "audio"], "prediction": {}, "seed": 1}))) == (
        "modalities",
        "n",
        "prediction",
    )


def test_token_ids_are_found_wherever_a_request_may_hold_them() -> None:
    assert token_ids_in(completion(logit_bias={"7": 1})) == "logit_bias"
    assert token_ids_in(completion(logit_bias={}, prompt=[7, 8])) == "prompt"
    assert token_ids_in(completion(prompt=[[7], [8]])) == "prompt"
    assert token_ids_in(completion(prompt=["x"])) is None
    assert token_ids_in(chat({})) is None


def test_a_request_of_ordinary_fields_is_refused_by_no_local_model() -> None:
    assert tuple(refused_by_local(chat({"model": "demo", "messages": HI, "temperature": 0}))) == ()


def test_moderation_is_asked_of_who_moderates_alone() -> None:
    assert tuple(refused_by_local(chat({"moderation": {"model": "omni-moderation-latest"}}))) == ("moderation",)
    assert tuple(refused_by_local(chat({"moderation": None, "prompt_cache_options": {"mode": "explicit"}}))) == ()


def test_refused_body_is_read_for_its_record_unless_it_is_long_or_no_object() -> None:
    assert refused_body(b'{"model": "demo", "n": 0}') == {"model": "demo", "n": 0}
    for raw in (b"", b"{", b"[]", b"[" * 200):
        assert refused_body(raw) == {}
    assert refused_body(b'{"user": "%b"}' % (b"x" * 2**20)) is None


@pytest.mark.parametrize(
    ("more", "meant"),
    [
        ({"max_tokens": -1, "max_completion_tokens": -1, "seed": -1}, {}),
        ({"tools": [], "tool_choice": "auto", "parallel_tool_calls": True, "functions": [], "stop": []}, {}),
        ({"modalities": [], "dry_sequence_breakers": []}, {}),
        ({"n_probs": 3}, {"logprobs": True, "top_logprobs": 3}),
        ({"n_probs": 3, "logprobs": True}, {"logprobs": True}),
        ({"n_probs": 0, "skip_special_tokens": True}, {}),
        ({"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (
            {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": True, "x": 1}},
            {"chat_template_kwargs": {"enable_thinking": True, "x": 1}},
        ),
        ({"min_tokens": 2, "top_k": -1}, {"min_tokens": 2, "top_k": -1}),
    ],
)
def test_values_that_ask_for_nothing_and_other_names_reach_no_tier(more: dict[str, Any], meant: dict[str, Any]) -> None:
    request = parse(Endpoint.CHAT, _chat(**more))
    assert as_json(request.body) == {"model": "demo", "messages": HI, **meant}
    assert request.max_tokens is None
    assert request.needs == frozenset()


def test_an_empty_list_of_calls_in_the_history_reaches_no_tier() -> None:
    answer = {"role": "assistant", "content": "hi"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    request = parse(Endpoint.CHAT, _said(*HI, {**answer, "tool_calls": []}, called, *HI))
    assert as_json(request.body)["messages"] == [*HI, answer, called, *HI]


def test_a_completion_without_limit_is_for_local_models_alone() -> None:
    request = parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":-1,"n_probs":2}')
    assert (request.max_tokens, as_json(request.body)["max_tokens"], as_json(request.body)["logprobs"]) == (None, -1, 2)
    assert OPENAI_COMPLETIONS.refused(request.body) == ("max_tokens",)
    assert OPENAI_COMPLETIONS.refused(completion(max_tokens=1)) == ()
    named = parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","n_probs":2,"logprobs":0}')
    assert as_json(named.body)["logprobs"] == 0


def test_log_probabilities_under_their_other_name_make_an_answer_that_does_not_go_on_elsewhere() -> None:
    assert not parse(Endpoint.CHAT, _chat(n_probs=1)).is_plain
