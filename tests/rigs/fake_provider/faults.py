"""How the fake provider may fail: a queue set over HTTP, and model names that ask for a failure; decides no payload.

POST /_fake/faults takes one object or a list:
    {"kind": "status", "status": 429, "retry_after": 7, "count": 2, "dialect": "anthropic", "model": "claude-x"}
`count` (default 1, null for ever) is how many matching requests meet it. A model named `fault-KIND` or `fault-KIND=N`
(`fault-429=7`, `fault-cut=3`, `fault-slow=0.5`) fails always, without any queue.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

KINDS: Mapping[str, str] = {
    "status": "`status`, with `retry_after` when given (seconds or an HTTP date)",
    "reset": "the connection is reset before any header",
    "silence": "no byte for `seconds`, then the answer; without `seconds` no byte ever",
    "slow": "headers at once, the first token after `seconds`",
    "pace": "`seconds` before every chunk",
    "cut": "the connection is reset after `after` content chunks",
    "truncate": "the body ends properly after `after` content chunks, without a finish",
    "stall": "no byte any more after `after` content chunks",
    "ping": "nothing but keep-alives after `after` content chunks, every 50 ms",
    "malformed": "broken JSON after `after` content chunks",
    "no_done": "the last event ([DONE], message_stop) is missing",
    "reset_after_finish": "the connection is reset between the finish and the last event",
    "no_usage": "no usage anywhere",
    "wrong_usage": "usage that is no count",
    "context": "the prompt is too long for the model, in the provider's own shape",
    "content_policy": "the prompt is against the policy, in the provider's own shape",
    "too_large": "the prompt is more than the account may use in a minute (OpenAI alone says so)",
    "no_quota": "the account is empty, in OpenAI's words (Anthropic's is a status 400)",
    "error_frame": "an error event after `after` content chunks",
    "empty": "a stream without content and without finish",
    "html": "200 with a web page",
}
_MAGIC = re.compile(r"fault-(?:(\d{3})|([a-z-]+))(?:=(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to fail; `dialect` (openai, google, anthropic) and `model` narrow which requests meet it."""

    kind: str
    status: int = 500
    retry_after: float | str | None = None
    after: int = 0
    seconds: float | None = None
    count: int | None = 1
    dialect: str | None = None
    model: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"no fault {self.kind!r}; there are {', '.join(KINDS)}")

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Fault:
        """The fault in posted JSON; raises ValueError for an invalid one."""
        if unknown := set(data) - {item.name for item in fields(cls)}:
            raise ValueError(f"unknown fields {sorted(unknown)}")
        return cls(**data)

    @classmethod
    def of_model(cls, model: str) -> Fault | None:
        """The fault that a model name selects."""
        if (match := _MAGIC.fullmatch(model)) is None:
            return None
        number = float(match[3]) if match[3] else None
        if match[1]:
            return cls("status", status=int(match[1]), retry_after=number, count=None)
        return cls(match[2].replace("-", "_"), after=int(number or 0), seconds=number, count=None)

    def matches(self, dialect: str, model: str) -> bool:
        return self.dialect in (None, dialect) and self.model in (None, model)


class FaultQueue:
    """Faults in the order they were set; a request takes the first that matches it."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []

    def add(self, *faults: Fault) -> None:
        self._faults += faults

    def clear(self) -> None:
        self._faults.clear()

    @property
    def waiting(self) -> tuple[Fault, ...]:
        return tuple(self._faults)

    def take(self, dialect: str, model: str) -> Fault | None:
        for index, fault in enumerate(self._faults):
            if fault.matches(dialect, model):
                if fault.count is not None:
                    left = fault.count - 1
                    self._faults[index : index + 1] = [replace(fault, count=left)] if left else []
                return fault
        return Fault.of_model(model)
