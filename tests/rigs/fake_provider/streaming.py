"""Sends the frames of a stream, and breaks it where a fault requires it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import Iterable

from aiohttp import web

from tests.rigs.fake_provider import anthropic_wire, openai_wire
from tests.rigs.fake_provider.records import Work

FOREVER = 3600.0
PING_SECONDS = 0.05


async def stream_frames(work: Work, frames: Iterable[tuple[str, bytes]]) -> web.StreamResponse:
    fault, record = work.fault, work.record
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    response.headers["Cache-Control"] = "no-cache"
    response.headers["x-request-id" if record.dialect != "anthropic" else "request-id"] = f"req_{record.number:06d}"
    await response.prepare(work.request)
    record.status = 200
    kind = fault.kind if fault else ""
    seconds = (fault.seconds or 0.0) if fault else 0.0
    if kind == "slow":
        await asyncio.sleep(seconds)
    contents = 0
    for what, frame in frames:
        if kind in _MID_STREAM and what in ("content", "finish") and fault is not None and contents >= fault.after:
            record.outcome = "faulted"
            if not await _break(work, response, kind):
                return response
        if (what == "done" and kind == "no_done") or (kind == "empty" and what in ("content", "finish", "usage")):
            continue
        if what == "done" and kind == "reset_after_finish":
            record.outcome = "faulted"
            await asyncio.sleep(0.05)  # earlier data must not be lost with the reset
            reset(work.request)
            return response
        if kind == "pace":
            await asyncio.sleep(seconds)
        if kind in ("no_usage", "wrong_usage"):
            if what == "usage" and kind == "no_usage":
                continue
            frame = _without_usage(frame, wrong=kind == "wrong_usage")
        await response.write(frame)
        record.frames_sent += 1
        contents += what == "content"
    await response.write_eof()
    record.outcome = record.outcome or "answered"
    return response


_MID_STREAM = frozenset(("cut", "truncate", "stall", "ping", "malformed", "error_frame"))


async def _break(work: Work, response: web.StreamResponse, kind: str) -> bool:
    """Applies the fault in mid-stream; returns whether the stream continues."""
    if kind == "cut":
        await asyncio.sleep(0.05)  # earlier data must not be lost with the reset
        reset(work.request)
    elif kind == "truncate":
        await response.write_eof()
    elif kind == "stall":
        await asyncio.sleep(FOREVER)
    elif kind == "ping":
        await _ping(response, anthropic_wire.PING if work.record.dialect == "anthropic" else openai_wire.KEEP_ALIVE)
    elif kind == "malformed":
        await response.write(b'data: {"id": "chatcmpl-broken", "choices": [{"delta"\n\n')
    elif work.record.dialect == "anthropic":
        await response.write(anthropic_wire.error_event(anthropic_wire.STREAM_ERROR))
        await response.write_eof()
    else:
        google = openai_wire.google_error(503, "The model is overloaded.")[0]
        payload = google if work.record.dialect == "google" else openai_wire.STREAM_ERROR
        await response.write(f"data: {json.dumps(payload)}\n\n".encode())
        await response.write_eof()
    return False


async def _ping(response: web.StreamResponse, frame: bytes) -> None:
    """Keep-alives until the client disconnects."""
    while True:
        await response.write(frame)
        await asyncio.sleep(PING_SECONDS)


def _without_usage(frame: bytes, *, wrong: bool) -> bytes:
    """The frame with its usage removed, or replaced by an invalid one."""
    head, data = frame.split(b"data: ", 1)
    if not data.startswith(b"{"):
        return frame
    payload = json.loads(data)
    for holder in (payload, payload.get("message", {})):
        if isinstance(holder.get("usage"), dict):
            del holder["usage"]
            if wrong:
                holder["usage"] = {"input_tokens": -1, "output_tokens": "many", "prompt_tokens": "many"}
    return head + b"data: " + json.dumps(payload, separators=(",", ":")).encode() + b"\n\n"


def reset(request: web.Request) -> None:
    """Ends the connection with a TCP reset."""
    transport = request.transport
    if transport is not None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        transport.abort()
