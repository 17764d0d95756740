"""Usage of each key with limits; `gateway.access.rate_limits` decides whether a request may start.

A request is counted before its body is read, its estimated tokens are reserved after the body was parsed, and its real
tokens are charged at its end.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple

from gateway.access import rate_limits as core
from gateway.access.authentication import Key
from gateway.access.shared_limits import Outage, SharedLimits, share_of
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


class _Loss(NamedTuple):
    """The account of a key when the store was lost: the share of this gateway, which was one of `gateways`."""

    account: core.Account
    at: float
    gateways: int = 1

    def of_all(self) -> core.Account:
        """The account of the key at all gateways."""
        own = self.account
        return replace(own, requests=own.requests * self.gateways, tokens=own.tokens * self.gateways)


class Limiter:
    """The accounts of all keys, by name, so that a new secret under an old name keeps its account.

    With `shared` the accounts of all gateways are in the store. Those here then hold this gateway's share of them and
    its own running requests; they decide while the store is lost, with this gateway's share of the limits.
    """

    def __init__(
        self, telemetry: Telemetry, clock: Callable[[], float] = time.monotonic, shared: SharedLimits | None = None
    ) -> None:
        self._telemetry = telemetry
        self._clock = clock
        self._numbers = itertools.count(1)
        self._accounts: dict[str, core.Account] = {}
        self._limits: dict[str, core.Limits] = {}
        self._shared = shared
        self._losses: dict[str, _Loss] = {}
        """The loss of each key, until what was added since the loss is merged into the store."""
        if shared is not None:
            shared.state.on_down.append(self._on_down)
            shared.state.on_up.append(self._on_up)
            shared.state.on_tick.append(self._on_tick)

    async def enter(self, key: Key, exchange: Exchange) -> Meter | None:
        """A context for one request with `key`; None for a key without limits. Raises RefusedError (429).

        Sets the rate-limit headers of `exchange`.
        """
        if not key.limits.is_any:
            return None
        number, limits = next(self._numbers), key.limits
        self._limits.setdefault(key.name, limits)
        shared = None if self._shared is None else await self._shared.enter(key.name, limits, number)
        if shared is None:
            limits = self._own(limits)
            account, refusal = core.enter(self._account(key), limits, number, self._clock())
            self._accounts[key.name] = account
        else:
            account, refusal = shared.account, None
            if not shared.is_accepted:
                refusal = core.enter(account, limits, number, account.at)[1]
            own = self._follow(key.name, account)
            if refusal is None:
                running = (*own.running, core.Running(number, account.at))
                self._accounts[key.name] = replace(own, running=running)
        self._note(exchange, account, limits, refusal)
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

    async def reserve(self, key: Key, exchange: Exchange, number: int, tokens: int) -> None:
        """Reserves `tokens` for a request that entered; raises RefusedError (429)."""
        limits = self._current_limits(key)
        shared = None if self._shared is None else await self._shared.reserve(key.name, limits, tokens)
        if shared is None:
            limits = self._own(limits)
            account, refusal = core.reserve(self._account(key), limits, number, tokens, self._clock())
            self._accounts[key.name] = account
        else:
            account, refusal, held = shared.account, None, 0
            if shared.is_accepted:
                held = min(tokens, limits.tokens_per_minute or 0)
            else:
                refusal = core.reserve(account, limits, number, tokens, account.at)[1]
            own = self._follow(key.name, account)
            running = tuple(replace(one, reserved=held) if one.number == number else one for one in own.running)
            self._accounts[key.name] = replace(own, running=running)
        self._note(exchange, account, limits, refusal)

    def counts_tokens(self, key: Key) -> bool:
        """Whether tokens of `key` are limited."""
        return self._current_limits(key).tokens_per_minute is not None

    def leave(self, key: Key, number: int, tokens: int) -> None:
        """Ends a request that took `tokens`."""
        account, limits = self._account(key), self._current_limits(key)
        if self._shared is not None:
            reserved = next((one.reserved for one in account.running if one.number == number), 0)
            self._shared.leave(key.name, limits, number, tokens, reserved)
            limits = self._own(limits)
        self._accounts[key.name] = core.leave(account, limits, number, tokens, self._clock())

    def _current_limits(self, key: Key) -> core.Limits:
        """The current limits of the key; a running request may have begun with others."""
        return self._limits.get(key.name, key.limits)

    def _account(self, key: Key) -> core.Account:
        return self._accounts.get(key.name, core.Account())

    def _note(
        self, exchange: Exchange, account: core.Account, limits: core.Limits, refusal: core.Refusal | None
    ) -> None:
        """Sets the headers of `exchange`; raises RefusedError for a refusal."""
        exchange.limits = _headers(core.limit_statuses(account, limits, account.at))
        if refusal is None:
            return
        self._telemetry.rate_limited.labels(str(refusal.kind)).inc()
        limit = _LIMIT_NAMES[refusal.kind].format(bound=refusal.bound)
        raise RefusedError(
            Code.RATE_LIMIT_EXCEEDED,
            f"this key's limit is reached ({limit}); try again in {core.duration(refusal.wait)}",
            retry_after=refusal.wait,
        )

    # --- shared state ------------------------------------------------------------------------------------------------
    def _own(self, limits: core.Limits) -> core.Limits:
        """What this gateway allows alone."""
        return limits if self._shared is None else share_of(limits, self._shared.state.gateways)

    def _follow(self, name: str, shared: core.Account) -> core.Account:
        """This gateway's account, with its share of the usage of all."""
        assert self._shared is not None
        gateways, own = self._shared.state.gateways, self._accounts.get(name, core.Account())
        own = replace(own, requests=shared.requests / gateways, tokens=shared.tokens / gateways, at=shared.at)
        self._accounts[name] = own
        return own

    def _on_down(self) -> None:
        """Keeps the accounts as they are now, unless an earlier loss is not merged yet."""
        assert self._shared is not None
        for name, account in self._accounts.items():
            self._losses.setdefault(name, _Loss(account, self._clock(), self._shared.state.gateways))

    async def _on_up(self) -> None:
        """Adds what was used while the store was lost; raises StoreLostError when it is lost again."""
        assert self._shared is not None
        now = self._clock()
        for name, account in tuple(self._accounts.items()):
            limits = self._limits.get(name, core.NO_LIMITS)
            if limits.is_any:
                own, loss = self._own(limits), self._losses.setdefault(name, _Loss(core.Account(), now))
                used, before = core.settled(account, own, now), core.settled(loss.account, own, now)
                added = (max(0.0, used.requests - before.requests), max(0.0, used.tokens - before.tokens))
                left = core.settled(loss.of_all(), limits, now)
                outage = Outage(loss.at, (left.requests, left.tokens), added)
                running = self._accounts.get(name, account).running  # some may have ended while others were merged
                await self._shared.merge(name, limits, outage, running)
            self._losses.pop(name, None)
        self._losses.clear()

    async def _on_tick(self) -> None:
        """Keeps the shares current for keys that other gateways serve."""
        assert self._shared is not None
        for name, account in (await self._shared.active()).items():
            self._follow(name, account)


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
    piece; where tokens are limited, pieces of local answers are single tokens. A request that ends in a
    GatewayError is charged none.
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

    async def reserve(self, request: InferenceRequest) -> None:
        """Reserves the estimated tokens of `request`; raises RefusedError (429)."""
        if not self.counts_tokens:
            return
        self._prompt_tokens = core.prompt_tokens(request.body)
        wanted = self._prompt_tokens + core.answer_tokens(request.body, request.answer_limit(core.ANSWER_TOKENS))
        await self._limiter.reserve(self._key, self._exchange, self._number, wanted)

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
