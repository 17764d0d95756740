"""A fake inference service in the test process: answers and fails on command, over a real socket."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from inference.errors import InferenceError
from inference.protocol import (
    DONE,
    FULL_FOR,
    H_DEVICE,
    H_PROBE,
    Code,
    ModelState,
    ModelStatus,
    Progress,
    device_frame,
    error_body,
)


@dataclass
class Answer:
    """How one request is answered, in this order of events.

    `comments` progress comments `pause` seconds apart come first; then `words` one delta each, `pause` apart, behind
    `thoughts`, which are reasoning. A request that continues an answer (`answer_so_far`) gets the words that are
    not in it yet. `hold` is awaited before the first word. `refuse` answers with an error status instead
    (with `full_for` where that is a full queue), `error` with an error frame after the words; `cut` drops the
    connection after the words, `stall` goes silent after them, `finish` None leaves the finish reason out, `done` False
    the `[DONE]`. `garbage` is sent as a frame after the words; `raw` is sent instead of them, and ends the answer.
    """

    words: tuple[str, ...] = ("Hello", " there", "!")
    thoughts: tuple[str, ...] = ()
    comments: int = 0
    pause: float = 0.0
    hold: asyncio.Event | None = None
    refuse: Code | None = None
    status: int | None = None
    retry_after: float | None = None
    full_for: tuple[str, ...] = ()
    message: str = "the fake refuses"
    error: Code | None = None
    cut: bool = False
    stall: bool = False
    stall_before_headers: bool = False
    finish: str | None = "stop"
    done: bool = True
    garbage: bytes | None = None
    raw: bytes | None = None
    device: str | None = None
    """The device that it reports: in a header, or in a comment after others."""


@dataclass
class Seen:
    """One received request; `closed` is set when its connection was closed before the end of the answer."""

    path: str
    model: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)


def _choices_of(body: dict[str, Any]) -> int:
    prompt = body.get("prompt")
    prompts = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    return prompts * (body.get("n") or 1)


class FakeInference:
    """An async context manager. `answers` are by model (default `Answer()`), after those in `queue`, which are used
    once. `seen` has every generation request but probes.

    `probes` are the paths of probes. A probe of a model gets its state, or the refusal in `answers`. `ready` is the
    answer of `/readyz`. While it `is_silent`, the list of models and probes of the service get no answer.
    """

    def __init__(self, token: str | None = None) -> None:
        self.epoch = secrets.token_hex(8)
        self.answers: dict[str, Answer] = {}
        self.queue: dict[str, list[Answer]] = {}
        self.models: dict[str, ModelStatus] = {
            name: ModelStatus(
                id=name, state=ModelState.READY, context_length=4096, capabilities=("chat", "completions")
            )
            for name in ("demo", "demo-mini")
        }
        self.counts: dict[str, int] = {}
        """The token count of any prompt, by model; a model that is not listed cannot count."""
        self.counted: list[Mapping[str, Any]] = []
        self.plans: dict[str, dict[str, Any]] = {}
        """Answers of `/memory/plan` by model, instead of one for the model's `fits`."""
        self.count_hold: asyncio.Event | None = None
        """Awaited before a count is returned."""
        self.seen: list[Seen] = []
        self.probes: list[str] = []
        self.listeners: list[asyncio.Queue[bytes]] = []
        self.devices: list[dict[str, Any]] = [{"id": "cpu", "state": "healthy"}]
        self.figures: dict[str, Any] = {}
        """The data of the event `figures`, for listeners that request it."""
        self.operated = ("", "", "")
        """Path, authorization and body of the last operation on a model."""
        self._number = 0
        self.ready = True
        self.is_silent = False
        self.token = token
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        """Base address."""
        return f"http://127.0.0.1:{self.port}"

    def seen_for(self, model: str) -> list[Seen]:
        """Requests for one model."""
        return [seen for seen in self.seen if seen.model == model]

    async def __aenter__(self) -> FakeInference:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        """Listens on `port`, or on a free one."""
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/v1/models", self._models)
        for path in ("chat/completions", "completions"):
            app.router.add_post(f"/v1/{path}", self._generate)
        app.router.add_post("/v1/embeddings", self._embed)
        app.router.add_post("/v1/rerank", self._rerank)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_get("/readyz", self._readyz)
        app.router.add_get("/events", self._events)
        app.router.add_post("/memory/plan", self._plan)
        app.router.add_post("/models/{path:.*}", self._operate)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.05)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port or self.port)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        """Refuses connections from now on and cuts open ones. `start` uses the same port again."""
        if self._runner is not None:
            runner, self._runner = self._runner, None
            await runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        if self.is_silent:
            await asyncio.Event().wait()
        return web.json_response({"object": "list", "data": [model.to_json() for model in self.models.values()]})

    def tell(self, kind: str, data: Mapping[str, Any]) -> None:
        """Sends one event to all listeners."""
        self._number += 1
        for queue in self.listeners:
            queue.put_nowait(_event(self._number, kind, data))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        models = [model.to_json() for model in self.models.values()]
        snapshot = {"models": models, "devices": self.devices, "ready": self.ready, "epoch": self.epoch}
        await response.write(_event(self._number, "snapshot", snapshot))
        if self.figures and request.query.get("figures") == "true":
            await response.write(_event(self._number, "figures", self.figures))
        queue: asyncio.Queue[bytes] = asyncio.Queue()
        self.listeners.append(queue)
        try:
            while True:
                await response.write(await queue.get())
        finally:
            self.listeners.remove(queue)

    async def _readyz(self, request: web.Request) -> web.Response:
        self.probes.append(request.path)
        if self.is_silent:
            await asyncio.Event().wait()
        return web.json_response({"status": "ready" if self.ready else "draining"}, status=200 if self.ready else 503)

    async def _plan(self, request: web.Request) -> web.Response:
        self.probes.append(request.path)
        model = (await request.json())["model"]
        if (plan := self.plans.get(model)) is not None:
            return web.json_response(plan)
        fits = self.models[model].fits
        return web.json_response({"result": "CANT_ACCOMMODATE" if fits is False else "FREE"})

    async def _operate(self, request: web.Request) -> web.Response:
        """An operation of an operator on a model; the last one is in `operated`."""
        self.operated = (request.raw_path, request.headers.get("authorization", ""), await request.text())
        model = request.match_info["path"].rpartition("/")[0]
        return web.json_response(self.models[model].to_json())

    def _probe(self, request: web.Request, model: str) -> web.Response:
        self.probes.append(request.path)
        answer = self.answers.get(model, Answer())
        if answer.refuse is not None or answer.status is not None:
            return _refusal(answer)
        return web.json_response({"headgate": {"probe": str(self.models[model].state)}})

    def _note(self, request: web.Request, body: Mapping[str, Any]) -> tuple[Seen, Answer]:
        model = body["model"]
        seen = Seen(request.path, model, body, {name.lower(): value for name, value in request.headers.items()})
        self.seen.append(seen)
        waiting = self.queue.get(model)
        return seen, waiting.pop(0) if waiting else self.answers.get(model, Answer())

    async def _embed(self, request: web.Request) -> web.StreamResponse:
        seen, answer = self._note(request, await request.json())
        if answer.refuse is not None or answer.status is not None:
            return _refusal(answer)
        try:
            if answer.hold is not None:
                await answer.hold.wait()
        except asyncio.CancelledError:
            seen.closed.set()
            raise
        vector = {"object": "embedding", "index": 0, "embedding": [0.5, 0.25]}
        return web.json_response(
            {"object": "list", "data": [vector], "model": seen.model, "usage": {"total_tokens": 1}}
        )

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.counted.append(body)
        if self.count_hold is not None:
            await self.count_hold.wait()
        count = self.counts.get(body["model"])
        if count is None:
            return web.json_response(error_body(Code.UNSUPPORTED_PARAMETER, "this is not counted"), status=400)
        return web.json_response({"tokens": [], "count": count})

    async def _rerank(self, request: web.Request) -> web.StreamResponse:
        seen, answer = self._note(request, await request.json())
        if answer.refuse is not None or answer.status is not None:
            return _refusal(answer)
        results = [{"index": index, "relevance_score": 0.5} for index in range(len(seen.body["documents"]))]
        return web.json_response(
            {"object": "list", "results": results, "model": seen.model, "usage": {"total_tokens": 1}}
        )

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if request.headers.get(H_PROBE) == "1":
            return self._probe(request, body["model"])
        seen, answer = self._note(request, body)
        if self.token is not None and seen.headers.get("authorization") != f"Bearer {self.token}":
            return web.json_response(error_body(Code.INVALID_API_KEY, "wrong token"), status=401)
        try:
            return await self._play(request, seen, answer)
        except (asyncio.CancelledError, ConnectionError):
            seen.closed.set()
            raise
        finally:
            seen.ended.set()

    async def _play(self, request: web.Request, seen: Seen, answer: Answer) -> web.StreamResponse:
        if seen.model not in self.models:
            return web.json_response(
                error_body(Code.MODEL_NOT_FOUND, f"no model {seen.model}", param="model"), status=404
            )
        if answer.refuse is not None or answer.status is not None:
            return _refusal(answer)
        if answer.stall_before_headers:
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        if answer.device is not None and not answer.comments:
            response.headers[H_DEVICE] = answer.device
        await response.prepare(request)
        for index in range(answer.comments):
            await response.write(Progress("loading", index, 100).frame())
            await asyncio.sleep(answer.pause)
        if answer.hold is not None:
            await answer.hold.wait()
        if answer.device is not None and answer.comments:
            await response.write(device_frame(answer.device))
        if answer.raw is not None:
            await response.write(answer.raw)
            return response
        chat = seen.path.endswith("chat/completions")
        choices = range(_choices_of(seen.body))
        options = seen.body.get("stream_options") or {}
        begin = {"prompt_tokens": 3, "completion_tokens": 0, "total_tokens": 3} if options.get("prompt_usage") else None
        if chat and (answer.words or answer.thoughts):
            for choice in choices:
                await response.write(_chunk(seen.model, chat, role="assistant", index=choice, usage=begin))
                begin = None
        so_far = seen.body.get("answer_so_far") or {}
        for name, words in (("reasoning_content", answer.thoughts), ("content", answer.words)):
            for word in _unsaid(words, so_far.get(name) or ""):
                for choice in choices:
                    await response.write(_chunk(seen.model, chat, text=word, field=name, index=choice))
                if answer.pause:
                    await asyncio.sleep(answer.pause)
        if answer.garbage is not None:
            await response.write(answer.garbage)
        if answer.stall:
            await asyncio.Event().wait()
        if answer.cut:
            assert request.transport is not None
            request.transport.abort()
            return response
        if answer.error is not None:
            error = InferenceError(answer.message, code=answer.error, retry_after=answer.retry_after)
            await response.write(b"data: " + json.dumps(error.body()).encode() + b"\n\n")
            return response
        if answer.finish is not None:
            for choice in choices:
                await response.write(_chunk(seen.model, chat, finish=answer.finish, index=choice))
            count = len(answer.words) + len(answer.thoughts)
            usage = {"prompt_tokens": 3, "completion_tokens": count, "total_tokens": 3 + count}
            await response.write(_chunk(seen.model, chat, usage=usage))
        if answer.done:
            await response.write(DONE)
        return response


def _event(number: int, kind: str, data: Mapping[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'number': number, **data})}\n\n".encode()


def _unsaid(words: tuple[str, ...], text_so_far: str) -> list[str]:
    """The words of an answer that follow the text so far."""
    text = "".join(words)
    if not text_so_far or not text.startswith(text_so_far):
        return [*words]
    cut, rest = 0, []
    for word in words:
        cut += len(word)
        if cut > len(text_so_far):
            rest.append(word[-min(len(word), cut - len(text_so_far)) :])
    return rest


def _refusal(answer: Answer) -> web.Response:
    headers = {} if answer.retry_after is None else {"retry-after": f"{answer.retry_after:g}"}
    if answer.refuse is None:
        return web.json_response({"error": {"message": answer.message}}, status=answer.status or 500, headers=headers)
    details: dict[str, Any] = {"needed_bytes": 1} | ({FULL_FOR: [*answer.full_for]} if answer.full_for else {})
    error = InferenceError(answer.message, code=answer.refuse, retry_after=answer.retry_after, details=details)
    return web.json_response(error.body(), status=answer.status or error.status, headers=headers)


def _chunk(
    model: str,
    chat: bool,
    *,
    role: str | None = None,
    text: str | None = None,
    finish: str | None = None,
    usage: Mapping[str, int] | None = None,
    field: str = "content",
    index: int = 0,
) -> bytes:
    choice: dict[str, Any] = {"index": index, "logprobs": None, "finish_reason": finish}
    if chat:
        choice["delta"] = {"role": role, "content": ""} if role else {field: text} if text is not None else {}
    else:
        choice["text"] = text or ""
    chunk: dict[str, Any] = {
        "id": "chatcmpl-fake",
        "object": "chat.completion.chunk" if chat else "text_completion",
        "created": 1,
        "model": model,
        "choices": [] if usage and not role else [choice],
    }
    if usage:
        chunk["usage"] = dict(usage)
    return b"data: " + json.dumps(chunk, separators=(",", ":")).encode() + b"\n\n"
