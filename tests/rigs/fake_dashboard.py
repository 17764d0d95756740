"""A gateway for the page of the dashboard: it serves `gateway/ui/static` and plays the event stream and the actions.

It runs on a thread of its own, so that tests use the synchronous API of Playwright.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.rigs import page_records

STATIC = Path(__file__).resolve().parents[2] / "gateway" / "ui" / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "font-src 'self'; form-action 'none'; frame-ancestors 'none'; base-uri 'none'"
)
KEYS = {"admin-key": ("ops", ["use", "admin"]), "use-key": ("reader", ["use"])}
PATIENCE_SECONDS = 10.0

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _error(status: int, message: str, code: str = "invalid_request") -> web.Response:
    return web.json_response(
        {"error": {"message": message, "type": "error", "param": None, "code": code}}, status=status
    )


class FakeDashboard:
    """The seam between page and gateway, with scripted answers."""

    def __init__(self) -> None:
        self._sessions: dict[str, str] = {}
        self._streams: set[asyncio.Queue[bytes | None]] = set()
        self._number = 0
        self._chat_gate = asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self.reset()

    def reset(self) -> None:
        """Forgets all but the sessions, for the next test."""
        self.snapshot: Json = page_records.snapshot(time.time())
        self.plans: dict[str, Json] = {}
        """Answers of `/ui/api/plan` by action; others are allowed with one sentence."""
        self.failures: dict[str, tuple[int, str]] = {}
        """Status and message by action."""
        self.done: list[tuple[str, ...]] = []
        """What was carried out."""
        self.planned: list[Json] = []
        self.usage: Json | None = None
        self.chat: list[str] = []
        """Frames of the next streamed answer."""
        self.chats: list[Json] = []
        self.left_chats = 0
        self.is_down = False
        """While true the stream is refused."""
        self._chat_gate.set()

    # --- control of tests ----------------------------------------------------------------------------------------
    def start(self) -> FakeDashboard:
        """Serves on a free port; `url` is its page."""
        self._thread.start()
        self._run(self._serve())
        return self

    def stop(self) -> None:
        """Ends all streams and the thread."""
        self.cut()
        self.release_chats()
        self._run(self._runner.cleanup())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_SECONDS)
        self._loop.close()

    def push(self, kind: str, data: Json) -> None:
        """Sends an event to every page."""
        self.push_all([(kind, data)])

    def push_all(self, events: list[tuple[str, Json]]) -> None:
        """Sends events in one piece."""
        frames = b"".join(self._frame(kind, data) for kind, data in events)
        self._loop.call_soon_threadsafe(self._send, frames)

    def push_paced(self, events: list[tuple[str, Json]], batch: int = 100, gap_seconds: float = 0.005) -> None:
        """Sends events in batches, and returns when all are sent."""
        for start in range(0, len(events), batch):
            self.push_all(events[start : start + batch])
            time.sleep(gap_seconds)

    def hold_chats(self) -> None:
        """From now on answers stop in their middle until `release_chats`."""
        self._loop.call_soon_threadsafe(self._chat_gate.clear)

    def release_chats(self) -> None:
        """Lets stopped answers continue."""
        self._loop.call_soon_threadsafe(self._chat_gate.set)

    def cut(self) -> None:
        """Ends every stream."""
        self._loop.call_soon_threadsafe(self._send, None)

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_SECONDS)

    def _frame(self, kind: str, data: Json) -> bytes:
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps({**data, 'number': self._number})}\n\n".encode()

    def _send(self, frames: bytes | None) -> None:
        for queue in self._streams:
            queue.put_nowait(frames)

    # --- server --------------------------------------------------------------------------------------------------
    async def _serve(self) -> None:
        app = web.Application(middlewares=[self._admit])
        app.add_routes(
            [
                web.get("/ui/", self._page),
                web.route("*", "/ui/session", self._session),
                web.get("/ui/api/events", self._events),
                web.post("/ui/api/plan", self._plan),
                web.post("/ui/api/models/{id:.+}/{action}", self._act),
                web.post("/ui/api/breakers/{id:.+}/reset", self._reset),
                web.post("/ui/api/devices/{id}/recover", self._recover),
                web.get("/ui/api/requests/{id}", self._explain),
                web.get("/ui/api/keys", self._keys),
                web.get("/ui/api/usage", self._usage),
                web.get("/ui/v1/models", self._routes),
                web.post("/ui/v1/chat/completions", self._chat),
                web.get("/ui/{path:.+}", self._page),
            ]
        )
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}/ui/"

    @web.middleware
    async def _admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        path = request.path
        if path.startswith(("/ui/api/", "/ui/v1/")):
            name = self._sessions.get(request.cookies.get("headgate_session", ""))
            if name is None:
                return _error(401, "the session has ended; sign in again", "invalid_api_key")
            if request.method != "GET" and request.headers.get("x-csrf-token") != "token-of-" + name:
                return _error(403, "the token of the session is missing", "permission_denied")
            if path.startswith("/ui/api/") and request.method != "GET" and name != "ops":
                return _error(403, "the key lacks the scope 'admin'", "permission_denied")
        return await handler(request)

    async def _page(self, request: web.Request) -> web.StreamResponse:
        path = STATIC / (request.match_info.get("path") or "index.html")
        if not path.is_file() or STATIC not in path.resolve().parents:
            return _error(404, "no such file", "not_found")
        headers = {
            "content-security-policy": POLICY,
            "x-content-type-options": "nosniff",
            "referrer-policy": "no-referrer",
            "cache-control": "max-age=3600",  # each test opens the page anew
        }
        return web.FileResponse(path, headers=headers)

    async def _session(self, request: web.Request) -> web.Response:
        token = request.cookies.get("headgate_session", "")
        if request.method == "DELETE":
            self._sessions.pop(token, None)
            return web.Response(status=204)
        if request.method == "POST":
            key = (await request.json())["key"]
            if key not in KEYS:
                return _error(401, "this key is not known; `headgate key show` prints one", "invalid_api_key")
            token = secrets.token_hex(16)
            self._sessions[token] = KEYS[key][0]
        name = self._sessions.get(token)
        if name is None:
            return _error(401, "sign in first", "invalid_api_key")
        scopes = next(scopes for owner, scopes in KEYS.values() if owner == name)
        answer = web.json_response({"name": name, "scopes": scopes, "csrf": "token-of-" + name, "version": "0.1.0"})
        if request.method == "POST":
            answer.set_cookie("headgate_session", token, path="/ui", httponly=True, samesite="Strict")
        return answer

    def sign_out_all(self) -> None:
        """Ends all sessions, as a revoked key does."""
        self._sessions.clear()

    async def _events(self, request: web.Request) -> web.StreamResponse:
        if self.is_down:
            return _error(503, "down", "shutting_down")
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", "cache-control": "no-store"})
        await answer.prepare(request)
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._streams.add(queue)
        try:
            await answer.write(self._frame("snapshot", self.snapshot))
            while (frames := await queue.get()) is not None:
                await answer.write(frames)
        except ConnectionError:
            pass
        finally:
            self._streams.discard(queue)
        return answer

    async def _plan(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.planned.append(body)
        base = {"action": body["action"], "model": body["model"], "allowed": True, "plan": None}
        to = f" on {body['device']}" if body.get("device") else ""
        base["sentences"] = [f"Would {body['action']} {body['model']}{to}."]
        return web.json_response(base | self.plans.get(body["action"], {}))

    async def _act(self, request: web.Request) -> web.Response:
        id, action = request.match_info["id"], request.match_info["action"]
        if action in self.failures:
            status, message = self.failures[action]
            return _error(status, message, "memory_limit_exceeded")
        body = await request.json()
        device, node = body.get("device"), body.get("node")
        self.done.append((id, action, *filter(None, (device, node))))
        state = "ready" if action in ("load", "move", "restart") else "warm" if action == "offload" else "cold"
        changed = page_records.model(id, state) | ({"node": node} if node else {})
        self._send(self._frame("model", {"model": changed}))
        return web.json_response(changed)

    async def _reset(self, request: web.Request) -> web.Response:
        name = request.match_info["id"]
        self.done.append(("reset", name))
        self._send(self._frame("breaker", {"breaker": page_records.breaker(name)}))
        return web.json_response({"name": name, "state": "closed"})

    async def _recover(self, request: web.Request) -> web.Response:
        node = (await request.json()).get("node")
        self.done.append(("recover", request.match_info["id"], *filter(None, (node,))))
        return web.json_response({"device": request.match_info["id"]})

    async def _explain(self, request: web.Request) -> web.Response:
        id = request.match_info["id"]
        if not id.startswith("req-"):
            return _error(404, f"no record of request {id!r}; only the last 1000 requests are kept", "not_found")
        return web.json_response(page_records.explain(id, time.time() - 30))

    async def _keys(self, request: web.Request) -> web.Response:
        limits = {"requests_per_minute": 60, "tokens_per_minute": None, "concurrent": 4}
        budget = {
            "models": ["demo", "gpt-*"],
            "budget_per_month": {"dollars": 20, "tokens": None},
            "used_this_month": {"dollars": 1.25, "tokens": 3456},
        }
        rows = [
            {"name": name, "scopes": scopes, "requests": 12, "tokens": 3456, "limits": limits, **budget}
            for name, scopes in KEYS.values()
        ]
        return web.json_response({"keys": rows})

    async def _usage(self, request: web.Request) -> web.Response:
        if self.usage is None:
            return _error(404, "usage is not stored", "not_found")
        return web.json_response(self.usage)

    async def _routes(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"object": "list", "data": [{"id": "demo", "object": "model"}, {"id": "qwen-7b", "object": "model"}]}
        )

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.chats.append(body)
        headers = {
            "x-headgate-tier": "local",
            "x-headgate-model": "local/demo",
            "x-headgate-attempts": "1",
            "x-request-id": "req-play-1",
        }
        if not body.get("stream"):
            message = {"role": "assistant", "content": "A whole answer."}
            whole = {
                "choices": [{"message": message, "finish_reason": "stop"}],
                "usage": {"prompt_tokens": 5, "completion_tokens": 4},
            }
            return web.json_response(whole, headers=headers)
        answer = web.StreamResponse(headers={"content-type": "text/event-stream", **headers})
        await answer.prepare(request)
        frames = self.chat or text_frames(["Head", "gate is ", "a gateway."])
        try:
            for index, frame in enumerate(frames):
                if index == len(frames) // 2:
                    await self._chat_gate.wait()
                await answer.write(frame.encode())
        except (ConnectionError, asyncio.CancelledError):
            self.left_chats += 1
            raise
        return answer


def chunk(delta: Json, finish: str | None = None, usage: Json | None = None) -> str:
    """A frame of a streamed answer."""
    body: Json = {"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}
    if usage is not None:
        body["usage"] = usage
    return f"data: {json.dumps(body)}\n\n"


def text_frames(parts: list[str]) -> list[str]:
    """A streamed answer of these parts."""
    usage = {"prompt_tokens": 9, "completion_tokens": len(parts)}
    return [
        ": headgate queued 2\n\n",
        *(chunk({"content": part}) for part in parts),
        chunk({}, "stop", usage),
        "data: [DONE]\n\n",
    ]
