"""The hot path: passes a request to the worker of its model and relays the answer as bytes.

The body is read once; only `model` and `stream` are decoded. When the client disconnects, the worker's request ends at
once. If the model is not ready, a stream begins after FIRST_WORD_SECONDS with progress comments; errors before that
have an HTTP status, later ones are error frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from headgate.shared import hop, wire
from headgate.shared.asgi import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientLeftError,
    Headers,
    Receive,
    Response,
    Scope,
    Send,
    headers_of,
    read_body,
    request_id,
    wait_for_disconnect,
)
from headgate.shared.hop import Answer, BrokenError, Hop
from inference.api.flow_control import Flow
from inference.api.request_shape import Envelope, envelope_of, shape_of
from inference.api.reruns import CrashedError, Rerun
from inference.authority.leases import Lease, Ticket
from inference.authority.placement.plan import Refusal
from inference.authority.quarantine import SUSPICIOUS, Crash
from inference.authority.shell import Authority
from inference.errors import BrokenBuild, InferenceError, InvalidRequestError, ModelFailed
from inference.estimate import cold_tokenizer
from inference.protocol import (
    H_DEADLINE,
    H_DEVICE,
    H_KV,
    H_PRIORITY,
    H_PROBE,
    H_REQUEST_ID,
    H_STREAM_INTERVAL,
    H_TENANT,
    PROGRESS_INTERVAL_SECONDS,
    Code,
    ExitCause,
    ModelState,
    Priority,
    Progress,
    device_frame,
)

log = logging.getLogger(__name__)

WORD_SECONDS = PROGRESS_INTERVAL_SECONDS * 0.75
"""Interval of comments on a waiting stream: shorter than documented, so that a busy machine keeps it."""
_BIG_BODY_BYTES = 2**20
"""Larger bodies are parsed in a thread, so that they do not delay other streams."""
_EXIT_SECONDS = 0.5
BODY_SECONDS = 60.0
"""Time for a body to arrive."""
CONNECT_SECONDS = 5.0
_PASSED_ON = (H_TENANT, H_KV, H_PRIORITY, H_PROBE, H_STREAM_INTERVAL)
_PASSED_BACK = ("content-type", "retry-after", "x-should-retry")


@dataclass(frozen=True, slots=True)
class RelayedRequest:
    """The fields of a request that the relay uses."""

    model: str
    stream: bool
    priority: Priority
    deadline_seconds: float | None
    probe: bool
    arrived_at: float
    """on the event loop's clock"""
    envelope: Envelope
    """of the body, for a crash record"""

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        if self.deadline_seconds is None:
            return None
        return max(0.0, self.arrived_at + self.deadline_seconds - now)

    def milliseconds_left(self, now: float) -> int | None:
        """Milliseconds until the deadline, at least 1; None without a deadline."""
        left = self.seconds_left(now)
        return None if left is None else max(1, int(left * 1000))


class _WorkerLeftError(Exception):
    """The worker ended normally before it took the request, which is sent to another worker once."""


class Relay:
    """An ASGI endpoint that passes requests to the worker of their model."""

    def __init__(self, authority: Authority, *, max_body_bytes: int) -> None:
        self._authority = authority
        self._max_body_bytes = max_body_bytes
        self._vocabulary = cold_tokenizer.Vocabulary()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; raises nothing except cancellations."""
        headers = {**headers_of(scope), H_REQUEST_ID: request_id(scope)}
        out = Response(send, headers[H_REQUEST_ID], wire.take(scope))
        body = await self._body(headers, receive, out)
        if body is None:
            return
        work = asyncio.ensure_future(self._answer(scope["path"], headers, body, out))
        gone = asyncio.ensure_future(wait_for_disconnect(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):  # the client disconnected
                await work

    async def _body(self, headers: Headers, receive: Receive, out: Response) -> bytes | None:
        """The body; None when the client left or the request was refused."""
        try:
            return b"".join(await read_body(receive, headers, self._max_body_bytes, BODY_SECONDS))
        except ClientLeftError:
            pass
        except BodyTimeoutError:
            await out.fail(InvalidRequestError(f"the body did not arrive within {BODY_SECONDS:g} s"))
        except BodyTooLargeError:
            problem = f"the body is larger than the limit of {self._max_body_bytes / 2**20:g} MiB"
            await out.refuse_body(InvalidRequestError(problem, code=Code.BODY_TOO_LARGE), receive)
        return None

    async def _answer(self, path: str, headers: Headers, body: bytes, out: Response) -> None:
        try:
            request = await self._read(path, headers, body)
            model = self._authority.resolve(request.model)
            if request.probe and await self._probe(model, out):
                return
            if path in cold_tokenizer.PATHS and not self._is_ready(model):
                await self._count(model, request, path, body, out)
                return
            try:
                await self._serve(model, request, path, headers, body, out)
            except _WorkerLeftError:
                model = self._authority.resolve(request.model)  # a reload may have removed it and added it again
                if request.probe and await self._probe(model, out):
                    return
                await self._serve(model, request, path, headers, body, out)
        except InferenceError as error:
            await out.fail(error)
        except _WorkerLeftError:
            await out.fail(ModelFailed("the model was unloaded twice before it took the request", retry_after=1.0))
        except OSError:
            log.debug("the client of %s disconnected", out.request_id)
        except Exception:
            log.exception("request %s failed: internal error", out.request_id)
            await out.fail(InferenceError("internal error of the inference service; see its log"))

    def _is_ready(self, model: str) -> bool:
        return self._authority.model(model).state in (ModelState.READY, ModelState.BUSY)

    async def _count(self, model: str, request: RelayedRequest, path: str, body: bytes, out: Response) -> None:
        limit = self._authority.state.settings.estimate_timeout_seconds
        seconds = limit if request.deadline_seconds is None else min(limit, request.deadline_seconds)
        status, answer = await self._vocabulary.ask(self._authority.model(model).spec, path, body, seconds=seconds)
        await out.whole(status, [(b"content-type", b"application/json")], answer)

    async def _serve(
        self, model: str, request: RelayedRequest, path: str, headers: Headers, body: bytes, out: Response
    ) -> None:
        rerun = Rerun(self._authority, path, body)
        await rerun.admit(model)
        while True:
            try:
                has_computed = await self._run(rerun, model, request, path, headers, body, out)
            except CrashedError as error:
                if not await rerun.crashed(model, error) or request.probe:
                    raise error.error from error
                model = self._authority.resolve(request.model)
            else:
                if has_computed:
                    rerun.answered(model)
                return

    async def _run(
        self, rerun: Rerun, model: str, request: RelayedRequest, path: str, headers: Headers, body: bytes, out: Response
    ) -> bool:
        """Whether the model computed the answer: not for an error, and not for tokenize requests."""
        now = asyncio.get_running_loop().time()
        with self._authority.ask(
            model,
            priority=request.priority,
            seconds=request.seconds_left(now) if rerun.crashes else request.deadline_seconds,
            counts=not request.probe and path not in cold_tokenizer.PATHS,
            alone=rerun.alone,
            retries=rerun.crashes,
        ) as ticket:
            lease = await (self._wait_with_progress(ticket, out) if request.stream else ticket.wait())
            assert lease is not None
            await rerun.admit(model)  # the same request may have been convicted meanwhile
            lease.shape = functools.partial(_shape, path, len(body), request.envelope, lease.alone)
            answer = self._stream if request.stream else self._whole
            has_computed = (
                await answer(lease, request, path, headers, body, out) == 200 and path not in cold_tokenizer.PATHS
            )
            lease.release(completed=has_computed)
            return has_computed

    async def _read(self, path: str, headers: Headers, body: bytes) -> RelayedRequest:
        arrived_at = asyncio.get_running_loop().time()
        envelope = await asyncio.to_thread(_envelope, body) if len(body) > _BIG_BODY_BYTES else _envelope(body)
        model, stream = msgspec.json.decode(envelope.model), msgspec.json.decode(envelope.stream)
        if not isinstance(model, str) or not model:
            raise InvalidRequestError("`model` must be a string, the id of a model; see /v1/models", param="model")
        if stream is not None and not isinstance(stream, bool):
            raise InvalidRequestError("`stream` must be true or false", param="stream")
        probe = headers.get(H_PROBE) == "1"
        return RelayedRequest(model, bool(stream), _priority(headers), _deadline(headers), probe, arrived_at, envelope)

    async def _probe(self, model: str, out: Response) -> bool:
        """Answers a probe, which must not load a model; False if the model is ready and can serve it."""
        if self._is_ready(model):
            return False
        state, prospect = self._authority.model(model).state, self._authority.prospect(model)
        if state is ModelState.FAILED and prospect is not None:
            raise self._authority.resting(model)
        if state is ModelState.COLD and isinstance(prospect, Refusal) and not prospect.waits_for:
            raise self._authority.refusal(model, prospect)
        await out.json(200, {"headgate": {"probe": str(state)}})
        return True

    # --- waiting ---------------------------------------------------------------------------------------------------
    async def _wait_with_progress(self, ticket: Ticket, out: Response) -> Lease:
        while True:
            lease = await ticket.wait(WORD_SECONDS)
            if lease is not None:
                return lease
            await _send_progress(out, ticket.progress())

    # --- forwarding ------------------------------------------------------------------------------------------------
    async def _stream(
        self, lease: Lease, request: RelayedRequest, path: str, headers: Headers, body: bytes, out: Response
    ) -> int:
        """Relays the worker's answer and returns its status."""
        asking = asyncio.ensure_future(_ask(lease, request, path, headers, body))
        answer: Answer | None = None
        flow: Flow | None = None
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=WORD_SECONDS)
                if not asking.done():
                    await _send_progress(out, Progress("queued", 0))
            answer = asking.result()
            if answer.status != 200 or not answer.headers.get("content-type", "").startswith("text/event-stream"):
                await self._pass_whole(answer.status, _back(lease, answer.headers), await answer.whole(), out)
            else:
                if out.started:
                    await out.data(device_frame(_where(lease)))
                await out.begin(200, _back(lease, answer.headers))
                flow = Flow(answer, out)
                await flow.run()
                await out.end()
        except (BrokenError, _UnreachableError) as error:
            raise await self._broken(lease, error, relayed=flow is not None and flow.has_begun) from error
        else:
            return answer.status
        finally:
            if answer is not None:
                answer.close()
            else:
                asking.cancel()
                with contextlib.suppress(asyncio.CancelledError, BrokenError, _UnreachableError):  # reported above
                    (await asking).close()

    async def _whole(
        self, lease: Lease, request: RelayedRequest, path: str, headers: Headers, body: bytes, out: Response
    ) -> int:
        try:
            response = await lease.session.post(path, data=body, headers=_passed(request, headers))
            try:
                await self._pass_whole(response.status, _back(lease, response.headers), await response.read(), out)
                return response.status
            finally:
                response.close()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise await self._broken(lease, error, relayed=False) from error

    @staticmethod
    async def _pass_whole(status: int, headers: list[tuple[bytes, bytes]], answer: bytes, out: Response) -> None:
        """Sends an answer without a stream as a whole, so that a crash in the middle gives a proper error."""
        if out.started:
            await out.data(b"data: " + answer.replace(b"\n", b"") + b"\n\n")
            await out.end()
        else:
            await out.whole(status, headers, answer)

    async def _broken(self, lease: Lease, error: Exception, *, relayed: bool) -> Exception:
        """The error for a broken connection to a worker; waits a moment for the worker's exit."""
        worker, model = lease.process, lease.model
        await asyncio.wait({worker.exited}, timeout=_EXIT_SECONDS)
        if not worker.exited.done():
            return ModelFailed(f"the worker of {model!r} closed the connection ({type(error).__name__})")
        exit = worker.exited.result()
        if exit.cause is ExitCause.REQUESTED and not relayed:
            return _WorkerLeftError()
        if exit.cause is ExitCause.DEVICE_LOST:
            return self._authority.loss(model, lease.devices, exit.message)
        cause = exit.cause
        if cause is ExitCause.BROKEN_BUILD:
            if not await self._authority.build_holds():
                return BrokenBuild()
            cause = ExitCause.ASSERT  # like every later exit of this kind
        failure = ModelFailed(
            f"the worker of {model!r} ended before the answer did: {exit.message}",
            retry_after=self._authority.model(model).backoff.delay_seconds or None,
            details={"cause": str(exit.cause)},
        )
        if cause not in SUSPICIOUS:
            return failure
        crash = Crash(cause, exit.message, alone=lease.alone, unexplained=exit.silent_abort)
        return CrashedError(crash, failure, relayed=relayed)


async def _send_progress(out: Response, progress: Progress) -> None:
    """Sends a progress comment, and starts the stream if it has not started."""
    await out.begin_stream()
    await out.data(progress.frame())


class _UnreachableError(Exception):
    """The worker's socket accepted no connection."""


async def _ask(lease: Lease, request: RelayedRequest, path: str, headers: Headers, body: bytes) -> Answer:
    """The worker's answer after its headers have arrived; raises BrokenError or _UnreachableError."""
    worker = Hop(hop.unix(str(lease.process.socket_path)), "worker")
    try:
        return await worker.post(path, body, _passed(request, headers), CONNECT_SECONDS)
    except OSError as error:
        raise _UnreachableError(str(error)) from error


def _passed(request: RelayedRequest, headers: Headers) -> dict[str, str]:
    """The headers of the request to a worker."""
    passed = {name: value for name in _PASSED_ON if (value := headers.get(name)) is not None}
    passed[H_REQUEST_ID] = headers[H_REQUEST_ID]
    passed["content-type"] = "application/json"
    if (left := request.milliseconds_left(asyncio.get_running_loop().time())) is not None:
        passed[H_DEADLINE] = str(left)
    return passed


def _back(lease: Lease, headers: Headers) -> list[tuple[bytes, bytes]]:
    passed = [
        (name.encode(), value.encode("latin-1")) for name in _PASSED_BACK if (value := headers.get(name)) is not None
    ]
    return [*passed, (H_DEVICE.encode(), _where(lease).encode())]


def _where(lease: Lease) -> str:
    """The devices that the worker computes on."""
    return ",".join(lease.devices)


def _envelope(body: bytes) -> Envelope:
    try:
        return envelope_of(body)
    except msgspec.ValidationError as error:
        raise InvalidRequestError('the body must be a JSON object such as {"model": ...}') from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}", code=Code.INVALID_JSON) from error


def _shape(path: str, body_bytes: int, envelope: Envelope, alone: bool) -> dict[str, Any]:
    return {**shape_of(path, body_bytes, envelope), "alone": alone}


def _priority(headers: Headers) -> Priority:
    value = headers.get(H_PRIORITY)
    if value is None:
        return Priority.NORMAL
    try:
        return Priority(value.lower())
    except ValueError:
        names = ", ".join(Priority)
        raise InvalidRequestError(f"{H_PRIORITY} is one of {names}, not {value[:50]!r}", param=H_PRIORITY) from None


def _deadline(headers: Headers) -> float | None:
    value = headers.get(H_DEADLINE)
    if value is None:
        return None
    if not value.isascii() or not value.isdigit() or len(value) > 12:
        raise InvalidRequestError(f"{H_DEADLINE} is a number of milliseconds, not {value[:50]!r}", param=H_DEADLINE)
    return int(value) / 1000
