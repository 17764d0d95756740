"""Adapts a Messages API request to one Anthropic model without translating it to OpenAI's format and back.

Cache marks, signatures and images in tool results are kept. Only what the model or the API without beta features
rejects is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from msgspec.structs import replace

from gateway.apis.messages.messages_answer import UNSIGNED
from gateway.apis.messages_body import (
    AdaptiveThinking,
    AnyBlock,
    AssistantMessage,
    CountedRequest,
    EnabledThinking,
    MessagesTool,
    OutputConfig,
    RedactedThinkingBlock,
    SystemMessage,
    TextBlock,
    Thinking,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    Turn,
    UserMessage,
)
from gateway.providers.anthropic.anthropic_models import effort_for, takes_later_system, thinking_for
from gateway.providers.anthropic.anthropic_request import ToolIds, sampling

Block = TypeVar("Block", bound=AnyBlock)


def to_native(request: CountedRequest, model: str) -> CountedRequest:
    """The streaming request to Anthropic for `model`."""
    messages = _messages(request.messages)
    if not takes_later_system(model):
        messages = _without_system(messages)
    system = request.system
    if isinstance(system, list):
        system = [block for block in system if block.text.strip()]
    return CountedRequest(
        model=model,
        messages=messages,
        stream=True,
        max_tokens=request.max_tokens,
        system=system or None,
        tools=[_tool(tool) for tool in request.tools or ()] or None,
        tool_choice=request.tool_choice if request.tools else None,
        metadata=request.metadata,
        service_tier=request.service_tier,
        cache_control=request.cache_control,
        output_config=_config(request, model),
        thinking=_thinking(request.thinking, model, messages),
        has_extra=request.has_extra,
        **sampling(model, request.stop_sequences or (), request.temperature, request.top_p, request.top_k),
    )


def _config(request: CountedRequest, model: str) -> OutputConfig | None:
    effort = request.output_config.effort if request.output_config is not None else None
    effort = effort_for(effort, model) if effort is not None else None
    return OutputConfig(effort=effort, format=request.shape) if effort or request.shape else None


def _thinking(thinking: Thinking | None, model: str, messages: Sequence[Turn]) -> Thinking | None:
    """The thinking for `model`, without the parts that need a beta feature; `updates` becomes `summarized`."""
    found = thinking_for(thinking, model) if thinking is not None else None
    if isinstance(found, EnabledThinking) and _resumes_without_thinking(messages):
        return None
    if isinstance(found, EnabledThinking | AdaptiveThinking):
        display = "summarized" if found.display == "updates" else found.display
        return replace(found, display=display, block_binding=None)
    return found


def _resumes_without_thinking(messages: Sequence[Turn]) -> bool:
    """Whether the last assistant turn has tool calls but no thinking, because another provider generated it.

    Anthropic rejects thinking with a budget after such a turn.
    """
    turns = [message.content for message in messages if isinstance(message, AssistantMessage)]
    if not turns or isinstance(messages[-1], AssistantMessage) or isinstance(turns[-1], str):
        return False
    has_calls = any(isinstance(block, ToolUseBlock) for block in turns[-1])
    return has_calls and not isinstance(turns[-1][0], ThinkingBlock | RedactedThinkingBlock)


# --- messages ---------------------------------------------------------------------------------------------------------
def _messages(messages: Sequence[Turn]) -> list[Turn]:
    """The messages without what the API rejects: empty texts, thinking without Anthropic's signature, empty turns.

    Characters that Anthropic rejects in tool call ids are replaced; white space at the end of a prefill is removed.
    """
    ids = ToolIds()
    turns: list[Turn] = []
    for message in messages:
        content: Any = message.content
        if not isinstance(content, str):
            content = _blocks(content, ids, from_user=isinstance(message, UserMessage))
        if content and (not isinstance(content, str) or content.strip()):
            turns.append(replace(message, content=content))
    if turns and isinstance(last := turns[-1], AssistantMessage):
        if isinstance(last.content, str):
            last.content = last.content.rstrip()
        elif isinstance(text := last.content[-1], TextBlock):
            last.content = [*last.content[:-1], replace(text, text=text.text.rstrip())]
    return turns


def _without_system(turns: Sequence[Turn]) -> list[Turn]:
    """The turns, with each system message as a part of a user turn at the same place.

    In the system prompt it would change the beginning of the prompt, which loses Anthropic's prompt cache.
    """
    found: list[Turn] = []
    is_moved = False  # whether the last turn contains the text of a system message
    for turn in turns:
        is_system = isinstance(turn, SystemMessage)
        last = found[-1] if found else None
        if isinstance(last, UserMessage) and (is_system or (is_moved and isinstance(turn, UserMessage))):
            last.content = [*_as_blocks(last), *_as_blocks(turn)]
        else:
            content: Any = turn.content
            found.append(UserMessage(content=content) if isinstance(turn, SystemMessage) else turn)
            is_moved = False
        is_moved = is_moved or is_system
    return found


def _as_blocks(turn: Turn) -> list[Any]:
    return [TextBlock(text=turn.content)] if isinstance(turn.content, str) else [*turn.content]


def _blocks(blocks: Sequence[Block], ids: ToolIds, *, from_user: bool) -> list[Block]:
    return [_block(block, ids, from_user=from_user) for block in blocks if _is_accepted(block)]


def _is_accepted(block: AnyBlock) -> bool:
    if isinstance(block, TextBlock):
        return bool(block.text.strip())
    return not isinstance(block, ThinkingBlock) or block.signature not in (None, "", UNSIGNED)


def _block(block: Block, ids: ToolIds, *, from_user: bool) -> Block:
    if isinstance(block, ToolUseBlock):
        return replace(block, id=ids(block.id))
    if isinstance(block, ToolResultBlock):
        content = block.content
        if isinstance(content, list):
            content = _blocks(content, ids, from_user=from_user)
        return replace(block, tool_use_id=ids(block.tool_use_id), content=content)
    if isinstance(block, TextBlock) and from_user:
        return replace(block, citations=None)  # the newer API version rejects them in user messages
    return block


def _tool(tool: MessagesTool) -> MessagesTool:
    """`tool` with an object schema, and without `defer_loading`, which needs a tool that the gateway rejects."""
    return replace(tool, defer_loading=None, input_schema={"type": "object", **tool.input_schema})
