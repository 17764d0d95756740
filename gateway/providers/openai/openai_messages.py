"""Removes and adds fields of chat messages as each OpenAI-compatible API requires; texts are not changed.

Clients send messages back with fields of other tiers and of their own libraries, such as reasoning. OpenAI and Google
answer 400 to unknown fields.
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
"""Google's signature for a call that another model made."""

_EXTRA = "extra_content"
"""The field in which Google sends the signature of a thought; clients may send it back. OpenAI rejects it."""
_ANSWERS_ONLY = frozenset(("annotations", "parsed"))
"""Fields of answers that requests do not have."""
_KNOWN = frozenset(("role", "content", "name", "refusal", "audio", "function_call", "tool_calls", "tool_call_id"))
"""The fields that a message of a request may have."""
_KNOWN_AT_GOOGLE = _KNOWN | {_EXTRA}
_KNOWN_OF_RESULTS = frozenset(("role", "content", "tool_call_id"))
"""The fields of a `tool` message at OpenAI. Google requires the function's name as well."""
_WANTS_SIGNATURES = re.compile(r"(models/)?gemini-([3-9]|\d\d)")
"""Models of Google that reject a history if the first call of a turn has no thought signature."""


def for_others(messages: Messages, model: str) -> Messages:
    """For other providers: only fields of answers are removed."""
    return (_without(_ANSWERS_ONLY, message) for message in messages)


def for_openai(messages: Messages, model: str) -> Messages:
    """For OpenAI: unknown fields are removed."""
    for message in messages:
        known = _only(_KNOWN_OF_RESULTS if message["role"] == "tool" else _KNOWN, message)
        calls = message.get("tool_calls")
        if calls and any(_EXTRA in call for call in calls):
            known = {**known, "tool_calls": [_without(frozenset((_EXTRA,)), call) for call in calls]}
        yield known


def for_google(messages: Messages, model: str) -> Messages:
    """For Google: results get their function's name, calls get an object as arguments and a signature if required."""
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
    """The calls; arguments that are not a JSON object are wrapped in one."""
    for call in calls:
        function = call.get("function")
        if function is None or _is_object(function["arguments"]):
            yield call
        else:
            text = orjson.dumps(arguments(function["arguments"])).decode()
            yield {**call, "function": {**function, "arguments": text}}


def _is_object(text: str) -> bool:
    try:
        return isinstance(orjson.loads(text), dict)
    except orjson.JSONDecodeError:
        return False


def _without(names: frozenset[str], holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """`holder` without these fields; the same object if it has none of them."""
    if names.isdisjoint(holder):
        return holder
    return {name: value for name, value in holder.items() if name not in names}


def _only(names: frozenset[str], holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """`holder` with these fields only; the same object if it has no others, like most messages of a history."""
    if names.issuperset(holder):
        return holder
    return {name: value for name, value in holder.items() if name in names}
