"""A worker without llama.cpp: speaks the link, answers canned SSE, and fails as FAKE_WORKER describes.

A test run starts hundreds of these workers, so it imports only the link and the standard library.

FAKE_WORKER is JSON, model id -> behavior (`exit` and `hold`: also below the id `*`):
`load_seconds`, `fail` (cause), `fail_on` (device -> cause),
`most` (setting of the grant -> above it, the load fails with `oom_load`), `exit` (status before hello),
`abort` (text, then SIGABRT while loading), `silent_after` (seconds after ready until heartbeats stop),
`step_seconds` (what beats claim), `buffers` (bytes of KV reported), `grow` (extra bytes from ready until
retained prefixes are dropped), `abort_answer` (text, then SIGABRT instead of an answer), `poison` (a text whose arrival
in a body aborts it; `last_words`: what it writes then; `after_chunks`: after this number of chunks), `answer_seconds`
(before the first token), `chunks`, `chunk_seconds`, `ignore_stop`, `saved` (bytes of sequences that an offload saves
into its arena), `kv` (rows of its sequences; null: it is too busy to list them), `kv_labels` (labels of its
sequences), `kv_counts` (fields of KvCounts in its beats), `offload`, `hold` and `restore` (`die` or `hang` then),
`grant_file` (where its grant is written).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference import worker_link


async def main() -> None:
    sock = socket.socket(fileno=int(os.environ[worker_link.LINK_FD_ENV]))
    listener = socket.socket(fileno=int(os.environ[worker_link.SOCKET_FD_ENV]))
    assert int(os.environ[worker_link.PARENT_ENV]) == os.getppid()
    behaviors = json.loads(os.environ.get("FAKE_WORKER", "{}"))
    reader, writer = await asyncio.open_connection(sock=sock)

    def send(message: worker_link.Message) -> None:
        writer.write(worker_link.encode(message))

    if "exit" in behaviors.get("*", {}):
        sys.exit(behaviors["*"]["exit"])
    send(worker_link.Hello(os.getpid(), "fake"))
    grant = worker_link.decode(await reader.readline())
    is_kept = isinstance(grant, worker_link.Hold)
    if isinstance(grant, worker_link.Hold):
        name = Path(grant.path).stem
        await _misbehave(behaviors.get(name, behaviors.get("*", {})).get("hold"))
        send(worker_link.Held(Path(grant.path).stat().st_size))
        grant = worker_link.decode(await reader.readline())
    assert isinstance(grant, worker_link.Grant)
    how: dict[str, Any] = behaviors.get(grant.model_id, {})
    if is_kept:
        await _misbehave(how.get("restore"))
    if path := how.get("grant_file"):
        Path(path).write_bytes(worker_link.encode(grant))
    hoard: list[bytes] = []
    orders = asyncio.create_task(_obey(reader, send, how, hoard))
    await _load(send, how)
    if cause := how.get("fail") or how.get("fail_on", {}).get(grant.devices[0].id):
        send(worker_link.Failed(cause, f"ordered to fail with {cause}"))
        await writer.drain()
        sys.exit(1)
    if above := [name for name, most in how.get("most", {}).items() if getattr(grant, name) > most]:
        send(worker_link.Failed("oom_load", f"{above[0]} is more than memory allows"))
        await writer.drain()
        sys.exit(1)
    if text := how.get("abort"):
        _abort(text)
    site = Site(grant.model_id, how)
    server = await asyncio.start_unix_server(site.converse, sock=listener)
    hoard.append(b"x" * how.get("grow", 0))  # at once, because readers may look right after `ready`
    send(_ready(grant, how))
    beats = asyncio.create_task(_beat(send, site))
    await asyncio.wait({orders, beats}, return_when=asyncio.FIRST_COMPLETED)
    server.close()


async def _load(send: Any, how: dict[str, Any]) -> None:
    seconds = how.get("load_seconds", 0.0)
    steps = max(1, int(seconds / 0.1))
    for step in range(steps):
        await asyncio.sleep(seconds / steps)
        send(worker_link.LoadProgress((step + 1) / steps))


async def _beat(send: Any, site: Site) -> None:
    elapsed = 0.0
    if labels := site.how.get("kv_labels"):
        send(worker_link.KvLabels(tuple(labels), ()))
    while elapsed < site.how.get("silent_after", 1e9):
        kv = worker_link.KvCounts(**site.how.get("kv_counts", {}))
        send(worker_link.Heartbeat(site.how.get("step_seconds"), 1, site.active, 0, 10, 10, kv=kv))
        await asyncio.sleep(worker_link.BEAT_SECONDS)
        elapsed += worker_link.BEAT_SECONDS
    await asyncio.Event().wait()


async def _obey(reader: asyncio.StreamReader, send: Any, how: dict[str, Any], hoard: list[bytes]) -> None:
    while line := await reader.readline():
        message = worker_link.decode(line)
        if isinstance(message, worker_link.Stop) and not how.get("ignore_stop"):
            os._exit(0)
        elif isinstance(message, worker_link.Forget):
            hoard.clear()
        elif isinstance(message, worker_link.Offload):
            await _misbehave(how.get("offload"))
            saved = how.get("saved", 0)
            if saved:
                os.pwrite(int(os.environ[worker_link.ARENA_FD_ENV]), b"x" * saved, 0)
            send(worker_link.Offloaded(saved, 1, 10))
            if not message.stays:
                await asyncio.sleep(0)  # lets pending messages be sent
                os._exit(0)
        elif isinstance(message, worker_link.Grant):
            await _misbehave(how.get("restore"))
            send(_ready(message, how, stored_tokens=10 if how.get("saved") else 0))
    os._exit(1)


def _ready(grant: worker_link.Grant, how: dict[str, Any], stored_tokens: int = 0) -> worker_link.Ready:
    device, amount = next(iter(dict(grant.reserved_bytes).items()))
    return worker_link.Ready(
        load_seconds=0.01,
        buffers=(worker_link.Buffer(device, "kv", how.get("buffers", max(0, amount - 2**26))),),
        context_length=grant.context_length,
        capabilities=("chat", "completions"),
        stored_tokens=stored_tokens,
    )


def _abort(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGABRT)


async def _misbehave(how: str | None) -> None:
    if how == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "hang":
        await asyncio.Event().wait()


@dataclass
class Site:
    """Answers requests: HTTP/1.1 with bodies of a known length."""

    model: str
    how: Mapping[str, Any]
    active: int = 0

    async def converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serves one connection; a client that disconnects ends its answer."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            await self._answers(reader, writer)
        writer.close()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first = asyncio.ensure_future(reader.read(1))
        while byte := await first:
            head = (byte + await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower().split("\r\n")
            length = sum(int(line.split(":")[1]) for line in head if line.startswith("content-length:"))
            body = await reader.readexactly(length)
            first = asyncio.ensure_future(reader.read(1))
            answer = asyncio.create_task(self._answer(head[0].split()[1], body, writer))
            await asyncio.wait({first, answer}, return_when=asyncio.FIRST_COMPLETED)
            if first.done() and (first.exception() or not first.result()):
                answer.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await answer

    async def _answer(self, path: str, raw: bytes, writer: asyncio.StreamWriter) -> None:
        if path == "/tokenize":
            return _tell(writer, 200, {"tokens": [1, 2, 3]})
        if path.startswith("/kv/"):
            return self._operate(writer, path.removeprefix("/kv/"), raw)
        body = json.loads(raw)
        if body.get("max_tokens") == -1:
            error = {"message": "max_tokens", "type": "invalid_request_error", "param": "max_tokens", "code": "x"}
            return _tell(writer, 400, {"error": error})
        if text := self.how.get("abort_answer"):
            _abort(text)
        is_poison = self.how.get("poison", "\0").encode() in raw
        if is_poison and not self.how.get("after_chunks"):
            self._die()
        self.active += 1
        try:
            await asyncio.sleep(self.how.get("answer_seconds", 0.0))
            if not body.get("stream"):
                return _tell(writer, 200, {"model": self.model, "text": f"{self.model} answers"})
            return await self._stream(writer, dies=is_poison)
        finally:
            self.active -= 1

    def _operate(self, writer: asyncio.StreamWriter, what: str, raw: bytes) -> None:
        """Lists, clears or pins the sequences in `kv`."""
        rows: list[dict[str, Any]] | None = self.how.get("kv", [])
        if rows is None:
            return _tell(writer, 504, {"error": {"message": "busy", "code": "deadline_exceeded"}})
        if what == "sequences":
            return _tell(writer, 200, {"sequences": rows})
        body = json.loads(raw)
        tenant = body.get("tenant")
        chosen = [row for row in rows if row["id"] in body.get("ids", ()) or row["tenant"] == tenant]
        if what == "clear":
            chosen = chosen if tenant is not None else rows[:]
            rows[:] = [row for row in rows if row not in chosen]
            return _tell(writer, 200, {"cleared": len(chosen)})
        return _tell(writer, 200, {"pinned": len(chosen)})

    def _die(self) -> None:
        _abort(self.how.get("last_words", "GGML_ASSERT(n > 0) failed"))

    async def _stream(self, writer: asyncio.StreamWriter, *, dies: bool) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for number in range(self.how.get("chunks", 3)):
            await _chunk(writer, f'data: {{"model": "{self.model}", "n": {number}}}\n\n'.encode())
            await asyncio.sleep(self.how.get("chunk_seconds", 0.0))
            if dies and number + 1 == self.how["after_chunks"]:
                self._die()
        await _chunk(writer, b"data: [DONE]\n\n")
        await _chunk(writer, b"")


async def _chunk(writer: asyncio.StreamWriter, data: bytes) -> None:
    writer.write(b"%x\r\n%b\r\n" % (len(data), data))
    await writer.drain()


def _tell(writer: asyncio.StreamWriter, status: int, content: Mapping[str, Any]) -> None:
    body = json.dumps(content).encode()
    head = f"HTTP/1.1 {status} -\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)


if __name__ == "__main__":
    asyncio.run(main())
