"""The typed request inside the gateway, and its parser for OpenAI's APIs.

The other public APIs are translated into the chat of this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from gateway.apis.body_parser import parse_json, with_request_errors
from gateway.apis.messages_body import CountedRequest
from gateway.apis.openai.frames import Endpoint
from headgate.shared.bodies.body_decoder import Body, refuse
from headgate.shared.bodies.openai_bodies import (
    SHAPES,
    AudioPart,
    ChatBody,
    CompletionRequest,
    EmbeddingRequest,
    GenerationFields,
    ImagePart,
    RerankRequest,
    decode_chat,
    decode_completion,
    decode_embedding,
    decode_rerank,
)


class ChatRequest(ChatBody, kw_only=True):
    """A chat of any public API."""

    origin: CountedRequest | None = msgspec.field(default=None, name="$origin")
    """The Messages request that this chat was translated from. Anthropic as a provider gets it as
    `gateway.providers.anthropic.anthropic_native` adapts it."""
    from_messages: bool = msgspec.field(default=False, name="$from_messages")
    """Whether fields have the meaning of the Messages API. It stays true when a changed copy has no origin."""


AnyRequest = ChatRequest | CompletionRequest | EmbeddingRequest | RerankRequest
Generation = TypeVar("Generation", bound=GenerationFields)


def changed(body: Generation, **more: Any) -> Generation:
    """A copy of `body` with other fields. The copy has no origin, because the origin lacks the change."""
    if isinstance(body, ChatRequest):
        more.setdefault("origin", None)
    copy: Generation = msgspec.structs.replace(body, **more)
    return copy


VISION = "vision"
TOOLS = "tools"
AUDIO = "audio"


class InferenceRequest(NamedTuple):
    """A well-formed request. `body` is immutable by convention: a change makes a copy (see `changed`).

    `needs` are capabilities (`chat`, `vision`, `tools`, `embeddings`, ...). `size_bytes`: the client's body and the
    stored items that it refers to. `is_plain`: the answer is one text without a required shape (one choice, no tools,
    no format, no logprobs). Only such an answer can be resumed.
    """

    endpoint: Endpoint
    model: str
    stream: bool
    include_usage: bool
    body: AnyRequest
    needs: frozenset[str]
    max_tokens: int | None
    size_bytes: int
    is_plain: bool
    clamps_max_tokens: bool = False
    """Whether `max_tokens` is cut to a model's context: in Ollama's API, and in the Messages API, which requires it."""

    @property
    def prompt_param(self) -> str:
        """The name of the parameter that holds the text of the request."""
        return _PROMPT_PARAMS[self.endpoint]

    def answer_limit(self, context_length: int) -> int | None:
        """`max_tokens` for a model with this context."""
        if self.max_tokens is None or not self.clamps_max_tokens:
            return self.max_tokens
        return min(self.max_tokens, context_length)


BODIES: Mapping[Endpoint, tuple[type[Body], Callable[[Mapping[str, Any]], AnyRequest]]] = {
    Endpoint.CHAT: (ChatRequest, partial(decode_chat, type_=ChatRequest, path="/v1/chat/completions")),
    Endpoint.COMPLETIONS: (CompletionRequest, partial(decode_completion, path="/v1/completions")),
    Endpoint.EMBEDDINGS: (EmbeddingRequest, partial(decode_embedding, path="/v1/embeddings")),
    Endpoint.RERANK: (RerankRequest, partial(decode_rerank, path="/v1/rerank")),
}
"""The type and the decoder of each endpoint's body."""

_NEEDS: Mapping[Endpoint, frozenset[str]] = {
    Endpoint.CHAT: frozenset(("chat",)),
    Endpoint.COMPLETIONS: frozenset(("completions",)),
    Endpoint.EMBEDDINGS: frozenset(("embeddings",)),
    Endpoint.RERANK: frozenset(("rerank",)),
}
"""The capabilities that every request of an endpoint needs."""
_shapes = attrgetter(*SHAPES)
_NO_SHAPES = (None,) * len(SHAPES)
_PROMPT_PARAMS: Mapping[Endpoint, str] = {
    Endpoint.CHAT: "messages",
    Endpoint.COMPLETIONS: "prompt",
    Endpoint.EMBEDDINGS: "input",
    Endpoint.RERANK: "documents",
}


MAX_TOOL_NAME_CHARS = 64
"""The limit of OpenAI and Google; Anthropic allows 128 characters, and agents send longer names."""

_MARK_CHARS = 12


def short_name(name: str) -> str:
    """The name of a tool; one that is too long is shortened to its beginning and a hash of the whole name."""
    if len(name) <= MAX_TOOL_NAME_CHARS:
        return name
    mark = sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:_MARK_CHARS]
    return f"{name[: MAX_TOOL_NAME_CHARS - _MARK_CHARS - 1]}_{mark}"


@with_request_errors
def parse(endpoint: Endpoint, raw: bytes) -> InferenceRequest:
    """The typed request in `raw`; raises RequestError (400) that names the parameter and what to write instead."""
    body = BODIES[endpoint][1](parse_json(raw))
    if isinstance(body, ChatRequest):
        check_field_combinations(body)
        normalize_chat(body)
    elif isinstance(body, CompletionRequest):
        _check_completion(body)
        _normalize_completion(body)
    return typed(endpoint, body, len(raw))


def typed(endpoint: Endpoint, body: AnyRequest, size_bytes: int) -> InferenceRequest:
    """The request with this `body`; `size_bytes`: see `InferenceRequest`."""
    if not isinstance(body, GenerationFields):
        return InferenceRequest(endpoint, body.model, False, False, body, _NEEDS[endpoint], None, size_bytes, True)
    options, limit = body.stream_options, body.max_tokens
    if isinstance(body, ChatRequest):
        needs, limit = needs_of(body), body.max_completion_tokens or limit
    else:
        needs = _NEEDS[endpoint]
    return InferenceRequest(
        endpoint,
        body.model,
        bool(body.stream),
        options is not None and bool(options.include_usage),
        body,
        needs,
        None if limit == -1 else limit,
        size_bytes,
        (body.n or 1) == 1 and not body.logprobs and TOOLS not in needs and not _has_format(body),
    )


def choices_of(body: AnyRequest) -> int:
    """The number of choices of an answer: `n` for each prompt."""
    if not isinstance(body, CompletionRequest):
        return (body.n or 1) if isinstance(body, ChatRequest) else 1
    prompt = body.prompt
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return prompts * (body.n or 1)


def needs_of(body: ChatRequest) -> frozenset[str]:
    """The capabilities that a chat needs."""
    needs = _NEEDS[Endpoint.CHAT]
    if (body.tools and body.tool_choice != "none") or body.functions:
        needs |= {TOOLS}
    if body.audio or "audio" in (body.modalities or ()):
        needs |= {AUDIO}
    for message in body.messages:
        if type(message.content) is list:
            for part in message.content:
                if isinstance(part, ImagePart):
                    needs |= {VISION}
                elif isinstance(part, AudioPart):
                    needs |= {AUDIO}
    return needs


def _has_format(body: ChatRequest | CompletionRequest) -> bool:
    """Whether the answer must have a format (JSON, grammar), which a part of the answer does not have."""
    if isinstance(body, ChatRequest) and body.response_format is not None and body.response_format.type != "text":
        return True
    return _shapes(body) != _NO_SHAPES


def check_field_combinations(body: ChatRequest) -> None:
    """Validates rules between the fields of a chat."""
    _check_stream(body)
    if body.top_logprobs is not None and not body.logprobs:
        refuse("top_logprobs", "`top_logprobs` needs `logprobs` to be true")
    if body.tool_choice not in (None, "none", "auto") and not body.tools:
        refuse("tool_choice", "`tool_choice` needs `tools`")
    shape = body.response_format
    if shape is not None and shape.type == "json_schema" and shape.json_schema is None:
        refuse("response_format.json_schema", "`response_format` of type json_schema needs `json_schema`")


def _check_stream(body: ChatRequest | CompletionRequest) -> None:
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "`stream_options` is only allowed when `stream` is true")


def _check_completion(body: CompletionRequest) -> None:
    _check_stream(body)
    if body.best_of and body.best_of < (body.n or 1):
        refuse("best_of", "`best_of` must be at least `n`")


# Providers reject empty lists, -1 and parameter names of llama.cpp and vLLM. These functions normalize a decoded body:
# neutral values are removed, and each parameter has one name.
def normalize_chat(body: ChatRequest) -> None:
    """Normalizes a decoded chat to values and names that every provider accepts."""
    _normalize(body)
    if body.max_tokens == -1:
        body.max_tokens = None
    if body.max_completion_tokens == -1:
        body.max_completion_tokens = None
    if body.tools is not None and not body.tools:
        body.tools = body.tool_choice = body.parallel_tool_calls = None
    if not body.functions:
        body.functions = None
    if not body.modalities:
        body.modalities = None
    for message in body.messages:
        if message.tool_calls is not None and not message.tool_calls:
            message.tool_calls = None
    if body.enable_thinking is not None:
        body.chat_template_kwargs = {"enable_thinking": body.enable_thinking, **(body.chat_template_kwargs or {})}
        body.enable_thinking = None
    if body.n_probs and not body.logprobs:
        body.logprobs, body.top_logprobs = True, body.n_probs
    body.n_probs = None


def normalized(body: Generation) -> Generation:
    """`body`, normalized in place."""
    if isinstance(body, ChatRequest):
        normalize_chat(body)
    else:
        assert isinstance(body, CompletionRequest), "all other generating requests are completions"
        _normalize_completion(body)
    return body


def _normalize_completion(body: CompletionRequest) -> None:
    """Normalizes a decoded completion. Its default limit is 16 tokens, so -1 is not neutral."""
    _normalize(body)
    if body.n_probs and body.logprobs is None:
        body.logprobs = body.n_probs
    body.n_probs = None


def _normalize(body: ChatRequest | CompletionRequest) -> None:
    if body.seed == -1:
        body.seed = None
    if not body.stop:
        body.stop = None
    if not body.dry_sequence_breakers:
        body.dry_sequence_breakers = None
    body.skip_special_tokens = None  # only true is accepted, which is the default
