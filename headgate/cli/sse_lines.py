"""Splits server-sent events into comments and data; knows nothing of what the data means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """One event: `data` without its field name, or a `comment` line without the blank line after it."""

    data: str | None = None
    comment: bytes | None = None


def events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The events in a stream of lines; several data lines of one event are joined, other fields are ignored."""
    data: list[str] = []
    for raw in lines:
        line = raw.rstrip(b"\r\n")
        if not line:
            if data:
                yield Event(data="\n".join(data))
                data = []
        elif line.startswith(b":"):
            yield Event(comment=line)
        elif line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" ").decode("utf-8", "replace"))
    if data:
        yield Event(data="\n".join(data))
