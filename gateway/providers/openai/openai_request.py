"""Adapts a request to an OpenAI-compatible provider and its model; texts of messages are not changed.

Clients send messages back with fields of other providers and of their own libraries, such as reasoning. OpenAI and
Google answer 400 to unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import orjson
from msgspec.structs import replace

from gateway.apis.lenient_json import arguments
from gateway.apis.openai.frames import Endpoint, Flavor
from gateway.apis.openai.generation_request import AnyRequest, ChatRequest
from gateway.errors import UpstreamError
from gateway.providers.provider_fields import (
    GOOGLE_CHAT,
    OPENAI_CHAT,
    OPENAI_COMPLETIONS,
    OPENAI_EMBEDDINGS,
    Profile,
    unsupported,
)
from headgate.shared.bodies.openai_bodies import CompletionRequest, Function, Message, StreamOptions, ToolCall

_TYPES = ("object", "array", "string", "number", "integer", "boolean", "null")
_FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
_KEYWORDS = frozenset((
    "type", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "enum", "const", "anyOf",
    "$ref", "$defs", "definitions", "title", "description", "pattern", "format", "multipleOf", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum",
))  # fmt: skip
_MEANINGS = ("type", "anyOf", "$ref")
"""A schema with none of these keywords counts as not strict."""
_KEYWORD_TYPES: Mapping[str, type] = {
    "properties": dict,
    "$defs": dict,
    "definitions": dict,
    "anyOf": list,
    "required": list,
}

_CHAT: Mapping[Flavor, Profile] = {
    Flavor.OPENAI: OPENAI_CHAT,
    Flavor.GOOGLE: GOOGLE_CHAT,
    Flavor.COMPATIBLE: OPENAI_CHAT,
}
_OTHER: Mapping[Endpoint, Profile] = {
    Endpoint.COMPLETIONS: OPENAI_COMPLETIONS,
    Endpoint.EMBEDDINGS: OPENAI_EMBEDDINGS,
}
"""OpenAI's API has no reranking."""
_GOOGLES_EFFORTS: Mapping[str, str] = {"xhigh": "high", "max": "high"}
"""Efforts above Google's highest."""
_ALWAYS_THINKS = re.compile(r"(models/)?gemini-(2\.5-pro|[3-9]|\d\d)")
"""Models of Google that answer 400 to the effort `none`."""
_MAX_STOPS = 4
"""The limit of OpenAI and Google. Other providers have their own limits, or none."""
_STREAMED_AUDIO = "pcm16"
"""The only audio format that OpenAI streams."""
_SAMPLING = ("temperature", "top_p")
_LOGPROBS = ("logprobs", "top_logprobs")
_PENALTIES = ("frequency_penalty", "presence_penalty", "logit_bias")

_HOSTED_BY_AZURE = (".openai.azure.com", ".services.ai.azure.com", ".openai.azure.us")
"""Azure's hosts of OpenAI models, public and government. They reject unknown fields like OpenAI."""


def is_openai(host: str) -> bool:
    """Whether the host belongs to OpenAI."""
    return host == "api.openai.com" or host.endswith(".api.openai.com")


def flavor_of(host: str, path: str) -> Flavor:
    """The flavor of an address, from its host and path (`/v1beta/openai` is Google's API on any host)."""
    if is_openai(host) or host.endswith(_HOSTED_BY_AZURE):
        return Flavor.OPENAI
    if host.endswith("googleapis.com") or path.rstrip("/").endswith("/v1beta/openai"):
        return Flavor.GOOGLE
    return Flavor.COMPATIBLE


def unsupported_params(
    body: AnyRequest, flavor: Flavor, endpoint: Endpoint = Endpoint.CHAT, model: str = ""
) -> Mapping[str, str]:
    """Why this provider cannot serve `body`, by parameter; empty if it can."""
    profile = _profile(endpoint, flavor)
    if profile is None:
        return {"model": no_endpoint(endpoint).message}
    found = profile.shortcomings(body)
    for param, why in _shortcomings(body, model, flavor):
        found.setdefault(param, unsupported(param, why).message)
    return found


def _shortcomings(body: AnyRequest, model: str, flavor: Flavor) -> Iterator[tuple[str, str]]:
    """Fields whose value makes this provider or model unsuitable, and why."""
    if not isinstance(body, ChatRequest | CompletionRequest):
        return
    if len(body.stops) > _MAX_STOPS and flavor is not Flavor.COMPATIBLE:
        yield "stop", f"it accepts at most {_MAX_STOPS} stop strings"
    if isinstance(body, CompletionRequest):
        return
    shape = body.response_format
    if shape is not None and shape.schema is not None and flavor is not Flavor.COMPATIBLE:
        yield "response_format", "it accepts a schema only as json_schema"
    if flavor is Flavor.OPENAI:
        if ((body.audio or {}).get("format") or _STREAMED_AUDIO) != _STREAMED_AUDIO:
            yield "audio", f"answers are requested as streams, whose audio format is {_STREAMED_AUDIO}"
        for param in _unknown_to(model, body.reasoning_effort):
            if getattr(body, param) and param not in _SAMPLING:
                yield param, f"{model} is a reasoning model and does not accept it"


def _unknown_to(model: str, effort: str | None) -> tuple[str, ...]:
    """The fields to which a model of OpenAI answers 400, mostly even with a neutral value."""
    if not reasons(model):
        return ()
    stop = () if takes_stop(model) else ("stop",)
    return _PENALTIES + stop + (() if takes_sampling(model, effort) else _LOGPROBS + _SAMPLING)


def to_openai(
    endpoint: Endpoint, body: AnyRequest, model: str, flavor: Flavor, *, stream: bool = True
) -> dict[str, Any]:
    """The request to send, with usage in a stream. Raises UpstreamError naming a rejected param."""
    profile = _profile(endpoint, flavor)
    if profile is None:
        raise no_endpoint(endpoint)
    for param, why in _shortcomings(body, model, flavor):
        raise unsupported(param, why)
    profile.check(body)
    sent = _chat(body, model, flavor) if isinstance(body, ChatRequest) else replace(body, model=model)
    if isinstance(sent, ChatRequest | CompletionRequest):
        options = sent.stream_options if flavor is Flavor.OPENAI else None
        sent.stream, sent.stream_options = stream, None
        if stream:
            sent.stream_options = StreamOptions(
                include_usage=True, include_obfuscation=options.include_obfuscation if options is not None else None
            )
    return profile.kept(sent)


def no_endpoint(endpoint: Endpoint) -> UpstreamError:
    """The error of a call to an endpoint that the provider does not have."""
    return unsupported("model", f"it has no /v1/{endpoint}")


def _profile(endpoint: Endpoint, flavor: Flavor) -> Profile | None:
    if endpoint is Endpoint.CHAT:
        return _CHAT[flavor]
    if endpoint is Endpoint.COMPLETIONS and flavor is Flavor.GOOGLE:
        return None
    return _OTHER.get(endpoint)


def _chat(body: ChatRequest, model: str, flavor: Flavor) -> ChatRequest:
    messages, has_extra = list(_MESSAGES[flavor](body.messages, model)), body.has_extra or flavor is Flavor.GOOGLE
    sent = replace(body, model=model, messages=messages, has_extra=has_extra, origin=None)
    if body.reasoning_effort is not None:
        sent.reasoning_effort = _effort(body.reasoning_effort, model, flavor)
    if flavor is Flavor.OPENAI:
        if sent.max_completion_tokens is None:
            sent.max_completion_tokens = sent.max_tokens
        sent.max_tokens = None  # newer models reject the old name, all models accept the new one
        for name in _unknown_to(model, body.reasoning_effort):
            setattr(sent, name, None)  # other values were refused before: this is a neutral or a droppable one
        if body.from_messages:
            _keep_messages_semantics(sent)
    return sent


def _effort(effort: str, model: str, flavor: Flavor) -> str | None:
    """`reasoning_effort` as the nearest effort of the provider and the model; None for a model without efforts."""
    if flavor is Flavor.OPENAI:
        return effort_for(effort, model)
    if flavor is Flavor.GOOGLE:
        is_off = effort == "none" and _ALWAYS_THINKS.match(model) is not None
        return "minimal" if is_off else _GOOGLES_EFFORTS.get(effort, effort)
    return effort


def _keep_messages_semantics(sent: ChatRequest) -> None:
    """Adapts fields of a Messages API request whose meaning differs at OpenAI.

    The Messages API requires `max_tokens`, and clients often set more than some models of OpenAI accept. Its strict
    schemas may have optional properties; such a schema is sent to OpenAI without `strict`.
    """
    limit, most = sent.max_completion_tokens, answer_limit(sent.model)
    if limit is not None and most is not None:
        sent.max_completion_tokens = min(limit, most)
    if (shape := sent.response_format) is not None and (inner := shape.json_schema) is not None:
        sent.response_format = replace(shape, json_schema=replace(inner, strict=is_strict(inner.schema)))
    if sent.tools:
        sent.tools = [replace(tool, function=_without_strict(tool.function)) for tool in sent.tools]


def _without_strict(function: Function | None) -> Function | None:
    if function is None or not function.strict or is_strict(function.parameters):
        return function
    return replace(function, strict=False)


def is_strict(schema: Any) -> bool:
    """Whether strict mode accepts `schema`, the schema of an answer or of a function's parameters.

    In strict mode every object lists all its properties and requires all of them; an optional property is nullable. A
    schema with keywords that are not documented counts as not strict.
    """
    return (
        isinstance(schema, dict) and schema.get("type") == "object" and "anyOf" not in schema and _is_accepted(schema)
    )


def _is_accepted(schema: Any) -> bool:
    if not isinstance(schema, dict) or not schema.keys() <= _KEYWORDS or schema.keys().isdisjoint(_MEANINGS):
        return False
    if "$ref" in schema and len(schema) > 1:
        return False
    if not all(isinstance(schema[name], kind) for name, kind in _KEYWORD_TYPES.items() if name in schema):
        return False
    type_ = schema.get("type", [])
    kinds = type_ if isinstance(type_, list) else [type_]
    if any(kind not in _TYPES for kind in kinds) or schema.get("format", "date") not in _FORMATS:
        return False
    if ("object" in kinds or "properties" in schema) and not _is_closed(schema):
        return False
    inner = [schema["items"]] if "items" in schema else []
    inner += schema.get("anyOf", ())
    for name in ("properties", "$defs", "definitions"):
        inner += schema.get(name, {}).values()
    return all(map(_is_accepted, inner))


def _is_closed(schema: Mapping[str, Any]) -> bool:
    properties, required = schema.get("properties", {}), schema.get("required", [])
    is_whole = len(required) == len(properties) and all(name in required for name in properties)
    return schema.get("additionalProperties") is False and is_whole


# --- messages ---------------------------------------------------------------------------------------------------------
Messages = Iterable[Message]
Holder = TypeVar("Holder", Message, ToolCall)

UNSIGNED_CALL = "skip_thought_signature_validator"
"""Google's signature for a call that another model made."""

_EXTRA = "extra_content"
"""The field in which Google sends the signature of a thought; clients may send it back. OpenAI rejects it."""
_ANSWERS_ONLY = frozenset(("annotations", "parsed"))
"""Fields of answers that requests do not have."""
_WANTS_SIGNATURES = re.compile(r"(models/)?gemini-([3-9]|\d\d)")
"""Models of Google that reject a history if the first call of a turn has no thought signature."""


def for_others(messages: Messages, model: str) -> Messages:
    """For other providers: only fields of answers are removed."""
    return (_with_extra(message, lambda name: name not in _ANSWERS_ONLY) for message in messages)


def for_openai(messages: Messages, model: str) -> Messages:
    """For OpenAI: unknown fields are removed, and the function's name from results."""
    for message in messages:
        if message.role == "tool":
            yield Message(role="tool", content=message.content, tool_call_id=message.tool_call_id)
            continue
        sent = _known(message, ())
        if any(_EXTRA in (call.extra or ()) for call in sent.tool_calls or ()):
            calls = [_with_extra(call, lambda name: name != _EXTRA) for call in sent.tool_calls or ()]
            sent = replace(sent, tool_calls=calls)
        yield sent


def for_google(messages: Messages, model: str) -> Messages:
    """For Google: results get their function's name, calls get an object as arguments and a signature if required."""
    needs_signature = _WANTS_SIGNATURES.match(model) is not None
    names: dict[str, str] = {}
    for message in messages:
        known = _known(message, (_EXTRA,))
        if message.tool_calls:
            calls = [_with_object(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in calls if call.function is not None}
            first = calls[0].extra or {}
            if needs_signature and not first.get(_EXTRA):
                signature = {"google": {"thought_signature": UNSIGNED_CALL}}
                calls[0] = replace(calls[0], extra={**first, _EXTRA: signature})
            known = replace(known, tool_calls=calls)
        elif message.role == "tool" and not message.name and message.tool_call_id in names:
            known = replace(known, name=names[message.tool_call_id])
        yield known


def _with_object(call: ToolCall) -> ToolCall:
    """The call; arguments that are not a JSON object are wrapped in one."""
    function = call.function
    if function is None or _is_object(function.arguments):
        return call
    text = orjson.dumps(arguments(function.arguments)).decode()
    return replace(call, function=replace(function, arguments=text))


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _known(message: Message, extra: Collection[str]) -> Message:
    """`message` with the fields that requests may have, and these `extra` ones."""
    if message.reasoning_content is not None:
        message = replace(message, reasoning_content=None)
    return _with_extra(message, extra.__contains__)


def _with_extra(holder: Holder, is_kept: Callable[[str], bool]) -> Holder:
    """`holder` with those of its extra fields that are kept; the same object if they all are."""
    extra = holder.extra
    if not extra or all(map(is_kept, extra)):
        return holder
    return replace(holder, extra={name: value for name, value in extra.items() if is_kept(name)} or None)


_MESSAGES: Mapping[Flavor, Callable[[Messages, str], Messages]] = {
    Flavor.OPENAI: for_openai,
    Flavor.GOOGLE: for_google,
    Flavor.COMPATIBLE: for_others,
}


# --- models -----------------------------------------------------------------------------------------------------------
# Which parameters the models accept, by name, from OpenAI's documentation. A name without a known generation, such as a
# custom deployment name, is treated as a model that does not reason.
_BEFORE = r"(?:[^:/]*/)*(?:ft:)?"
"""The optional part before a name: prefixes such as `models/`, and `ft:` of a fine-tuned model."""


def _named(pattern: str) -> re.Pattern[str]:
    return re.compile(_BEFORE + pattern, re.IGNORECASE)


_REASONS = _named(r"(o\d|codex-|gpt-([5-9]|[12]\d)(?!\d|-chat))")
"""The o series and GPT-5 and later except `gpt-5-chat`. They answer 400 to sampling parameters."""

_SAMPLES_WITHOUT_EFFORT = _named(r"gpt-5\.\d")
"""GPT-5.1 and later 5.x models accept sampling parameters while their effort is `none`."""

_NO_EFFORT_BY_DEFAULT = _named(r"gpt-5\.[1-4](?!\d|[^:]*-(chat|codex|pro))")
"""Models whose default effort is `none`. For GPT-5.5 and later, and for the excluded variants, it is `medium` or
higher."""

_NEVER_REASONS = _named(r"(gpt-(3\.5|4)|chatgpt-4o|gpt-5-chat)")
"""Models that do not reason. They answer 400 to an effort; models with unknown names may accept one."""

_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""All efforts, lowest first."""

_EFFORTS_OF = (
    (_NEVER_REASONS, ()),
    (_named(r"gpt-5\.\d+-chat"), ("medium",)),
    (_named(r"gpt-5-pro"), ("high",)),
    (_named(r"gpt-5\.\d[^:]*-pro"), ("medium", "high", "xhigh")),
    (_named(r"(o\d|codex-|gpt-5-codex|gpt-5\.1-codex(?!-max))"), ("low", "medium", "high")),
    (_named(r"gpt-5(?![.\d])"), ("minimal", "low", "medium", "high")),
    (_named(r"gpt-5\.1(?!\d|-codex)"), ("none", "low", "medium", "high")),
    (_named(r"gpt-5\.\d[^:]*-codex"), ("low", "medium", "high", "xhigh")),
    (_named(r"gpt-5\.\d"), ("none", "low", "medium", "high", "xhigh")),
    (_named(""), ("none", "minimal", "low", "medium", "high", "xhigh")),
)
"""The known efforts of a model, lowest first, by the first matching pattern; the API answers 400 to others.

`max` is left out: later models accept it, and they accept the next lower one as well."""

_STOPS = _named(r"o(1|3-mini)(?!\d)")
"""Reasoning models that accept `stop`: those before o3 and o4-mini."""

_MAX_TOKENS = (
    (_named(r"gpt-3\.5|gpt-4-(turbo|\d{4}-preview|vision)|gpt-4o-2024-05-13"), 4_096),
    (_named(r"gpt-4(-0314|-0613)?$"), 8_192),
    (_named(r"gpt-4o|chatgpt-4o|gpt-4\.5|gpt-5(\.\d)?-chat"), 16_384),
    (_named(r"gpt-4\.1|o1-preview"), 32_768),
    (_named(r"o1-mini"), 65_536),
    (_named(r"o[134](?!\d)"), 100_000),
    (_named(r"gpt-5(?!\d)"), 128_000),
)
"""The known maximum of `max_completion_tokens`, by the first pattern that matches; the API answers 400 to more."""


def answer_limit(model: str) -> int | None:
    """The largest `max_completion_tokens` that `model` accepts; None if it is unknown."""
    return next((most for name, most in _MAX_TOKENS if name.match(model)), None)


def reasons(model: str) -> bool:
    """Whether `model` reasons, and so accepts neither penalties nor a logit bias, whatever its effort."""
    return _REASONS.match(model) is not None


def effort_for(effort: str, model: str) -> str | None:
    """`effort` if `model` accepts it, else the next higher one, else its highest; None for a model without efforts.

    An unknown effort is returned unchanged.
    """
    taken: tuple[str, ...] = next(efforts for name, efforts in _EFFORTS_OF if name.match(model))
    if not taken:
        return None
    if effort not in _EFFORTS:
        return effort
    least = _EFFORTS.index(effort)
    return next((other for other in taken if _EFFORTS.index(other) >= least), taken[-1])


def takes_sampling(model: str, effort: str | None) -> bool:
    """Whether a reasoning `model` accepts `temperature`, `top_p`, `logprobs` with this effort (None: its default)."""
    given = None if effort is None else effort_for(effort, model)
    models = {None: _NO_EFFORT_BY_DEFAULT, "none": _SAMPLES_WITHOUT_EFFORT}.get(given)
    return models is not None and models.match(model) is not None


def takes_stop(model: str) -> bool:
    """Whether `model` accepts `stop`."""
    return not reasons(model) or _STOPS.match(model) is not None
