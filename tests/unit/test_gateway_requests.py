"""Decoding of OpenAI requests: errors with the field's name, needs of a request, limits of a body."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat.chat_completion_content_part_image_param import ImageURL

from gateway.apis.body_parser import MAX_NESTING, MAX_VALUES, check_count, check_depth, parse_json, refused_body
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import BODIES, AnyRequest, InferenceRequest, parse
from gateway.errors import RequestError
from gateway.providers.provider_fields import OPENAI_COMPLETIONS, refused_by_local, token_ids_in
from headgate.shared.bodies.body_decoder import as_json, json_schema
from inference.protocol import Code
from tests.rigs.typed_bodies import json_of

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


def _messages(*messages: Any) -> bytes:
    return _chat(messages=list(messages))


def _part(part: dict[str, Any]) -> bytes:
    return _messages({"role": "user", "content": [part]})


CHAT, COMPLETIONS, EMBEDDINGS, RERANK = Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.EMBEDDINGS, Endpoint.RERANK
INVALID_JSON: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"  \n", None),
    (b"{", None),
    (b"[1]", None),
    (b'{"model": "\xff"}', None),
    (b'{"a": "\\ud800"}', None),
    (_chat(temperature=float("nan")), "temperature"),
    (_chat(temperature=float("inf")), "temperature"),
    (b"[NaN]", None),
    (b'{"a": [NaN]}', None),
    (b"[" * 100_000 + b"]" * 100_000, None),
]
UNSUPPORTED: list[tuple[Endpoint, bytes, str]] = [
    (CHAT, _chat(skip_special_tokens=False), "skip_special_tokens"),
    (CHAT, _chat(top_a=1), "top_a"),
    (CHAT, _chat(temprature=1), "temprature"),
    (CHAT, _chat(zzzzzz=1), "zzzzzz"),
    (COMPLETIONS, b'{"model":"m","prompt":"x","messages":[]}', "messages"),
    (RERANK, b'{"model":"m","query":"q","documents":["a"],"n":1}', "n"),
]
INVALID: list[tuple[Endpoint, bytes, str]] = [
    (CHAT, json.dumps({"messages": HI}).encode(), "model"),
    (CHAT, _chat(model=None), "model"),
    (CHAT, _chat(model=3), "model"),
    (CHAT, _chat(model=""), "model"),
    (CHAT, _chat(model="x" * 300), "model"),
    (CHAT, _chat(messages=None), "messages"),
    (CHAT, _chat(messages=[]), "messages"),
    (CHAT, _chat(messages="hi"), "messages"),
    (CHAT, _messages("hi"), "messages[0]"),
    (CHAT, _messages({"content": "x"}), "messages[0].role"),
    (CHAT, _messages({"role": "wizard", "content": "x"}), "messages[0].role"),
    (CHAT, _messages({"role": ["user"], "content": "x"}), "messages[0].role"),
    (CHAT, _messages({"role": "user"}), "messages[0].content"),
    (CHAT, _messages({"role": "assistant"}), "messages[0].content"),
    (CHAT, _messages({"role": "user", "content": 5}), "messages[0].content"),
    (CHAT, _messages({"role": "user", "content": []}), "messages[0].content"),
    (CHAT, _messages({"role": "assistant", "tool_calls": []}), "messages[0].content"),
    (CHAT, _part({"type": "smell"}), "messages[0].content[0].type"),
    (CHAT, _part({"type": "text"}), "messages[0].content[0].text"),
    (CHAT, _part({**IMAGE, "image_url": {"url": "http://169.254.169.254/"}}), "messages[0].content[0].image_url.url"),
    (CHAT, _messages({"role": "tool", "content": "x"}), "messages[0].tool_call_id"),
    (
        CHAT,
        _messages({"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "f"}}]}),
        "messages[0].tool_calls[0].function.arguments",
    ),
    (CHAT, _chat(temperature="hot"), "temperature"),
    (CHAT, _chat(temperature=True), "temperature"),
    (CHAT, _chat(temperature=-1), "temperature"),
    (CHAT, _chat(max_tokens=0), "max_tokens"),
    (CHAT, _chat(max_tokens=1.5), "max_tokens"),
    (CHAT, _chat(max_tokens=-2), "max_tokens"),
    (CHAT, _chat(n=10_000), "n"),
    (CHAT, _chat(n="2"), "n"),
    (CHAT, _chat(stop={"a": 1}), "stop"),
    (CHAT, _chat(stop=["x"] * 17), "stop"),
    (CHAT, _chat(stop=[""]), "stop[0]"),
    (CHAT, _chat(stream="yes"), "stream"),
    (CHAT, _chat(stream_options={"include_usage": True}), "stream_options"),
    (CHAT, _chat(stream=True, stream_options={"include_usage": 1}), "stream_options.include_usage"),
    (CHAT, _chat(top_logprobs=3), "top_logprobs"),
    (CHAT, _chat(tool_choice="required"), "tool_choice"),
    (CHAT, _chat(tools=[], tool_choice="required"), "tool_choice"),
    (CHAT, _chat(mirostat=3), "mirostat"),
    (CHAT, _chat(min_tokens=1.5), "min_tokens"),
    (CHAT, _chat(dry_sequence_breakers=[1]), "dry_sequence_breakers"),
    (CHAT, _chat(dry_sequence_breakers=["\0"]), "dry_sequence_breakers"),
    (CHAT, _chat(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    (CHAT, _chat(response_format={"type": "xml"}), "response_format.type"),
    (CHAT, _chat(response_format={"type": "json_schema"}), "response_format.json_schema"),
    (CHAT, _chat(logit_bias=[1]), "logit_bias"),
    (COMPLETIONS, b'{"model":"m"}', "prompt"),
    (COMPLETIONS, b'{"model":"m","prompt":5}', "prompt"),
    (COMPLETIONS, b'{"model":"m","prompt":[]}', "prompt"),
    (COMPLETIONS, b'{"model":"m","prompt":["a",1]}', "prompt[1]"),
    (COMPLETIONS, b'{"model":"m","prompt":[[1,-2]]}', "prompt[0][1]"),
    (COMPLETIONS, b'{"model":"m","prompt":"x","best_of":1,"n":2}', "best_of"),
    (EMBEDDINGS, b'{"model":"m"}', "input"),
    (EMBEDDINGS, b'{"model":"m","input":""}', "input"),
    (EMBEDDINGS, b'{"model":"m","input":"x","encoding_format":"hex"}', "encoding_format"),
    (RERANK, b'{"model":"m","documents":["a"]}', "query"),
    (RERANK, b'{"model":"m","query":"q"}', "documents"),
    (RERANK, b'{"model":"m","query":"q","documents":[]}', "documents"),
    (RERANK, b'{"model":"m","query":"q","documents":[{"t":"a"}]}', "documents[0].text"),
    (RERANK, b'{"model":"m","query":"q","documents":["a"],"top_n":0}', "top_n"),
]
BAD = [
    *((CHAT, raw, param, Code.INVALID_JSON) for raw, param in INVALID_JSON),
    *((*case, Code.UNSUPPORTED_PARAMETER) for case in UNSUPPORTED),
    *((*case, Code.INVALID_REQUEST) for case in INVALID),
]


@pytest.mark.parametrize(("endpoint", "raw", "param", "code"), BAD, ids=range(len(BAD)))
def test_error_names_its_field(endpoint: Endpoint, raw: bytes, param: str | None, code: Code) -> None:
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
    _messages(
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "4"},
    ),
    _messages({"role": "user", "content": [{"type": "text", "text": "look"}, IMAGE]}),
    _messages({"role": "system", "content": ""}, {"role": "user", "content": "x"}),
    _chat(metadata={"deep": json.loads("[" * (MAX_NESTING - 2) + "]" * (MAX_NESTING - 2))}),
    _messages({"role": "user", "content": "[" * 500}),
]


@pytest.mark.parametrize("raw", GOOD, ids=range(len(GOOD)))
def test_valid_request_is_unchanged(raw: bytes) -> None:
    request = parse(Endpoint.CHAT, raw)
    assert as_json(request.body) == {name: value for name, value in json.loads(raw).items() if value is not None}
    assert request.size_bytes == len(raw)


def test_needs_and_limits_of_a_request_are_found() -> None:
    audio = {"type": "input_audio", "input_audio": {"data": "A", "format": "wav"}}
    fields = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}, "max_completion_tokens": 9}
    request = parse(Endpoint.CHAT, _chat(**fields, messages=[{"role": "user", "content": [IMAGE, audio]}]))
    assert request.needs == {"chat", "tools", "vision", "audio"}
    assert (request.stream, request.include_usage, request.max_tokens, request.is_plain) == (True, True, 9, False)
    plain = parse(Endpoint.CHAT, _chat())
    assert (plain.needs, plain.stream, plain.include_usage) == ({"chat"}, False, False)
    assert (plain.max_tokens, plain.is_plain) == (None, True)
    assert parse(Endpoint.EMBEDDINGS, b'{"model":"m","input":[[1,2],[3]]}').needs == {"embeddings"}
    assert parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":[1,2]}').is_plain
    reranking = parse(Endpoint.RERANK, b'{"model":"m","query":"q","documents":["a",{"text":"b","id":1}],"top_n":1}')
    assert reranking.needs == {"rerank"}
    assert not reranking.stream


def test_misspelled_field_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(RequestError, match="did you mean `temperature`"):
        parse(Endpoint.CHAT, _chat(temprature=1))


def test_schemas_have_the_required_fields() -> None:
    needed = {"chat": ["model", "messages"], "rerank": ["model", "query", "documents"]}
    for endpoint, fields in ((Endpoint.CHAT, needed["chat"]), (Endpoint.RERANK, needed["rerank"])):
        described, _ = json_schema(BODIES[endpoint][0])
        assert sorted(described["required"]) == sorted(fields)
        assert set(fields) <= set(described["properties"])
        assert described["additionalProperties"] is False


def test_request_for_a_spoken_answer_needs_the_audio_capability() -> None:
    raw = b'{"model":"a","messages":[{"role":"user","content":"x"}],"modalities":["text","audio"],"audio":{}}'
    assert parse(Endpoint.CHAT, raw).needs == {"chat", "audio"}


def test_fields_that_local_models_do_not_support_are_named() -> None:
    assert tuple(refused_by_local(chat({"n": 16, "modalities": ["text"], "functions": [], "audio": None}))) == ()
    assert tuple(refused_by_local(chat({"temperature": 0}))) == ()
    found = refused_by_local(chat({"n": 17, "modalities": ["text", "audio"], "prediction": {}, "seed": 1}))
    assert tuple(found) == ("modalities", "n", "prediction")
    assert tuple(refused_by_local(chat({"moderation": {"model": "omni-moderation-latest"}}))) == ("moderation",)
    assert tuple(refused_by_local(chat({"moderation": None, "prompt_cache_options": {"mode": "explicit"}}))) == ()


def test_token_ids_in_a_request_are_found() -> None:
    assert token_ids_in(completion(logit_bias={"7": 1})) == "logit_bias"
    assert token_ids_in(completion(logit_bias={}, prompt=[7, 8])) == "prompt"
    assert token_ids_in(completion(prompt=[[7], [8]])) == "prompt"
    assert token_ids_in(completion(prompt=["x"])) is None
    assert token_ids_in(chat({})) is None


def test_rejected_body_is_recorded_unless_it_is_long_or_no_object() -> None:
    assert refused_body(b'{"model": "demo", "n": 0}') == ("demo", False, {"model": "demo", "n": 0})
    assert refused_body(b'{"model": 7, "stream": true}') == ("", True, {"model": 7, "stream": True})
    for raw in (b"", b"{", b"[]", b"[" * 200):
        assert refused_body(raw) == ("", False, {})
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
def test_defaults_and_aliases_are_normalized(more: dict[str, Any], meant: dict[str, Any]) -> None:
    request = parse(Endpoint.CHAT, _chat(**more))
    assert as_json(request.body) == {"model": "demo", "messages": HI, **meant}
    assert request.max_tokens is None
    assert request.needs == {"chat"}


def test_empty_list_of_calls_in_the_history_is_removed() -> None:
    answer = {"role": "assistant", "content": "hi"}
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    request = parse(Endpoint.CHAT, _messages(*HI, {**answer, "tool_calls": []}, called, *HI))
    assert as_json(request.body)["messages"] == [*HI, answer, called, *HI]


def test_completion_without_a_limit_is_supported_by_local_models_only() -> None:
    request = parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","max_tokens":-1,"n_probs":2}')
    assert (request.max_tokens, as_json(request.body)["max_tokens"], as_json(request.body)["logprobs"]) == (None, -1, 2)
    assert OPENAI_COMPLETIONS.refused(request.body) == ("max_tokens",)
    assert OPENAI_COMPLETIONS.refused(completion(max_tokens=1)) == ()
    named = parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"x","n_probs":2,"logprobs":0}')
    assert as_json(named.body)["logprobs"] == 0


def test_request_with_n_probs_is_not_resumable() -> None:
    assert not parse(Endpoint.CHAT, _chat(n_probs=1)).is_plain


def test_number_of_values_in_a_body_is_limited() -> None:
    most = b"[" + b"1," * (MAX_VALUES - 2) + b"1]"
    check_count(most)
    with pytest.raises(RequestError, match=str(MAX_VALUES)):
        check_count(b"[" + b"1," * (MAX_VALUES + 1) + b"1]")
    with pytest.raises(RequestError, match=str(MAX_VALUES)):
        check_count(b"[" + b'"",' * (2 * MAX_VALUES) + b'""]')


def test_strings_do_not_count_as_values_or_nesting() -> None:
    text = "[{" * 1000 + "," * (2 * MAX_VALUES) + '"\\"' * 1000
    assert parse_json(json.dumps({"a": text, "b": ["\\", '"']}).encode()) == {"a": text, "b": ["\\", '"']}


def test_field_with_an_invalid_number_is_named_for_small_bodies_only() -> None:
    with pytest.raises(RequestError) as caught:
        parse_json(b'{"a": NaN, "b": "' + b"x" * 2**20 + b'"}')
    assert caught.value.param is None
    with pytest.raises(RequestError) as caught:
        parse_json(b'{"a": NaN}')
    assert caught.value.param == "a"


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='ab"\\[]{},'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(alphabet='a"\\[{'), inner, max_size=4),
    max_leaves=20,
)


def _depth(value: object) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inner is None else 1 + max(map(_depth, inner), default=0)


@given(value=JSON, levels=st.integers(MAX_NESTING - 8, MAX_NESTING + 8))
def test_nesting_is_measured_exactly(value: object, levels: int) -> None:
    for _ in range(levels):
        value = [value]
    assert isinstance(value, list)
    if _depth(value) <= MAX_NESTING:
        check_depth(value)
    else:
        with pytest.raises(RequestError, match="nested deeper"):
            check_depth(value)


@pytest.mark.parametrize("levels", [MAX_NESTING, 5000])
def test_nesting_over_the_limit_is_rejected(levels: int) -> None:
    with pytest.raises(RequestError, match="nested deeper"):
        parse_json(b'{"a":' + b"[" * levels + b"]" * levels + b"}")


SCHEMA = {"type": "object"}
FUNCTIONS = [{"type": "function", "function": {"name": "add"}}]


def parsed(**fields: Any) -> InferenceRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(Endpoint.CHAT, json.dumps(body).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"json_schema": True},
        {"regex": "a+"},
        {"grammar": 'root ::= "a"'},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a"'},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
    ids=str,
)
def test_constraints_are_passed_on_unchanged_and_prevent_a_resume(fields: dict[str, Any]) -> None:
    """The second half of a JSON text is not valid JSON."""
    request = parsed(**fields)
    assert not request.is_plain
    assert request.needs == {"chat"}
    name, value = next(iter(fields.items()))
    assert json_of(request.body)[name] == value


def test_completions_accept_constraints() -> None:
    assert not parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"a","regex":"b"}').is_plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": "x"}, "json_schema"),
        ({"regex": 5}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ],
    ids=str,
)
def test_constraint_of_the_wrong_type_is_an_error_with_its_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        parsed(**fields)
    assert caught.value.param == param


def test_text_format_is_no_constraint() -> None:
    assert parsed(response_format={"type": "text"}).is_plain
    assert parsed(regex=None).is_plain


def test_tools_that_must_not_be_called_need_no_capability() -> None:
    assert parsed(tools=FUNCTIONS).needs == {"chat", "tools"}
    assert parsed(tools=FUNCTIONS, tool_choice="none").needs == {"chat"}


@pytest.mark.parametrize("detail", get_args(get_type_hints(ImageURL)["detail"]))
def test_every_image_detail_of_the_official_client_is_accepted(detail: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": detail}}
    assert parsed(messages=[{"role": "user", "content": [image]}]).needs == {"chat", "vision"}
