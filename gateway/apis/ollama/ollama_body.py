"""The request bodies of Ollama's API. Unknown fields and options are refused, those of messages are ignored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from headgate.shared.bodies.body_decoder import (
    Body,
    Object,
    Text,
    decode,
    expected,
    keep_extra,
    must,
    parameter_type,
    refuse,
)
from headgate.shared.bodies.openai_bodies import StopStrings, Tool
from headgate.shared.parameters import SAMPLING_PARAMETERS
from inference.protocol import Code

IGNORED_OPTIONS = (
    # settings of the loaded model, which models.yaml has
    "embedding_only", "f16_kv", "logits_all", "low_vram", "main_gpu", "num_batch", "num_ctx", "num_gpu", "num_thread",
    "numa", "use_mlock", "use_mmap", "vocab_only",
    # prompts are not shortened; penalties read every token of the answer; Ollama ignores tfs_z as well
    "num_keep", "penalize_newline", "repeat_last_n", "tfs_z",
)  # fmt: skip
"""Options that clients send and that have no effect; their values are not checked."""

SAMPLING_OPTIONS = tuple(row for row in SAMPLING_PARAMETERS if row.kind != "strings")
"""The parameters that are options of the same name."""

_NO_TEMPLATE = "the template of the model is used; with `raw: true` the prompt is used as it is"
_NO_CONTEXT = "the gateway keeps no conversations; send the messages to /api/chat"


class _NoUnknown(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An object that holds no other fields than these."""


if TYPE_CHECKING:
    _Options = _NoUnknown
else:
    _Options = msgspec.defstruct(
        "_Options",
        [(row.name, parameter_type(row), None) for row in SAMPLING_OPTIONS]
        + [(name, Any, None) for name in IGNORED_OPTIONS],
        bases=(_NoUnknown,),
        kw_only=True,
    )


class OllamaOptions(_Options, kw_only=True):
    """Sampling parameters. `num_predict`: longest answer in tokens; -1 and -2: as long as the context allows."""

    num_predict: Annotated[int, Meta(ge=-2)] | None = None
    stop: StopStrings | None = None


class OllamaFunction(Struct, kw_only=True, omit_defaults=True):
    """The function of a tool call."""

    name: Text
    arguments: Object


class OllamaCall(Struct, kw_only=True, omit_defaults=True):
    """A tool call of the assistant."""

    function: OllamaFunction
    id: str | None = None


Images: TypeAlias = list[Text]


class OllamaMessage(Struct, kw_only=True, omit_defaults=True):
    """One message of a conversation. `tool_name` or `tool_call_id` is the call that a result belongs to."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: Images | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


_FORMAT = Meta(extra=expected("json or a JSON schema"))
_KEEP_ALIVE = Meta(extra=expected("a number of seconds or a duration such as 5m"))
Format: TypeAlias = Annotated[Literal["", "json"] | Object | None, _FORMAT]
KeepAlive: TypeAlias = Annotated[float | str | None, _KEEP_ALIVE]
Think: TypeAlias = Annotated[
    bool | Literal["low", "medium", "high", "max"] | None,
    Meta(extra=must("must be true, false, low, medium, high or max")),
]
ModelName: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]


class GeneratingRequest(Body, kw_only=True):
    """Fields of `/api/chat` and `/api/generate`. `keep_alive`, `truncate` and `shift` have no effect on an answer."""

    model: ModelName
    stream: bool | None = None
    format: Format = None
    options: OllamaOptions | None = None
    think: Think = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncate: bool | None = None
    shift: bool | None = None


class OllamaChatRequest(GeneratingRequest, kw_only=True):
    """The body of `/api/chat`. Without messages it loads the model."""

    messages: Annotated[list[OllamaMessage], Meta(max_length=100_000)] | None = None
    tools: Annotated[list[Tool], Meta(max_length=1024)] | None = None


class OllamaGenerateRequest(GeneratingRequest, kw_only=True):
    """The body of `/api/generate`. Without a prompt it loads the model."""

    prompt: str | None = None
    suffix: str | None = None
    images: Images | None = None
    system: str | None = None
    raw: bool | None = None
    template: str | None = None
    context: Sequence[int] | None = None


class EmbeddingOptions(Body, kw_only=True):
    """Fields of both embedding endpoints. `truncate`, `options` and `keep_alive` have no effect."""

    model: ModelName
    truncate: bool | None = None
    options: OllamaOptions | None = None
    keep_alive: KeepAlive = None


class OllamaEmbedRequest(EmbeddingOptions, kw_only=True):
    """The body of `/api/embed`."""

    input: Annotated[
        Text | Annotated[list[Text], Meta(min_length=1)], Meta(extra=expected("a string or an array of strings"))
    ]
    dimensions: Annotated[int, Meta(ge=1)] | None = None


class OllamaEmbeddingsRequest(EmbeddingOptions, kw_only=True):
    """The body of `/api/embeddings`, the older form."""

    prompt: Text


def decode_ollama_chat(given: Mapping[str, Any]) -> OllamaChatRequest:
    """The body of `/api/chat` in parsed JSON; raises InvalidBodyError."""
    body = decode(given, OllamaChatRequest, "/api/chat")
    if body.tools:
        keep_extra(body, {"tools": given["tools"]})
    return body


def decode_ollama_generate(given: Mapping[str, Any]) -> OllamaGenerateRequest:
    """The body of `/api/generate` in parsed JSON; raises InvalidBodyError."""
    body = decode(given, OllamaGenerateRequest, "/api/generate")
    if body.template:
        refuse("template", f"`template` is not accepted: {_NO_TEMPLATE}", Code.UNSUPPORTED_PARAMETER)
    if body.context:
        refuse("context", f"`context` is not accepted: {_NO_CONTEXT}", Code.UNSUPPORTED_PARAMETER)
    return body


def decode_ollama_embed(given: Mapping[str, Any]) -> OllamaEmbedRequest:
    """The body of `/api/embed` in parsed JSON; raises InvalidBodyError."""
    return decode(given, OllamaEmbedRequest, "/api/embed")


def decode_ollama_embeddings(given: Mapping[str, Any]) -> OllamaEmbeddingsRequest:
    """The body of `/api/embeddings` in parsed JSON; raises InvalidBodyError."""
    return decode(given, OllamaEmbeddingsRequest, "/api/embeddings")
