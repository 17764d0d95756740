"""Puts messages and tools into the shapes that templates want; decides no family's wording and renders nothing."""

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
    """Tools in OpenAI's shape; templates read every field, so none is left out."""
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
    """A call's arguments as JSON text; what a model once wrote that holds no object stays as it was written."""
    said = _bare(arguments)
    return said if isinstance(said, str) else json.dumps(said, ensure_ascii=False)


def as_object(arguments: Any) -> dict[str, Any]:
    """A call's arguments as an object; what a model once wrote that is none travels whole under the key `arguments`."""
    said = _bare(arguments)
    value = _parsed(said) if isinstance(said, str) else said
    return value if isinstance(value, dict) else {"arguments": arguments}


def _bare(arguments: Any) -> Any:
    """Arguments without what models write around or instead of them, as it is understood in answers: an object's text
    in quotes is that text; null, an empty text and an empty list are an empty object. All others stay as they are.
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

    A result without an id answers the earliest call that has no result yet. Empty lists of calls are left out, because
    some templates only ask whether there is one.
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

    For templates that write one call per turn. Results that answer none of the calls stay behind the last.
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
            said = message if index == 0 else {"role": "assistant", "content": ""}
            found.append({**said, "tool_calls": [call]})
            found += [result for result in results if result["tool_call_id"] == call["id"]]
        ids = {call["id"] for call in calls}
        found += [result for result in results if result["tool_call_id"] not in ids]
    return found


def joined(content: Any, more: Any) -> Any:
    """Two contents as two paragraphs; where one is in parts, both are."""
    if isinstance(content, list) or isinstance(more, list):
        return [*_parts(content), *_parts(more)]
    return "\n\n".join(text for text in (content, more) if text)


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def goes_on_behind_results(messages: Sequence[Message]) -> bool:
    """Whether a user says something right behind a result."""
    return any(first["role"] == "tool" and then["role"] == "user" for first, then in itertools.pairwise(messages))


def said_in_results(messages: Sequence[Message]) -> list[Message]:
    """The messages with what a user says right behind results in the last of these, as a paragraph of its own."""
    found: list[Message] = []
    for message in messages:
        if found and found[-1]["role"] == "tool" and message["role"] == "user":
            found[-1] = {**found[-1], "content": joined(found[-1]["content"], message["content"])}
        else:
            found.append(message)
    return found


@dataclass(frozen=True, slots=True)
class Roles:
    """Which orders of roles a template shows in full. Turns that alternate between user and assistant always work."""

    first_system: bool = True
    """A system message at the beginning."""
    later_system: bool = True
    """Further system messages, anywhere."""
    neighbors: bool = True
    """Two messages of the user, or of the assistant, in a row."""


def needs_arranging(messages: Sequence[Message]) -> bool:
    """Whether the messages are more than turns that alternate, so that some templates would refuse or drop one."""
    return any(message["role"] == "system" for message in messages) or any(
        first["role"] == then["role"] != "tool" for first, then in itertools.pairwise(messages)
    )


def arranged(messages: Sequence[Message], roles: Roles) -> list[Message]:
    """The messages in an order that the template shows, without losing a text.

    System messages that it does not take at the beginning are joined to the first one. One that it does not take in
    its place becomes a part of the user's turn there, which leaves the prompt before it unchanged.
    """
    found: list[Message] = []
    is_moved = False  # whether the last message holds what a system message said
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
    """Whether two neighbors may be one turn: both of the user, or of the assistant without calls in the first."""
    return first["role"] == then["role"] in ("user", "assistant") and not first.get("tool_calls")


def runs(messages: Sequence[dict[str, Any]], role: str) -> Iterator[list[dict[str, Any]]]:
    """The messages in order: those of `role` that stand together as one list, every other alone."""
    run: list[dict[str, Any]] = []
    for message in messages:
        if run and not (message["role"] == role == run[0]["role"]):
            yield run
            run = []
        run.append(message)
    if run:
        yield run


def explained(messages: Sequence[dict[str, Any]], about: str, *, system: bool = True) -> list[dict[str, Any]]:
    """The messages with an explanation behind the system message's text, or before what the user says first."""
    found = list(messages)
    role = "system" if system else "user"
    for index, message in enumerate(found):
        if message["role"] == role:
            content = message["content"]
            found[index] = {**message, "content": joined(content, about) if system else joined(about, content)}
            return found
    return [{"role": role, "content": about}, *found]
