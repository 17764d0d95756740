"""Serves one generation request, the same way for every API:

key -> body -> typed request -> route -> admission -> chain -> answer.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from typing import TypeVar

from gateway.access.authentication import Key
from gateway.access.key_usage import Meter
from gateway.apis.public_api import ApiRequest, Dialect
from gateway.breaker.outcome import End
from gateway.endpoints.answer_stream import relay
from gateway.endpoints.route_lookup import find, known
from gateway.errors import GatewayError, RefusedError, RequestError
from gateway.http.body_memory import NOTHING, SMALL_BYTES, Room, length_of
from gateway.http.client_disconnect import DisconnectWatch
from gateway.http.http_exchange import Exchange, body_at_hand, exchange_of, read_body, send_at_once, send_bytes
from gateway.routing.chain import RouteMatch
from gateway.routing.chain_runner import ChainRunner
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState, RequestContext
from gateway.routing.resume_runner import Answer
from gateway.runtime import Runtime
from gateway.telemetry.quote_redaction import without_quotes
from headgate.shared.asgi import ClientLeftError, Receive, Scope, Send
from inference.protocol import H_KV, H_POLICY, H_PRIORITY, Code, Priority, Tier

log = logging.getLogger("gateway.requests")

S = TypeVar("S", bound=str)

_PRIORITIES, _NORMAL = tuple(Priority), Priority.NORMAL
_LEFT = str(End.CLIENT_LEFT)

READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
"""Seconds that OpenAI's and Anthropic's Python clients wait for each read."""

TIMEOUT_HEADER = "x-stainless-timeout"
"""Seconds that the JavaScript clients wait for an answer to begin. The Python clients send both, this one larger."""

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""Number of earlier attempts of the client at the same request."""


class Generation:
    """The ASGI application behind the path of one public API."""

    def __init__(self, runtime: Runtime, dialect: Dialect) -> None:
        self._runtime = runtime
        self._dialect = dialect
        self._path = dialect.path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        runtime, exchange = self._runtime, exchange_of(scope)
        headers = exchange.head.headers
        record = Record(exchange.request_id, time.time(), self._path)
        generation = runtime.join()
        try:
            key, tenant = runtime.keys.admit(headers, "use")
            record.key = key.name
            meter = runtime.limiter.enter(key, exchange)
            size = length_of(headers, runtime.config.max_body)
            if meter is None and size <= SMALL_BYTES:
                await self._admitted(key, tenant, None, exchange, record, receive, send)
            else:
                with meter or NOTHING, runtime.bodies.room(size, runtime.config.max_body):
                    await self._admitted(key, tenant, meter, exchange, record, receive, send)
        except GatewayError as error:
            record.note_error(error)
            if record.key and not record.route:
                runtime.records.add_refused(record)
            exchange.reason = record.reason if record.reason != "none" else str(error.code)
            exchange.attempts = len(record.attempts)
            raise
        except (ClientLeftError, asyncio.CancelledError):
            record.outcome = _LEFT if record.outcome == "running" else record.outcome
            raise
        finally:
            runtime.disuse(generation)
            self._finish(exchange, record)

    async def _admitted(
        self,
        key: Key,
        tenant: str,
        meter: Meter | None,
        exchange: Exchange,
        record: Record,
        receive: Receive,
        send: Send,
    ) -> None:
        """Serves a request with a valid key: body, route, chain."""
        runtime = self._runtime
        context = request_context(exchange, key, tenant, meter)
        max_body = runtime.config.max_body
        if (raw := body_at_hand(exchange, max_body)) is None:
            raw = await read_body(receive, exchange.head.headers, max_body)
        record.priority, record.retries = context.priority, context.retries
        try:
            api_request = self._dialect.parse(raw, key.digest.hex())
        except RequestError as error:
            record.note_refused_body(raw, error)
            raise
        request = api_request.request
        built_on = request.size_bytes - len(raw)
        del raw
        if meter is not None:
            meter.reserve(request)
        record.model, record.stream = request.model, request.stream
        match = known(runtime, request.model) or await find(runtime, request.model, exchange)
        state = runtime.gateway_state  # kept while the request waits: a reload may remove the route
        record.route = match.route
        asyncio.get_running_loop().call_soon(
            runtime.records.add, record
        )  # later, so that freeing the oldest record delays no request
        watch = runtime.open_requests.watch(receive, exchange.wire)
        if built_on <= SMALL_BYTES:
            with watch:
                await self._answer(api_request, state, match, context, watch, exchange, record, send)
        else:
            with runtime.bodies.room(built_on, max_body), watch:
                await self._answer(api_request, state, match, context, watch, exchange, record, send)

    async def _answer(
        self,
        api_request: ApiRequest,
        state: GatewayState,
        match: RouteMatch,
        context: RequestContext,
        watch: DisconnectWatch,
        exchange: Exchange,
        record: Record,
        send: Send,
    ) -> None:
        """Waits for admission, runs the chain and sends the answer; a disconnect of the client raises nothing."""
        runtime, request = self._runtime, api_request.request
        queued = time.monotonic()
        try:
            place = runtime.admission.try_enter() or await runtime.admission.take(
                context.priority, context.silence_seconds
            )
            fetched: Room | None = None
            try:
                if request.needs:
                    fetched = Room(runtime.bodies, runtime.config.max_body)
                    request = await runtime.images.inlined(request, fetched)
                waited = time.monotonic() - queued
                exchange.waited_seconds += waited
                runner = ChainRunner(
                    state, request, match, context, record, exchange.began, waited, watch.cancel_reason
                )
                if request.stream:
                    record.outcome = await self._stream(runner, api_request, watch, exchange, record, send)
                    return
                body, is_sent = await self._whole(runner, api_request, watch, exchange, record)
            finally:
                runtime.admission.leave(place)
                if fetched is not None:
                    fetched.close()
            watch.release()
            record.outcome = "success"
            if not is_sent:
                await send_bytes(send, 200, body)
        except GatewayError as error:
            record.error = without_quotes(error.message, request.body)
            raise
        except asyncio.CancelledError:
            if not watch.absorb():
                raise
            record.outcome = str(watch.reason)
            if watch.reason is End.SHUTTING_DOWN and not exchange.started:
                raise RefusedError(
                    Code.SHUTTING_DOWN, "the gateway is shutting down; retry the request", retry_after=1.0
                ) from None

    async def _stream(
        self,
        runner: ChainRunner,
        api_request: ApiRequest,
        watch: DisconnectWatch,
        exchange: Exchange,
        record: Record,
        send: Send,
    ) -> str:
        """Sends a streamed answer; returns its outcome."""
        try:
            answer = await runner.stream()
        finally:
            exchange.upstream_seconds = runner.upstream_seconds
        try:
            self._note(runner, exchange, record, unsettled=1)
            answer.attempt.reader.mark_sent()
        except BaseException as error:
            await answer.attempt.abandon(error)
            raise
        return await relay(answer, send, watch, self._runtime.telemetry, api_request.writer(), exchange)

    async def _whole(
        self, runner: ChainRunner, api_request: ApiRequest, watch: DisconnectWatch, exchange: Exchange, record: Record
    ) -> tuple[bytes, bool]:
        """The body of an answer that is one object, and whether it is sent already."""
        answer: Answer | None = None
        try:
            if api_request.request.endpoint.streams:
                assembled, answer = await runner.whole()
            else:
                body = await runner.unary()
        finally:  # the time of the providers is not the gateway's own, also when all of them failed
            exchange.upstream_seconds = runner.upstream_seconds
        try:
            self._note(runner, exchange, record, 0 if answer is None or answer.attempt.is_settled else 1)
            if api_request.request.endpoint.streams:
                body = api_request.whole(assembled)
            if is_sent := send_at_once(exchange, body):
                watch.release()
        finally:
            if answer is not None:
                await answer.conclude()
        return body, is_sent

    def _note(self, runner: ChainRunner, exchange: Exchange, record: Record, unsettled: int) -> None:
        """Fills in the response headers. `unsettled` is the number of attempts that are not in the record yet."""
        candidate = runner.answered_by
        assert candidate is not None, "a candidate answered"
        exchange.tier, exchange.model, exchange.device = candidate.tier, candidate.name, runner.device
        exchange.attempts, exchange.reason = len(record.attempts) + unsettled, record.reason
        record.status = 200
        record.overhead_seconds = exchange.overhead_seconds
        self._runtime.telemetry.overhead.observe(record.overhead_seconds)

    def _finish(self, exchange: Exchange, record: Record) -> None:
        if record.outcome == _LEFT:
            self._runtime.telemetry.disconnects.inc()
        record.total_seconds = time.monotonic() - exchange.began
        route = record.route or "none"
        tier = record.tier if record.outcome in ("success", "broken") else str(Tier.NONE)
        self._runtime.telemetry.requests(route, tier, record.outcome).inc()
        log_end(record)


def log_end(record: Record) -> None:
    """Logs the end of a request: at level DEBUG when the first candidate answered, else at INFO."""
    ordinary = record.outcome == "success" and record.reason == "none"
    if ordinary and not log.isEnabledFor(logging.DEBUG):
        return
    milliseconds = (record.total_seconds or 0.0) * 1000
    reason = f" ({record.reason})" if record.reason != "none" else ""
    if record.status is not None and record.status >= 400 and not record.attempts:
        about = [f"model {record.model!r}"] if record.model else []
        about += [f"parameter {record.param!r}"] if record.param else []
        log.info(
            "request %s: %s refused with %d %s%s, %.0f ms%s", record.id, record.endpoint, record.status,
            record.outcome, f" ({', '.join(about)})" if about else "", milliseconds, reason,
        )  # fmt: skip
        return
    log.log(
        logging.DEBUG if ordinary else logging.INFO,
        "request %s: %s -> %s: %s, %d attempts, %.0f ms%s", record.id, record.model or "unknown model",
        record.answered_by or "no tier", record.outcome, len(record.attempts), milliseconds, reason,
    )  # fmt: skip


def request_context(exchange: Exchange, key: Key, tenant: str, meter: Meter | None) -> RequestContext:
    """The context of a request, from its key and headers; raises RequestError for invalid header values."""
    headers = exchange.head.headers
    priority = _one_of(headers, H_PRIORITY, _PRIORITIES, _NORMAL)
    policy = _one_of(headers, H_POLICY, ("local-only", "any"), "any")
    gap_seconds = _timeout(headers.get(READ_TIMEOUT_HEADER))
    silence_seconds = _timeout(headers.get(TIMEOUT_HEADER)) if gap_seconds is None else gap_seconds
    retries = _count(headers.get(RETRY_COUNT_HEADER))
    return RequestContext(
        exchange.request_id, tenant, key.cap(priority), policy != "local-only", silence_seconds, retries,
        headers.get(H_KV), gap_seconds, meter,
    )  # fmt: skip


def _one_of(headers: Mapping[str, str], name: str, allowed: tuple[S, ...], default: S) -> S:
    """The value of a header that must be one of `allowed`."""
    if name not in headers:
        return default
    value = headers[name].strip().lower()
    if value not in allowed:
        raise RequestError(
            Code.INVALID_REQUEST,
            f"the header {name} must be one of {', '.join(allowed)}; it is {value[:40]!r}",
            param=name,
        )
    return allowed[allowed.index(value)]


def _timeout(header: str | None) -> float | None:
    """The client's timeout in seconds, less a margin for the way; None without a usable value."""
    if header is None:
        return None
    try:
        seconds = float(header)
    except ValueError:
        return None
    if not 0 < seconds < math.inf:
        return None
    return seconds - min(0.5, seconds * 0.1)


def _count(header: str | None) -> int:
    """A whole number in a header; 0 without a usable value."""
    text = header or ""
    return int(text) if text.isascii() and text.isdigit() and len(text) < 6 else 0
