"""Turns an OpenAI body into a frozen request once, or says which parameter is wrong; never tokenizes or computes."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from inference.protocol import Code
from inference.worker import fields, sampling_fields
from inference.worker.errors import BadRequestError
from inference.worker.messages import messages_of
from inference.worker.requests import EmbeddingRequest, Facts, GenerateRequest, Prompt

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_TOP_LOGPROBS = 20
MAX_INPUTS = 2048

_IGNORED = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "reasoning_effort",
        "prompt_cache_key",
        "safety_identifier",
        "prompt_cache_retention",
        "verbosity",
        "cache_prompt",
        "timings_per_token",
    ]
)
"""Fields that clients commonly send and that have no effect on a local model; they are checked for nothing."""

_COMMON = (
    _IGNORED | sampling_fields.SAMPLED | frozenset(["max_tokens", "stop", "n", "stream", "stream_options", "logprobs"])
)
_CHAT = _COMMON | frozenset(
    [
        "messages",
        "max_completion_tokens",
        "top_logprobs",
        "response_format",
        "tools",
        "tool_choice",
        "functions",
        "function_call",
        "modalities",
        "audio",
        "prediction",
        "web_search_options",
        "chat_template_kwargs",
        "continue_final_message",
        "add_generation_prompt",
    ]
)
_COMPLETION = _COMMON | frozenset(["prompt", "echo", "suffix", "best_of"])
_EMBEDDING = frozenset(["model", "input", "encoding_format", "dimensions", "user"])

_UNSUPPORTED: Mapping[str, str] = {
    "tools": "this model server does not call tools yet; send the request without tools",
    "tool_choice": "this model server does not call tools yet; leave tool_choice out",
    "functions": "functions are superseded by tools, which this model server does not call yet",
    "function_call": "functions are superseded by tools, which this model server does not call yet",
    "audio": "this model does not speak; leave audio out",
    "prediction": "predicted outputs are not supported; leave prediction out",
    "web_search_options": "this model cannot search the web; leave web_search_options out",
    "suffix": "filling in the middle is not supported; leave suffix out",
}


def chat(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/chat/completions body; raises BadRequestError with `param`."""
    given = _given(body, _CHAT)
    _need_capability(facts, "chat", "has no chat template; use /v1/completions")
    _refuse_unsupported(given)
    _check_format(given.get("response_format"))
    if (modalities := given.get("modalities")) is not None and modalities != ["text"]:
        raise BadRequestError('this model only writes text: modalities must be ["text"]', "modalities")
    messages = messages_of(given.get("messages"))
    continues = fields.boolean(given, "continue_final_message", False)
    if continues and messages[-1]["role"] != "assistant":
        raise BadRequestError(
            "continue_final_message needs an assistant message at the end of messages", "continue_final_message"
        )
    if "add_generation_prompt" in given and fields.boolean(given, "add_generation_prompt", True) is continues:
        raise BadRequestError(
            "add_generation_prompt must be the opposite of continue_final_message", "add_generation_prompt"
        )
    wants_logprobs = fields.boolean(given, "logprobs", False)
    top = fields.integer(given, "top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top is not None and not wants_logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    newer = fields.integer(given, "max_completion_tokens", None, 1)
    older = fields.integer(given, "max_tokens", None, 1)
    return GenerateRequest(
        kind="chat",
        messages=messages,
        logprobs=(top or 0) if wants_logprobs else None,
        max_tokens=newer if newer is not None else older,
        template_arguments=fields.mapping(given, "chat_template_kwargs"),
        continue_final=continues,
        **_common(given, facts),
    )


def completion(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/completions body; raises BadRequestError with `param`."""
    given = _given(body, _COMPLETION)
    _need_capability(facts, "completions", "does not generate text; use /v1/embeddings")
    _refuse_unsupported(given)
    prompts = prompts_of(given.get("prompt"), "prompt", facts, MAX_SEQUENCES)
    common = _common(given, facts)
    if (best_of := fields.integer(given, "best_of", None, 1, MAX_CHOICES)) is not None and best_of != common["n"]:
        raise BadRequestError("best_of is not supported; leave it out or make it equal to n", "best_of")
    if len(prompts) * common["n"] > MAX_SEQUENCES:
        raise BadRequestError(f"at most {MAX_SEQUENCES} answers per request: prompts times n is more", "n")
    logprobs = fields.integer(given, "logprobs", None, 0, MAX_TOP_LOGPROBS)
    echo = fields.boolean(given, "echo", False)
    if echo and logprobs is not None:
        raise BadRequestError(
            "log probabilities of an echoed prompt are not supported; leave echo or logprobs out",
            "echo",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    return GenerateRequest(
        kind="completion",
        prompts=prompts,
        logprobs=logprobs,
        echo=echo,
        max_tokens=fields.integer(given, "max_tokens", 16, 1),
        **common,
    )


def embedding(body: Any, facts: Facts) -> EmbeddingRequest:
    """The request in a /v1/embeddings body; raises BadRequestError with `param`."""
    given = _given(body, _EMBEDDING)
    _need_capability(facts, "embeddings", "gives no embeddings; ask an embedding model")
    inputs = prompts_of(given.get("input"), "input", facts, MAX_INPUTS)
    style = given.get("encoding_format", "float")
    if style not in ("float", "base64"):
        raise BadRequestError('encoding_format must be "float" or "base64"', "encoding_format")
    return EmbeddingRequest(inputs, style == "base64", fields.integer(given, "dimensions", None, 1, facts.n_embd))


def prompts_of(value: Any, param: str, facts: Facts, most: int) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists; never empty."""
    if value is None:
        raise BadRequestError(f"{param} is required", param)
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif not isinstance(value, list) or not value:
        raise BadRequestError(f"{param} must be a string, or a non-empty list of strings or of token ids", param)
    elif all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        prompts = (_token_ids(value, param, facts),)
    elif len(value) > most:
        raise BadRequestError(f"{param} has {len(value)} entries; at most {most} are allowed", param)
    else:
        prompts = tuple(_prompt(item, f"{param}[{index}]", facts) for index, item in enumerate(value))
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadRequestError(f"{param} is empty", param if len(prompts) == 1 else f"{param}[{index}]")
    return prompts


def _prompt(item: Any, param: str, facts: Facts) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(item, param, facts)
    raise BadRequestError(f"{param} must be a string or a list of token ids", param)


def _token_ids(items: list[Any], param: str, facts: Facts) -> tuple[int, ...]:
    for index, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < facts.n_vocab:
            raise BadRequestError(
                f"{param}[{index}] is no token of this model: ids are whole numbers from 0 to {facts.n_vocab - 1}",
                f"{param}[{index}]",
            )
    return tuple(items)


def _given(body: Any, known: frozenset[str]) -> dict[str, Any]:
    """The fields that are not null; raises for a body that is no object and for names nobody knows."""
    if not isinstance(body, dict):
        raise BadRequestError("the body must be a JSON object")
    for name in body:
        if name not in known:
            close = difflib.get_close_matches(name[:80], known, 1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise BadRequestError(f"unknown field {name[:80]!r}{hint}", name[:80])
    return {name: value for name, value in body.items() if value is not None}


def _need_capability(facts: Facts, name: str, hint: str) -> None:
    if name not in facts.capabilities:
        raise BadRequestError(f"model {facts.model_id!r} {hint}", "model")


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, reason in _UNSUPPORTED.items():
        if name in given and given[name] not in ([], "none", "auto", "", False):
            raise BadRequestError(reason, name, code=Code.UNSUPPORTED_PARAMETER)


def _check_format(value: Any) -> None:
    if value is None:
        return
    kind = value.get("type") if isinstance(value, dict) else None
    if kind in ("json_object", "json_schema"):
        raise BadRequestError(
            f"response_format {kind} is not supported by this model server yet; ask for JSON in the prompt instead",
            "response_format",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    if kind != "text":
        raise BadRequestError('response_format must be {"type": "text"}', "response_format")


def _common(given: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    stream = fields.boolean(given, "stream", False)
    options = fields.mapping(given, "stream_options")
    if options and not stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation"):
            raise BadRequestError(f"unknown field {name[:80]!r}", f"stream_options.{name[:80]}")
    return {
        "sampling": sampling_fields.sampling_of(given, facts),
        "stops": sampling_fields.stops_of(given.get("stop")),
        "n": fields.integer(given, "n", 1, 1, MAX_CHOICES),
        "stream": stream,
        "include_usage": fields.boolean(options, "include_usage", False, prefix="stream_options."),
    }
