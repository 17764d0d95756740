"""Decoding of request bodies; errors name the parameter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest

from headgate.shared.bodies.openai_bodies import decode_tokenize
from headgate.shared.parameters import Sampling
from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.api.body_intake import typed
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, GenerateRequest

FACTS = Facts("tiny", 128, 300, 64, ("chat", "completions"))
EMBEDS = Facts("vectors", 128, 300, 64, ("embeddings",))
HELLO = [{"role": "user", "content": "hello"}]


def chat(**fields: Any) -> GenerateRequest:
    return generation_body.chat({"messages": HELLO, **fields}, FACTS)


CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
CALLED = {"role": "assistant", "content": "Well:", "tool_calls": [CALL]}

WRONG_CHATS: list[tuple[dict[str, Any], str | None]] = [
    ({"messages": None}, "messages"),
    ({"messages": []}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": ["hello"]}, "messages[0]"),
    ({"messages": [{"content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    ({"messages": [*HELLO, {"role": "user", "content": "x", "mood": 1}]}, "messages[1].mood"),
    ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "messages[0].tool_calls[0].id"),
    ({"temprature": 1}, "temprature"),
    ({"temperature": "hot"}, "temperature"),
    ({"temperature": []}, "temperature"),
    ({"min_tokens": -1}, "min_tokens"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
    ({"mirostat": 3}, "mirostat"),
    ({"dry_base": 0.5}, "dry_base"),
    ({"dry_sequence_breakers": "x"}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": [""]}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["a\0b"]}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["é" * 21]}, "dry_sequence_breakers"),
    ({"dry_sequence_breakers": ["x"] * 17}, "dry_sequence_breakers"),
    ({"xtc_probability": 1.1}, "xtc_probability"),
    ({"n_probs": 21}, "n_probs"),
    ({"n_probs": 3, "top_logprobs": 3}, "top_logprobs"),
    ({"skip_special_tokens": False}, "skip_special_tokens"),
    ({"enable_thinking": "yes"}, "enable_thinking"),
    ({"cache_prompt": 1}, "cache_prompt"),
    ({"timings_per_token": 1}, "timings_per_token"),
    ({"top_n_sigma": 101}, "top_n_sigma"),
    ({"top_a": 1.0}, "top_a"),
    ({"temperature": math.nan}, "temperature"),
    ({"temperature": math.inf}, "temperature"),
    ({"temperature": 2.1}, "temperature"),
    ({"temperature": True}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"top_k": 1.5}, "top_k"),
    ({"min_p": 2}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repeat_penalty": 0}, "repeat_penalty"),
    ({"seed": "x"}, "seed"),
    ({"seed": 2**70}, "seed"),
    ({"n": 0}, "n"),
    ({"n": generation_body.MAX_CHOICES + 1}, "n"),
    ({"n": "2"}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -5}, "max_tokens"),
    ({"max_completion_tokens": "many"}, "max_completion_tokens"),
    ({"max_completion_tokens": 2**31}, "max_completion_tokens"),
    ({"stop": 5}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": ["a"] * 17}, "stop"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": True}}, "stream_options"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5"),
    ({"logit_bias": {"300": 1}}, "logit_bias"),
    ({"logit_bias": {"-1": 1}}, "logit_bias"),
    ({"logit_bias": [1]}, "logit_bias"),
    ({"logprobs": 3}, "logprobs"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"response_format": "json"}, "response_format"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"continue_final_message": True}, "continue_final_message"),
    ({"messages": [*HELLO, CALLED], "continue_final_message": True}, "continue_final_message"),
    ({"chat_template_kwargs": 3}, "chat_template_kwargs"),
]


@pytest.mark.parametrize(("fields", "param"), WRONG_CHATS, ids=lambda value: str(value)[:50])
def test_invalid_chat_is_a_400_with_its_param(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        chat(**fields)
    assert caught.value.param == param
    assert caught.value.status == 400
    assert len(caught.value.message) > 10


@pytest.mark.parametrize("body", [None, [], "text", 5])
def test_body_of_another_type_is_a_400(body: Any) -> None:
    with pytest.raises(BadRequestError):
        generation_body.chat(body, FACTS)


def test_misspelled_field_gets_a_suggestion() -> None:
    with pytest.raises(BadRequestError, match="did you mean temperature"):
        chat(temprature=1)


def test_fields_without_effect_and_nulls_are_accepted() -> None:
    """Clients of OpenAI send them."""
    request = chat(
        model="anything", user="u", metadata={"a": 1}, store=False, service_tier="auto", parallel_tool_calls=True,
        prompt_cache_key="k", prompt_cache_options={}, safety_identifier="s", temperature=None, stop=None, tools=None,
        tool_choice="none", response_format={"type": "text"}, modalities=["text"], functions=[],
    )  # fmt: skip
    assert request.sampling == Sampling()


def test_every_parameter_reaches_the_request() -> None:
    request = chat(
        temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, typical_p=0.8, frequency_penalty=1, presence_penalty=-1,
        top_n_sigma=2, xtc_probability=0.2, xtc_threshold=0.3, mirostat=2, mirostat_tau=4, mirostat_eta=0.2,
        dry_multiplier=0.8, dry_base=2, dry_allowed_length=3, dry_penalty_last_n=64, dry_sequence_breakers=["x"],
        min_tokens=4, repetition_penalty=1.5, logit_bias={"5": 2}, seed=7, ignore_eos=True, n=2, stop="x", max_tokens=9,
        max_completion_tokens=8, stream=True, stream_options={"include_usage": True}, logprobs=True, top_logprobs=3,
        chat_template_kwargs={"enable_thinking": False},
    )  # fmt: skip
    assert request.sampling == Sampling(
        temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, typical_p=0.8, repeat_penalty=1.5, frequency_penalty=1.0,
        presence_penalty=-1.0, logit_bias=((5, 2.0),), seed=7, ignore_eos=True, xtc_probability=0.2, xtc_threshold=0.3,
        mirostat=2, mirostat_tau=4.0, mirostat_eta=0.2, dry_multiplier=0.8, dry_base=2.0, dry_allowed_length=3,
        dry_penalty_last_n=64, dry_sequence_breakers=("x",), min_tokens=4, top_n_sigma=2.0,
    )  # fmt: skip
    assert (request.n, request.stops, request.max_tokens, request.logprobs) == (2, ("x",), 8, 3)
    assert (request.stream, request.include_usage) == (True, True)
    assert request.template_arguments == {"enable_thinking": False}


def test_empty_lists_and_minus_one_count_as_absent() -> None:
    """Also `tool_calls` in the history."""
    messages = [*HELLO, {"role": "assistant", "content": "hi", "tool_calls": []}, *HELLO]
    request = chat(
        messages=messages, max_tokens=-1, max_completion_tokens=-1, seed=-1, tools=[], functions=[], stop=[],
        modalities=[], dry_sequence_breakers=[],
    )  # fmt: skip
    assert request == chat(messages=[*HELLO, {"role": "assistant", "content": "hi"}, *HELLO])


def test_completion_has_16_tokens_by_default_and_no_limit_for_minus_one() -> None:
    assert generation_body.completion({"prompt": "a", "max_tokens": -1}, FACTS).max_tokens is None
    assert generation_body.completion({"prompt": "a"}, FACTS).max_tokens == 16


def test_alternative_parameter_names_have_the_same_effect() -> None:
    assert chat(enable_thinking=False) == chat(chat_template_kwargs={"enable_thinking": False})
    both = chat(enable_thinking=False, chat_template_kwargs={"enable_thinking": True})
    assert both.template_arguments == {"enable_thinking": True}
    assert chat(n_probs=3) == chat(logprobs=True, top_logprobs=3)
    assert chat(n_probs=3, logprobs=True, top_logprobs=2).logprobs == 2
    assert chat(n_probs=0).logprobs is None
    assert generation_body.completion({"prompt": "a", "n_probs": 3}, FACTS).logprobs == 3
    assert generation_body.completion({"prompt": "a", "n_probs": 3, "logprobs": 0}, FACTS).logprobs == 0


def test_only_cache_prompt_of_the_hints_changes_the_request() -> None:
    assert chat(timings_per_token=True, skip_special_tokens=True, cache_prompt=True) == chat()
    assert (chat().shares_cache, chat(cache_prompt=False).shares_cache) == (True, False)


def test_sampling_of_the_model_file_is_the_default() -> None:
    facts = Facts("tiny", 128, 300, 64, ("chat",), {"temperature": 0.6, "top_k": 20.0})
    sampling = generation_body.chat({"messages": HELLO, "top_k": 5}, facts).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.6, 5, 1.0)


def test_messages_reach_the_template_as_plain_text() -> None:
    """Parts are joined, developer messages become system messages, tool arguments are kept."""
    call = {"name": "f", "arguments": '{"x": 1}'}
    request = chat(
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": call}]},
            {"role": "tool", "tool_call_id": "1", "content": "ok"},
        ]
    )  # fmt: skip
    assert request.messages[0] == {"role": "system", "content": "a\nb"}
    assert request.messages[1]["tool_calls"][0]["function"] == call
    assert request.messages[2] == {"role": "tool", "content": "ok", "tool_call_id": "1"}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("a", ("a",)), (["a", "b"], ("a", "b")), ([1, 2], ((1, 2),)), ([[1], [2, 3]], ((1,), (2, 3)))],
)
def test_prompt_has_four_forms(prompt: Any, expected: Any) -> None:
    assert generation_body.completion({"prompt": prompt}, FACTS).prompts == expected


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": {}}, "prompt"),
        ({"prompt": [1, 300]}, "prompt[1]"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [True]}, "prompt[0]"),
        ({"prompt": [1, "a"]}, "prompt[1]"),
        ({"prompt": ["a", ""]}, "prompt[1]"),
        ({"prompt": [[1], []]}, "prompt[1]"),
        ({"prompt": ["a"] * 129}, "prompt"),
        ({"prompt": ["a"] * 100, "n": 2}, "n"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "suffix": 5}, "suffix"),
        ({"prompt": "a", "suffix": "b", "echo": True}, "suffix"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ({"prompt": "a", "regex": "a+", "ignore_eos": True}, "ignore_eos"),
        ({"prompt": "a", "messages": []}, "messages"),
    ],
    ids=str,
)
def test_invalid_completion_is_a_400_with_its_param(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        generation_body.completion(body, FACTS)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 65}, "dimensions"),
        ({"input": "a", "temperature": 0}, "temperature"),
    ],
    ids=str,
)
def test_invalid_embedding_is_a_400_with_its_param(body: dict[str, Any], param: str) -> None:
    with pytest.raises(BadRequestError) as caught:
        generation_body.embedding(body, EMBEDS)
    assert caught.value.param == param


HELLO_BODY = {"messages": [{"role": "user", "content": "hello"}]}


def facts(*capabilities: str) -> Facts:
    return Facts("tiny", 128, 300, 64, capabilities)


FULL = facts("chat", "completions", "tools")


def refused(read: Callable[[Any, Facts], object], body: Any, known: Facts = FULL) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(body, known)
    return caught.value


@pytest.mark.parametrize(
    ("read", "body", "capabilities", "message"),
    [
        (generation_body.chat, HELLO_BODY, ("embeddings",), "does not support chats; it supports /v1/embeddings"),
        (generation_body.chat, HELLO_BODY, ("rerank",), "does not support chats; it supports /v1/rerank"),
        (generation_body.chat, HELLO_BODY, ("completions",), "does not support chats; it supports /v1/completions"),
        (generation_body.chat, HELLO_BODY, (), "does not support chats; use another model"),
        (
            generation_body.completion,
            {"prompt": "a"},
            ("embeddings",),
            "does not support completions; it supports /v1/embeddings",
        ),
        (
            generation_body.embedding,
            {"input": "a"},
            ("chat", "completions", "tools"),
            "does not support embeddings; it supports /v1/chat/completions and /v1/completions",
        ),
    ],
)
def test_wrong_endpoint_is_refused_with_the_right_ones(
    read: Callable[[Any, Facts], object], body: Any, capabilities: tuple[str, ...], message: str
) -> None:
    error = refused(read, body, facts(*capabilities))
    assert (error.message, error.param, error.code) == (f"model 'tiny' {message}", "model", Code.UNSUPPORTED_PARAMETER)


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (generation_body.chat, {**HELLO_BODY, "n": 17}, "n"),
        (generation_body.completion, {"prompt": "a", "n": 17}, "n"),
        (generation_body.completion, {"prompt": ["a"] * 100, "n": 2}, "n"),
        (generation_body.completion, {"prompt": "a", "best_of": 3}, "best_of"),
        (generation_body.completion, {"prompt": "a", "best_of": 20}, "best_of"),
    ],
)
def test_too_many_choices_are_an_unsupported_parameter(
    read: Callable[[Any, Facts], object], body: Any, param: str
) -> None:
    error = refused(read, body)
    assert (error.param, error.code) == (param, Code.UNSUPPORTED_PARAMETER)


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": "2"}, {"n": 1.5}, {"best_of": 0}, {"best_of": True}], ids=str)
def test_invalid_numbers_are_an_invalid_request(fields: dict[str, Any]) -> None:
    assert refused(generation_body.completion, {"prompt": "a", **fields}).code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("messages", "use messages"),
        ("tools", "use tools"),
        ("add_generation_prompt", "use continue_final_message"),
        ("bos_token", "remove it"),
        ("eos_token", "remove it"),
    ],
)
def test_reserved_template_variables_are_refused(name: str, instead: str) -> None:
    """They would bypass the checks of their own fields."""
    error = refused(
        generation_body.chat, {**HELLO_BODY, "chat_template_kwargs": {"enable_thinking": True, name: ["x"]}}
    )
    assert (error.param, error.code) == (f"chat_template_kwargs.{name}", Code.INVALID_REQUEST)
    assert error.message.endswith(instead)


def test_documents_can_be_set_in_template_variables() -> None:
    """No other field sets them."""
    arguments = {"documents": [{"title": "a", "text": "b"}]}
    assert generation_body.chat({**HELLO_BODY, "chat_template_kwargs": arguments}, FULL).template_arguments == arguments


def test_body_to_tokenize_holds_messages_or_a_prompt() -> None:
    found = typed(
        {"messages": HELLO, "tools": [{"type": "function", "function": {"name": "f"}}]}, decode_tokenize, FACTS
    )
    assert found.messages is not None and (found.messages[0].content, found.model) == ("hello", "tiny")
    assert typed({"prompt": [1, 2]}, decode_tokenize, FACTS).prompt == [1, 2]
    with pytest.raises(BadRequestError, match="unknown field 'temperature'"):
        typed({"prompt": "a", "temperature": 1}, decode_tokenize, FACTS)
    with pytest.raises(BadRequestError) as caught:
        typed({"prompt": [1, "a"]}, decode_tokenize, FACTS)
    assert caught.value.param == "prompt[1]"
