"""The routes below `/ui`: the page, its session, its live events, and its actions."""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import time
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import orjson
from fastapi import APIRouter, Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import FileResponse, RedirectResponse, Response, StreamingResponse
from starlette.staticfiles import NotModifiedResponse, StaticFiles
from starlette.types import Scope as HttpScope

import headgate
from gateway.access.authentication import Key, Scope
from gateway.endpoints.model_routes import VIEW_SECONDS, models_of
from gateway.endpoints.operator_routes import reset_breaker, sums
from gateway.errors import RefusedError, RequestError
from gateway.http.http_exchange import exchange_of, read_body
from gateway.http.middleware import PAGE
from gateway.runtime import Runtime
from gateway.ui import operator_actions
from gateway.ui.dashboard import COOKIE, Dashboard, SignedIn
from gateway.ui.live_feed import Viewer
from inference.protocol import Code

log = logging.getLogger("gateway.ui.ui_routes")

CHAT = f"{PAGE}/v1/chat/completions"
MAX_BODY_BYTES = 16384
_NO_STORE = {"cache-control": "no-store"}
_STREAM = {"cache-control": "no-cache", "x-accel-buffering": "no"}

B = TypeVar("B", bound=msgspec.Struct)


class SignIn(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /ui/session`."""

    key: str


class PlanBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of `POST /ui/api/plan`."""

    model: str
    action: str
    device: str | None = None
    node: str = ""


class ActionBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of an action or a recovery: the device of a move, and the node where there are several."""

    device: str | None = None
    node: str = ""


class PageFiles(StaticFiles):
    """Files with ETags of their content, because a build may give a changed file the time and size of the old one."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory=directory, follow_symlink=True)  # installs may link files
        self._etags: dict[str, str] = {}

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        """Path and status of a file; runs in a thread."""
        full_path, status = super().lookup_path(path)
        if status is not None and stat.S_ISREG(status.st_mode):
            self._etags[full_path] = f'"{hashlib.sha256(Path(full_path).read_bytes()).hexdigest()}"'
        return full_path, status

    def file_response(
        self, full_path: str | os.PathLike[str], stat_result: os.stat_result, scope: HttpScope, status_code: int = 200
    ) -> Response:
        """The file, or 304 if the client has it."""
        headers = {"etag": self._etags[str(full_path)]}
        response = FileResponse(full_path, status_code, headers, stat_result=stat_result)
        is_known = self.is_not_modified(response.headers, Headers(scope=scope))
        return NotModifiedResponse(response.headers) if is_known else response


def router(runtime: Runtime, dashboard: Dashboard) -> APIRouter:
    """The routes of the page. They are not part of the public API, so they are not in its OpenAPI document."""
    routes = APIRouter(prefix=PAGE, include_in_schema=False)
    files = PageFiles(Path(__file__).with_name("static"))

    def signed_in(request: Request, scope: Scope = "use") -> SignedIn:
        changes = request.method not in ("GET", "HEAD")
        return dashboard.signed_in(exchange_of(request.scope), scope=scope, changes=changes)

    # --- session -----------------------------------------------------------------------------------------------------
    @routes.post("/session")
    async def sign_in(request: Request) -> Response:
        body = await _body(request, SignIn)
        address = request.client.host if request.client is not None else ""
        signed = dashboard.sign_in(exchange_of(request.scope), body.key, address)
        response = _json(_session(signed))
        response.set_cookie(
            COOKIE, signed.token, path=PAGE, httponly=True, samesite="strict", secure=_is_https(request)
        )
        return response

    @routes.get("/session")
    async def session(request: Request) -> Response:
        return _json(_session(signed_in(request)))

    @routes.delete("/session")
    async def sign_out(request: Request) -> Response:
        dashboard.sign_out(signed_in(request))
        response = _json({})
        response.delete_cookie(COOKIE, path=PAGE, httponly=True, samesite="strict")
        return response

    # --- live state --------------------------------------------------------------------------------------------------
    @routes.get("/api/events")
    async def events(request: Request) -> Response:
        signed = signed_in(request)
        if runtime.is_draining:
            raise RefusedError(Code.SHUTTING_DOWN, "the gateway is shutting down", retry_after=2.0)
        if dashboard.feed.is_full:
            raise RefusedError(Code.QUEUE_FULL, "too many pages are open; close one", retry_after=5.0)
        viewer = Viewer(signed.key.name, signed.is_admin)
        stream = dashboard.feed.listen(viewer, lambda: dashboard.is_valid(signed))
        return StreamingResponse(stream, media_type="text/event-stream", headers=_STREAM)

    @routes.get("/api/requests/{request_id}")
    async def explain(request: Request, request_id: str) -> Response:
        signed = signed_in(request)
        record = runtime.records.get(request_id)
        if record is None or not (signed.is_admin or record.key == signed.key.name):
            raise RequestError(
                Code.NOT_FOUND, f"no record of request {request_id[:128]!r} for this key; only the last ones are kept"
            )
        return _json(record.to_json())

    # --- actions -----------------------------------------------------------------------------------------------------
    @routes.post("/api/plan")
    async def plan(request: Request) -> Response:
        signed_in(request, "admin")
        body = await _body(request, PlanBody)
        node = runtime.inference.node(body.node)
        return _json(await operator_actions.plan(runtime, node, body.model, body.action, body.device))

    @routes.post("/api/models/{model:path}/{action}")
    async def act(request: Request, model: str, action: str) -> Response:
        signed = signed_in(request, "admin")
        body = await _body(request, ActionBody)
        log.info("%s of %s is requested with the key %s", action[:40], model[:100], signed.key.name)
        node = runtime.inference.node(body.node)
        changed = await operator_actions.act(runtime, node, model, action, body.device)
        return _json(dashboard.feed.model(node.name, changed))

    @routes.post("/api/devices/{device}/recover")
    async def recover(request: Request, device: str) -> Response:
        signed = signed_in(request, "admin")
        body = await _body(request, ActionBody)
        log.info("recovery of %s is requested with the key %s", device[:100], signed.key.name)
        return _json(await operator_actions.recover(runtime, runtime.inference.node(body.node), device))

    @routes.post("/api/breakers/{name:path}/reset")
    async def reset(request: Request, name: str) -> Response:
        signed = signed_in(request, "admin")
        log.info("reset of the breaker %s is requested with the key %s", name[:100], signed.key.name)
        return _json(reset_breaker(runtime, name))

    # --- keys and usage ----------------------------------------------------------------------------------------------
    @routes.get("/api/keys")
    async def keys(request: Request) -> Response:
        signed_in(request, "admin")
        return _json({"keys": [_key(runtime, key) for key in runtime.keys.all]})

    @routes.get("/api/usage")
    async def usage(request: Request, by: str = "model", since: str = "", until: str = "") -> Response:
        signed_in(request, "admin")
        return _json(await sums(runtime, by, since, until))

    # --- playground: its path for chat (CHAT) is in `gateway.app`, like the other paths of generation --------------
    @routes.get("/v1/models")
    async def models(request: Request) -> Response:
        key = signed_in(request).key
        await runtime.view.ensure(VIEW_SECONDS)
        return _json({"object": "list", "data": list(models_of(runtime, key).values())})

    # --- files -------------------------------------------------------------------------------------------------------
    @routes.get("")
    async def index(request: Request) -> Response:
        """The page; its address ends in a slash, so that its files have relative addresses."""
        if not request.scope["raw_path"].endswith(b"/"):
            return RedirectResponse(f"{PAGE.rpartition('/')[2]}/")
        return await file(request, "index.html")

    @routes.get("/{path:path}")
    async def file(request: Request, path: str) -> Response:
        try:
            response = await files.get_response(path, request.scope)
        except HTTPException:
            message = f"unknown path {PAGE}/{path[:200]}; the page is at {PAGE}/"
            raise RequestError(Code.NOT_FOUND, message) from None
        response.headers["cache-control"] = "no-cache"
        return response

    return routes


def _session(signed: SignedIn) -> dict[str, Any]:
    return {
        "name": signed.key.name,
        "scopes": sorted(signed.key.scopes, reverse=True),
        "csrf": signed.session.csrf,
        "version": headgate.__version__,
    }


def _key(runtime: Runtime, key: Key) -> dict[str, Any]:
    totals = runtime.traffic.keys.get(key.name)
    spent = runtime.usage.spent_everywhere(key.name, time.time())
    return {
        "name": key.name,
        "scopes": sorted(key.scopes, reverse=True),
        "requests": totals.requests if totals else 0,
        "tokens": totals.tokens if totals else 0,
        "limits": {
            "requests_per_minute": key.limits.requests_per_minute,
            "tokens_per_minute": key.limits.tokens_per_minute,
            "concurrent": key.limits.concurrent,
        },
        "models": list(key.models) or ["all"],
        "budget_per_month": {"dollars": key.budget.dollars, "tokens": key.budget.tokens},
        "used_this_month": {"dollars": round(spent.dollars, 4), "tokens": spent.tokens} if key.budget.is_any else None,
    }


def _is_https(request: Request) -> bool:
    """Whether the browser uses TLS, to the gateway or to a proxy that sends X-Forwarded-Proto."""
    return request.url.scheme == "https" or request.headers.get("x-forwarded-proto", "").lower() == "https"


async def _body(request: Request, kind: type[B]) -> B:
    """The JSON body; an empty one counts as `{}`. Raises RequestError."""
    raw = await read_body(request.receive, exchange_of(request.scope).headers, MAX_BODY_BYTES)
    try:
        return msgspec.json.decode(raw or b"{}", type=kind)
    except msgspec.ValidationError as error:
        raise RequestError(Code.INVALID_REQUEST, f"the body is not valid: {error}") from error
    except msgspec.DecodeError as error:
        raise RequestError(Code.INVALID_JSON, "the body is not valid JSON") from error


def _json(content: Any) -> Response:
    return Response(orjson.dumps(content), headers=_NO_STORE, media_type="application/json")
