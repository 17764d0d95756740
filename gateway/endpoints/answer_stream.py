"""Relays a committed answer to its client.

A stream ends in the end mark of its API (`[DONE]` of OpenAI's) only after a finish reason, else in an error frame.
"""

from __future__ import annotations

import asyncio
import time

from gateway.apis.openai.frames import Comment, Done, Frame
from gateway.apis.public_api import Writer
from gateway.breaker.outcome import End
from gateway.errors import UpstreamError, UpstreamKind
from gateway.http.http_exchange import DisconnectWatch, Exchange, send_head
from gateway.routing.resume_runner import Answer
from gateway.routing.stream_reader import ExpiredError
from gateway.telemetry.gateway_metrics import Telemetry
from headgate.shared.asgi import Send
from inference.protocol import Code

_HEADERS = [
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


async def relay(
    answer: Answer,
    send: Send,
    watch: DisconnectWatch,
    telemetry: Telemetry,
    writer: Writer,
    exchange: Exchange,
) -> str:
    """Sends status, headers and the rest of `answer`, settles it and closes it; returns the name of its outcome.

    With an `exchange.wire`, frames of a local answer are written to the connection as they arrive, and this task
    runs again only when the answer ends or is interrupted.
    Returns `client_left` after a disconnect, and `shutting_down` after `interrupt_all`; other cancellations propagate.
    """
    wire = exchange.wire
    before = 0.0

    def observe(first: Frame) -> None:
        nonlocal before
        now = time.perf_counter()
        if not isinstance(first, Comment):
            telemetry.inter_token.observe(now - before)
        before = now

    def write_now(frames: list[Frame]) -> bool:
        """Writes frames that arrive while this task waits; after False `answer.next` returns them."""
        if wire is None or not wire.is_free or isinstance(frames[-1], Done):
            return False
        observe(frames[0])
        answer.attempt.note_content()
        wire.write(writer.write(frames))
        return True

    async def end_with(last: bytes) -> None:
        watch.release()
        if wire is not None and wire.is_free:
            wire.end(last)
        else:
            await send({"type": "http.response.body", "body": last})

    try:
        await send_head(send, exchange, [(b"content-type", writer.media_type), *_HEADERS])
        frames = answer.first_frames()
        before = time.perf_counter()
        answer.pass_on(write_now)
        while not isinstance(frames[-1], Done):
            body = writer.write(frames)
            if wire is not None and wire.is_free:
                wire.write(body)
            elif body:
                await send({"type": "http.response.body", "body": body, "more_body": True})
            frames = await answer.next()
            observe(frames[0])
        answer.attempt.succeed()
        answer.note_end()
        await end_with(writer.write(frames[:-1]) + writer.end())
    except asyncio.CancelledError as error:
        answer.attempt.settle_error(error)
        if not watch.absorb():
            raise
        if watch.reason is End.CLIENT_LEFT:
            return str(End.CLIENT_LEFT)
        message = "the gateway is shutting down; repeat the request for the whole answer"
        await end_with(writer.end_with_error(Code.SHUTTING_DOWN, message))
        return str(End.SHUTTING_DOWN)
    except (UpstreamError, ExpiredError) as error:
        _, _, message = answer.attempt.settle_error(error)
        name = answer.attempt.candidate.name
        await end_with(writer.end_with_error(_code_of(error), f"the answer of {name} was interrupted: {message}"))
        return "broken"
    except Exception as error:
        answer.attempt.settle_error(error)  # logs the traceback of this defect
        await end_with(writer.end_with_error(Code.INTERNAL_ERROR, "internal error of the gateway"))
        return "broken"
    finally:
        answer.forget_sink()
        await answer.attempt.close()
    return "success"


def _code_of(error: UpstreamError | ExpiredError) -> str:
    if isinstance(error, ExpiredError) or error.kind is UpstreamKind.TIMEOUT:
        return Code.DEADLINE_EXCEEDED
    return error.code or Code.MODEL_FAILED
