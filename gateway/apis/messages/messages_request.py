"""Translates an Anthropic Messages request into the chat request of the gateway.

Fields that only an Anthropic tier can use (cache marks, signatures of thinking) stay in `ChatRequest.origin`;
`gateway.providers.anthropic.anthropic_native` writes the request for such a tier from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import orjson

from gateway.apis.body_parser import parse_json, with_request_errors
from gateway.apis.messages_body import (
    AnyBlock,
    AnyChoice,
    AssistantMessage,
    AutoChoice,
    CountedRequest,
    DisabledThinking,
    DocumentBlock,
    EnabledThinking,
    ImageAddress,
    ImageBlock,
    MessagesTool,
    NamedChoice,
    NoChoice,
    ShownBlock,
    SystemMessage,
    TextBlock,
    TextSource,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserMessage,
    decode_messages,
    is_hosted,
)
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import ChatRequest, InferenceRequest, short_name, typed
from headgate.shared.bodies.body_decoder import refuse
from headgate.shared.bodies.openai_bodies import (
    AnswerSchema,
    CalledFunction,
    ChosenFunction,
    ChosenTool,
    FilePart,
    Function,
    ImagePart,
    ImageUrl,
    Message,
    Part,
    ResponseFormat,
    TextPart,
    Tool,
    ToolCall,
)

ATTRIBUTION = "x-anthropic-billing-header:"
"""The beginning of a system block that coding agents send for Anthropic's accounts. It differs in each request: at the
head of a prompt it would prevent all prefix reuse of local models."""

MAX_USER_CHARS = 64
"""OpenAI's longest `user`; a longer `user_id` is left out of the chat request."""

FAILED = "Error: "
"""Precedes the result of a failed tool call: a chat has no field for failure."""

SCHEMA_NAME = "answer"
"""The name of every schema: a chat needs one, and Anthropic's API has none."""

Block = TypeVar("Block", bound=AnyBlock)


@with_request_errors
def parse(raw: bytes, *, counting: bool = False, omit_hosted_tools: bool = False) -> InferenceRequest:
    """The typed request in `raw`; raises RequestError (400) that names the parameter and what to write instead.

    `counting`: only the tokens are counted, which needs no `max_tokens`. `omit_hosted_tools`: tools that run at
    Anthropic are left out instead of rejected.
    """
    given = parse_json(raw)
    if omit_hosted_tools and isinstance(given.get("tools"), list):
        given["tools"] = [tool for tool in given["tools"] if not is_hosted(tool)]
    origin = decode_messages(given, counting=counting)
    _check_field_combinations(origin)
    return typed(Endpoint.CHAT, to_chat(origin), len(raw))._replace(clamps_max_tokens=True)


def long_names(body: CountedRequest) -> dict[str, str]:
    """The original names of tools, by the shorter names that they have in the chat request."""
    return {short: tool.name for tool in body.tools or () if (short := short_name(tool.name)) != tool.name}


def to_chat(body: CountedRequest) -> ChatRequest:
    """The chat request of a decoded body; raises InvalidBodyError if tool calls and results do not match."""
    turns = _turns(body.messages)
    chat = ChatRequest(
        model=body.model,
        messages=[*_system(body.system), *_messages(turns)],
        max_tokens=body.max_tokens,
        stop=body.stop_sequences or None,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        continue_final_message=True if turns[-1].role == "assistant" else None,
        origin=body,
        from_messages=True,
    )
    _set_tools(chat, body)
    _set_output(chat, body)
    user = body.metadata.user_id if body.metadata is not None else None
    if user and len(user) <= MAX_USER_CHARS:
        chat.user = user
    if body.service_tier is not None:
        chat.service_tier = "auto" if body.service_tier == "auto" else "default"
    return chat


def _check_field_combinations(body: CountedRequest) -> None:
    """Validates rules between fields."""
    names: set[str] = set()
    for index, tool in enumerate(body.tools or ()):
        if tool.name in names:
            refuse(f"tools[{index}].name", f"two tools are named {tool.name!r}")
        names.add(tool.name)
        if "direct" not in (tool.allowed_callers or ("direct",)):
            refuse(
                f"tools[{index}].allowed_callers",
                "`allowed_callers` must contain `direct`, because only the model calls tools",
            )
    choice = body.tool_choice
    if isinstance(choice, AnyChoice | NamedChoice) and not names:
        refuse("tool_choice", "`tool_choice` needs `tools`")
    if isinstance(choice, NamedChoice) and choice.name not in names:
        refuse("tool_choice.name", f"there is no tool {choice.name[:64]!r} in `tools`")
    thinking, limit = body.thinking, body.max_tokens
    if isinstance(thinking, EnabledThinking) and limit is not None and thinking.budget_tokens >= limit:
        refuse("thinking.budget_tokens", "`thinking.budget_tokens` must be less than `max_tokens`")
    if body.output_config is not None and body.output_config.format is not None and body.output_format is not None:
        refuse("output_format", "`output_format` is the old name of `output_config.format`; send one of them")


# --- the conversation -------------------------------------------------------------------------------------------------
@dataclass(slots=True)
class _Turn:
    """Adjacent messages of one role, which form one turn."""

    role: str
    blocks: list[tuple[str, AnyBlock]] = field(default_factory=list)
    """The blocks with their paths in the body."""

    def of(self, kind: type[Block]) -> list[tuple[str, Block]]:
        """The blocks of this type."""
        return [(path, block) for path, block in self.blocks if isinstance(block, kind)]


_ROLES = {UserMessage: "user", AssistantMessage: "assistant", SystemMessage: "system"}


def _turns(messages: Sequence[UserMessage | AssistantMessage | SystemMessage]) -> list[_Turn]:
    turns: list[_Turn] = []
    for index, message in enumerate(messages):
        role, content = _ROLES[type(message)], message.content
        if not turns or turns[-1].role != role:
            turns.append(_Turn(role))
        at = f"messages[{index}].content"
        if isinstance(content, str):
            turns[-1].blocks.append((at, TextBlock(text=content)))
        else:
            turns[-1].blocks += [(f"{at}[{place}]", block) for place, block in enumerate(content)]
    return turns


def _messages(turns: Sequence[_Turn]) -> Iterator[Message]:
    """The turns as chat messages. `calls` are those that the next turn must answer: id to name."""
    calls: dict[str, str] = {}
    for turn in turns:
        if turn.role == "user":
            yield from _user(turn, calls)
            calls = {}
            continue
        _check_all_answered(calls)
        if turn.role == "assistant":
            calls = _calls(turn)
            yield _assistant(turn)
        else:
            yield Message(role="system", content=_joined(turn))
    _check_all_answered(calls)


def _check_all_answered(calls: Iterable[str]) -> None:
    if missing := ", ".join(list(calls)[:5]):
        refuse("messages", f"every `tool_use` needs its `tool_result` in the next user message; without one: {missing}")


def _calls(turn: _Turn) -> dict[str, str]:
    calls: dict[str, str] = {}
    for path, block in turn.of(ToolUseBlock):
        if block.id in calls:
            refuse(f"{path}.id", f"two calls of one turn have the id {block.id[:64]!r}")
        calls[block.id] = short_name(block.name)
    return calls


def _assistant(turn: _Turn) -> Message:
    calls = [_call(block) for _, block in turn.of(ToolUseBlock)]
    text = _joined(turn)
    thoughts = "\n".join(block.thinking for _, block in turn.of(ThinkingBlock) if block.thinking)
    return Message(
        role="assistant",
        content=None if calls and not text else text,
        reasoning_content=thoughts or None,
        tool_calls=calls or None,
    )


def _call(block: ToolUseBlock) -> ToolCall:
    function = CalledFunction(name=short_name(block.name), arguments=orjson.dumps(block.input).decode())
    return ToolCall(id=block.id, type="function", function=function)


def _user(turn: _Turn, calls: dict[str, str]) -> Iterator[Message]:
    """The results in the order of their calls, then the other content.

    Images and documents in results become parts of the user message: tool messages hold text only. Raises
    InvalidBodyError for a result without a call, a second result of a call, and a call without a result.
    """
    results: dict[str, ToolResultBlock] = {}
    for path, block in turn.of(ToolResultBlock):
        id = block.tool_use_id
        if id not in calls or id in results:
            problem = "already has a result" if id in results else "is not a `tool_use` of the previous assistant turn"
            refuse(f"{path}.tool_use_id", f"`{path}.tool_use_id` {id[:64]!r} {problem}")
        results[id] = block
    _check_all_answered(id for id in calls if id not in results)
    parts: list[Part] = []
    for id, name in calls.items():
        result = results[id]
        text = "\n".join(block.text for block in result.blocks if isinstance(block, TextBlock))
        yield Message(role="tool", tool_call_id=id, content=(FAILED if result.is_error else "") + text)
        if others := [_part(block) for block in result.blocks if not isinstance(block, TextBlock)]:
            parts += [TextPart(text=f"From the result of {name}:"), *others]
    parts += [_part(block) for _, block in turn.blocks if isinstance(block, TextBlock | ImageBlock | DocumentBlock)]
    if len(parts) == 1 and isinstance(parts[0], TextPart):
        yield Message(role="user", content=parts[0].text)
    elif parts:
        yield Message(role="user", content=parts)


def _part(block: ShownBlock) -> Part:
    if isinstance(block, TextBlock):
        return TextPart(text=block.text)
    if isinstance(block, ImageBlock):
        image = block.source
        url = image.url if isinstance(image, ImageAddress) else f"data:{image.media_type};base64,{image.data}"
        return ImagePart(image_url=ImageUrl(url=url))
    source = block.source
    if isinstance(source, TextSource):
        heads = [text for text in (block.title, block.context) if text]
        return TextPart(text="\n".join([*heads, source.data]))
    data = f"data:{source.media_type};base64,{source.data}"
    return FilePart(file={"filename": block.title or "document.pdf", "file_data": data})


def _joined(turn: _Turn) -> str:
    """The texts of a turn, joined by line breaks."""
    return "\n".join(block.text for _, block in turn.of(TextBlock))


def _system(system: str | list[TextBlock] | None) -> list[Message]:
    texts = [system] if isinstance(system, str) else [block.text for block in system or ()]
    kept = [text for text in texts if text and not text.startswith(ATTRIBUTION)]
    return [Message(role="system", content="\n\n".join(kept))] if kept else []


# --- tools and output -------------------------------------------------------------------------------------------------
def _set_tools(chat: ChatRequest, body: CountedRequest) -> None:
    if not body.tools:
        return
    chat.tools = [Tool(type="function", function=_function(tool)) for tool in body.tools]
    choice = body.tool_choice
    match choice:
        case AutoChoice():
            chat.tool_choice = "auto"
        case AnyChoice():
            chat.tool_choice = "required"
        case NoChoice():
            chat.tool_choice = "none"
        case NamedChoice():
            chat.tool_choice = ChosenTool(type="function", function=ChosenFunction(name=short_name(choice.name)))
    if isinstance(choice, AutoChoice | AnyChoice | NamedChoice) and choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False


def _function(tool: MessagesTool) -> Function:
    return Function(
        name=short_name(tool.name),
        description=tool.description or None,
        parameters={"type": "object", **tool.input_schema},
        strict=tool.strict or None,
    )


def _set_output(chat: ChatRequest, body: CountedRequest) -> None:
    """Sets the shape of the answer and the reasoning effort.

    Only templates of local models have a switch for reasoning; clouds reason by default.
    """
    if (shape := body.shape) is not None:
        schema = AnswerSchema(name=SCHEMA_NAME, schema=shape.schema, strict=True)
        chat.response_format = ResponseFormat(type="json_schema", json_schema=schema)
    effort = body.output_config.effort if body.output_config is not None else None
    reasons = not isinstance(body.thinking, DisabledThinking)
    if effort is not None and reasons:
        chat.reasoning_effort = effort
    elif body.thinking is not None:
        chat.chat_template_kwargs = {"enable_thinking": reasons, "thinking": reasons}
