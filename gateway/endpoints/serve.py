"""Serves the requests of the public APIs, the same way for each:

key -> body -> typed request -> route -> admission -> chain -> answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from gateway.access.authentication import Key
from gateway.access.key_usage import Meter
from gateway.apis.lenient_json import dumps
from gateway.apis.openai.generation_request import VISION
from gateway.apis.openai.route_parameters import with_route_parameters
from gateway.apis.public_api import ApiRequest
from gateway.breaker.outcome import LOCAL, End
from gateway.endpoints.answer_stream import relay
from gateway.endpoints.model_routes import unknown_model
from gateway.errors import GatewayError, RefusedError, RequestError
from gateway.http.body_memory import Room
from gateway.http.http_exchange import (
    DisconnectWatch,
    Exchange,
    exchange_of,
    read_body,
    send_at_once,
    send_bytes,
    take_buffered_body,
)
from gateway.routing import chain
from gateway.routing.chain import SMALLER, RouteMatch
from gateway.routing.chain_runner import ChainRunner
from gateway.routing.explain_record import Record
from gateway.routing.request_context import GatewayState, RequestContext
from gateway.routing.request_spans import request_spans
from gateway.routing.resume_runner import Answer
from gateway.runtime import Runtime
from gateway.settings import RouteSettings
from gateway.telemetry.quote_redaction import without_quotes
from gateway.telemetry.traffic_counters import Finished
from gateway.usage.capture import CapturingWriter
from headgate.shared.asgi import ClientDisconnectedError, Receive, Scope, Send
from headgate.shared.bodies.body_decoder import as_json
from headgate.shared.kv_hint import parse_kv_hint
from inference.protocol import H_KV, H_POLICY, H_PRIORITY, Code, Priority, Tier

log = logging.getLogger("gateway.requests")

S = TypeVar("S", bound=str)
Admit = Callable[[Exchange], tuple[Key, str]]
"""The key of a request and its tenant; raises RequestError (401, 403)."""

Parse = Callable[[bytes, str], ApiRequest | Awaitable[ApiRequest]]
"""Decodes a body, with the digest of the key: see `gateway.apis.public_api.PublicApi.parse`."""

_PRIORITIES, _NORMAL = tuple(Priority), Priority.NORMAL
_LEFT = str(End.CLIENT_LEFT)
_NO_METER = contextlib.nullcontext()

READ_TIMEOUT_HEADER = "x-stainless-read-timeout"
"""Seconds that OpenAI's and Anthropic's Python clients wait for each read."""

TIMEOUT_HEADER = "x-stainless-timeout"
"""Seconds that the JavaScript clients wait for an answer to begin. Python clients send both headers, with a larger
value in this one."""

RETRY_COUNT_HEADER = "x-stainless-retry-count"
"""Number of earlier attempts of the client at the same request."""


@dataclass(slots=True)
class Job:
    """One request with a key, a body and a route. `state` is kept, because a reload may remove the route."""

    parsed: ApiRequest
    state: GatewayState
    match: RouteMatch
    context: RequestContext
    watch: DisconnectWatch
    exchange: Exchange
    record: Record
    send: Send
    queued: float = field(default_factory=time.monotonic)

    @property
    def captures(self) -> bool:
        """Whether the route stores bodies."""
        return self.state.policies[self.match.route].route.capture

    def note_waited(self) -> float:
        """The seconds that the request waited until now; they are not the gateway's own time."""
        waited = time.monotonic() - self.queued
        self.exchange.waited_seconds += waited
        return waited


class RequestApp(ABC):
    """The ASGI application behind one path. `admit` replaces the check of the API key in the headers."""

    takes_tokens = True
    """Whether the request counts towards the key's limit of tokens."""

    def __init__(
        self,
        runtime: Runtime,
        parse: Parse,
        admit: Admit | None = None,
    ) -> None:
        self.runtime = runtime
        self._parse = parse
        self._admit = admit or (lambda exchange: runtime.keys.admit(exchange.headers, "use"))

    @abstractmethod
    async def run(self, job: Job) -> bytes | None:
        """Answers a request after its admission. Returns the body that is still to be sent; None when nothing is."""

    @abstractmethod
    def finish(self, record: Record) -> None:
        """Called at the end of each request."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves one request."""
        runtime, exchange = self.runtime, exchange_of(scope)
        record = Record(exchange.request_id, time.time(), scope["path"])
        if (tracer := runtime.tracer) is not None:
            record.trace = tracer.begin(exchange.headers)
        joined = runtime.join()
        try:
            await self._with_key(exchange, record, receive, send)
        except GatewayError as error:
            record.note_error(error)
            if record.key and not record.route:
                runtime.records.add_refused(record)
            exchange.reason = record.reason if record.reason != "none" else str(error.code)
            exchange.attempts = len(record.attempts)
            raise
        except (ClientDisconnectedError, asyncio.CancelledError):
            record.outcome = _LEFT if record.outcome == "running" else record.outcome
            raise
        finally:
            runtime.leave(joined)
            record.note_end(time.monotonic() - exchange.began)
            self.finish(record)
            if tracer is not None and record.trace is not None and record.trace.is_sampled:
                tracer.export(request_spans(record, runtime.gateway_state.addresses))

    async def _with_key(self, exchange: Exchange, record: Record, receive: Receive, send: Send) -> None:
        """Checks the key of a request and serves it: body, route, chain."""
        runtime, headers, max_body = self.runtime, exchange.headers, self.runtime.config.max_body
        key, tenant = self._admit(exchange)
        record.key = key.name
        runtime.usage.admit(key)
        meter = await runtime.limiter.enter(key, exchange)
        with meter or _NO_METER, runtime.bodies.hold(headers, max_body):
            context = request_context(exchange, key, tenant, meter)
            if (raw := take_buffered_body(exchange, max_body)) is None:
                raw = await read_body(receive, headers, max_body)
            record.priority, record.retries = context.priority, context.retries
            try:
                parsed = self._parse(raw, key.digest.hex())
                if isinstance(parsed, Awaitable):
                    parsed = await parsed
            except RequestError as error:
                record.note_refused_body(raw, error)
                raise
            request = parsed.request
            referenced_bytes = request.size_bytes - len(raw)
            del raw
            if meter is not None and self.takes_tokens:
                await meter.reserve(request)
            record.model, record.stream = request.model, request.stream
            check_allowed(key, request.model)
            match = await find_route(runtime, request.model, exchange)
            state, record.route = runtime.gateway_state, match.route
            parsed = with_parameters_of(state.policies[match.route].route, parsed, record)
            runtime.records.add(record)
            with (
                runtime.bodies.room(referenced_bytes, max_body),
                runtime.open_requests.watch(receive, exchange.wire) as watch,
            ):
                await self._answer(Job(parsed, state, match, context, watch, exchange, record, send))

    async def _answer(self, job: Job) -> None:
        """Waits for admission, runs the chain and sends the answer; a disconnect of the client is not an error."""
        context, record, watch = job.context, job.record, job.watch
        try:
            place = await self.runtime.admission.enter(context.priority, context.silence_seconds)
            record.note_prefill()
            try:
                body = await self.run(job)
            finally:
                self.runtime.admission.leave(place)
            if body is not None:
                watch.release()
                await send_bytes(job.send, 200, body)
        except GatewayError as error:
            record.error = without_quotes(error.message, job.parsed.request.body)
            raise
        except asyncio.CancelledError:
            if not watch.absorb():
                raise
            record.outcome = str(watch.reason)
            if watch.reason is End.SHUTTING_DOWN and not job.exchange.started:
                raise RefusedError(
                    Code.SHUTTING_DOWN, "the gateway is shutting down; retry the request", retry_after=1.0
                ) from None


class Generation(RequestApp):
    """Generates answers."""

    async def run(self, job: Job) -> bytes | None:
        """See `RequestApp`."""
        runtime, request, record = self.runtime, job.parsed.request, job.record
        fetched: Room | None = None
        try:
            if VISION in request.needs:
                fetched = Room(runtime.bodies, runtime.config.max_body)
                request = await runtime.images.inlined(request, fetched)
            runner = ChainRunner(
                job.state, request, job.match, job.context, record, job.exchange.began, job.note_waited(),
                job.watch.cancel_reason,
            )  # fmt: skip
            if request.stream:
                record.outcome = await self._stream(runner, job)
                return None
            body = await self._whole(runner, job)
            record.outcome = "success"
            return body
        finally:
            if fetched is not None:
                fetched.close()

    def finish(self, record: Record) -> None:
        """Counts the request, stores its usage and logs its end."""
        telemetry = self.runtime.telemetry
        if record.outcome == _LEFT:
            telemetry.disconnects.inc()
        tier = record.tier if record.outcome in ("success", "broken") else str(Tier.NONE)
        telemetry.requests(record.route or "none", tier, record.outcome).inc()
        self.runtime.traffic.note(_finished(record, tier), time.time())
        self.runtime.usage.note(record, tier)
        log_end(record)

    async def _stream(self, runner: ChainRunner, job: Job) -> str:
        """Sends a streamed answer; returns its outcome."""
        try:
            answer = await runner.stream()
        finally:
            job.exchange.upstream_seconds = runner.upstream_seconds
        try:
            self._note(runner, job, unsettled=1)
            answer.attempt.reader.mark_sent()
        except BaseException as error:
            await answer.attempt.abandon(error)
            raise
        writer = CapturingWriter(job.parsed.writer()) if job.captures else job.parsed.writer()
        try:
            return await relay(answer, job.send, job.watch, self.runtime.telemetry, writer, job.exchange)
        finally:
            if isinstance(writer, CapturingWriter):
                self._keep_bodies(job, writer.answer())

    async def _whole(self, runner: ChainRunner, job: Job) -> bytes | None:
        """The body of an answer that is one object; None when it is sent already."""
        streams = job.parsed.request.endpoint.streams
        answer: Answer | None = None
        try:
            if streams:
                assembled, answer = await runner.whole()
            else:
                body = job.parsed.unary(await runner.unary())
        finally:  # the time of the providers is not the gateway's own, also when all of them failed
            job.exchange.upstream_seconds = runner.upstream_seconds
        try:
            self._note(runner, job, 0 if answer is None or answer.attempt.is_settled else 1)
            if streams:
                body = job.parsed.whole(assembled)
            if job.captures:
                self._keep_bodies(job, body)
            if is_sent := send_at_once(job.exchange, body):
                job.watch.release()
        finally:
            if answer is not None:
                await answer.conclude()
        return None if is_sent else body

    def _keep_bodies(self, job: Job, answer: bytes) -> None:
        self.runtime.usage.keep_bodies(job.record, dumps(as_json(job.parsed.request.body)), answer)

    def _note(self, runner: ChainRunner, job: Job, unsettled: int) -> None:
        """Fills in the response headers. `unsettled` is the number of attempts that are not in the record yet."""
        candidate, exchange, record = runner.answered_by, job.exchange, job.record
        assert candidate is not None, "a candidate answered"
        exchange.tier, exchange.model, exchange.device = candidate.tier, candidate.name, runner.device
        exchange.node = candidate.node
        exchange.attempts, exchange.reason = len(record.attempts) + unsettled, record.reason
        record.status = 200
        record.overhead_seconds = exchange.overhead_seconds
        self.runtime.telemetry.overhead.observe(record.overhead_seconds)


def with_parameters_of(route: RouteSettings, parsed: ApiRequest, record: Record) -> ApiRequest:
    """`parsed` with the parameters of its route; the record gets the changed ones."""
    rules = route.parameters
    request, record.changed_parameters = with_route_parameters(
        parsed.request, defaults=rules.defaults, overrides=rules.overrides, remove=rules.remove
    )
    return parsed if request is parsed.request else parsed.with_request(request)


def _finished(record: Record, tier: str) -> Finished:
    provider, _, model = (record.answered_by or "").partition("/")
    return Finished(
        record.key, model if provider == LOCAL else "", tier, record.outcome, record.reason,
        record.first_token_seconds, sum(record.tokens),
    )  # fmt: skip


def log_end(record: Record) -> None:
    """Logs the end of a request: at level DEBUG when the first candidate gave the whole answer, else at INFO."""
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


async def find_route(runtime: Runtime, model: str, exchange: Exchange) -> RouteMatch:
    """The route of `model`; refreshes the list of local models before it raises RequestError (404) for an unknown name.

    A reload may remove the route after the next await of the caller.
    """
    if (found := _known_route(runtime, model)) is None:
        began = time.monotonic()
        await runtime.view.refresh()  # the model may be new
        exchange.waited_seconds += time.monotonic() - began
        if (found := _known_route(runtime, model)) is None:
            routes = (route for route in runtime.config.routes if route != "*")
            raise unknown_model(model, {*routes, *runtime.view.models})
    return found


def _known_route(runtime: Runtime, model: str) -> RouteMatch | None:
    """The route of `model`; None if the service does not list it and no cloud or other model may serve it.

    `local/smaller` answers for models that exist, not for misspelled ones.
    """
    view, routes = runtime.view, runtime.config.routes
    found = chain.find_route(model, routes, view.aliases)
    if found is None or found.route != "*" or found.model in view.models or not view.is_complete:
        return found
    only = (f"{LOCAL}/*", f"{LOCAL}/{SMALLER}")
    return None if all(entry in only for entry in routes["*"].chain) else found


def request_context(exchange: Exchange, key: Key, tenant: str, meter: Meter | None) -> RequestContext:
    """The context of a request, from its key and headers; raises RequestError for invalid header values."""
    headers = exchange.headers
    priority = _one_of(headers, H_PRIORITY, _PRIORITIES, _NORMAL)
    policy = _one_of(headers, H_POLICY, ("local-only", "any"), "any")
    gap_seconds = _timeout(headers.get(READ_TIMEOUT_HEADER))
    silence_seconds = _timeout(headers.get(TIMEOUT_HEADER)) if gap_seconds is None else gap_seconds
    retries = _count(headers.get(RETRY_COUNT_HEADER))
    return RequestContext(
        exchange.request_id, tenant, key.cap(priority), policy != "local-only", silence_seconds, retries,
        _kv_hint(headers), gap_seconds, meter, key.budget.is_any or (meter is not None and meter.counts_tokens),
    )  # fmt: skip


def check_allowed(key: Key, model: str) -> None:
    """Raises RequestError (403) unless `key` may use `model`."""
    if not key.may_use(model):
        raise RequestError(
            Code.PERMISSION_DENIED,
            f"the key {key.name!r} may not use the model {model[:100]!r}; it may use: {', '.join(key.models)}",
            param="model",
        )


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


def _kv_hint(headers: Mapping[str, str]) -> str | None:
    """The hint about the KV cache as the client sent it; None without one."""
    if (value := headers.get(H_KV)) is None:
        return None
    try:
        parse_kv_hint(value)
    except ValueError as error:
        raise RequestError(Code.INVALID_REQUEST, f"the header {H_KV} {error}", param=H_KV) from None
    return value


def _timeout(header: str | None) -> float | None:
    """The client's timeout in seconds, minus a margin for the network; None without a usable value."""
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
