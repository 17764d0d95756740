"""Decides whether a key may start one more request now, and otherwise when.

Requests and tokens are token buckets: usage drains at `limit / 60` per second, and a request starts while the usage
and its own estimate fit the limit. So a period of t seconds holds at most `limit * (1 + t / 60)`, and over time the
limit is exact: tokens beyond the estimate count as usage too. Times are monotonic seconds. A new limit keeps the usage.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, NamedTuple

from gateway.apis.openai.generation_request import AnyRequest, ChatRequest
from headgate.shared.bodies.body_decoder import as_json
from headgate.shared.bodies.openai_bodies import CompletionRequest

BYTES_PER_TOKEN = 4
"""An estimate for prompts, whose text is counted in bytes of UTF-8."""
IMAGE_TOKENS = 1000
"""An estimate for each data: URL."""
ANSWER_TOKENS = 500
"""An estimate for an answer without `max_tokens`."""
UNKNOWN_SECONDS = 1.0
"""Least expected time until a request ends; also the expected time while there is no mean duration yet."""

_MEAN_REQUESTS = 8
"""Number of requests over which the mean duration is smoothed."""
_ROUNDING = 1e-6
_TOTAL = re.compile(rb'"total_tokens"\s*:\s*(\d{1,15})')


class LimitKind(StrEnum):
    """The three limits."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENT = "concurrent"


class Limits(NamedTuple):
    """The limits of one key; None is no limit."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None

    @property
    def is_any(self) -> bool:
        """Whether there is a limit."""
        return self != NO_LIMITS


NO_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class Running:
    """One running request with its `reserved` tokens."""

    number: int
    since: float
    reserved: int = 0


@dataclass(frozen=True, slots=True)
class Account:
    """The usage of one key at time `at`, and its running requests. `mean_seconds`: mean duration of ended requests."""

    requests: float = 0.0
    tokens: float = 0.0
    at: float = 0.0
    running: tuple[Running, ...] = ()
    mean_seconds: float | None = None

    def is_idle(self, limits: Limits, now: float) -> bool:
        """Whether this account can be dropped without an effect on limits."""
        current = settled(self, limits, now)
        return not current.running and current.requests == 0 and current.tokens == 0


@dataclass(frozen=True, slots=True)
class Refusal:
    """The limit `kind` of `bound` is reached. A request may start in `wait` seconds."""

    kind: LimitKind
    bound: int
    wait: float


@dataclass(frozen=True, slots=True)
class LimitStatus:
    """One limit of a key: the rest of `bound`, and the seconds until all of `bound` is available again."""

    kind: LimitKind
    bound: int
    remaining: int
    reset: float


def settled(account: Account, limits: Limits, now: float) -> Account:
    """The account at time `now`, after draining."""
    passed = max(0.0, now - account.at)
    return replace(
        account,
        requests=_drained(account.requests, limits.requests_per_minute, passed),
        tokens=_drained(account.tokens, limits.tokens_per_minute, passed),
        at=max(now, account.at),
    )


def enter(account: Account, limits: Limits, number: int, now: float) -> tuple[Account, Refusal | None]:
    """Request `number` starts and is counted, or is refused without an effect."""
    account = settled(account, limits, now)
    refusals = [
        refusal for refusal in (_too_many(account, limits, now), _too_often(account, limits)) if refusal is not None
    ]
    if refusals:
        return account, max(refusals, key=lambda refusal: refusal.wait)
    counted = account.requests + (1 if limits.requests_per_minute is not None else 0)
    return replace(account, requests=counted, running=(*account.running, Running(number, now))), None


def reserve(account: Account, limits: Limits, number: int, tokens: int, now: float) -> tuple[Account, Refusal | None]:
    """Reserves `tokens` for the running request `number`, at most the whole limit, or refuses them.

    So a request larger than the limit starts when the usage is 0; its further tokens count as usage at its end.
    """
    account = settled(account, limits, now)
    bound = limits.tokens_per_minute
    if bound is None:
        return account, None
    held = min(tokens, bound)
    lacking = account.tokens + held - bound
    if lacking > _ROUNDING:
        often = _too_often(account, limits)
        wait = max(lacking * 60 / bound, often.wait if often is not None else 0.0)
        return account, Refusal(LimitKind.TOKENS, bound, wait)
    running = tuple(replace(one, reserved=held) if one.number == number else one for one in account.running)
    return replace(account, tokens=account.tokens + held, running=running), None


def leave(account: Account, limits: Limits, number: int, tokens: int, now: float) -> Account:
    """Ends the running request `number`, which took `tokens`; unused reserved tokens are released."""
    account = settled(account, limits, now)
    ended = next((one for one in account.running if one.number == number), None)
    if ended is None:
        return account
    took = now - ended.since
    mean = (
        took if account.mean_seconds is None else account.mean_seconds + (took - account.mean_seconds) / _MEAN_REQUESTS
    )
    owed = max(0.0, account.tokens + tokens - ended.reserved) if limits.tokens_per_minute is not None else 0.0
    running = tuple(one for one in account.running if one.number != number)
    return replace(account, tokens=owed, running=running, mean_seconds=mean)


def limit_statuses(account: Account, limits: Limits, now: float) -> tuple[LimitStatus, ...]:
    """The status of each limit on requests and tokens that the key has."""
    account = settled(account, limits, now)
    buckets = (
        (LimitKind.REQUESTS, limits.requests_per_minute, account.requests),
        (LimitKind.TOKENS, limits.tokens_per_minute, account.tokens),
    )
    return tuple(
        LimitStatus(which, bound, max(0, math.floor(bound - used + _ROUNDING)), used * 60 / bound)
        for which, bound, used in buckets
        if bound is not None
    )


def seconds_until_end(since: float, mean_seconds: float | None, now: float) -> float:
    """Expected seconds until the end of a request that started at `since`; at least UNKNOWN_SECONDS."""
    return max(UNKNOWN_SECONDS, since + (mean_seconds or 0.0) - now)


def duration(seconds: float) -> str:
    """`seconds` as OpenAI writes the time to a reset: `0s`, `120ms`, `1.5s`, `6m0s`."""
    milliseconds = math.ceil(seconds * 1000 - _ROUNDING)
    if 0 < milliseconds < 1000:
        return f"{milliseconds}ms"
    minutes, rest = divmod(milliseconds, 60_000)
    return f"{minutes}m{rest / 1000:g}s" if minutes else f"{rest / 1000:g}s"


def total_tokens(answer: bytes) -> int | None:
    """`usage.total_tokens` of an answer's JSON, or None. Quotes inside a string are escaped, so the pattern is safe."""
    found = _TOTAL.findall(answer)
    return int(found[-1]) if found else None


def prompt_tokens(body: AnyRequest) -> int:
    """About how many tokens the prompt of a request has: its text by size, images at a flat rate."""
    text = ids = images = 0
    waiting: list[Any] = [as_json(body)]
    while waiting:
        value = waiting.pop()
        if isinstance(value, str):
            if value.startswith("data:"):
                images += 1
            else:
                text += len(value.encode("utf-8", "surrogatepass"))
        elif isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value
        else:
            ids += 1
    return math.ceil(text / BYTES_PER_TOKEN) + ids + images * IMAGE_TOKENS


def answer_tokens(body: AnyRequest, max_tokens: int | None) -> int:
    """An estimate of the tokens of an answer, all choices together."""
    choices = body.n if isinstance(body, ChatRequest | CompletionRequest) else None
    return (ANSWER_TOKENS if max_tokens is None else max_tokens) * (choices or 1)


def _drained(used: float, per_minute: int | None, passed: float) -> float:
    return 0.0 if per_minute is None else max(0.0, used - passed * per_minute / 60)


def _too_often(account: Account, limits: Limits) -> Refusal | None:
    bound = limits.requests_per_minute
    if bound is None or (lacking := account.requests + 1 - bound) <= _ROUNDING:
        return None
    return Refusal(LimitKind.REQUESTS, bound, lacking * 60 / bound)


def _too_many(account: Account, limits: Limits, now: float) -> Refusal | None:
    bound = limits.concurrent
    if bound is None or len(account.running) < bound:
        return None
    first = min(seconds_until_end(one.since, account.mean_seconds, now) for one in account.running)
    return Refusal(LimitKind.CONCURRENT, bound, first)
