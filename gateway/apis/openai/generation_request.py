"""Turns the bytes of a request into one typed request or a RequestError that names the field; never talks to anyone.

A body is parsed and checked exactly once. What passes is well-formed; whether a model can do it is its tier's word.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import orjson

from gateway.apis.json_shape import check_shape
from gateway.apis.openai import field_checks as f
from gateway.apis.openai.chat_messages import MESSAGES, TOOL, TOOL_CHOICE, needs_of_contents, needs_of_messages
from gateway.apis.openai.frames import CHAT, COMPLETIONS, Endpoint
from gateway.errors import RequestError
from headgate.shared.parameters import BY_NAME, PARAMETERS
from inference.protocol import Code

MOST_MODEL_CHARS = 256
"""The longest name of a model."""

_EXPLAINED_BYTES = 2**20
"""A body that is no JSON is looked at a second time for a better explanation when it is no larger than this."""


class InferenceRequest(NamedTuple):
    """A request that is well-formed. `body` is the caller's own, parsed; nobody changes it.

    `needs` are capabilities (`vision`, `tools`, `embeddings`, `rerank`). `size_bytes` is what was sent. `is_plain` is
    whether one text of any shape comes out (one choice, no tools, no format, no logprobs), as resuming needs.
    """

    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    body: Mapping[str, Any]
    needs: frozenset[str]
    max_tokens: int | None
    size_bytes: int
    is_plain: bool
    is_only_bounded: bool = False
    """Whether `max_tokens` stands there because the API demands one: callers then name more than some models hold, and
    mean as much as there is room for."""

    def most_tokens(self, context_length: int) -> int | None:
        """`max_tokens`, as a model with this context is asked."""
        if self.max_tokens is None or not self.is_only_bounded:
            return self.max_tokens
        return min(self.max_tokens, context_length)


_SAMPLING: Mapping[str, f.Check] = {
    **{
        row.name: f.parameter(row) for row in PARAMETERS if row.name not in ("max_completion_tokens", "enable_thinking")
    },
    "logit_bias": f.mapping(),
    "n": f.integer(1, 128),
    "stop": f.by_type("a string or an array of strings", text=f.string(1), array=f.array(f.string(1), high=16)),
    "stream": f.boolean,
    "stream_options": f.mapping({"include_usage": f.boolean, "include_obfuscation": f.boolean}),
    "user": f.string(),
}

_SCHEMA = f.by_type("a JSON schema", mapping=f.mapping(), boolean=f.anything)
_SCHEMA_OR_TEXT = f.by_type("a JSON schema", mapping=f.mapping(), boolean=f.anything, text=f.string(1))
_WORDS = f.array(f.string(1), low=1, high=4096)

_SHAPES: Mapping[str, f.Check] = {
    # what llama.cpp and vLLM add to OpenAI's dialect; only a local model can promise it
    "json_schema": _SCHEMA,
    "regex": f.string(1),
    "grammar": f.string(1),
    "guided_json": _SCHEMA_OR_TEXT,
    "guided_regex": f.string(1),
    "guided_choice": _WORDS,
    "guided_grammar": f.string(1),
    "structured_outputs": f.mapping(
        {
            "json": _SCHEMA_OR_TEXT,
            "json_object": f.boolean,
            "regex": f.string(1),
            "choice": _WORDS,
            "grammar": f.string(1),
        }
    ),
}

_CHAT: Mapping[str, f.Check] = {
    **_SAMPLING,
    **_SHAPES,
    "model": f.string(1, MOST_MODEL_CHARS),
    "messages": MESSAGES,
    "audio": f.mapping(),
    "function_call": f.by_type("a string or an object", text=f.string(1), mapping=f.mapping(needed=("name",))),
    "functions": f.array(f.mapping({"name": f.string(1)}, needed=("name",))),
    "logprobs": f.boolean,
    "max_completion_tokens": f.parameter(BY_NAME["max_completion_tokens"]),
    "enable_thinking": f.parameter(BY_NAME["enable_thinking"]),
    "metadata": f.mapping(),
    "modalities": f.array(f.one_of("text", "audio")),
    "moderation": f.mapping(),
    "parallel_tool_calls": f.boolean,
    "prediction": f.mapping(),
    "prompt_cache_key": f.string(),
    "prompt_cache_options": f.mapping(),
    "prompt_cache_retention": f.string(),
    "reasoning_effort": f.string(1),
    "response_format": f.mapping(
        {
            "type": f.one_of("text", "json_object", "json_schema"),
            "json_schema": f.mapping({"schema": f.mapping(), "name": f.string(1), "strict": f.boolean}),
            "schema": f.mapping(),
        },
        needed=("type",),
    ),
    "safety_identifier": f.string(),
    "service_tier": f.string(1),
    "store": f.boolean,
    "tool_choice": TOOL_CHOICE,
    "tools": f.array(TOOL, high=1024),
    "top_logprobs": f.integer(0, 20),
    "verbosity": f.one_of("low", "medium", "high"),
    "web_search_options": f.mapping(),
    "chat_template_kwargs": f.mapping(),
    "continue_final_message": f.boolean,
    "add_generation_prompt": f.boolean,
}

_TOKENS = f.array(f.integer(0, 2**31 - 1), low=1)


def _check_prompts(value: Any, path: str) -> None:
    f.array(low=1)(value, path)
    if isinstance(value[0], str):
        f.array(f.string())(value, path)
    elif isinstance(value[0], list):
        f.array(_TOKENS)(value, path)
    else:
        _TOKENS(value, path)


_PROMPTS = f.Check(
    _check_prompts,
    {
        "type": "array",
        "minItems": 1,
        "anyOf": [{"items": item} for item in ({"type": "string"}, _TOKENS.schema, {"type": "integer", "minimum": 0})],
    },
)
"""An array of strings, of token ids, or of arrays of token ids."""
_PROMPT = f.by_type("a string, an array of strings or of token ids", text=f.string(), array=_PROMPTS)

_COMPLETIONS: Mapping[str, f.Check] = {
    **_SAMPLING,
    **_SHAPES,
    "model": f.string(1, MOST_MODEL_CHARS),
    "prompt": _PROMPT,
    "best_of": f.integer(1, 20),
    "echo": f.boolean,
    "logprobs": f.integer(0, 20),
    "max_tokens": f.parameter(replace(BY_NAME["max_tokens"], low=0)),
    "suffix": f.string(),
}

_EMBEDDINGS: Mapping[str, f.Check] = {
    "model": f.string(1, MOST_MODEL_CHARS),
    "input": f.by_type("a string, an array of strings or of token ids", text=f.string(1), array=_PROMPTS),
    "dimensions": f.integer(1),
    "encoding_format": f.one_of("float", "base64"),
    "user": f.string(),
}

_RERANK: Mapping[str, f.Check] = {
    "model": f.string(1, MOST_MODEL_CHARS),
    "query": f.string(1),
    "documents": f.array(
        f.by_type("a string or an object", text=f.string(), mapping=f.mapping({"text": f.string()}, needed=("text",))),
        low=1,
    ),
    "top_n": f.integer(1),
    "return_documents": f.boolean,
    "user": f.string(),
}

_FIELDS: Mapping[Endpoint, Mapping[str, f.Check]] = {
    Endpoint.CHAT: _CHAT,
    Endpoint.COMPLETIONS: _COMPLETIONS,
    Endpoint.EMBEDDINGS: _EMBEDDINGS,
    Endpoint.RERANK: _RERANK,
}
_NEEDED: Mapping[Endpoint, tuple[str, ...]] = {
    Endpoint.CHAT: ("model", "messages"),
    Endpoint.COMPLETIONS: ("model", "prompt"),
    Endpoint.EMBEDDINGS: ("model", "input"),
    Endpoint.RERANK: ("model", "query", "documents"),
}
_NEEDS: Mapping[Endpoint, frozenset[str]] = {
    endpoint: frozenset() if endpoint.streams else frozenset({str(endpoint)}) for endpoint in Endpoint
}
"""What an endpoint asks of a model, whatever is in the body."""

_ORDINARY = frozenset(
    {
        "model", "messages", "prompt", "stream", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k",
        "min_p", "seed", "stop", "user", "presence_penalty", "frequency_penalty",
    }
)  # fmt: skip
"""Fields that have no rules between them and leave one text of any shape as the answer; most bodies have no other."""


def schema(endpoint: Endpoint) -> dict[str, Any]:
    """The body that `parse` takes, in JSON Schema; rules between fields are not in it."""
    return {**f.object_schema(_FIELDS[endpoint], _NEEDED[endpoint]), "additionalProperties": False}


def parse(endpoint: Endpoint, raw: bytes) -> InferenceRequest:
    """The typed request in `raw`; raises RequestError (400) naming the field and what to write instead."""
    body = parse_json(raw)
    known = _FIELDS[endpoint]
    for name in _NEEDED[endpoint]:
        if body.get(name) is None:
            f.refuse(name, f"`{name}` is needed and not there")
    for name, value in body.items():
        check = known.get(name)
        if check is None:
            near = difflib.get_close_matches(name[:64], known, n=1)
            advice = f"; did you mean `{near[0]}`?" if near else "; leave it out"
            f.refuse(
                name[:64], f"`{name[:64]}` is not a parameter of /v1/{endpoint}{advice}", Code.UNSUPPORTED_PARAMETER
            )
        if value is not None:
            check.run(value, name)
    if not body.keys() <= _ORDINARY:
        _check_together(endpoint, body)
    return typed(endpoint, as_meant(endpoint, body), len(raw))


def as_meant(endpoint: Endpoint, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A checked `body` without values that count as absent and without other names of the same parameters.

    Every tier then reads one spelling: providers refuse empty lists, -1 and the names of llama.cpp and vLLM.
    """
    absent = {name for name in _ABSENT[endpoint].keys() & body.keys() if body[name] == _ABSENT[endpoint][name]}
    if "tools" in absent:
        absent |= {name for name in ("tool_choice", "parallel_tool_calls") if name in body}
    more: dict[str, Any] = {}
    if endpoint is CHAT and any("tool_calls" in message and not message["tool_calls"] for message in body["messages"]):
        more["messages"] = [_without_no_calls(message) for message in body["messages"]]
    if not body.keys().isdisjoint(_RENAMED):
        absent |= _RENAMED & body.keys()
        more |= _renamed(endpoint, body)
    return {**{name: value for name, value in body.items() if name not in absent}, **more} if absent or more else body


_EMPTY_LISTS: Mapping[str, Any] = {
    name: [] for name in ("tools", "functions", "stop", "modalities", "dry_sequence_breakers")
}
_ABSENT: Mapping[Endpoint, Mapping[str, Any]] = {
    Endpoint.CHAT: {**_EMPTY_LISTS, **{row.name: -1 for row in PARAMETERS if row.minus_one}},
    # without a limit a completion ends after 16 tokens, so -1 is no absence there
    Endpoint.COMPLETIONS: {**_EMPTY_LISTS, "seed": -1},
    Endpoint.EMBEDDINGS: {},
    Endpoint.RERANK: {},
}
"""The value of a parameter that counts as its absence."""
_RENAMED = frozenset({"n_probs", "enable_thinking", "skip_special_tokens"})
"""Parameters that say what others say, or what is so in any case."""


def _without_no_calls(message: Mapping[str, Any]) -> Mapping[str, Any]:
    if "tool_calls" not in message or message["tool_calls"]:
        return message
    return {name: value for name, value in message.items() if name != "tool_calls"}


def _renamed(endpoint: Endpoint, body: Mapping[str, Any]) -> dict[str, Any]:
    """What the parameters of `_RENAMED` in `body` mean, in other parameters."""
    found: dict[str, Any] = {}
    if (thinks := body.get("enable_thinking")) is not None:
        found["chat_template_kwargs"] = {"enable_thinking": thinks, **(body.get("chat_template_kwargs") or {})}
    if count := body.get("n_probs"):
        if endpoint is COMPLETIONS and body.get("logprobs") is None:
            found["logprobs"] = count
        elif endpoint is CHAT and not body.get("logprobs"):
            found |= {"logprobs": True, "top_logprobs": count}
    return found


def typed(endpoint: Endpoint, body: Mapping[str, Any], size_bytes: int) -> InferenceRequest:
    """The request of a checked `body`; `size_bytes` is what the caller sent."""
    is_ordinary = body.keys() <= _ORDINARY
    if endpoint is CHAT:
        needs = needs_of_contents(body) if is_ordinary else needs_of_messages(body)
    else:
        needs = _NEEDS[endpoint]
    options = body.get("stream_options")
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return InferenceRequest(
        endpoint,
        body["model"],
        bool(body.get("stream")),
        options is not None and bool(options.get("include_usage")),
        body,
        needs,
        None if limit == -1 else limit,
        size_bytes,
        is_ordinary or _is_plain(body, needs),
    )


def _is_plain(body: Mapping[str, Any], needs: frozenset[str]) -> bool:
    """See `InferenceRequest`."""
    is_one = (body.get("n") or 1) == 1
    return is_one and not body.get("logprobs") and "tools" not in needs and not _is_shaped(body)


def _is_shaped(body: Mapping[str, Any]) -> bool:
    """Whether the answer has to have a shape, which its second half alone has not."""
    said = (body.get("response_format") or {}).get("type", "text")
    return said != "text" or (
        not _SHAPES.keys().isdisjoint(body) and any(body.get(name) is not None for name in _SHAPES)
    )


def _check_together(endpoint: Endpoint, body: Mapping[str, Any]) -> None:
    """Rules between fields."""
    if body.get("stream_options") is not None and not body.get("stream"):
        f.refuse("stream_options", "`stream_options` is only allowed when `stream` is true")
    if endpoint is CHAT:
        if body.get("top_logprobs") is not None and not body.get("logprobs"):
            f.refuse("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
        if body.get("tool_choice") not in (None, "none", "auto") and not body.get("tools"):
            f.refuse("tool_choice", "`tool_choice` needs `tools`")
        shape = body.get("response_format") or {}
        if shape.get("type") == "json_schema" and not isinstance(shape.get("json_schema"), dict):
            f.refuse("response_format.json_schema", "`response_format` of type json_schema needs `json_schema`")
    if endpoint is COMPLETIONS and (body.get("best_of") or 1) < (body.get("n") or 1) and body.get("best_of"):
        f.refuse("best_of", "`best_of` must be at least `n`")


def parse_json(raw: bytes) -> dict[str, Any]:
    """The object in `raw`; raises RequestError for what is none or nests too deep."""
    check_shape(raw)
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if not raw.strip():
            raise RequestError(Code.INVALID_JSON, "the body is empty; send a JSON object") from None
        raise RequestError(
            Code.INVALID_JSON, f"the body is not valid JSON: {error}", param=_not_a_number(raw)
        ) from error
    if not isinstance(body, dict):
        raise RequestError(Code.INVALID_JSON, "the body must be a JSON object")
    return body


def refused_body(raw: bytes) -> Mapping[str, Any] | None:
    """The object in a body that was refused, for its record; empty where there is none.

    None where the body is too long to be parsed a second time.
    """
    if len(raw) > _EXPLAINED_BYTES:
        return None
    try:
        return parse_json(raw)
    except RequestError:
        return {}


def _not_a_number(raw: bytes) -> str | None:
    """The top-level field that holds NaN or Infinity, which are not JSON though some writers send them."""
    if len(raw) > _EXPLAINED_BYTES:
        return None
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict):
        return None
    return next(
        (name for name, value in body.items() if isinstance(value, float) and not math.isfinite(value)),
        None,
    )
