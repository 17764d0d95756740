"""`POST /v1/messages/count_tokens` and `/v1/responses/input_tokens`: how many tokens a request has for the tier that
would be asked first; computes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from gateway.core.chain import Candidate, expand
from gateway.core.outcome import End
from gateway.core.requests import InferenceRequest
from gateway.errors import PassedOnError, RefusedError, UpstreamError, UpstreamKind
from gateway.exchange import Receive, Scope, Send, exchange_of, read_body, send_bytes
from gateway.finding import find
from gateway.providers.base import Call, CountsTokens
from gateway.runtime import Runtime
from gateway.serve import caller_of
from inference.protocol import Code

PATH = "/v1/messages/count_tokens"
INPUT_TOKENS_PATH = "/v1/responses/input_tokens"

Parse = Callable[[bytes, str], InferenceRequest]
"""The request in a body, of the owner of the key; raises RequestError."""

SECONDS = 30.0
"""Counting computes nothing, but a model that is not loaded needs a helper that reads its vocabulary first."""

_RETRY_SECONDS = 2.0


class CountTokens:
    """The ASGI application behind one path. `said` is what the answer holds beside the count."""

    def __init__(self, runtime: Runtime, parse: Parse, said: Mapping[str, Any] | None = None) -> None:
        self._runtime = runtime
        self._parse = parse
        self._said = said or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One question."""
        runtime, exchange = self._runtime, exchange_of(scope)
        with runtime.generation(), contextlib.ExitStack() as held:
            key, tenant = runtime.keys.admit(exchange.told.headers, "use")
            if (meter := runtime.limiter.enter(key, exchange)) is not None:
                held.enter_context(meter)
            held.enter_context(runtime.bodies.hold(exchange.told.headers, runtime.config.max_body))
            caller = caller_of(exchange, key, tenant, None)
            raw = await read_body(receive, exchange.told.headers, runtime.config.max_body)
            request = self._parse(raw, key.digest.hex())
            held.enter_context(runtime.bodies.room(request.size_bytes - len(raw), runtime.config.max_body))
            found = await find(runtime, request.model, exchange)
            route = runtime.config.routes[found.route]
            clouds = caller.cloud_allowed and route.cloud == "allowed"
            presence = held.enter_context(runtime.presences.watch(receive, exchange.wire))
            try:
                async with runtime.admission.enter(caller.priority, caller.silence_seconds):
                    candidate, count = await self._count(
                        request, expand(route.chain, found.model, runtime.view.aliases), clouds, caller.request_id
                    )
            except asyncio.CancelledError:
                if not presence.absorb():
                    raise
                if presence.reason is End.CLIENT_LEFT:
                    return
                raise RefusedError(Code.SHUTTING_DOWN, "the gateway stops; ask again", retry_after=1.0) from None
        exchange.tier, exchange.model = candidate.tier, candidate.name
        await send_bytes(send, 200, orjson.dumps({**self._said, "input_tokens": count}))

    async def _count(
        self, request: InferenceRequest, candidates: tuple[Candidate, ...], clouds: bool, request_id: str
    ) -> tuple[Candidate, int]:
        """The count of the first tier that could answer; raises GatewayError where that tier counts nothing.

        A tier that cannot be reached is passed over, as an answer would pass it over too.
        """
        said: list[str] = []
        for candidate in candidates:
            if not self._could_answer(candidate, request, clouds):
                continue
            try:
                async with asyncio.timeout(SECONDS):
                    return candidate, await self._ask(candidate, request, request_id)
            except TimeoutError:
                said.append(f"{candidate.name}: silent for {SECONDS:g} s")
            except UpstreamError as error:
                if error.status is not None and error.status in (400, 413, 422):
                    raise PassedOnError(error, error.status, error.param) from error
                said.append(f"{candidate.name}: {error}")
        if said:
            raise RefusedError(
                Code.NO_TIER_AVAILABLE, f"no tier could count: {'; '.join(said)}", retry_after=_RETRY_SECONDS
            )
        raise RefusedError(Code.NO_TIER_AVAILABLE, f"no tier behind {request.model!r} can answer", should_retry=False)

    def _could_answer(self, candidate: Candidate, request: InferenceRequest, clouds: bool) -> bool:
        tools = self._runtime.tools
        if tools.registry.get(candidate.provider) is None or not (candidate.is_local or clouds):
            return False
        status = tools.view.models.get(candidate.model) if candidate.is_local else None
        return status is None or not status.capabilities or request.needs <= set(status.capabilities)

    async def _ask(self, candidate: Candidate, request: InferenceRequest, request_id: str) -> int:
        tools = self._runtime.tools
        if candidate.is_local:
            return await tools.counter.count(candidate.model, request.endpoint, request.body, SECONDS)
        provider = tools.registry.get(candidate.provider)
        if isinstance(provider, CountsTokens):
            connect = tools.config.deadlines.connect
            return await provider.count_tokens(
                Call(request.endpoint, candidate.model, request.body, request_id, connect)
            )
        raise UpstreamError(
            UpstreamKind.STATUS,
            f"{candidate.name} would answer this and counts no tokens; ask for a model of this machine or of Anthropic",
            status=400,
            code=Code.UNSUPPORTED_PARAMETER,
            param="model",
        )
