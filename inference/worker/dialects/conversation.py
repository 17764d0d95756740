"""Converts messages and tools into the forms that templates need."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.worker.dialects.answer_parts import Tool

Message = Mapping[str, Any]

_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def described(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, with all fields, because templates read them."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": _NO_PARAMETERS if tool.parameters is None else tool.parameters,
            },
        }
        for tool in tools
    ]


def as_text(arguments: Any) -> str:
    """A call's arguments as JSON text; text is kept, except deviations that `_bare` removes."""
    bare = _bare(arguments)
    return bare if isinstance(bare, str) else json.dumps(bare, ensure_ascii=False)


def as_object(arguments: Any) -> dict[str, Any]:
    """A call's arguments as an object; arguments other than an object get the key `arguments`."""
    bare = _bare(arguments)
    value = _parsed(bare) if isinstance(bare, str) else bare
    return value if isinstance(value, dict) else {"arguments": arguments}


def _bare(arguments: Any) -> Any:
    """Arguments with common deviations removed, as the readers of answers do: the text of an object in quotes becomes
    that text; null, an empty text and an empty list become an empty object. Other arguments are kept.
    """
    if isinstance(arguments, str) and arguments.lstrip().startswith("{"):
        return arguments
    value = _parsed(arguments) if isinstance(arguments, str) else arguments
    inner = value.strip() if isinstance(value, str) else value
    if inner in (None, "", []):
        return {}
    return inner if isinstance(inner, str) and isinstance(_parsed(inner), dict) else arguments


def _parsed(text: str) -> Any:
    """The value of JSON text; any other text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def normal(messages: Sequence[Message], *, text_arguments: bool) -> list[dict[str, Any]]:
    """Copies in which every call has an id, a type and arguments of one kind, and every result names its call.

    A result without an id answers the first unanswered call of the last message with calls. Empty lists of calls are
    left out, because some templates only test whether the key exists.
    """
    convert = as_text if text_arguments else as_object
    found: list[dict[str, Any]] = []
    waiting: list[str] = []
    count = 0
    for message in messages:
        copy = dict(message)
        found.append(copy)
        if message["role"] == "tool":
            id = str(message.get("tool_call_id") or next(iter(waiting), ""))
            copy["tool_call_id"] = id
            waiting = [other for other in waiting if other != id]
        calls = []
        for call in copy.pop("tool_calls", None) or ():
            function = call["function"]
            calls.append(
                {
                    "id": call.get("id") or f"{count:09d}",
                    "type": "function",
                    "function": {"name": function["name"], "arguments": convert(function.get("arguments"))},
                }
            )
            count += 1
        if calls:
            copy["tool_calls"] = calls
            waiting = [str(call["id"]) for call in calls]
    return found


def one_at_a_time(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`normal` messages with at most one call each, every call followed by its own results.

    For templates that write one call per turn. Results with other ids follow the last call.
    """
    found: list[dict[str, Any]] = []
    left = list(messages)
    while left:
        message = left.pop(0)
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while left and left[0]["role"] == "tool":
            results.append(left.pop(0))
        for index, call in enumerate(calls):
            first = message if index == 0 else {"role": "assistant", "content": ""}
            found.append({**first, "tool_calls": [call]})
            found += [result for result in results if result["tool_call_id"] == call["id"]]
        ids = {call["id"] for call in calls}
        found += [result for result in results if result["tool_call_id"] not in ids]
    return found


def joined(content: Any, more: Any) -> Any:
    """Two contents as two paragraphs; if one has parts, the result has parts."""
    if isinstance(content, list) or isinstance(more, list):
        return [*_parts(content), *_parts(more)]
    return "\n\n".join(text for text in (content, more) if text)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def has_user_after_results(messages: Sequence[Message]) -> bool:
    """Whether a message of a user follows a result directly."""
    return any(first["role"] == "tool" and then["role"] == "user" for first, then in itertools.pairwise(messages))


def merge_into_results(messages: Sequence[Message]) -> list[Message]:
    """The messages, with text of users that follows results directly appended to the last result as a paragraph."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == "tool" and message["role"] == "user":
            found[-1] = {**found[-1], "content": joined(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found


@dataclass(frozen=True, slots=True)
class Roles:
    """The orders of roles that a template renders in full. Alternating turns of user and assistant always work."""

    first_system: bool = True
    """A system message at the beginning."""
    later_system: bool = True
    """Further system messages, anywhere."""
    neighbors: bool = True
    """Two messages of the user, or of the assistant, in a row."""


def needs_arranging(messages: Sequence[Message]) -> bool:
    """Whether there are messages besides alternating turns; some templates refuse or drop those."""
    return any(message["role"] == "system" for message in messages) or any(
        first["role"] == then["role"] != "tool" for first, then in itertools.pairwise(messages)
    )


def arranged(messages: Sequence[Message], roles: Roles) -> list[Message]:
    """The messages in an order that the template renders, with all texts.

    System messages that the template does not render are moved: those directly after a system message are joined to it,
    others become part of the user's turn in their place, which leaves the prompt before them unchanged.
    """
    found: list[Message] = []
    is_moved = False  # whether the last message contains a moved system message
    for message in messages:
        last = found[-1] if found else None
        is_system = message["role"] == "system"
        if is_system and not (roles.later_system if found else roles.first_system):
            if last is not None and last["role"] == "system":
                found[-1] = {**last, "content": joined(last["content"], message["content"])}
                continue
            message = {"role": "user", "content": message["content"]}
            if last is not None and last["role"] == "user":
                found[-1] = {**last, "content": joined(last["content"], message["content"])}
            else:
                found.append(message)
            is_moved = True
            continue
        if last is not None and _joins(last, message) and (is_moved or not roles.neighbors):
            content = joined(last.get("content"), message.get("content"))
            found[-1] = {**last, **message, "content": content}
            continue
        found.append(message)
        is_moved = False
    return found


def _joins(first: Message, then: Message) -> bool:
    """Whether two adjacent messages may be one turn: both of the user, or of the assistant without calls in the
    first.
    """
    return first["role"] == then["role"] in ("user", "assistant") and not first.get("tool_calls")


def runs(messages: Sequence[dict[str, Any]], role: str) -> Iterator[list[dict[str, Any]]]:
    """The messages in order: adjacent messages of `role` as one list, each other message as a list of one."""
    run: list[dict[str, Any]] = []
    for message in messages:
        if run and not (message["role"] == role == run[0]["role"]):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def explained(messages: Sequence[Message], about: str, *, system: bool = True) -> list[Message]:
    """The messages, with an explanation after the system message's text or before the first text of the user."""
    found = list(messages)
    role = "system" if system else "user"
    for index, message in enumerate(found):
        if message["role"] == role:
            content = message["content"]
            found[index] = {**message, "content": joined(content, about) if system else joined(about, content)}
            return found
    return [{"role": role, "content": about}, *found]
