"""The hot path: passes a request to the worker of its model and relays the answer as bytes.

The body is read once; only `model` and `stream` are decoded. When the client disconnects, the worker's request ends at
once. If the model is not ready, a stream begins after COMMENT_SECONDS with progress comments; errors before that
have an HTTP status, later ones are error frames.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING

from headgate.shared import hop, wire
from headgate.shared.asgi import (
    BodyTimeoutError,
    BodyTooLargeError,
    ClientDisconnectedError,
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
from headgate.shared.traces.span_ids import new_span_id
from inference.api.relay_spans import RelayTrace, Wait, relay_spans
from inference.api.relayed_request import RelayedRequest, read_request
from inference.api.reruns import CrashedError, Rerun
from inference.authority.leases import Lease, Ticket
from inference.authority.lifecycle import ACCEPTING
from inference.authority.quarantine import SUSPICIOUS, Crash
from inference.authority.shell import Authority
from inference.authority.views.inference_metrics import OTHER_MODEL
from inference.errors import BrokenBuild, InferenceError, InvalidRequestError, ModelFailed
from inference.estimate import cold_tokenizer
from inference.protocol import (
    H_DEVICE,
    H_REQUEST_ID,
    PROGRESS_INTERVAL_SECONDS,
    Code,
    ExitCause,
    Progress,
    device_frame,
)
from inference.workers.exit_cause import WorkerExit

if TYPE_CHECKING:
    from headgate.shared.traces.otlp_tracer import Tracer

log = logging.getLogger(__name__)

COMMENT_SECONDS = PROGRESS_INTERVAL_SECONDS * 0.75
"""Interval of comments on a waiting stream: shorter than the documented one, because a busy machine may be late."""
_EXIT_SECONDS = 0.5
BODY_SECONDS = 60.0
"""Time limit for the arrival of a body."""
CONNECT_SECONDS = 5.0
CLIENT_LEFT = "client_left"
"""The outcome of requests whose client disconnected, as in the metrics of the gateway."""
_PASSED_BACK = ("content-type", "retry-after", "x-should-retry")
_FRAME_END = b"\n\n"
_DATA = b"\ndata:"


class _WorkerEndedError(Exception):
    """The worker ended before it answered, but not because of the request, which is sent once more."""


class Relay:
    """An ASGI endpoint that passes requests to the worker of their model."""

    def __init__(self, authority: Authority, *, max_body_bytes: int, tracer: Tracer | None = None) -> None:
        """`tracer`: None without traces."""
        self._authority = authority
        self._tracer = tracer
        self._max_body_bytes = max_body_bytes
        self._cold_tokenizer = cold_tokenizer.ColdTokenizer()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; raises only cancellations."""
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
        """The body; None when the client disconnected or the request was refused."""
        try:
            return b"".join(await read_body(receive, headers, self._max_body_bytes, BODY_SECONDS))
        except ClientDisconnectedError:
            pass
        except BodyTimeoutError:
            await out.fail(InvalidRequestError(f"the body did not arrive within {BODY_SECONDS:g} s"))
        except BodyTooLargeError:
            problem = f"the body is larger than the limit of {self._max_body_bytes / 2**20:g} MiB"
            await out.refuse_body(InvalidRequestError(problem, code=Code.BODY_TOO_LARGE), receive)
        return None

    async def _answer(self, path: str, headers: Headers, body: bytes, out: Response) -> None:
        model, outcome = OTHER_MODEL, CLIENT_LEFT
        is_counted = True
        trace = self._begin_trace(path, headers)
        try:
            request = await read_request(path, headers, body, trace)
            is_counted = not request.probe and not request.only_tokenizes
            model = self._authority.resolve(request.model)
            if request.probe and await self._probe(model, out):
                return
            if request.only_tokenizes and not self._authority.is_ready(model):
                await self._tokenize(model, request, out)
                return
            try:
                status = await self._serve(model, request, out)
            except _WorkerEndedError:
                model = self._authority.resolve(request.model)  # a reload may have removed it and added it again
                if request.probe and await self._probe(model, out):
                    return
                status = await self._serve(model, request, out)
            outcome = "success" if status == 200 else f"status_{status}"
        except InferenceError as error:
            outcome = str(error.code)
            await out.fail(error)
        except _WorkerEndedError:
            outcome = str(Code.MODEL_FAILED)
            await out.fail(ModelFailed("the worker of the model ended twice before it answered", retry_after=1.0))
        except OSError:
            log.debug("request %s: the client disconnected", out.request_id)
        except Exception:
            outcome = str(Code.INTERNAL_ERROR)
            log.exception("request %s failed: internal error", out.request_id)
            await out.fail(InferenceError("internal error of the inference service; see its log"))
        finally:
            if is_counted:
                self._authority.metrics.requests.labels(model, outcome).inc()
            if trace is not None and trace.span.is_sampled and self._tracer is not None and is_counted:
                trace.model, trace.outcome = model, outcome
                self._tracer.export(relay_spans(trace, self._authority.now, new_span_id))

    def _begin_trace(self, path: str, headers: Headers) -> RelayTrace | None:
        if self._tracer is None:
            return None
        return RelayTrace(self._tracer.begin(headers), path, time.time(), self._authority.now)

    async def _tokenize(self, model: str, request: RelayedRequest, out: Response) -> None:
        limit = self._authority.state.settings.estimate_timeout_seconds
        seconds = limit if request.deadline_seconds is None else min(limit, request.deadline_seconds)
        spec = self._authority.model(model).spec
        status, answer = await self._cold_tokenizer.ask(spec, request.path, request.body, seconds=seconds)
        await out.whole(status, [(b"content-type", b"application/json")], answer)

    async def _serve(self, model: str, request: RelayedRequest, out: Response) -> int:
        """Relays the answer of the model; returns its status."""
        rerun = Rerun(self._authority, request.path, request.body)
        await rerun.admit(model)
        while True:
            try:
                status = await self._run(rerun, model, request, out)
            except CrashedError as error:
                if not await rerun.crashed(model, error) or request.probe:
                    raise error.error from error
                model = self._authority.resolve(request.model)
            else:
                if status == 200 and not request.only_tokenizes:
                    rerun.answered(model)
                return status

    async def _run(self, rerun: Rerun, model: str, request: RelayedRequest, out: Response) -> int:
        """Relays the answer of one worker; returns its status."""
        now = asyncio.get_running_loop().time()
        with self._authority.ask(
            model,
            priority=request.priority,
            seconds=request.seconds_left(now) if rerun.crashes else request.deadline_seconds,
            counts_as_use=not request.probe and not request.only_tokenizes,
            alone=rerun.alone,
            retries=rerun.crashes,
            conversation=request.conversation,
            any_replica=True,
        ) as ticket:
            wait = None if request.trace is None else request.trace.begin_wait(self._authority.now)
            lease = await (self._wait_with_progress(ticket, out) if request.stream else ticket.wait())
            assert lease is not None
            if wait is not None:
                self._note_lease(wait, lease)
            await rerun.admit(model)  # the same request may be in quarantine meanwhile
            alone = lease.alone
            lease.shape = lambda: {**request.shape(), "alone": alone}
            answer = self._stream if request.stream else self._whole
            status = await answer(lease, request, out)
            lease.release(completed=status == 200 and not request.only_tokenizes)
            return status

    def _note_lease(self, wait: Wait, lease: Lease) -> None:
        """Notes the end of a wait, and when the worker loaded its model."""
        wait.ended_at = self._authority.now
        if (worker := self._authority.state.workers.get(lease.record.worker)) is not None:
            wait.load_began_at, wait.load_ended_at = worker.began_at, worker.ready_at

    async def _probe(self, model: str, out: Response) -> bool:
        """Answers a probe, which must not load a model; False if the model is ready and can serve it."""
        if self._authority.is_ready(model):
            return False
        if (error := self._authority.refusal(model)) is not None:
            raise error
        await out.json(200, {"headgate": {"probe": str(self._authority.status(model).state)}})
        return True

    # --- waiting ---------------------------------------------------------------------------------------------------
    async def _wait_with_progress(self, ticket: Ticket, out: Response) -> Lease:
        while True:
            lease = await ticket.wait(COMMENT_SECONDS)
            if lease is not None:
                return lease
            await _send_progress(out, ticket.progress())

    # --- forwarding ------------------------------------------------------------------------------------------------
    async def _stream(self, lease: Lease, request: RelayedRequest, out: Response) -> int:
        """Relays the worker's answer and returns its status."""
        asking = asyncio.ensure_future(_ask(lease, request))
        answer: Answer | None = None
        flow: Flow | None = None
        try:
            while not asking.done():
                await asyncio.wait({asking}, timeout=COMMENT_SECONDS)
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

    async def _whole(self, lease: Lease, request: RelayedRequest, out: Response) -> int:
        try:
            answer = await _ask(lease, request)
            try:
                await self._pass_whole(answer.status, _back(lease, answer.headers), await answer.whole(), out)
                return answer.status
            finally:
                answer.close()
        except (BrokenError, _UnreachableError) as error:
            raise await self._broken(lease, error, relayed=False) from error

    @staticmethod
    async def _pass_whole(status: int, headers: list[tuple[bytes, bytes]], answer: bytes, out: Response) -> None:
        """Sends an answer without a stream as a whole, so that a crash before its end results in an error response."""
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
        if not relayed and (exit.cause is ExitCause.REQUESTED or self._goes_on(model, exit)):
            return _WorkerEndedError()
        if exit.cause is ExitCause.DEVICE_LOST:
            return self._authority.loss(model, lease.devices, exit.message)
        cause = exit.cause
        if cause is ExitCause.BROKEN_BUILD:
            if not await self._authority.build_computes():
                return BrokenBuild()
            cause = ExitCause.ASSERT  # as later exits of this kind are classified
        failure = ModelFailed(
            f"the worker of {model!r} ended before the answer did: {exit.message}",
            retry_after=self._authority.model(model).backoff.delay_seconds or None,
            details={"cause": str(exit.cause)},
        )
        if cause not in SUSPICIOUS:
            return failure
        crash = Crash(cause, exit.message, alone=lease.alone, unexplained=exit.silent_abort)
        return CrashedError(crash, failure, relayed=relayed)

    def _goes_on(self, model: str, exit: WorkerExit) -> bool:
        """Whether another replica takes the requests: the worker ended for a reason outside of them."""
        if exit.starved or exit.cause not in (ExitCause.KILLED, ExitCause.DEVICE_LOST):
            return False
        others = self._authority.siblings(model)
        return any(other.state in ACCEPTING for other in others)


async def _send_progress(out: Response, progress: Progress) -> None:
    """Sends a progress comment, and starts the stream if it has not started."""
    await out.begin_stream()
    await out.data(progress.frame())


class _UnreachableError(Exception):
    """The worker's socket accepted no connection."""


async def _ask(lease: Lease, request: RelayedRequest) -> Answer:
    """The worker's answer after its headers have arrived; raises BrokenError or _UnreachableError."""
    worker = Hop(hop.unix(str(lease.process.socket_path)), "worker")
    headers = request.worker_headers(asyncio.get_running_loop().time())
    try:
        return await worker.post(request.path, request.body, headers, CONNECT_SECONDS)
    except OSError as error:
        raise _UnreachableError(str(error)) from error


def _back(lease: Lease, headers: Headers) -> list[tuple[bytes, bytes]]:
    passed = [
        (name.encode(), value.encode("latin-1")) for name in _PASSED_BACK if (value := headers.get(name)) is not None
    ]
    return [*passed, (H_DEVICE.encode(), _where(lease).encode())]


def _where(lease: Lease) -> str:
    """The devices that the worker computes on."""
    return ",".join(lease.devices)


class Flow:
    """The pieces of one stream between a worker and its client.

    While the client reads more slowly than the worker writes, reading from the worker is paused.
    """

    def __init__(self, answer: Answer, response: Response) -> None:
        self.has_begun = False
        """Whether anything except comments was relayed."""
        self._answer = answer
        self._response = response
        self._kept: list[bytes] = []
        self._last = _FRAME_END
        self._ended = False
        self._error: BrokenError | None = None
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Returns after the last piece; raises BrokenError."""
        self._answer.listen(self._on_piece, self._on_end)
        while True:
            await self._changed.wait()
            self._changed.clear()
            while self._kept:
                await self._response.data(self._kept[0])
                del self._kept[0]  # removed after sending, so that pieces that arrive meanwhile keep their order
            if self._error is not None:
                if not self._last.endswith(_FRAME_END):
                    await self._response.data(_FRAME_END)  # separates the error from a partial frame
                raise self._error
            if self._ended:
                return
            self._answer.resume()

    def _on_piece(self, piece: bytes) -> None:
        if not self.has_begun:
            self.has_begun = not piece.startswith(b":") or _DATA in piece
        self._last = piece
        if not self._kept and self._response.takes_pieces:
            self._response.piece(piece)
        else:
            self._kept.append(piece)
            self._answer.pause()
            self._changed.set()

    def _on_end(self, error: BrokenError | None) -> None:
        self._ended, self._error = error is None, error
        self._changed.set()
