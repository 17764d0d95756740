"""Usage of each key with limits; `gateway.access.rate_limits` decides whether a request may start.

A request is counted before its body is read, its estimated tokens are reserved after the body was parsed, and its real
tokens are charged at its end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from types import TracebackType

from gateway.access import rate_limits as core
from gateway.access.authentication import Key
from gateway.apis.openai.frames import Data, DeltaKind, Frame
from gateway.apis.openai.generation_request import InferenceRequest
from gateway.errors import GatewayError, RefusedError
from gateway.http.http_exchange import Exchange
from gateway.telemetry.gateway_metrics import Telemetry
from inference.protocol import Code

_LIMIT_NAMES = {
    core.LimitKind.REQUESTS: "requests a minute: {bound}",
    core.LimitKind.TOKENS: "tokens a minute: {bound}",
    core.LimitKind.CONCURRENT: "requests at a time: {bound}",
}


class Limiter:
    """The accounts of all keys, by name, so that a new secret under an old name keeps its account."""

    def __init__(self, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._numbers = itertools.count(1)
        self._accounts: dict[str, core.Account] = {}
        self._limits: dict[str, core.Limits] = {}

    def enter(self, key: Key, exchange: Exchange) -> Meter | None:
        """A context for one request with `key`; None for a key without limits. Raises RefusedError (429).

        Sets the rate-limit headers of `exchange`.
        """
        if not key.limits.is_any:
            return None
        number = next(self._numbers)
        outcome = core.enter(self._account(key), key.limits, number, self._clock())
        self._note(key, exchange, outcome)
        return Meter(self, key, exchange, number)

    def apply(self, keys: Sequence[Key]) -> None:
        """Applies new keys; accounts without an effect on limits are dropped."""
        now = self._clock()
        self._limits = {key.name: key.limits for key in keys}
        self._accounts = {
            name: account
            for name, account in self._accounts.items()
            if not account.is_idle(self._limits.get(name, core.NO_LIMITS), now)
        }

    def reserve(self, key: Key, exchange: Exchange, number: int, tokens: int) -> None:
        """Reserves `tokens` for a request that entered; raises RefusedError (429)."""
        self._note(key, exchange, core.reserve(self._account(key), self._now(key), number, tokens, self._clock()))

    def counts_tokens(self, key: Key) -> bool:
        """Whether tokens of `key` are limited."""
        return self._now(key).tokens_per_minute is not None

    def leave(self, key: Key, number: int, tokens: int) -> None:
        """Ends a request that took `tokens`."""
        self._accounts[key.name] = core.leave(self._account(key), self._now(key), number, tokens, self._clock())

    def _now(self, key: Key) -> core.Limits:
        """The current limits of the key; a running request may have begun with others."""
        return self._limits.get(key.name, key.limits)

    def _account(self, key: Key) -> core.Account:
        return self._accounts.get(key.name, core.Account())

    def _note(self, key: Key, exchange: Exchange, outcome: tuple[core.Account, core.Refusal | None]) -> None:
        account, refusal = outcome
        self._accounts[key.name] = account
        exchange.limits = _headers(core.limit_statuses(account, key.limits, account.at))
        if refusal is None:
            return
        self._telemetry.rate_limited.labels(str(refusal.kind)).inc()
        limit = _LIMIT_NAMES[refusal.kind].format(bound=refusal.bound)
        raise RefusedError(
            Code.RATE_LIMIT_EXCEEDED,
            f"this key's limit is reached ({limit}); try again in {core.duration(refusal.wait)}",
            retry_after=refusal.wait,
        )


def _headers(limit_statuses: Sequence[core.LimitStatus]) -> tuple[tuple[str, str], ...]:
    """The rate-limit headers of OpenAI's API, for the limits that the key has."""
    headers: list[tuple[str, str]] = []
    for status in limit_statuses:
        headers += [
            (f"x-ratelimit-limit-{status.kind}", str(status.bound)),
            (f"x-ratelimit-remaining-{status.kind}", str(status.remaining)),
            (f"x-ratelimit-reset-{status.kind}", core.duration(status.reset)),
        ]
    return tuple(headers)


class Meter:
    """Counts the tokens of one request of a limited key, while the context is open.

    An answer with a usage is charged this usage, but at least one token per piece, because the usage of a resumed
    answer covers only its last attempt. An interrupted answer is charged the estimate of its prompt and a token per
    piece; where tokens are limited, pieces of local answers are single tokens. A request that ends in an error is
    charged none.
    """

    def __init__(self, limiter: Limiter, key: Key, exchange: Exchange, number: int) -> None:
        self._limiter = limiter
        self._key = key
        self._exchange = exchange
        self._number = number
        self._prompt_tokens = 0
        self._pieces = 0
        self._usage: bytes | None = None

    @property
    def counts_tokens(self) -> bool:
        """Whether the key's tokens are limited."""
        return self._limiter.counts_tokens(self._key)

    def reserve(self, request: InferenceRequest) -> None:
        """Reserves the estimated tokens of `request`; raises RefusedError (429)."""
        if not self.counts_tokens:
            return
        self._prompt_tokens = core.prompt_tokens(request.body)
        wanted = self._prompt_tokens + core.answer_tokens(request.body, request.most_tokens(core.ANSWER_TOKENS))
        self._limiter.reserve(self._key, self._exchange, self._number, wanted)

    def note(self, frame: Frame) -> None:
        """Counts one frame of the answer."""
        if isinstance(frame, Data):
            if frame.kind is DeltaKind.CONTENT:
                self._pieces += 1
            elif frame.kind is DeltaKind.USAGE:
                self._usage = frame.payload

    def note_whole(self, answer: bytes) -> None:
        """Keeps the usage of an answer without a stream."""
        self._usage = answer

    def __enter__(self) -> Meter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        tokens = 0 if isinstance(error, GatewayError) else self._tokens()
        self._limiter.leave(self._key, self._number, tokens)

    def _tokens(self) -> int:
        if not self.counts_tokens:
            return 0
        total = None if self._usage is None else core.total_tokens(self._usage)
        return self._prompt_tokens + self._pieces if total is None else max(total, self._pieces)
