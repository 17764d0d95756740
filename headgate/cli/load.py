"""A small load on the gateway: streams that ask, read and ask again, each in its thread; judges and shows nothing."""

from __future__ import annotations

import json
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.cli import sse_lines
from headgate.cli.client import Api, ApiError, from_envelope
from headgate.shared.errors import HeadgateError
from inference.protocol import H_POLICY, H_TIER, Tier

SILENCE_SECONDS = 330.0
"""Longer than the gateway's own longest deadline by default (300 s): its sentence is better than ours."""

WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "as", "with", "at", "be", "by", "not")
"""Words that are one token each in nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked. `seconds` is how long new requests begin; those that run then are finished."""

    model: str
    streams: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float

    def body(self, answer_tokens: int | None = None) -> dict[str, Any]:
        """A request whose prompt begins like no other, so that no computed prefix helps."""
        words = (secrets.choice(WORDS) for _ in range(self.prompt_tokens))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": answer_tokens or self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class Asked:
    """One request: `times` are the moments of its pieces of text, in seconds after it was sent; `error` None when it
    ended well, and then `end` is when, and the token counts are the service's own.
    """

    times: Sequence[float]
    end: float
    prompt_tokens: int = 0
    answer_tokens: int = 0
    tier: str = Tier.LOCAL
    error: HeadgateError | None = None


def ask(api: Api, body: Mapping[str, Any]) -> Asked:
    """One request, read to its end; never raises a HeadgateError."""
    start = time.perf_counter()
    times: list[float] = []
    usage: Mapping[str, Any] = {}
    tier = str(Tier.LOCAL)
    try:
        headers = {H_POLICY: "local-only"}
        with api.open("POST", "/v1/chat/completions", body, SILENCE_SECONDS, headers) as answer:
            tier = answer.headers.get(H_TIER, tier)
            for event in sse_lines.events(answer.lines):
                if event.data == "[DONE]":
                    end = time.perf_counter() - start
                    tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
                    return Asked(times, end, *tokens, tier=tier)
                chunk = json.loads(event.data or "{}")
                if error := chunk.get("error"):
                    raise from_envelope(error, None, None)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("content") or delta.get("reasoning_content"):
                        times.append(time.perf_counter() - start)
        raise ApiError("the answer was cut off: the stream ended before its end", code="cut_off")
    except HeadgateError as error:
        return Asked(times, time.perf_counter() - start, tier=tier, error=error)


class Load:
    """The streams of a plan, begun by `start`. A refused stream waits as long as it was told to, or ends."""

    def __init__(self, api: Api, plan: Plan) -> None:
        self.plan = plan
        self._api = api
        self._asked: list[Asked] = []
        self._enough = threading.Event()
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(plan.streams)]
        self._began = self._ended = 0.0

    @property
    def asked(self) -> list[Asked]:
        """The requests that have ended so far."""
        return list(self._asked)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last request that ended."""
        return max(0.0, self._ended - self._began)

    def start(self) -> None:
        """Begins all streams."""
        self._began = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Begins no further request; those that run are not waited for: their threads end with the process."""
        self._enough.set()

    def wait(self, seconds: float) -> bool:
        """Waits at most so long; whether every stream has ended."""
        until = time.perf_counter() + seconds
        for thread in self._threads:
            thread.join(max(0.0, until - time.perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    def _stream(self) -> None:
        """One request after the other until the time is over; the first one in any case."""
        until = self._began + self.plan.seconds
        while not self._enough.is_set():
            asked = ask(self._api, self.plan.body())
            self._asked.append(asked)
            self._ended = time.perf_counter()
            left = until - self._ended
            if asked.error is not None:
                pause = getattr(asked.error, "retry_after", None)
                if pause is None or self._enough.wait(min(pause, max(0.0, left))):
                    return
                left = until - time.perf_counter()
            if left <= 0:
                return
