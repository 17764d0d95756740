"""Removes and adds fields of chat messages as each OpenAI-compatible API requires; texts are not changed.

Clients send messages back with fields of other tiers and of their own libraries, such as reasoning. OpenAI and Google
answer 400 to unknown fields.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from typing import TypeVar

import orjson
from msgspec.structs import replace

from gateway.apis.tool_names import arguments
from headgate.shared.bodies.openai_bodies import Message, ToolCall

Messages = Iterable[Message]
Holder = TypeVar("Holder", Message, ToolCall)

UNSIGNED_CALL = "skip_thought_signature_validator"
"""Google's signature for a call that another model made."""

_EXTRA = "extra_content"
"""The field in which Google sends the signature of a thought; clients may send it back. OpenAI rejects it."""
_ANSWERS_ONLY = frozenset(("annotations", "parsed"))
"""Fields of answers that requests do not have."""
_WANTS_SIGNATURES = re.compile(r"(models/)?gemini-([3-9]|\d\d)")
"""Models of Google that reject a history if the first call of a turn has no thought signature."""


def for_others(messages: Messages, model: str) -> Messages:
    """For other providers: only fields of answers are removed."""
    return (_with_extra(message, lambda name: name not in _ANSWERS_ONLY) for message in messages)


def for_openai(messages: Messages, model: str) -> Messages:
    """For OpenAI: unknown fields are removed, and the function's name from results."""
    for message in messages:
        if message.role == "tool":
            yield Message(role="tool", content=message.content, tool_call_id=message.tool_call_id)
            continue
        sent = _known(message, ())
        if any(_EXTRA in (call.extra or ()) for call in sent.tool_calls or ()):
            calls = [_with_extra(call, lambda name: name != _EXTRA) for call in sent.tool_calls or ()]
            sent = replace(sent, tool_calls=calls)
        yield sent


def for_google(messages: Messages, model: str) -> Messages:
    """For Google: results get their function's name, calls get an object as arguments and a signature if required."""
    is_signed = _WANTS_SIGNATURES.match(model) is not None
    names: dict[str, str] = {}
    for message in messages:
        known = _known(message, (_EXTRA,))
        if message.tool_calls:
            calls = [_with_object(call) for call in message.tool_calls]
            names |= {call.id: call.function.name for call in calls if call.function is not None}
            first = calls[0].extra or {}
            if is_signed and not first.get(_EXTRA):
                signature = {"google": {"thought_signature": UNSIGNED_CALL}}
                calls[0] = replace(calls[0], extra={**first, _EXTRA: signature})
            known = replace(known, tool_calls=calls)
        elif message.role == "tool" and not message.name and message.tool_call_id in names:
            known = replace(known, name=names[message.tool_call_id])
        yield known


def _with_object(call: ToolCall) -> ToolCall:
    """The call; arguments that are not a JSON object are wrapped in one."""
    function = call.function
    if function is None or _is_object(function.arguments):
        return call
    text = orjson.dumps(arguments(function.arguments)).decode()
    return replace(call, function=replace(function, arguments=text))


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _known(message: Message, extra: Collection[str]) -> Message:
    """`message` with the fields that requests may have, and these `extra` ones."""
    if message.reasoning_content is not None:
        message = replace(message, reasoning_content=None)
    return _with_extra(message, extra.__contains__)


def _with_extra(holder: Holder, is_kept: Callable[[str], bool]) -> Holder:
    """`holder` with those of its extra fields that are kept; the same object if they all are."""
    extra = holder.extra
    if not extra or all(map(is_kept, extra)):
        return holder
    return replace(holder, extra={name: value for name, value in extra.items() if is_kept(name)} or None)
