"""`GET /openapi.json`: the OpenAPI description of the service.

Workers read the bodies of the hot paths, so their schemas are declared here. A test compares the field names with
those of the worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse

from headgate.shared import openapi
from headgate.shared.parameters import BY_NAME, PARAMETERS
from inference.protocol import PROMPT_USAGE

Schema = Mapping[str, Any]

_ANY: Schema = {}
_BOOLEAN: Schema = {"type": "boolean"}
_TEXT: Schema = {"type": "string"}
_OBJECT: Schema = {"type": "object"}
_MODEL: Schema = {"type": "string", "minLength": 1}


def _number(low: float, high: float) -> Schema:
    return {"type": "number", "minimum": low, "maximum": high}


def _integer(low: int, high: int | None = None) -> Schema:
    return {"type": "integer", "minimum": low, **({} if high is None else {"maximum": high})}


def _one_of(*words: str) -> Schema:
    return {"type": "string", "enum": list(words)}


def _list(item: Schema, low: int = 0, high: int | None = None) -> Schema:
    return {"type": "array", "items": item, "minItems": low, **({} if high is None else {"maxItems": high})}


def _either(*choices: Schema) -> Schema:
    return {"anyOf": list(choices)}


_TOKENS = _list(_integer(0), 1)
_TEXTS = _either(_TEXT, _list(_either(_TEXT, _TOKENS), 1, 2048), _TOKENS)
_SCHEMA = _either(_OBJECT, _BOOLEAN)

_IGNORED: Mapping[str, Schema] = dict.fromkeys(
    (
        "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options",
        "safety_identifier", "prompt_cache_retention", "verbosity",
    ),
    _ANY,
)  # fmt: skip
_GENERATED: Mapping[str, Schema] = {
    "model": _MODEL,
    **_IGNORED,
    **{row.name: row.schema() for row in PARAMETERS if row.name not in ("max_completion_tokens", "enable_thinking")},
    "logit_bias": {"type": "object", "additionalProperties": _number(-100, 100), "maxProperties": 1024},
    "answer_so_far": {
        "type": "object",
        "properties": {name: _either(_TEXT, {"type": "null"}) for name in ("content", "reasoning_content")},
        "additionalProperties": False,
    },
    "stop": _either(_TEXT, _list({"type": "string", "minLength": 1, "maxLength": 1024}, 0, 16)),
    "n": _integer(1, 16),
    "stream": _BOOLEAN,
    "stream_options": {
        "type": "object",
        "properties": {"include_usage": _BOOLEAN, "include_obfuscation": _BOOLEAN, PROMPT_USAGE: _BOOLEAN},
        "additionalProperties": False,
    },
    "json_schema": _SCHEMA,
    "regex": _TEXT,
    "grammar": _TEXT,
    "guided_json": _either(_OBJECT, _BOOLEAN, _TEXT),
    "guided_regex": _TEXT,
    "guided_choice": _list(_TEXT, 1, 4096),
    "guided_grammar": _TEXT,
    "structured_outputs": _OBJECT,
}
_MESSAGES = _list(
    {
        "type": "object",
        "required": ["role"],
        "properties": {
            "role": _one_of("system", "developer", "user", "assistant", "tool", "function"),
            "content": _either(_TEXT, _list(_OBJECT), {"type": "null"}),
            "name": _TEXT,
            "tool_calls": _list(_OBJECT),
            "tool_call_id": _TEXT,
            "function_call": _OBJECT,
            "refusal": _TEXT,
            "audio": _OBJECT,
            "annotations": _ANY,
            "reasoning_content": _TEXT,
        },
        "additionalProperties": False,
    },
    1,
    4096,
)
_TOOLS: Mapping[str, Schema] = {
    "tools": _list(_OBJECT, 0, 128),
    "tool_choice": _either(_one_of("none", "auto", "required"), _OBJECT),
    "parallel_tool_calls": _BOOLEAN,
    "functions": _list(_OBJECT),
    "function_call": _either(_TEXT, _OBJECT),
}

_RENDERED: Mapping[str, Schema] = {
    "reasoning_effort": _one_of("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    "chat_template_kwargs": _OBJECT,
    "enable_thinking": BY_NAME["enable_thinking"].schema(),
    "continue_final_message": _BOOLEAN,
    "add_generation_prompt": _BOOLEAN,
}


def _body(fields: Mapping[str, Schema], *needed: str) -> Schema:
    """An object with only these fields. Null counts as absent, except for `needed` ones."""
    properties = {
        name: schema if name in needed or schema is _ANY else _either(schema, {"type": "null"})
        for name, schema in fields.items()
    }
    return {"type": "object", "properties": properties, "required": list(needed), "additionalProperties": False}


BODIES: Mapping[str, Schema] = {
    "/v1/chat/completions": _body(
        {
            **_GENERATED,
            **_TOOLS,
            "messages": _MESSAGES,
            "max_completion_tokens": BY_NAME["max_completion_tokens"].schema(),
            "logprobs": _BOOLEAN,
            "top_logprobs": _integer(0, 20),
            "response_format": _OBJECT,
            **_RENDERED,
            "modalities": _list(_one_of("text"), 0, 1),
            "audio": _ANY,
            "moderation": _ANY,
            "prediction": _ANY,
            "web_search_options": _ANY,
        },
        "model",
        "messages",
    ),
    "/v1/completions": _body(
        {
            **_GENERATED,
            "max_tokens": replace(BY_NAME["max_tokens"], low=0).schema(),
            "prompt": _TEXTS,
            "logprobs": _integer(0, 20),
            "echo": _BOOLEAN,
            "suffix": _TEXT,
            "best_of": _integer(1),
        },
        "model",
        "prompt",
    ),
    "/v1/embeddings": _body(
        {
            "model": _MODEL,
            "input": _TEXTS,
            "encoding_format": _one_of("float", "base64"),
            "dimensions": _integer(1),
            "user": _ANY,
        },
        "model",
        "input",
    ),
    "/v1/rerank": _body(
        {
            "model": _MODEL,
            "query": _TEXT,
            "documents": _list(_either(_TEXT, {"type": "object", "required": ["text"]}), 1, 2048),
            "top_n": _integer(1),
            "return_documents": _BOOLEAN,
            "user": _ANY,
        },
        "model",
        "query",
        "documents",
    ),
    "/tokenize": _body(
        {
            **_TOOLS,
            **_RENDERED,
            "model": _MODEL,
            "content": _TEXT,
            "messages": _MESSAGES,
            "prompt": _TEXTS,
            "suffix": _TEXT,
            "add_special": _BOOLEAN,
            "parse_special": _BOOLEAN,
        },
        "model",
    ),
    "/detokenize": _body({"model": _MODEL, "tokens": _list(_integer(0))}, "model", "tokens"),
}
"""The body of each hot path."""

_STREAMS = ("/v1/chat/completions", "/v1/completions")


def add(app: FastAPI, open_paths: frozenset[str]) -> None:
    """Adds the route to `app`."""

    @app.get(openapi.PATH, include_in_schema=False)
    async def describe() -> JSONResponse:
        return JSONResponse(description(app, open_paths))


def description(app: FastAPI, open_paths: frozenset[str]) -> dict[str, Any]:
    """The complete description: the routes of `app` and the hot paths."""
    return openapi.completed(app.openapi(), BODIES, open_paths, _STREAMS)
