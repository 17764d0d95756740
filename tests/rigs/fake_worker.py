"""A worker without llama.cpp: speaks the link, answers canned SSE, and misbehaves as FAKE_WORKER tells it to.

FAKE_WORKER is JSON, model id -> behavior: `load_seconds`, `fail` (cause), `fail_on` (device -> cause),
`most` (setting of the grant -> above it, the load fails with `oom_load`), `exit` (status before hello),
`abort` (text, then SIGABRT while loading), `silent_after` (beats stop so many seconds after ready),
`step_seconds` (what beats claim), `buffers` (bytes of KV reported), `grow` (bytes it has too many once it is ready),
`abort_answer` (text, then SIGABRT instead of an answer), `answer_seconds` (before the first token), `chunks`,
`chunk_seconds`, `ignore_stop`, `saved` (bytes of sequences that an offload saves), `offload`, `hold` and `restore`
(`die` or `hang` then), `grant_file` (where its grant is written).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

from aiohttp import web

from inference.worker import link


async def main() -> None:
    sock = socket.socket(fileno=int(os.environ[link.LINK_FD_ENV]))
    listener = socket.socket(fileno=int(os.environ[link.SOCKET_FD_ENV]))
    assert int(os.environ[link.PARENT_ENV]) == os.getppid()
    behaviors = json.loads(os.environ.get("FAKE_WORKER", "{}"))
    reader, writer = await asyncio.open_connection(sock=sock)

    def send(message: link.Message) -> None:
        writer.write(link.encode(message))

    if "exit" in behaviors.get("*", {}):
        sys.exit(behaviors["*"]["exit"])
    send(link.Hello(os.getpid(), "fake"))
    grant = link.decode(await reader.readline())
    is_kept = isinstance(grant, link.Hold)
    if isinstance(grant, link.Hold):
        name = Path(grant.path).stem
        await _misbehave(behaviors.get(name, behaviors.get("*", {})).get("hold"))
        send(link.Held(Path(grant.path).stat().st_size))
        grant = link.decode(await reader.readline())
    assert isinstance(grant, link.Grant)
    how: dict[str, Any] = behaviors.get(grant.model_id, {})
    if is_kept:
        await _misbehave(how.get("restore"))
    if path := how.get("grant_file"):
        Path(path).write_bytes(link.encode(grant))
    orders = asyncio.create_task(_obey(reader, send, how))
    await _load(send, how)
    if cause := how.get("fail") or how.get("fail_on", {}).get(grant.devices[0].id):
        send(link.Failed(cause, f"told to fail with {cause}"))
        await writer.drain()
        sys.exit(1)
    if above := [name for name, most in how.get("most", {}).items() if getattr(grant, name) > most]:
        send(link.Failed("oom_load", f"{above[0]} is more than memory allows"))
        await writer.drain()
        sys.exit(1)
    if text := how.get("abort"):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    app = web.Application()
    app["how"], app["model"], app["active"] = how, grant.model_id, [0]
    for path in ("/v1/chat/completions", "/v1/completions"):
        app.router.add_post(path, _answer)
    app.router.add_post("/tokenize", _tokenize)
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.SockSite(runner, listener).start()
    hoard = b"x" * how.get("grow", 0)  # at once for who looks, which happens from `ready` on
    send(_ready(grant, how))
    beats = asyncio.create_task(_beat(send, app, how))
    await asyncio.wait({orders, beats}, return_when=asyncio.FIRST_COMPLETED)
    await runner.cleanup()
    del hoard


async def _load(send: Any, how: dict[str, Any]) -> None:
    seconds = how.get("load_seconds", 0.0)
    steps = max(1, int(seconds / 0.1))
    for step in range(steps):
        await asyncio.sleep(seconds / steps)
        send(link.LoadProgress((step + 1) / steps))


async def _beat(send: Any, app: web.Application, how: dict[str, Any]) -> None:
    elapsed = 0.0
    while elapsed < how.get("silent_after", 1e9):
        send(link.Beat(how.get("step_seconds"), 1, app["active"][0], 0, 10, 10))
        await asyncio.sleep(link.BEAT_SECONDS)
        elapsed += link.BEAT_SECONDS
    await asyncio.Event().wait()


async def _obey(reader: asyncio.StreamReader, send: Any, how: dict[str, Any]) -> None:
    while line := await reader.readline():
        message = link.decode(line)
        if isinstance(message, link.Stop) and not how.get("ignore_stop"):
            os._exit(0)
        elif isinstance(message, link.Offload):
            await _misbehave(how.get("offload"))
            send(link.Offloaded(min(message.most_bytes, how.get("saved", 0)), 1, 10))
            if not message.stays:
                await asyncio.sleep(0)  # what was sent is on its way
                os._exit(0)
        elif isinstance(message, link.Grant):
            await _misbehave(how.get("restore"))
            send(_ready(message, how))
    os._exit(1)


def _ready(grant: link.Grant, how: dict[str, Any]) -> link.Ready:
    device, amount = next(iter(dict(grant.reserved_bytes).items()))
    return link.Ready(
        load_seconds=0.01,
        buffers=(link.Buffer(device, "kv", how.get("buffers", max(0, amount - 2**26))),),
        context_length=grant.context_length,
        capabilities=("chat", "completions"),
    )


async def _misbehave(how: str | None) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        await asyncio.Event().wait()


async def _answer(request: web.Request) -> web.StreamResponse:
    how, model = request.app["how"], request.app["model"]
    body = await request.json()
    if body.get("max_tokens") == -1:
        error = {
            "error": {"message": "max_tokens", "type": "invalid_request_error", "param": "max_tokens", "code": "x"}
        }
        return web.json_response(error, status=400)
    if text := how.get("abort_answer"):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGABRT)
    request.app["active"][0] += 1
    try:
        await asyncio.sleep(how.get("answer_seconds", 0.0))
        if not body.get("stream"):
            return web.json_response({"model": model, "text": f"{model} answers", "seen": dict(request.headers)})
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for number in range(how.get("chunks", 3)):
            await response.write(f'data: {{"model": "{model}", "n": {number}}}\n\n'.encode())
            await asyncio.sleep(how.get("chunk_seconds", 0.0))
        await response.write(b"data: [DONE]\n\n")
        return response
    finally:
        request.app["active"][0] -= 1


async def _tokenize(request: web.Request) -> web.Response:
    return web.json_response({"tokens": [1, 2, 3]})


if __name__ == "__main__":
    asyncio.run(main())
