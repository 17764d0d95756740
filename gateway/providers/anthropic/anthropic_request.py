"""Translates an OpenAI chat request into an Anthropic messages request.

A request that Anthropic cannot serve raises UpstreamError with code `unsupported_parameter`, so that the chain tries
another tier; `unsupported_params` gives the same reasons before an attempt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from gateway.apis.lenient_json import arguments
from gateway.apis.messages_body import (
    IMAGE_TYPES,
    AnyChoice,
    AssistantMessage,
    AutoChoice,
    Base64Image,
    Base64Pdf,
    CountedRequest,
    DisabledThinking,
    DocumentBlock,
    Effort,
    ImageAddress,
    ImageBlock,
    JsonSchemaFormat,
    MessagesChoice,
    MessagesMetadata,
    MessagesTool,
    NamedChoice,
    NoChoice,
    OutputConfig,
    ShownBlock,
    TextBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserMessage,
)
from gateway.apis.openai.generation_request import ChatRequest
from gateway.errors import UpstreamError
from gateway.providers.anthropic.anthropic_models import (
    effort_for,
    takes_format,
    takes_prefill,
    takes_sampling,
    thinking_by_effort,
    thinking_for,
)
from gateway.providers.anthropic.anthropic_schema import to_anthropic_schema
from gateway.providers.provider_fields import ANTHROPIC_CHAT, unsupported
from headgate.shared.bodies.openai_bodies import (
    AudioPart,
    ChosenTool,
    FilePart,
    Function,
    ImagePart,
    Message,
    Part,
    RefusalPart,
    ResponseFormat,
    TextPart,
    ToolCall,
)

DEFAULT_MAX_TOKENS = 32_000
"""`max_tokens` when the request has none. Anthropic requires it; OpenAI's default is the model's limit. This is the
largest number that every model since Claude 4 accepts."""

OPENING = "(The conversation begins with the assistant's turn.)"
"""The user turn that is added where a conversation begins with the assistant, which Anthropic rejects."""

SAMPLING_VERSION = "2023-06-01"
"""The API version for a request with `temperature`, `top_p` or `top_k`; later versions reject all three."""
_DATA_URL = re.compile(r"data:([\w.+-]+/[\w.+-]+)(?:;[^,;]+)*;base64,", re.IGNORECASE)
_BAD_ID = re.compile(r"[^a-zA-Z0-9_-]")

# OpenAI's efforts beside Anthropic's `output_config.effort`; `none` turns thinking off instead.
_EFFORTS: Mapping[str, Effort] = {
    "minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "xhigh", "max": "max",
}  # fmt: skip

_THINKING_EFFORTS = frozenset(_EFFORTS) - {"minimal"}
"""Efforts that turn thinking on for models that do not think by default."""

_STOPS = "each stop sequence needs a character that is not white space"
_JSON_OBJECT = "it has no JSON mode without a schema; use json_schema"
_AUDIO = "it does not accept audio"
_FUNCTION_TOOLS = "it accepts only tools of type function"
_OWN_OBJECT = "the schema of a strict tool must be an object, not a union or a reference"

_MAX_STRICT_TOOLS = 20
"""The maximum number of strict tools of a request."""


def unsupported_params(body: ChatRequest, model: str | None = None) -> Mapping[str, str]:
    """Why Anthropic cannot serve a chat request, by parameter; empty if it can.

    Without `model`, limits of single models are left out.
    """
    found = ANTHROPIC_CHAT.shortcomings(body)
    for error in _value_errors(body, model):
        found.setdefault(error.param or "", error.message)
    return found


def check_supported(body: ChatRequest, model: str) -> None:
    """Raises UpstreamError where `to_anthropic` does."""
    for error in _value_errors(body, model):
        raise error
    ANTHROPIC_CHAT.check(body)


def needs_sampling_version(request: CountedRequest) -> bool:
    """Whether a request to Anthropic must be sent with `anthropic-version: SAMPLING_VERSION`."""
    return any(value is not None for value in (request.temperature, request.top_p, request.top_k))


def to_anthropic(body: ChatRequest, model: str) -> CountedRequest:
    """The streaming Messages request for `body`; raises UpstreamError (400, `unsupported_parameter`) naming a param."""
    check_supported(body, model)
    system, messages = _conversation(body.messages)
    tools, tool_choice = _tools(body, messages)
    sampled = sampling(model, body.stops, body.temperature, body.top_p, body.top_k)
    request = CountedRequest(
        model=model,
        max_tokens=body.max_completion_tokens or body.max_tokens or DEFAULT_MAX_TOKENS,
        messages=messages,
        stream=True,
        system=system or None,
        tools=tools,
        tool_choice=tool_choice,
        output_config=_output_config(body, model),
        metadata=MessagesMetadata(user_id=body.user) if body.user else None,
        **sampled,
    )
    effort = body.reasoning_effort
    if effort == "none":
        request.thinking = thinking_for(DisabledThinking(), model)
    elif effort in _THINKING_EFFORTS:
        # A forced tool call and sampling parameters exclude thinking.
        is_forced = body.tool_choice not in (None, "none", "auto")
        if not is_forced and not needs_sampling_version(request):
            request.thinking = thinking_by_effort(model)
    return request


def _value_errors(body: ChatRequest, model: str | None) -> Iterator[UpstreamError]:
    """Parameters whose value is unsupported."""
    if any(not text.strip() for text in body.stops):
        yield unsupported("stop", _STOPS)
    shape = body.response_format
    if shape is not None and shape.type == "json_object":
        yield unsupported("response_format", _JSON_OBJECT)
    if any(tool.type != "function" or tool.function is None for tool in body.tools or ()):
        yield unsupported("tools", _FUNCTION_TOOLS)
    if isinstance(body.tool_choice, ChosenTool) and (
        body.tool_choice.type != "function" or body.tool_choice.function is None
    ):
        yield unsupported("tool_choice", _FUNCTION_TOOLS)
    for index, message in enumerate(body.messages):
        if message.role == "function" or message.function_call:
            yield unsupported("messages", "it has tool calls, not function calls")
        if any(call.type == "custom" for call in message.tool_calls or ()):
            yield unsupported("messages", _FUNCTION_TOOLS)
        for part in message.parts:
            if why := _part_problem(part, message.role):
                yield unsupported(f"messages[{index}].content", why)
    spoken = [message for message in body.messages if not _is_empty(message)]
    if not spoken:
        yield unsupported("messages", "at least one message must not be empty")
    if shape is not None and shape.type == "json_schema" and model is not None and not takes_format(model):
        yield unsupported("response_format", f"{model} does not support JSON schemas")
    yield from _schema_errors(body)
    turns = [message.role for message in spoken if message.role not in ("system", "developer")]
    if turns and turns[-1] == "assistant" and model is not None and not takes_prefill(model):
        yield unsupported("messages", f"the last message for {model} must have the role user or tool")


def _schema_errors(body: ChatRequest) -> Iterator[UpstreamError]:
    """Schemas that cannot be translated. Requests of the Messages API are not translated."""
    if body.origin is not None:
        return
    try:
        if body.response_format is not None and body.response_format.type == "json_schema":
            to_anthropic_schema(_schema_of(body.response_format), "response_format")
        strict = [tool.function for tool in body.tools or () if tool.function is not None and tool.function.strict]
        if len(strict) > _MAX_STRICT_TOOLS:
            raise unsupported("tools", f"it accepts at most {_MAX_STRICT_TOOLS} tools with `strict`, not {len(strict)}")
        for function in strict:
            _strict_input_schema(function)
    except UpstreamError as error:
        yield error


def _schema_of(shape: ResponseFormat) -> dict[str, Any]:
    found = shape.json_schema.schema if shape.json_schema is not None else None
    return found or {"type": "object"}


def _is_empty(message: Message) -> bool:
    """Whether a message has no content to send."""
    if isinstance(message.content, list):
        return not any(_part(part) if isinstance(part, TextPart | RefusalPart) else True for part in message.content)
    is_spoken = _text(message.content) or _text(message.refusal) or message.tool_calls
    return not is_spoken and message.role != "tool"


def _part_problem(part: Part, role: str) -> str | None:
    if isinstance(part, ImagePart | FilePart) and role not in ("user", "tool"):
        return f"images and files may be in user and tool messages, not in {role} messages"
    if isinstance(part, AudioPart):
        return _AUDIO
    if isinstance(part, ImagePart):
        url = part.image_url.url
        match = _DATA_URL.match(url)
        if match is not None and match[1].lower() not in IMAGE_TYPES:
            return f"images must be {', '.join(IMAGE_TYPES)}"
        if match is None and url.startswith("data:"):
            return "an image must be a base64 data: URL or an https URL"
    if isinstance(part, FilePart):
        match = _DATA_URL.match(part.file.get("file_data") or "")
        if match is None or match[1].lower() != "application/pdf":
            return "a file must be a PDF as a base64 data: URL in `file_data`"
    return None


# --- messages --------------------------------------------------------------------------------------------------------
def _conversation(messages: Sequence[Message]) -> tuple[str, list[Turn]]:
    """The system prompt, and the turns: alternating, starting with the user, without empty blocks.

    System messages are joined into one prompt. Adjacent messages of one role become one turn; tool results come first
    in a turn, because the API requires them directly after the calls. A conversation of system messages only is sent as
    a user turn.
    """
    system: list[str] = []
    turns: list[tuple[str, list[Any]]] = []
    ids = ToolIds()
    for message in messages:
        role = message.role
        blocks = _blocks(message)
        if role in ("system", "developer"):
            system += [block.text for block in blocks if isinstance(block, TextBlock)]
            continue
        if role == "assistant":
            blocks += [*_text(message.refusal), *(_tool_use(call, ids) for call in message.tool_calls or ())]
        elif role == "tool":
            assert message.tool_call_id is not None, "results name their call"
            blocks = [ToolResultBlock(tool_use_id=ids(message.tool_call_id), content=blocks or None)]
        speaker = "assistant" if role == "assistant" else "user"
        if not blocks:
            continue
        if turns and turns[-1][0] == speaker:
            turns[-1][1].extend(blocks)
        else:
            turns.append((speaker, blocks))
    if not turns:
        return "", [UserMessage(content=[TextBlock(text="\n\n".join(system))])]
    if turns[0][0] == "assistant":
        turns.insert(0, ("user", [TextBlock(text=OPENING)]))
    if turns[-1][0] == "assistant":
        _trim_prefill(turns[-1][1])
    return "\n\n".join(system), [
        AssistantMessage(content=blocks)
        if speaker == "assistant"
        else UserMessage(content=sorted(blocks, key=lambda block: not isinstance(block, ToolResultBlock)))
        for speaker, blocks in turns
    ]


def _trim_prefill(blocks: list[Any]) -> None:
    """Removes white space at the end of a prefill, which the API rejects."""
    if isinstance(last := blocks[-1], TextBlock):
        blocks[-1] = TextBlock(text=last.text.rstrip())


def _text(text: Any) -> list[TextBlock]:
    """A text block; none for empty text or white space, which the API rejects."""
    return [TextBlock(text=text)] if isinstance(text, str) and text.strip() else []


def _blocks(message: Message) -> list[Any]:
    if not message.parts:
        return [*_text(message.content)]
    return [block for part in message.parts for block in _part(part)]


def _part(part: Part) -> Sequence[ShownBlock]:
    match part:
        case ImagePart():
            url = part.image_url.url
            match = _DATA_URL.match(url)
            if match is None:
                return [ImageBlock(source=ImageAddress(url=url))]
            media_type: Any = match[1].lower()
            return [ImageBlock(source=Base64Image(media_type=media_type, data=url[match.end() :]))]
        case FilePart():
            url = part.file["file_data"]
            data = url[url.index(",") + 1 :]
            source = Base64Pdf(media_type="application/pdf", data=data)
            return [DocumentBlock(source=source, title=part.file.get("filename") or None)]
        case RefusalPart():
            return _text(part.refusal)
    assert isinstance(part, TextPart), "audio was rejected"
    return _text(part.text)


# --- tools -----------------------------------------------------------------------------------------------------------
class ToolIds:
    """Maps tool call ids to the alphabet that Anthropic accepts; different ids stay different."""

    def __init__(self) -> None:
        self._ids: dict[str, str] = {}
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}
        """Uses of each clean id, so that long histories need no linear search."""

    def __call__(self, id: str) -> str:
        """`id`, or its replacement."""
        if id not in self._ids:
            clean = base = _BAD_ID.sub("_", id)
            while clean in self._taken:
                self._counts[base] = self._counts.get(base, 1) + 1
                clean = f"{base}_{self._counts[base]}"
            self._taken.add(clean)
            self._ids[id] = clean
        return self._ids[id]


def _tool_use(call: ToolCall, ids: ToolIds) -> ToolUseBlock:
    name, text = ("", "") if call.function is None else (call.function.name, call.function.arguments)
    return ToolUseBlock(id=ids(call.id), name=name, input=arguments(text))


def _tools(body: ChatRequest, messages: Sequence[Turn]) -> tuple[list[MessagesTool] | None, MessagesChoice | None]:
    """`tools` and `tool_choice`. The API requires definitions of all tools that the history calls."""
    tools = [_tool(tool.function) for tool in body.tools or () if tool.function is not None]
    if not tools:
        blocks = (block for message in messages for block in message.content)
        used = dict.fromkeys(block.name for block in blocks if isinstance(block, ToolUseBlock))
        if not used:
            return None, None
        return [MessagesTool(name=name, input_schema={"type": "object"}) for name in used], NoChoice()
    choice = _tool_choice(body.tool_choice)
    if body.parallel_tool_calls is False and not isinstance(choice, NoChoice):
        choice = replace(choice or AutoChoice(), disable_parallel_tool_use=True)
    return tools, choice


def _tool(function: Function) -> MessagesTool:
    return MessagesTool(
        name=function.name,
        description=function.description or None,
        input_schema=_strict_input_schema(function)
        if function.strict
        else {"type": "object", **(function.parameters or {})},
        strict=function.strict or None,
    )


def _strict_input_schema(function: Function) -> dict[str, Any]:
    """The schema of a strict tool's input; without parameters it has no properties."""
    parameters = function.parameters or {}
    if not parameters.keys().isdisjoint(("$ref", "anyOf", "oneOf", "allOf")):
        raise unsupported("tools", _OWN_OBJECT)
    return {"type": "object", **to_anthropic_schema({"type": "object", "properties": {}, **parameters}, "tools")}


def _tool_choice(choice: str | ChosenTool | None) -> MessagesChoice | None:
    if isinstance(choice, ChosenTool):
        assert choice.function is not None, "other types were rejected"
        return NamedChoice(name=choice.function.name)
    kinds: Mapping[str | None, type[NoChoice | AutoChoice | AnyChoice]] = {
        "none": NoChoice,
        "auto": AutoChoice,
        "required": AnyChoice,
    }
    return kinds[choice]() if choice in kinds else None


# --- the rest --------------------------------------------------------------------------------------------------------
def sampling(
    model: str, stops: Sequence[str], temperature: float | None, top_p: float | None, top_k: int | None
) -> dict[str, Any]:
    """Stop sequences, and sampling for the models that accept it. Temperature is at most 1 (OpenAI: 2).

    The API rejects temperature together with top_p: temperature is sent, unless it is the default.
    """
    found: dict[str, Any] = {"stop_sequences": list(stops)} if stops else {}
    if not takes_sampling(model):
        return found
    if top_p is not None and top_p < 1 and temperature in (None, 1):
        found["top_p"] = top_p
    elif temperature is not None:
        found["temperature"] = min(temperature, 1)
    if top_k is not None and top_k > 0:
        found["top_k"] = top_k
    return found


def _output_config(body: ChatRequest, model: str) -> OutputConfig | None:
    """The schema of response_format, and reasoning_effort."""
    config = OutputConfig()
    if body.response_format is not None and body.response_format.type == "json_schema":
        schema = to_anthropic_schema(_schema_of(body.response_format), "response_format")
        config.format = JsonSchemaFormat(type="json_schema", schema=schema)
    if (effort := _EFFORTS.get(body.reasoning_effort or "")) is not None:
        config.effort = effort_for(effort, model)
    return config if config.format or config.effort else None
