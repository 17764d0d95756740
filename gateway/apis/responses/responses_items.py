"""Rewrites checked Responses input items as chat messages, in their order; loses no word a model is to read.

What one turn of the assistant consists of (reasoning, a message, function calls) are items of their own in Responses
and one message in chat. Reasoning that only another service can read stays with that service.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from gateway.apis.responses.responses_fields import kind_of
from gateway.apis.tool_names import short_name

SEALED = "headgate.1."
"""Begins the `encrypted_content` of reasoning that was given here: the text itself, for clients that send nothing else
of it back."""


def seal(text: str) -> str:
    """`text` as `encrypted_content`; for carrying, not for keeping a secret: the caller was given the text too."""
    return SEALED + base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()


def unseal(content: str) -> str:
    """The reasoning in an `encrypted_content`; empty for one of another service."""
    if not content.startswith(SEALED):
        return ""
    try:
        return base64.b64decode(content.removeprefix(SEALED), validate=True).decode("utf-8", "surrogatepass")
    except (binascii.Error, ValueError):
        return ""


def function_name(name: str, namespace: str | None) -> str:
    """The one name of a function, in a namespace or not, as chat knows it."""
    if namespace:
        name = f"{namespace}{name}" if namespace.endswith("_") else f"{namespace}__{name}"
    return short_name(name)


def messages_of(items: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The chat messages of checked input items."""
    turns = _Turns()
    for item in items:
        _ADDS[kind_of(item)](turns, item)
    turns.close()
    return list(_with_outputs_shown(turns.messages))


_ID_PREFIXES: Mapping[str, str] = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
}


def listed(items: Iterable[Mapping[str, Any]], response: str) -> list[dict[str, Any]]:
    """Input items as the API lists them: with an id, a type and a status, and with the content of messages in parts.

    An item that has an id keeps it. Others get one that is made of `response`, the id of the Response without `resp_`.
    """
    return [_listed(item, f"{response}i{index:02d}") for index, item in enumerate(items)]


def _listed(item: Mapping[str, Any], id: str) -> dict[str, Any]:
    kind, given = kind_of(item), item.get("id")
    found = {
        **item,
        "id": given if isinstance(given, str) and given else f"{_ID_PREFIXES[kind]}_{id}",
        "type": kind,
        "status": item.get("status") or "completed",
    }
    if kind == "message" and isinstance(text := item["content"], str):
        is_answer = item["role"] == "assistant"
        part = {"type": "output_text", "text": text, "annotations": []} if is_answer else _input_text(text)
        found["content"] = [part]
    return found


def _input_text(text: str) -> dict[str, Any]:
    return {"type": "input_text", "text": text}


def page(items: Sequence[Mapping[str, Any]], *, limit: int, after: str | None, oldest_first: bool) -> dict[str, Any]:
    """The list object with at most `limit` of the listed `items`, those behind the id `after` where it is given.

    Raises KeyError when no item has that id.
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


def _with_outputs_shown(messages: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """`messages`, with what outputs hold beside text said by the user behind them: tool messages hold text alone."""
    names: dict[str, str] = {}
    shown: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "tool":
            texts, others = _divided(message["content"])
            if others:
                name = names.get(message["tool_call_id"], "a call")
                shown += [{"type": "text", "text": f"From the result of {name}:"}, *others]
                message["content"] = texts or ""
        elif shown:
            yield {"role": "user", "content": shown}
            shown = []
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls") or ()}
        yield message
    if shown:
        yield {"role": "user", "content": shown}


def _divided(content: str | list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The parts that are text, and the others; none of a content that is text as a whole."""
    parts = content if isinstance(content, list) else []
    return [part for part in parts if part["type"] == "text"], [part for part in parts if part["type"] != "text"]


def with_instructions(instructions: str | None, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """`messages` behind the instructions. System and developer messages that lead become one system message, because
    many models' templates take only one and only at the beginning.
    """
    told = [instructions] if instructions else []
    lead = 0
    for message in messages:
        text = _all_text(message["content"]) if message["role"] in ("system", "developer") else None
        if text is None:
            break
        told.append(text)
        lead += 1
    return [*_system(told), *messages[lead:]]


def _all_text(content: str | Sequence[Mapping[str, Any]]) -> str | None:
    """A content as one text; None where it has parts of another kind."""
    if isinstance(content, str):
        return content
    if any(part["type"] != "text" for part in content):
        return None
    return "\n\n".join(part["text"] for part in content)


def _system(told: Sequence[str]) -> list[Mapping[str, Any]]:
    return [{"role": "system", "content": "\n\n".join(told)}] if told else []


class _Turns:
    """Messages so far; `turn` is the assistant's message that later items may still belong to, `callers` the messages
    with calls, by the calls' ids.
    """

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self.callers: dict[str, dict[str, Any]] = {}
        self.turn: dict[str, Any] | None = None

    def close(self) -> None:
        """Ends the assistant's turn; reasoning that nothing followed belongs to no message."""
        turn, self.turn = self.turn, None
        if turn is not None and len(turn) > (2 if "reasoning_content" in turn else 1):
            message = {"role": "assistant", "content": None, **turn}
            self.messages.append(message)
            self.callers |= {call["id"]: message for call in turn.get("tool_calls") or ()}

    def assistant(self, *taken: str) -> dict[str, Any]:
        """The assistant's turn, a new one where this one has one of the fields `taken` already."""
        if self.turn is None or any(name in self.turn for name in taken):
            self.close()
            self.turn = {"role": "assistant"}
        return self.turn


def _add_message(turns: _Turns, item: Mapping[str, Any]) -> None:
    role, content = item["role"], _content(item["content"])
    if role == "assistant":
        turns.assistant("content")["content"] = content
        return
    turns.close()
    turns.messages.append({"role": role, "content": content})


def _add_reasoning(turns: _Turns, item: Mapping[str, Any]) -> None:
    said = [part["text"] for part in item.get("content") or ()]
    if not said:
        said = [unseal(item.get("encrypted_content") or "")]
    if not any(said):
        said = [part["text"] for part in item.get("summary") or ()]
    if text := "\n\n".join(said):
        turns.assistant("reasoning_content", "content", "tool_calls")["reasoning_content"] = text


def _add_call(turns: _Turns, item: Mapping[str, Any]) -> None:
    function = {"name": function_name(item["name"], item.get("namespace")), "arguments": item["arguments"]}
    call = {"id": item["call_id"], "type": "function", "function": function}
    turns.assistant().setdefault("tool_calls", []).append(call)


def _add_output(turns: _Turns, item: Mapping[str, Any]) -> None:
    """An output stands right behind the calls, as chat wants it, whatever was said in between.

    One without `call_id` answers no call of the model: Codex reports events that way. It becomes a user message.
    """
    turns.close()
    messages, call_id = turns.messages, item.get("call_id")
    if call_id is None:
        messages.append({"role": "user", "content": _reported(item)})
        return
    caller, end = turns.callers.get(call_id), len(messages)
    behind = range(end, max(0, end - _SOON) if caller else end, -1)
    at = next((place for place in behind if messages[place - 1] is caller), end)
    while at < end and messages[at]["role"] == "tool":
        at += 1
    messages.insert(at, {"role": "tool", "tool_call_id": call_id, "content": _content(item["output"])})


def _reported(item: Mapping[str, Any]) -> str | list[dict[str, Any]]:
    """What a tool put out without a call, under the tool's name."""
    name = function_name(item["name"], item.get("namespace")) if item.get("name") else "a tool"
    about, content = f"Output of {name}:", _content(item["output"])
    return f"{about}\n\n{content}" if isinstance(content, str) else [{"type": "text", "text": about}, *content]


_SOON = 64
"""Messages that may stand between a call and its output; behind more it stays where it is."""


_ADDS = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _content(content: str | Sequence[Mapping[str, Any]]) -> str | list[dict[str, Any]]:
    """Chat's content: a text where it is one, else its parts."""
    if isinstance(content, str):
        return content
    if not content:
        return ""
    if len(content) == 1 and content[0]["type"] in ("input_text", "output_text"):
        return str(content[0]["text"])
    return [_part(part) for part in content]


def _part(part: Mapping[str, Any]) -> dict[str, Any]:
    match part["type"]:
        case "refusal":
            return {"type": "refusal", "refusal": part["refusal"]}
        case "input_image":
            image = {"url": part["image_url"]}
            if detail := part.get("detail"):
                image["detail"] = "high" if detail == "original" else detail
            return {"type": "image_url", "image_url": image}
        case "input_file":
            file = {"file_data": part["file_data"]}
            return {"type": "file", "file": file | ({"filename": part["filename"]} if part.get("filename") else {})}
        case "input_audio":
            return {"type": "input_audio", "input_audio": part["input_audio"]}
    return {"type": "text", "text": part["text"]}
