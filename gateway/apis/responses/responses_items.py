"""Translates Responses input items into chat messages.

Reasoning, message and function calls of one assistant turn are separate items in Responses and one message in a chat.
Reasoning that is encrypted by another service is left out.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway.apis.openai.generation_request import short_name
from gateway.apis.responses_body import (
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    InputFile,
    InputImage,
    InputItem,
    InputText,
    MessageItem,
    OutputText,
    ReasoningItem,
)
from headgate.shared.bodies.body_decoder import as_json, is_set
from headgate.shared.bodies.openai_bodies import (
    AudioPart,
    CalledFunction,
    FilePart,
    ImagePart,
    ImageUrl,
    Message,
    Part,
    RefusalPart,
    TextPart,
    ToolCall,
)

SEALED = "headgate.1."
"""Prefix of the gateway's `encrypted_content`, which contains the reasoning as text for clients that send only this
field back."""


def seal(text: str) -> str:
    """`text` as `encrypted_content`. It is encoded, not encrypted: the client has the text too."""
    return SEALED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(content: str) -> str:
    """The reasoning in an `encrypted_content`; empty if it is from another service."""
    if not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""


def function_name(name: str, namespace: str | None) -> str:
    """The name of a function in the chat, with its namespace as a prefix."""
    if namespace:
        name = f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"
    return short_name(name)


def messages_of(items: Iterable[InputItem]) -> list[Message]:
    """The chat messages of input items without references."""
    turns = _Turns()
    for item in items:
        match item:
            case MessageItem():
                _add_message(turns, item)
            case ReasoningItem():
                _add_reasoning(turns, item)
            case FunctionCallItem():
                _add_call(turns, item)
            case _:
                assert isinstance(item, FunctionOutputItem), "references were replaced"
                _add_output(turns, item)
    turns.close()
    return list(_with_media_in_user_messages(turns.messages))


_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def listed(items: Iterable[InputItem], response: str) -> list[dict[str, Any]]:
    """Input items as the API lists them: with id, type and status, and with the content of messages in parts.

    Items without an id get one that is derived from `response`, the id of the Response without `resp_`.
    """
    return [_listed(item, f"{response}i{index:02d}") for index, item in enumerate(items)]


def _listed(item: InputItem, id: str) -> dict[str, Any]:
    found = as_json(item)
    given = found.get("id")
    found["id"] = given if isinstance(given, str) and given else f"{_ID_PREFIXES[found['type']]}_{id}"
    found["status"] = found.get("status") or "completed"
    if isinstance(item, MessageItem) and isinstance(text := item.content, str):
        is_answer = item.role == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_answer else _input_text(text)
        found["content"] = [part]
    return found


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def page(items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, oldest_first: bool) -> dict[str, Any]:
    """The list object with at most `limit` of `items`, after the item with the id `after` if given.

    Raises KeyError if no item has that id.
    """
    ordered = list(items) if oldest_first else list(reversed(items))
    if after is not None:
        places = {item["id"]: place for place, item in enumerate(ordered)}
        ordered = ordered[places[after] + 1 :]
    data = ordered[:limit]
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": len(ordered) > limit,
    }


def _with_media_in_user_messages(messages: Iterable[Message]) -> Iterator[Message]:
    """Moves images and files of tool outputs into a user message after them; tool messages contain text only."""
    names: dict[str, str] = {}
    shown: list[Part] = []
    for message in messages:
        if message.role == "tool":
            others = [part for part in message.parts if not isinstance(part, TextPart)]
            if others:
                name = names.get(message.tool_call_id or "", "a call")
                shown += [TextPart(text=f"From the result of {name}:"), *others]
                message.content = [part for part in message.parts if isinstance(part, TextPart)] or ""
        elif shown:
            yield Message(role="user", content=shown)
            shown = []
        names |= {call.id: call.function.name for call in message.tool_calls or () if call.function is not None}
        yield message
    if shown:
        yield Message(role="user", content=shown)


def with_instructions(instructions: str | None, messages: Sequence[Message]) -> list[Message]:
    """The instructions and `messages`. Leading system and developer messages become one system message, because many
    chat templates accept only one, at the beginning.
    """
    texts = [instructions] if instructions else []
    lead = 0
    for message in messages:
        text = _all_text(message) if message.role in ("system", "developer") else None
        if text is None:
            break
        texts.append(text)
        lead += 1
    system = [Message(role="system", content="\n\n".join(texts))] if texts else []
    return [*system, *messages[lead:]]


def _all_text(message: Message) -> str | None:
    """The content as one text; None if it has other parts."""
    if isinstance(message.content, str):
        return message.content
    texts = [part.text for part in message.parts if isinstance(part, TextPart)]
    return "\n\n".join(texts) if len(texts) == len(message.parts) else None


class _Turns:
    """The messages so far. `turn` is the open assistant message; `callers` are the messages with calls, by call id."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.callers: dict[str, Message] = {}
        self.turn: Message | None = None

    def close(self) -> None:
        """Ends the assistant's turn; a turn with reasoning only is dropped."""
        turn, self.turn = self.turn, None
        if turn is not None and (is_set(turn.content) or turn.tool_calls):
            if not is_set(turn.content):
                turn.content = None
            self.messages.append(turn)
            self.callers |= {call.id: turn for call in turn.tool_calls or ()}

    def assistant(self, *taken: str) -> Message:
        """The open assistant message, or a new one if the open one already has a value in a field of `taken`."""
        if self.turn is None or any(is_set(getattr(self.turn, name)) for name in taken):
            self.close()
            self.turn = Message(role="assistant")
        return self.turn


def _add_message(turns: _Turns, item: MessageItem) -> None:
    content = _content(item.content)
    if item.role == "assistant":
        turns.assistant("content").content = content
        return
    turns.close()
    turns.messages.append(Message(role=item.role, content=content))


def _add_reasoning(turns: _Turns, item: ReasoningItem) -> None:
    texts = [part.text for part in item.content or ()]
    if not texts:
        texts = [unseal(item.encrypted_content or "")]
    if not any(texts):
        texts = [part.text for part in item.summary or ()]
    if text := "\n\n".join(texts):
        turns.assistant("reasoning_content", "content", "tool_calls").reasoning_content = text


def _add_call(turns: _Turns, item: FunctionCallItem) -> None:
    function = CalledFunction(name=function_name(item.name, item.namespace), arguments=item.arguments)
    turn = turns.assistant()
    turn.tool_calls = [*(turn.tool_calls or ()), ToolCall(id=item.call_id, type="function", function=function)]


def _add_output(turns: _Turns, item: FunctionOutputItem) -> None:
    """Adds an output directly after its call, as a chat requires, also if other messages came in between.

    An output without `call_id` is an event report of Codex and becomes a user message.
    """
    turns.close()
    messages = turns.messages
    if item.call_id is None:
        messages.append(Message(role="user", content=_event_report(item)))
        return
    caller, end = turns.callers.get(item.call_id), len(messages)
    places = range(end, max(0, end - _MAX_MESSAGES_BETWEEN) if caller else end, -1)
    at = next((place for place in places if messages[place - 1] is caller), end)
    while at < end and messages[at].role == "tool":
        at += 1
    messages.insert(at, Message(role="tool", tool_call_id=item.call_id, content=_content(item.output)))


def _event_report(item: FunctionOutputItem) -> str | list[Part]:
    """The content of an output without a call, with the name of its tool."""
    name = function_name(item.name, item.namespace) if item.name else "a tool"
    about, content = f"Output of {name}:", _content(item.output)
    return f"{about}\n\n{content}" if isinstance(content, str) else [TextPart(text=about), *content]


_MAX_MESSAGES_BETWEEN = 64
"""The maximum number of messages between a call and its output; a later output is not moved."""


def _content(content: str | Sequence[ContentPart]) -> str | list[Part]:
    """The content of a chat message: a string, or its parts."""
    if isinstance(content, str):
        return content
    if not content:
        return ""
    if len(content) == 1 and isinstance(content[0], InputText | OutputText):
        return content[0].text
    return [_part(part) for part in content]


def _part(part: ContentPart) -> Part:
    match part:
        case RefusalPart():
            return RefusalPart(refusal=part.refusal)
        case InputImage():
            assert part.image_url is not None, "it was checked"
            detail = part.detail
            return ImagePart(image_url=ImageUrl(url=part.image_url, detail="high" if detail == "original" else detail))
        case InputFile():
            name = {"filename": part.filename} if part.filename else {}
            return FilePart(file={"file_data": part.file_data, **name})
        case AudioPart():
            return AudioPart(input_audio=part.input_audio)
    return TextPart(text=part.text)
