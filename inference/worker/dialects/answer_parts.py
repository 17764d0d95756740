"""The parts of an answer besides plain text, reasoning and tool calls, and the tools that can be called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is a JSON schema of an object."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    strict: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`name` is set when the mode is `named`."""

    mode: Literal["none", "auto", "required", "named"] = "auto"
    name: str | None = None
    parallel: bool = True


@dataclass(frozen=True, slots=True)
class Content:
    """More text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """More text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a tool call. Calls are numbered from 0. `id` is the one that the model writes, else empty."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Part = Content | Reasoning | CallBegin | CallArguments


def joined(parts: tuple[Part, ...], more: tuple[Part, ...]) -> tuple[Part, ...]:
    """`parts` followed by `more`; if the first of `more` continues the last of `parts`, they are joined."""
    if not parts or not more:
        return parts or more
    last, first = parts[-1], more[0]
    if isinstance(last, CallBegin) or isinstance(first, CallBegin) or type(last) is not type(first):
        return parts + more
    if isinstance(last, CallArguments) and isinstance(first, CallArguments) and last.index != first.index:
        return parts + more
    return (*parts[:-1], replace(last, text=last.text + first.text), *more[1:])


class AnswerParser(Protocol):
    """Divides the text of one answer into parts as it is generated.

    The joined texts of the parts do not depend on how the text is divided into pushes. Text that turns out not to be a
    call is content.
    """

    def push(self, text: str) -> Sequence[Part]:
        """The parts that `text` completes or continues; control tokens appear in it as their texts."""
        ...

    def flush(self) -> Sequence[Part]:
        """The parts that were held back, at the end of the answer."""
        ...
