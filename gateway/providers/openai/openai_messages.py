"""Writes a chat history as each address of OpenAI's dialect takes it; changes no word of it and sends nothing.

Clients send whole messages back, with what other tiers and their own helpers wrote into them, such as reasoning.
OpenAI and Google answer 400 to a field that they do not know.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import orjson

from gateway.apis.tool_names import arguments

Message = Mapping[str, Any]
Messages = Iterable[Message]

UNSIGNED_CALL = "skip_thought_signature_validator"
"""Google's word for a call that another model made."""

_EXTRA = "extra_content"
"""Where Google's address puts the signature of a thought; clients may send it back. OpenAI does not know it."""
_ANSWERS_ONLY = frozenset(("annotations", "parsed"))
"""Fields of answers that no request has."""
_KNOWN = frozenset(("role", "content", "name", "refusal", "audio", "function_call", "tool_calls", "tool_call_id"))
"""What a message of a request may have."""
_KNOWN_AT_GOOGLE = _KNOWN | {_EXTRA}
_KNOWN_OF_RESULTS = frozenset(("role", "content", "tool_call_id"))
"""What one of the role `tool` may have at OpenAI. Google wants the function's name in it."""
_WANTS_SIGNATURES = re.compile(r"(models/)?gemini-([3-9]|\d\d)")
"""Models of Google's that refuse a history whose first call of a turn lacks the signature of the thought behind it."""


def for_others(messages: Messages, model: str) -> Messages:
    """For addresses of which nobody knows here what they take."""
    return (_without(_ANSWERS_ONLY, message) for message in messages)


def for_openai(messages: Messages, model: str) -> Messages:
    """For OpenAI."""
    for message in messages:
        known = _only(_KNOWN_OF_RESULTS if message["role"] == "tool" else _KNOWN, message)
        calls = message.get("tool_calls")
        if calls and any(_EXTRA in call for call in calls):
            known = {**known, "tool_calls": [_without(frozenset((_EXTRA,)), call) for call in calls]}
        yield known


def for_google(messages: Messages, model: str) -> Messages:
    """For Google: results have their function's name, calls an object as arguments, and a signature if `model` wants
    one.
    """
    is_signed = _WANTS_SIGNATURES.match(model) is not None
    names: dict[str, str] = {}
    for message in messages:
        known = _only(_KNOWN_AT_GOOGLE, message)
        if message.get("tool_calls"):
            calls = [*_with_objects(message["tool_calls"])]
            names |= {call["id"]: call["function"]["name"] for call in calls if call.get("function") is not None}
            if is_signed and not calls[0].get(_EXTRA):
                calls[0] = {**calls[0], _EXTRA: {"google": {"thought_signature": UNSIGNED_CALL}}}
            known = {**known, "tool_calls": calls}
        elif message["role"] == "tool" and not message.get("name") and message["tool_call_id"] in names:
            known = {**known, "name": names[message["tool_call_id"]]}
        yield known


def _with_objects(calls: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """The calls; what a model once wrote that is no object goes along under a key."""
    for call in calls:
        function = call.get("function")
        if function is None or _is_object(function["arguments"]):
            yield call
        else:
            said = orjson.dumps(arguments(function["arguments"])).decode()
            yield {**call, "function": {**function, "arguments": said}}


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _without(names: frozenset[str], holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """`holder` without these fields; itself where it has none of them."""
    if names.isdisjoint(holder):
        return holder
    return {name: value for name, value in holder.items() if name not in names}


def _only(names: frozenset[str], holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """`holder` with these fields alone; itself where it has no others, as most messages of a long history."""
    if names.issuperset(holder):
        return holder
    return {name: value for name, value in holder.items() if name in names}
