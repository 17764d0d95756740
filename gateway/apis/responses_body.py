"""The request body of OpenAI's Responses API.

Unsupported fields that would change the answer are rejected. Fields that only tune another provider's hosting are
accepted without effect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias, get_args

import msgspec
from msgspec import Meta

from headgate.shared.bodies.body_decoder import (
    CHECKED,
    Body,
    Extensible,
    Object,
    Text,
    check_parameters,
    decode,
    expected,
    json_schema,
    keep_extra,
    must,
    prepare,
    refuse,
    refused_types,
    with_parameters,
)
from headgate.shared.bodies.openai_bodies import (
    MAX_TOOLS,
    AudioPart,
    Function,
    ImageUrlText,
    ModelName,
    RefusalPart,
    StopStrings,
)
from headgate.shared.parameters import BY_NAME, PARAMETERS
from inference.protocol import Code

Include: TypeAlias = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]
INCLUDES: tuple[str, ...] = get_args(Include)
INCLUDE_LOGPROBS, INCLUDE_REASONING = INCLUDES[:2]
"""The others have no effect: answers contain no data of tools that run at a provider."""
ReasoningEffort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ServiceTier: TypeAlias = Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"]
Id = Annotated[str, Meta(min_length=1, max_length=256)]
MAX_METADATA = 16


# --- content ----------------------------------------------------------------------------------------------------------
class InputText(Extensible, kw_only=True, tag_field="type", tag="input_text"):
    """A content part with text of the client."""

    text: str


class OutputText(Extensible, kw_only=True, tag_field="type", tag="output_text"):
    """A content part with text of the assistant."""

    text: str


class InputImage(Extensible, kw_only=True, tag_field="type", tag="input_image"):
    """A content part with an image, as a data: URL or an address."""

    image_url: ImageUrlText | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    file_id: Any = None


class InputFile(Extensible, kw_only=True, tag_field="type", tag="input_file"):
    """A content part with a file."""

    file_data: (
        Annotated[
            str,
            Meta(
                pattern="^data:",
                extra=must("must be a data: URL; the gateway does not fetch files, so send the content as base64"),
            ),
        ]
        | None
    ) = None
    filename: str | None = None
    file_id: Any = None
    file_url: Any = None


ContentPart: TypeAlias = InputText | OutputText | RefusalPart | InputImage | InputFile | AudioPart
ItemContent = Annotated[str | list[ContentPart], Meta(extra=expected("a string or an array of parts"))]


# --- items ------------------------------------------------------------------------------------------------------------
class MessageItem(Extensible, kw_only=True, tag_field="type", tag="message"):
    """An input item that is a message."""

    role: Literal["user", "assistant", "system", "developer"]
    content: ItemContent


class FunctionCallItem(Extensible, kw_only=True, tag_field="type", tag="function_call"):
    """An input item that is a function call of the assistant."""

    call_id: Text
    name: Text
    arguments: str
    namespace: Text | None = None


class FunctionOutputItem(Extensible, kw_only=True, tag_field="type", tag="function_call_output"):
    """The output of a function. Codex reports events as outputs without a `call_id`."""

    output: ItemContent
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None


class ReasoningText(Extensible, kw_only=True):
    """A piece of reasoning or of its summary."""

    text: str


class ReasoningItem(Extensible, kw_only=True, tag_field="type", tag="reasoning"):
    """An input item that is reasoning of the assistant."""

    summary: list[ReasoningText] | None = None
    content: list[ReasoningText] | None = None
    encrypted_content: str | None = None


REFERENCE = "item_reference"


class ItemReference(Extensible, kw_only=True, tag_field="type", tag="item_reference"):
    """Stands for an item of a stored conversation."""

    id: Id


InputItem: TypeAlias = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem | ItemReference
_ITEM_TYPES = frozenset({"message", "function_call", "function_call_output", "reasoning", REFERENCE})

_REFUSED_ITEMS: Mapping[str, str] = {
    "compaction": "it was created by another service; send the original items",
    "compaction_trigger": "it requests compaction, which this gateway does not do; leave it out",
    "configuration_update": "the request cannot be changed midway; set the field in the body",
    "additional_tools": "tools cannot be added midway; list them in `tools`",
    **dict.fromkeys(
        ("custom_tool_call", "custom_tool_call_output"), "custom tools are not supported; use a function instead"
    ),
}
_ELSEWHERE = "it belongs to a tool that runs at another provider; leave it out"


def _refused_item(kind: str) -> str | None:
    return None if kind in _ITEM_TYPES else _REFUSED_ITEMS.get(kind, _ELSEWHERE)


def kind_of(item: Mapping[str, Any]) -> Any:
    """The type of an input item in JSON; `type` may be left out of messages and references."""
    return item.get("type") or ("message" if item.get("role") is not None else REFERENCE)


# --- tools ------------------------------------------------------------------------------------------------------------
class FunctionTool(Function, kw_only=True, tag_field="type", tag="function"):
    """A function. Unlike in a chat, its fields are not nested in `function`."""


class NamespaceTool(Extensible, kw_only=True, tag_field="type", tag="namespace"):
    """Functions under a common name."""

    name: Annotated[str, Meta(min_length=1, max_length=256)]
    tools: list[FunctionTool]
    description: str | None = None


_TOOL_TYPES = ("function", "namespace")
_CUSTOM = "it takes free text; declare it as a function whose parameter is that text"
_HOSTED = "it runs at another provider and not here; leave it out (`hosted_tools: leave_out` in gateway.yaml does so)"


def _refused_tool(kind: str) -> str | None:
    return None if kind in _TOOL_TYPES else _CUSTOM if kind == "custom" else _HOSTED


def without_hosted(tools: Any) -> Any:
    """Tools in JSON without those that run at another provider; a value of another shape is returned as it is."""
    if not isinstance(tools, list):
        return tools
    return [tool for tool in tools if not isinstance(tool, dict) or tool.get("type", "function") in _TOOL_TYPES]


class FunctionChoice(Extensible, kw_only=True, tag_field="type", tag="function"):
    """The function that must be called."""

    name: Text
    namespace: Text | None = None


class AllowedTools(Extensible, kw_only=True, tag_field="type", tag="allowed_tools"):
    """The functions that may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[FunctionChoice], Meta(min_length=1)]


# --- options ----------------------------------------------------------------------------------------------------------
class TextFormat(Extensible, kw_only=True, tag_field="type", tag="text"):
    """A format without restrictions."""


class JsonObjectFormat(Extensible, kw_only=True, tag_field="type", tag="json_object"):
    """The format of any JSON object."""


class SchemaFormat(Extensible, kw_only=True, tag_field="type", tag="json_schema"):
    """The format of JSON that satisfies a schema."""

    name: Text
    schema: Object
    strict: bool | None = None
    description: str | None = None


class TextOptions(Extensible, kw_only=True):
    """The shape and the length of the answer."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(Extensible, kw_only=True):
    """How much the model reasons, and what the answer shows of it."""

    effort: ReasoningEffort | None = None
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: Literal["auto", "concise", "detailed"] | None = None
    context: Literal["auto", "all_turns"] | None = None
    mode: Literal["standard"] | None = None


class ResponsesStreamOptions(Extensible, kw_only=True):
    """Options of a streamed response."""

    include_obfuscation: bool | None = None


_NOT_HERE = ("max_tokens", "max_completion_tokens", "n_probs")
"""Generation parameters that have another name in this API."""
_ROWS = tuple(row for row in PARAMETERS if row.name not in _NOT_HERE)

if TYPE_CHECKING:

    class ResponsesParameters(Body, kw_only=True):
        """The generation parameters, for the type checker only those that the code reads."""

        temperature: float | None = None
        top_p: float | None = None

else:
    ResponsesParameters = with_parameters("ResponsesParameters", Body, _ROWS)


class ResponsesBody(ResponsesParameters, kw_only=True):
    """The body of `/v1/responses`."""

    model: ModelName
    input: Annotated[
        str | list[Annotated[InputItem, Meta(extra=refused_types(_refused_item))]] | None,
        Meta(extra=expected("a string or an array of items")),
    ] = None
    instructions: str | None = None
    background: bool | None = None
    client_metadata: Object | None = None
    include: list[Include] | None = None
    max_output_tokens: Annotated[int, Meta(ge=-1)] | None = None
    max_tool_calls: Annotated[int, Meta(ge=1)] | None = None
    metadata: Object | None = None
    parallel_tool_calls: bool | None = None
    previous_response_id: Id | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: Object | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    service_tier: ServiceTier | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | FunctionChoice | AllowedTools | None,
        Meta(extra=expected("none, auto, required or an object")),
    ] = None
    tools: (
        Annotated[
            list[Annotated[FunctionTool | NamespaceTool, Meta(extra=refused_types(_refused_tool))]],
            Meta(max_length=MAX_TOOLS),
        ]
        | None
    ) = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    user: str | None = None
    chat_template_kwargs: Object | None = None
    logit_bias: Object | None = None
    stop: StopStrings | None = None


SAME_IN_CHAT = (
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "user", "chat_template_kwargs",
    "logit_bias", "stop", *(row.name for row in _ROWS),
)  # fmt: skip
"""Fields with the same name and meaning in a chat."""

REFUSED: Mapping[str, str] = {
    "max_tokens": "the Responses API calls it `max_output_tokens`",
    "max_completion_tokens": "the Responses API calls it `max_output_tokens`",
    "n_probs": "the Responses API calls it `top_logprobs`",
    "access_programs": "this gateway has no access programs; leave it out",
    "context_management": "compaction is not supported; leave it out and send only the items for the model",
    "conversation": "conversations are not stored; use `previous_response_id`, or send the items themselves",
    "image": "image editing is not supported; leave it out",
    "moderation": "moderation is not supported; leave it out",
    "prompt": "prompt templates are not stored; send `instructions` and `input`",
}
"""Unsupported fields that would change the answer, with advice for the client."""


_CHECKED_HERE = CHECKED.difference(_NOT_HERE)


def decode_responses(given: Mapping[str, Any]) -> ResponsesBody:
    """The body for parsed JSON from which null fields were removed; raises InvalidBodyError."""
    for name in given:
        if name in REFUSED:
            refuse(name, f"`{name}` is not supported: {REFUSED[name]}", Code.UNSUPPORTED_PARAMETER)
    if isinstance(items := given.get("input"), list):
        given = {**given, "input": [_with_type(item) for item in items]}
    body = decode(given, ResponsesBody, "/v1/responses")
    keep_extra(body, {"input": given.get("input")})
    check_parameters(given, _CHECKED_HERE)
    if body.background:
        message = "`background` must be false: background responses are not supported"
        refuse("background", message, Code.UNSUPPORTED_PARAMETER)
    if body.max_output_tokens is not None and (problem := BY_NAME["max_tokens"].problem(body.max_output_tokens)):
        refuse("max_output_tokens", f"`max_output_tokens` {problem}")
    if body.stream_options is not None and not body.stream:
        refuse("stream_options", "`stream_options` is only allowed when `stream` is true")
    _check_metadata(body.metadata or {})
    for index, item in enumerate(body.input if isinstance(body.input, list) else ()):
        if isinstance(item, MessageItem):
            _check_parts(item.content, f"input[{index}].content")
        elif isinstance(item, FunctionOutputItem):
            _check_parts(item.output, f"input[{index}].output")
    return body


def stored_items(items: Sequence[Mapping[str, Any]]) -> list[InputItem]:
    """Decodes items of a stored conversation, which were valid when the gateway stored them."""
    prepare(list[InputItem])
    found: list[InputItem] = msgspec.convert(items, list[InputItem])
    for item, given in zip(found, items, strict=True):
        keep_extra(item, given)
    return found


def _with_type(item: Any) -> Any:
    return item if not isinstance(item, dict) or item.get("type") is not None else {**item, "type": kind_of(item)}


def _check_metadata(metadata: Mapping[str, Any]) -> None:
    if len(metadata) > MAX_METADATA:
        refuse("metadata", f"`metadata` must have at most {MAX_METADATA} pairs; it has {len(metadata)}")
    for name, value in metadata.items():
        if not 0 < len(name) <= 64:
            refuse("metadata", "the keys of `metadata` must have 1 to 64 characters")
        if not isinstance(value, str) or len(value) > 512:
            refuse(f"metadata.{name}", f"`metadata.{name}` must be a string of at most 512 characters")


def _check_parts(content: str | list[ContentPart], path: str) -> None:
    if isinstance(content, str):
        return
    for index, part in enumerate(content):
        at = f"{path}[{index}]"
        if isinstance(part, InputImage):
            if part.file_id is not None:
                refuse(
                    f"{at}.file_id", f"`{at}.file_id` names a file that this gateway does not store; send a data: URL"
                )
            if part.image_url is None:
                refuse(f"{at}.image_url", f"`{at}` needs `image_url`")
        elif isinstance(part, InputFile):
            for name in ("file_id", "file_url"):
                if getattr(part, name) is not None:
                    refuse(f"{at}.{name}", f"`{at}.{name}` cannot be fetched; send the file itself as `file_data`")
            if part.file_data is None:
                refuse(f"{at}.file_data", f"`{at}` needs `file_data`")


def responses_schema() -> tuple[dict[str, Any], dict[str, Any]]:
    """The JSON schema of the body and its definitions. It has one of the rules between fields: an `input`,
    `instructions` or `previous_response_id` is required.
    """
    root, parts = json_schema(ResponsesBody)
    needed = [{"required": [name]} for name in ("input", "instructions", "previous_response_id")]
    return {**root, "anyOf": needed}, parts
