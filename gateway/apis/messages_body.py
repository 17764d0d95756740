"""The request body of Anthropic's Messages API. Unknown fields are refused, as Anthropic does, except in cache marks,
citations and metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from headgate.shared.bodies.body_decoder import (
    Body,
    Extensible,
    Object,
    Text,
    decode,
    expected,
    keep_extra,
    must,
    parameter_type,
    refuse,
    refused_types,
)
from headgate.shared.parameters import BY_NAME
from inference.protocol import Code

MAX_URL_CHARS = 2048
IMAGE_TYPES = ("image/jpeg", "image/png", "image/gif", "image/webp")

IGNORED: Mapping[str, str] = {
    "anthropic_beta": "names beta features; those that change an answer have fields of their own",
    "anthropic_version": "the version is in a header; both existing versions are understood",
    "betas": "names beta features; those that change an answer have fields of their own",
    "billing_policy": "concerns the bill of another provider's hosting",
    "context_management": "drops old tool results at Anthropic; here they stay",
    "diagnostics": "explains Anthropic's prompt cache",
    "fallback_credit_token": "concerns the bill of another provider's hosting",
    "fallbacks": "names other models of Anthropic; the gateway falls back along the chain of the route",
    "speed": "chooses between machines of Anthropic",
    "user_profile_id": "names the user that Anthropic bills",
    "workspace_id": "names the workspace that Anthropic bills",
}
"""Fields that clients send and that do not change the meaning of an answer; their values are not checked."""

REFUSED: Mapping[str, str] = {
    "compaction": "the gateway does not summarize conversations",
    "container": "containers and skills exist only at Anthropic",
    "inference_geo": "the gateway cannot promise a region; `x-headgate-policy: local-only` excludes the clouds",
    "mcp_servers": "the gateway does not call MCP servers; let the client call them and send their tools",
    "thread": "the gateway does not store conversations; send all messages",
}
"""Fields that would change the answer and that no tier behind the gateway can honor."""

_REFUSED_BLOCKS: Mapping[str, str] = {
    "compaction": "the gateway does not summarize conversations",
    "search_result": "send it as text",
    "container_upload": "the gateway does not store files",
    "server_tool_use": "it belongs to a tool that runs at Anthropic, which no other tier has",
    "tool_reference": "send the tool itself in `tools`",
    "browser_state": "send it as text or an image",
}
_NO_FETCHING = "the gateway does not fetch documents, so send the data as base64"
_NO_FILES = "the gateway does not store files, so send the data as base64"


def _refused_block(kind: str) -> str | None:
    return _REFUSED_BLOCKS["server_tool_use"] if kind.endswith("_tool_result") else _REFUSED_BLOCKS.get(kind)


def is_hosted(tool: Any) -> bool:
    """Whether a tool in JSON is defined by Anthropic: it runs there, or only its models support it."""
    return isinstance(tool, dict) and tool.get("type") not in (None, "custom")


class Closed(Struct, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """An object that holds no other fields than these."""


class CacheControl(Struct, kw_only=True, omit_defaults=True):
    """A mark of Anthropic's prompt cache; other fields need beta features and are dropped."""

    type: Literal["ephemeral"]
    ttl: Any = None


# --- content ----------------------------------------------------------------------------------------------------------
class TextBlock(Closed, kw_only=True, tag_field="type", tag="text"):
    """A content block with text."""

    text: str
    citations: Any = None
    cache_control: CacheControl | None = None


class Base64Image(Closed, kw_only=True, tag_field="type", tag="base64"):
    """The source of an image, as base64."""

    media_type: Literal["image/jpeg", "image/png", "image/gif", "image/webp"]
    data: Text


class ImageAddress(Closed, kw_only=True, tag_field="type", tag="url"):
    """An image that the gateway may fetch."""

    url: Annotated[
        str,
        Meta(
            pattern=f"^https://.{{0,{MAX_URL_CHARS - len('https://')}}}$",
            extra=must("must be a short https: address; send the image itself as base64"),
        ),
    ]


class ImageBlock(Closed, kw_only=True, tag_field="type", tag="image"):
    """A content block with an image."""

    source: Annotated[Base64Image | ImageAddress, Meta(extra=refused_types({"file": _NO_FILES}.get))]
    transformations: Any = None
    cache_control: CacheControl | None = None


class Base64Pdf(Closed, kw_only=True, tag_field="type", tag="base64"):
    """The source of a PDF, as base64."""

    media_type: Literal["application/pdf"]
    data: Text


class TextSource(Closed, kw_only=True, tag_field="type", tag="text"):
    """The source of a plain text document."""

    data: str
    media_type: Literal["text/plain"] | None = None


class Citations(Struct, kw_only=True, omit_defaults=True):
    """Whether the answer cites the document. Only false is supported."""

    enabled: bool | None = None


_DOCUMENTS = {"url": _NO_FETCHING, "file": _NO_FILES, "content": "send its blocks themselves"}


class DocumentBlock(Closed, kw_only=True, tag_field="type", tag="document"):
    """A content block with a document."""

    source: Annotated[Base64Pdf | TextSource, Meta(extra=refused_types(_DOCUMENTS.get))]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    cache_control: CacheControl | None = None


ShownBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock


class ToolResultBlock(Closed, kw_only=True, tag_field="type", tag="tool_result"):
    """A content block with the result of a tool call."""

    tool_use_id: Text
    content: Annotated[
        str | list[Annotated[ShownBlock, Meta(extra=refused_types(_refused_block))]] | None,
        Meta(extra=expected("a string or an array of blocks")),
    ] = None
    is_error: bool | None = None
    toolset_name: Any = None
    cache_control: CacheControl | None = None

    @property
    def blocks(self) -> list[ShownBlock]:
        """The content as blocks."""
        return [TextBlock(text=self.content)] if isinstance(self.content, str) else self.content or []


class ToolUseBlock(Closed, kw_only=True, tag_field="type", tag="tool_use"):
    """A content block with a tool call of the assistant."""

    id: Text
    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input: Object
    caller: Any = None
    toolset_name: Any = None
    cache_control: CacheControl | None = None


class ThinkingBlock(Closed, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning, signed by the provider that wrote it."""

    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(Closed, kw_only=True, tag_field="type", tag="redacted_thinking"):
    """Reasoning that only Anthropic can read."""

    data: str


UserBlock: TypeAlias = TextBlock | ImageBlock | DocumentBlock | ToolResultBlock
AssistantBlock: TypeAlias = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
AnyBlock: TypeAlias = UserBlock | AssistantBlock
_BLOCKS = Meta(extra=refused_types(_refused_block))
_CONTENT = Meta(extra=expected("a string or an array of blocks"))


class UserMessage(Closed, kw_only=True, tag_field="role", tag="user"):
    """A message of the user, or results of tools."""

    content: Annotated[str | Annotated[list[Annotated[UserBlock, _BLOCKS]], Meta(min_length=1)], _CONTENT]


class AssistantMessage(Closed, kw_only=True, tag_field="role", tag="assistant"):
    """A message of the assistant."""

    content: Annotated[str | Annotated[list[Annotated[AssistantBlock, _BLOCKS]], Meta(min_length=1)], _CONTENT]


class SystemMessage(Closed, kw_only=True, tag_field="role", tag="system"):
    """A system message within the conversation."""

    content: Annotated[str | Annotated[list[Annotated[TextBlock, _BLOCKS]], Meta(min_length=1)], _CONTENT]


Turn: TypeAlias = UserMessage | AssistantMessage | SystemMessage


# --- tools and output -------------------------------------------------------------------------------------------------
class MessagesTool(Closed, kw_only=True):
    """A tool that the client runs."""

    name: Annotated[str, Meta(min_length=1, max_length=128)]
    input_schema: Object
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    allowed_callers: list[Text] | None = None
    defer_loading: bool | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[Any] | None = None
    cache_control: CacheControl | None = None


class AutoChoice(Closed, kw_only=True, tag_field="type", tag="auto"):
    """The model decides whether it calls a tool."""

    disable_parallel_tool_use: bool | None = None


class AnyChoice(Closed, kw_only=True, tag_field="type", tag="any"):
    """The model must call a tool."""

    disable_parallel_tool_use: bool | None = None


class NoChoice(Closed, kw_only=True, tag_field="type", tag="none"):
    """The model must not call a tool."""


class NamedChoice(Closed, kw_only=True, tag_field="type", tag="tool"):
    """The model must call this tool."""

    name: Text
    disable_parallel_tool_use: bool | None = None


MessagesChoice: TypeAlias = AutoChoice | AnyChoice | NoChoice | NamedChoice
Display: TypeAlias = Literal["summarized", "omitted", "updates"]


class EnabledThinking(Closed, kw_only=True, tag_field="type", tag="enabled"):
    """Reasoning within a budget."""

    budget_tokens: Annotated[int, Meta(ge=1024)]
    display: Display | None = None
    block_binding: Any = None


class AdaptiveThinking(Closed, kw_only=True, tag_field="type", tag="adaptive"):
    """The model decides how much it reasons."""

    display: Display | None = None
    block_binding: Any = None


class ThinkingBetweenTools(Closed, kw_only=True, tag_field="type", tag="between_tools"):
    """Reasoning between tool calls."""


class DisabledThinking(Closed, kw_only=True, tag_field="type", tag="disabled"):
    """The setting for no reasoning."""


Thinking: TypeAlias = EnabledThinking | AdaptiveThinking | ThinkingBetweenTools | DisabledThinking


class JsonSchemaFormat(Closed, kw_only=True):
    """A JSON schema for the answer."""

    type: Literal["json_schema"]
    schema: Object


Effort: TypeAlias = Literal["low", "medium", "high", "xhigh", "max"]


class OutputConfig(Closed, kw_only=True):
    """The shape of the answer, and the effort for it."""

    effort: Effort | None = None
    format: JsonSchemaFormat | None = None
    task_budget: Any = None


class MessagesMetadata(Extensible, kw_only=True):
    """Metadata of the request."""

    user_id: str | None = None


if TYPE_CHECKING:
    IgnoredFields = Body
    Temperature: TypeAlias = float | None
    TopP: TypeAlias = float | None
else:
    IgnoredFields = msgspec.defstruct(
        "IgnoredFields", [(name, Any, None) for name in IGNORED], bases=(Body,), kw_only=True
    )
    Temperature = parameter_type(replace(BY_NAME["temperature"], high=1))
    TopP = parameter_type(BY_NAME["top_p"])


class CountedRequest(IgnoredFields, kw_only=True):
    """The body of `/v1/messages/count_tokens`."""

    model: Annotated[str, Meta(min_length=1, max_length=256)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=100_000)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    cache_control: CacheControl | None = None
    metadata: MessagesMetadata | None = None
    output_config: OutputConfig | None = None
    output_format: JsonSchemaFormat | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    stop_sequences: Annotated[list[Text], Meta(max_length=16)] | None = None
    stream: bool | None = None
    system: Annotated[str | list[TextBlock] | None, Meta(extra=expected("a string or an array of text blocks"))] = None
    temperature: Temperature = None
    thinking: Thinking | None = None
    tool_choice: MessagesChoice | None = None
    tools: Annotated[list[MessagesTool], Meta(max_length=1024)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    top_p: TopP = None

    @property
    def shape(self) -> JsonSchemaFormat | None:
        """The format of the answer, by its new or its old name."""
        return (self.output_config.format if self.output_config is not None else None) or self.output_format


class MessagesRequest(CountedRequest, kw_only=True):
    """The body of `/v1/messages`."""

    max_tokens: Annotated[int, Meta(ge=1)]


_HOSTED = (
    "it is a tool of Anthropic's own; only tools with a name and an `input_schema`, which the client runs, reach every "
    "model"
)


def decode_messages(given: Mapping[str, Any], *, counting: bool = False) -> CountedRequest:
    """The request in parsed JSON; raises InvalidBodyError."""
    for name, reason in REFUSED.items():
        if given.get(name):
            refuse(name, f"`{name}` is not accepted: {reason}", Code.UNSUPPORTED_PARAMETER)
    if not REFUSED.keys().isdisjoint(given):
        given = {name: value for name, value in given.items() if name not in REFUSED}
    tools = given.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        if is_hosted(tool) and isinstance(kind := tool["type"], str):
            message = f"`tools[{index}]` of type {kind[:60]} is not accepted: {_HOSTED}"
            refuse(f"tools[{index}].type", message, Code.UNSUPPORTED_PARAMETER)
    body = decode(given, CountedRequest if counting else MessagesRequest, "/v1/messages")
    if body.metadata is not None:
        body.has_extra = keep_extra(body.metadata, given["metadata"])
    for index, one in enumerate(body.tools or ()):
        if one.input_schema.get("type") not in (None, "object"):
            param = f"tools[{index}].input_schema.type"
            refuse(param, f"`{param}` must be 'object'")
    _check_citations(body)
    return body


def _check_citations(body: CountedRequest) -> None:
    for index, message in enumerate(body.messages):
        if not isinstance(message, UserMessage) or isinstance(message.content, str):
            continue
        for place, block in enumerate(message.content):
            path = f"messages[{index}].content[{place}]"
            _check_document(block, path)
            for inner, shown in enumerate(block.blocks if isinstance(block, ToolResultBlock) else ()):
                _check_document(shown, f"{path}.content[{inner}]")


def _check_document(block: AnyBlock, path: str) -> None:
    if isinstance(block, DocumentBlock) and block.citations is not None and block.citations.enabled:
        param = f"{path}.citations.enabled"
        message = f"`{param}` must be false: most models behind the gateway do not cite"
        refuse(param, message, Code.UNSUPPORTED_PARAMETER)
