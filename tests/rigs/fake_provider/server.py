"""The fake provider's HTTP server: routes, keys and controls."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any

from aiohttp import web

from tests.rigs.fake_provider import anthropic_wire, openai_wire, prompts, rules, streaming
from tests.rigs.fake_provider.answers import Answers, Prompt
from tests.rigs.fake_provider.faults import Fault, FaultQueue
from tests.rigs.fake_provider.records import Record, Work, recorded
from tests.rigs.fake_provider.streaming import reset, stream_frames

Handle = Callable[[web.Request, Record, str], Awaitable[web.StreamResponse]]
MODELS = ("fake-large", "fake-small")
BODY_LIMIT = 32 * 2**20
AZURE = "/openai/v1"
"""Azure's address: OpenAI's models and rules, and results of a content filter in streams."""
PREFIXES: Mapping[str, str] = {"/v1": "openai", AZURE: "openai", "/v1beta/openai": "google"}


class FakeProvider:
    """The server; port 0 picks a free one. `records`, `faults` and `answers` are what the HTTP controls act on."""

    def __init__(self, host: str = "127.0.0.1", port: int = 0) -> None:
        self._host = host
        self._port = port
        self._numbers = itertools.count(1)
        self.records: list[Record] = []
        self.faults = FaultQueue()
        self.answers = Answers()
        self._arrived = asyncio.Condition()

    # --- for tests in the same process --------------------------------------------------------------------------------
    @property
    def url(self) -> str:
        return f"http://{self._host}:{self._port}"

    @property
    def openai_url(self) -> str:
        return self.url + "/v1"

    @property
    def azure_url(self) -> str:
        return self.url + AZURE

    @property
    def google_url(self) -> str:
        return self.url + "/v1beta/openai/"

    async def record(self, index: int = -1) -> Record:
        """The record at `index` once its request has ended."""
        async with asyncio.timeout(10):
            async with self._arrived:
                await self._arrived.wait_for(lambda: bool(self.records))
            await self.records[index].ended.wait()
        return self.records[index]

    async def arrived(self, count: int) -> None:
        """Waits until `count` requests have begun."""
        async with asyncio.timeout(10), self._arrived:
            await self._arrived.wait_for(lambda: len(self.records) >= count)

    async def __aenter__(self) -> FakeProvider:
        app = web.Application(client_max_size=BODY_LIMIT)
        for prefix, flavor in PREFIXES.items():
            for path, handle in (
                ("/chat/completions", self._chat),
                ("/completions", self._text),
                ("/embeddings", self._embeddings),
            ):
                if flavor == "openai" or path != "/completions":
                    app.router.add_post(prefix + path, self._openai(flavor, handle))
            app.router.add_get(prefix + "/models", self._models)
            app.router.add_get(prefix + "/models/{id:.+}", self._model)
        app.router.add_post("/v1/messages", self._messages)
        app.router.add_post("/v1/messages/count_tokens", self._count_tokens)
        app.router.add_get("/livez", self._livez)
        app.router.add_route("*", "/_fake/{what}", self._control)
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        await site.start()
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._runner.cleanup()

    async def _livez(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"status": "ok"})

    # --- controls -----------------------------------------------------------------------------------------------------
    async def _control(self, request: web.Request) -> web.StreamResponse:
        what = request.match_info["what"]
        if what == "requests" and request.method == "DELETE":
            self.records.clear()
        if what == "requests":
            return web.json_response({"requests": [record.to_json() for record in self.records]})
        if request.method == "DELETE":
            (self.faults if what == "faults" else self.answers).clear()
            return web.json_response({})
        if request.method == "POST":
            given = await request.json()
            try:
                for item in given if isinstance(given, list) else [given]:
                    if what == "faults":
                        self.faults.add(Fault.from_json(item))
                    else:
                        self.answers.set_json(item)
            except (ValueError, KeyError, TypeError) as error:
                return web.json_response({"error": str(error)}, status=400)
        return web.json_response({"faults": [fault.kind for fault in self.faults.waiting]})

    # --- OpenAI and Google --------------------------------------------------------------------------------------------
    def _openai(self, flavor: str, handle: Handle) -> Callable[[web.Request], Any]:
        async def handler(request: web.Request) -> web.StreamResponse:
            raw = await request.read()
            record = await self._begin(request, flavor, _parsed(raw))
            with recorded(record):
                key = request.headers.get("Authorization", "").removeprefix("Bearer ")
                if not key.startswith("fake-"):
                    return self._openai_status(record, 401, key=key)
                if not isinstance(record.body, dict):
                    return _refuse_openai(record, rules.RefusedError("The JSON body could not be parsed."))
                try:
                    return await handle(request, record, flavor)
                except rules.RefusedError as error:
                    return _refuse_openai(record, error)

        return handler

    async def _chat(self, request: web.Request, record: Record, flavor: str) -> web.StreamResponse:
        rules.openai_chat(record.body, flavor)
        work = self._work(request, record, prompts.openai_chat(flavor, record.body))
        stream = openai_wire.azure_stream if request.path.startswith(AZURE) else openai_wire.chat_stream
        return await self._generate(work, stream, openai_wire.chat_answer)

    async def _text(self, request: web.Request, record: Record, flavor: str) -> web.StreamResponse:
        rules.openai_completions(record.body)
        work = self._work(request, record, prompts.openai_text(flavor, record.body))
        return await self._generate(work, openai_wire.text_stream, openai_wire.text_answer)

    async def _embeddings(self, request: web.Request, record: Record, flavor: str) -> web.StreamResponse:
        rules.openai_embeddings(record.body)
        work = self._work(request, record, Prompt(flavor, record.body["model"], "", 0))
        if (refused := await self._before(work)) is not None:
            return refused
        return _answered(record, openai_wire.embeddings(record.body))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        wire = anthropic_wire if "anthropic-version" in request.headers else openai_wire
        return web.json_response(wire.models(MODELS))

    async def _model(self, request: web.Request) -> web.StreamResponse:
        name = request.match_info["id"]
        if name in MODELS:
            return web.json_response(openai_wire.model(name))
        return web.json_response(_filled(openai_wire.STATUS_ERRORS[404], model=name), status=404)

    # --- Anthropic ----------------------------------------------------------------------------------------------------
    async def _messages(self, request: web.Request) -> web.StreamResponse:
        return await self._anthropic(request, self._message)

    async def _count_tokens(self, request: web.Request) -> web.StreamResponse:
        return await self._anthropic(request, self._counted, counting=True)

    async def _anthropic(
        self, request: web.Request, handle: Callable[[Work], Awaitable[web.StreamResponse]], *, counting: bool = False
    ) -> web.StreamResponse:
        raw = await request.read()
        record = await self._begin(request, "anthropic", _parsed(raw))
        with recorded(record):
            key = request.headers.get("x-api-key") or request.headers.get("Authorization", "").removeprefix("Bearer ")
            if not key.startswith("fake-"):
                return _refused(record, anthropic_wire.STATUS_ERRORS[401], 401)
            version = request.headers.get("anthropic-version")
            if version not in rules.ANTHROPIC_VERSIONS:
                return _refused(record, _invalid("anthropic-version: header is required"), 400)
            if not isinstance(record.body, dict):
                return _refused(record, _invalid("The request body is not valid JSON"), 400)
            try:
                rules.anthropic(record.body, version, counting=counting)
            except rules.RefusedError as error:
                return _refused(record, _invalid(error.message), 400)
            return await handle(self._work(request, record, prompts.anthropic(record.body)))

    async def _message(self, work: Work) -> web.StreamResponse:
        return await self._generate(work, anthropic_wire.stream, anthropic_wire.message)

    async def _counted(self, work: Work) -> web.StreamResponse:
        if (refused := await self._before(work)) is not None:
            return refused
        return _answered(work.record, {"input_tokens": work.prompt.tokens})

    # --- one request --------------------------------------------------------------------------------------------------
    async def _begin(self, request: web.Request, dialect: str, body: Any) -> Record:
        record = Record(next(self._numbers), dialect, request.path, dict(request.headers), body, _peer(request))
        async with self._arrived:
            self.records.append(record)
            self._arrived.notify_all()
        return record

    def _work(self, request: web.Request, record: Record, prompt: Prompt) -> Work:
        fault = self.faults.take(prompt.dialect, prompt.model)
        record.fault = fault.kind if fault else None
        return Work(request, record, record.body, prompt, fault)

    async def _before(self, work: Work) -> web.StreamResponse | None:
        """The failure that comes before any answer, if one is due."""
        fault, record, dialect = work.fault, work.record, work.prompt.dialect
        if work.prompt.model.startswith("unknown-"):
            return self._status(work, Fault("status", status=404))
        if fault is None:
            return None
        if fault.kind == "silence":
            await asyncio.sleep(streaming.FOREVER if fault.seconds is None else fault.seconds)
            return None
        if fault.kind == "reset":
            record.outcome = "faulted"
            reset(work.request)
            return web.Response()
        if fault.kind == "status":
            return self._status(work, fault)
        if fault.kind in ("context", "content_policy"):
            return _refused(record, _ERRORS[fault.kind, dialect], 400, outcome="faulted")
        if fault.kind in ("too_large", "no_quota"):
            return _refused(record, _ERRORS[fault.kind, dialect], 429, outcome="faulted")
        if fault.kind == "html":
            record.outcome = "faulted"
            return web.Response(text="<html><body>Sign in to the airport Wi-Fi</body></html>", content_type="text/html")
        return None

    async def _generate(self, work: Work, stream: Callable[..., Any], whole: Callable[..., Any]) -> web.StreamResponse:
        if (refused := await self._before(work)) is not None:
            return refused
        answer = self.answers.answer(work.prompt)
        arguments = (work.record.number, work.body, answer, work.prompt.tokens)
        if not work.body.get("stream"):
            if work.fault is not None and work.fault.seconds:
                await asyncio.sleep(work.fault.seconds)
            return _answered(work.record, whole(*arguments))
        return await stream_frames(work, stream(*arguments))

    def _status(self, work: Work, fault: Fault) -> web.StreamResponse:
        headers = {} if fault.retry_after is None else {"Retry-After": f"{_plain(fault.retry_after)}"}
        model, dialect = work.prompt.model, work.prompt.dialect
        if dialect == "anthropic":
            payload = anthropic_wire.STATUS_ERRORS.get(fault.status, anthropic_wire.STATUS_ERRORS[500])
            return _refused(work.record, _filled(payload, model=model), fault.status, headers, outcome="faulted")
        return self._openai_status(work.record, fault.status, headers, model=model, retry=fault.retry_after)

    def _openai_status(
        self,
        record: Record,
        status: int,
        headers: Mapping[str, str] | None = None,
        *,
        key: str = "",
        model: str = "",
        retry: float | str | None = None,
    ) -> web.StreamResponse:
        if record.dialect == "google":
            if status == 401:
                return _refused(record, openai_wire.GOOGLE_BAD_KEY, 400)
            delay = retry if isinstance(retry, (int, float)) else None
            payload: Any = openai_wire.google_error(status, f"{model}: error {status}", retry_delay=delay)
            headers = {}  # Google sends the retry delay in the body only
        else:
            payload = _filled(
                openai_wire.STATUS_ERRORS.get(status, openai_wire.STATUS_ERRORS[500]), key=key, model=model
            )
        return _refused(record, payload, status, headers, outcome="refused" if status == 401 else "faulted")


_ERRORS: Mapping[tuple[str, str], Any] = {
    ("context", "openai"): openai_wire.CONTEXT,
    ("context", "google"): openai_wire.GOOGLE_CONTEXT,
    ("context", "anthropic"): anthropic_wire.CONTEXT,
    ("content_policy", "openai"): openai_wire.CONTENT_POLICY,
    ("content_policy", "google"): openai_wire.google_error(400, "The prompt was blocked: PROHIBITED_CONTENT"),
    ("content_policy", "anthropic"): anthropic_wire.CONTENT_POLICY,
    ("too_large", "openai"): openai_wire.TOO_LARGE,
    ("no_quota", "openai"): openai_wire.NO_QUOTA,
}


# --- small things -----------------------------------------------------------------------------------------------------
def _peer(request: web.Request) -> int:
    address = request.transport.get_extra_info("peername") if request.transport else None
    return int(address[1]) if address else 0


def _parsed(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return None


def _plain(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, (int, float)) else value


def _filled(payload: Any, **words: str) -> Any:
    text = json.dumps(payload)
    for name, word in words.items():
        text = text.replace("{" + name + "}", word)
    return json.loads(text)


def _invalid(message: str) -> dict[str, Any]:
    return anthropic_wire.error("invalid_request_error", message)


def _answered(record: Record, payload: Any) -> web.Response:
    record.status, record.outcome = 200, "answered"
    return web.json_response(payload)


def _refused(
    record: Record, payload: Any, status: int, headers: Mapping[str, str] | None = None, outcome: str = "refused"
) -> web.Response:
    record.status, record.outcome = status, outcome
    return web.json_response(payload, status=status, headers=headers or {})


def _refuse_openai(record: Record, error: rules.RefusedError) -> web.Response:
    if record.dialect == "google":
        return _refused(record, openai_wire.google_error(400, error.message), 400)
    return _refused(record, openai_wire.error(error.message, param=error.param, code=error.code), 400)
