"""Assembles the inference service and runs it until a signal.

`serve` defines the order: the port is opened first, and `/readyz` is 503 while devices are found. At the end `/readyz`
becomes 503 before the port closes, and streams end before workers.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client.metrics_core import GaugeMetricFamily
from starlette.exceptions import HTTPException
from starlette.routing import Route

from headgate.shared.asgi import App, Receive, Response, Scope, Send, error_headers, request_id
from headgate.shared.configfile import meant
from headgate.shared.errors import ConfigError, Exit
from headgate.shared.state_directory import INFERENCE_TOKEN, StateDir, load_environ
from headgate.shared.traces import tracing
from headgate.shared.traces.span_ids import new_span_id
from headgate.shared.wire import QuietServer, server_config
from inference import settings
from inference.api import kv_routes, local_model_routes, memory_routes, pull_routes, service_routes
from inference.api.relay import Relay
from inference.api.relay_spans import worker_spans
from inference.api.service_routes import KEYLESS_PATHS
from inference.authority.clock import Clock
from inference.authority.shell import Authority
from inference.authority.state import Timing
from inference.authority.views import figures
from inference.authority.views.dumps import Dumps
from inference.authority.views.event_bus import Bus, LogPublisher
from inference.authority.views.inference_metrics import Metrics, gauges
from inference.devices.accelerator_record import AcceleratorRecord, Circumstances
from inference.devices.build_check import BuildCheck
from inference.devices.inventory import Inventory
from inference.errors import BrokenBuild, InferenceError
from inference.estimate.estimator import Estimator
from inference.estimate.headrooms import Headrooms
from inference.protocol import H_REQUEST_ID, Code, error_body
from inference.service_tls import ServiceTls, service_tls
from inference.settings import InferenceConfig
from inference.worker_link import Timings
from inference.workers import orphans
from inference.workers.crash_records import CrashStore
from inference.workers.hang_detection import HangTimeouts
from inference.workers.os_api import socket_directory
from inference.workers.worker_supervisor import WORKER_COMMAND, Supervisor

if TYPE_CHECKING:
    from headgate.shared.traces.otlp_tracer import Tracer

log = logging.getLogger(__name__)

LINGER_SECONDS = 2.0
"""How long the port stays open after `/readyz` became 503, so that load balancers notice."""
CUT_SECONDS = 8.0
"""Streams end with an error frame after the drain; connections that are open this much later are closed."""
HOT_PATHS = tuple(service_routes.BODIES)
USE_PATHS = (*HOT_PATHS, "/memory/plan")
"""Paths whose POST needs only the token: requests for answers, and the dry run of a load."""


class Service:
    """All parts of one inference service, created from a configuration."""

    def __init__(
        self,
        config: InferenceConfig,
        state: StateDir,
        token: str,
        *,
        command: tuple[str, ...] = WORKER_COMMAND,
        inventory: Inventory | None = None,
        estimator: Estimator | None = None,
        supervisor: Supervisor | None = None,
        headrooms: Headrooms | None = None,
        timing: Timing | None = None,
        cores: int | None = None,
        clock: Clock | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        """The parameters from `command` to `clock` replace parts in tests. `tracer`: None without traces."""
        settings = config.settings
        self.draining = False
        self.tracer = tracer
        self.metrics = Metrics()
        self.crashes = CrashStore(state)
        self.build_check = BuildCheck(state)
        hang_timeouts = HangTimeouts(
            start_seconds=settings.worker_start_seconds,
            load_seconds=settings.load_timeout_seconds,
            silence_seconds=settings.worker_silence_seconds,
            step_seconds=settings.step_timeout_seconds,
            step_seconds_per_token=settings.step_timeout_seconds_per_token,
        )
        self.authority = Authority(
            config,
            inventory=inventory or Inventory.of(settings, socket_directory(state)),
            estimator=estimator or Estimator(state, seconds=settings.estimate_timeout_seconds),
            supervisor=supervisor
            or Supervisor(
                state,
                hang_timeouts,
                command=command,
                build_is_trusted=lambda: self.build_check.is_trusted,
                on_timings=self._export_timings,
                on_labels=lambda process, labels: self.authority.note_labels(process, labels),
            ),
            crashes=self.crashes,
            bus=Bus(),
            metrics=self.metrics,
            headrooms=headrooms or Headrooms(state),
            build_check=self.build_check,
            timing=timing,
            cores=cores,
            clock=clock,
            kv_directory=state.root / "kv",
        )
        self.metrics.gauges = self._gauges
        self.pulls = pull_routes.Pulls(self.authority)
        self.app = self._app(token, settings.admin_key, settings.max_body_bytes)

    def close_streams(self) -> None:
        """Ends event streams and downloads; none begins afterwards."""
        self.authority.bus.close()
        self.pulls.close()

    def _gauges(self) -> Iterator[GaugeMetricFamily]:
        self.authority.observe()
        return gauges(self.authority.state, self.authority.now)

    def _export_timings(self, timings: Timings) -> None:
        if self.tracer is not None:
            self.tracer.export(worker_spans(timings, new_span_id))

    def _app(self, token: str, admin_key: str | None, max_body_bytes: int) -> App:
        app = FastAPI(
            title="Headgate inference", docs_url=None, redoc_url=None, openapi_url=None,
            telemetry={"tracing": False},  # the relay has spans of its own
        )  # fmt: skip
        relay = Relay(self.authority, max_body_bytes=max_body_bytes, tracer=self.tracer)
        app.router.routes.extend(Route(path, endpoint=relay, methods=["POST"]) for path in HOT_PATHS)
        app.include_router(service_routes.router(app, self.authority, self.metrics, lambda: self.draining))
        app.include_router(local_model_routes.router(self.authority, self.crashes))
        app.include_router(pull_routes.router(self.pulls))
        app.include_router(memory_routes.router(self.authority, Dumps(self.authority, self.crashes)))
        app.include_router(kv_routes.router(self.authority))
        app.add_exception_handler(InferenceError, _inference_error)  # type: ignore[arg-type]
        app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]
        app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
        app.add_exception_handler(Exception, _unexpected)
        return Guard(app, token, admin_key, USE_PATHS)


async def serve(
    config: InferenceConfig, environ: Mapping[str, str], overrides: Mapping[str, Any], sock: socket.socket
) -> int:
    """Runs the service on `sock` until SIGTERM, SIGINT or a reason to restart; returns the exit status.

    Raises HeadgateError when the start fails.
    """
    state = StateDir.from_env(environ)
    token = config.settings.token or state.secret(INFERENCE_TOKEN)
    await asyncio.to_thread(orphans.end_orphans, state, os.environ)
    tracer = tracing.start("headgate-inference", environ)
    running = Service(config, state, token, tracer=tracer)
    accelerator_record = AcceleratorRecord(state, Circumstances.now(config.settings.devices))
    cpu_configured = config.settings.force_cpu_mode or config.settings.devices == "cpu"
    tls = service_tls(config.settings)
    drain_seconds = round(config.settings.drain_seconds + CUT_SECONDS)
    listening = server_config(
        running.app, lifespan="off", timeout_keep_alive=75, timeout_graceful_shutdown=drain_seconds
    )
    if tls is not None:
        listening.load()
        listening.ssl = tls.context
    server = QuietServer(listening)
    running.pulls.reload = partial(_reload, running, config.config_dir, overrides, tls)
    stopping = _handle_signals(running, server, running.pulls.reload)
    answering = asyncio.create_task(server.serve([sock]))
    lines = LogPublisher(running.authority.bus, asyncio.get_running_loop())
    logging.getLogger().addHandler(lines)
    try:
        check = partial(accelerator_record.check, cpu_configured=cpu_configured)
        starting = asyncio.create_task(running.authority.start(check))
        await asyncio.wait({starting, answering}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            starting.cancel()
        elif problems := starting.result():
            raise ConfigError(problems)
        else:
            host, port = sock.getsockname()[:2]
            log.info(
                "the inference service listens on %s://%s:%d (%d models; usable memory: %s)",
                config.settings.scheme, host, port, len(config.models), figures.usable(running.authority.state),
            )  # fmt: skip
        await answering
    finally:
        logging.getLogger().removeHandler(lines)
        server.should_exit = True
        stopping.cancel()
        running.authority.stop_accepting()  # after a failed start, requests and event streams may be open
        running.close_streams()
        await asyncio.gather(answering, return_exceptions=True)
        await running.authority.close()
        if tracer is not None:
            tracer.close()
    if stopping.status is Exit.RESTART_OUTSIDE and running.authority.state.restart_reason is not None:
        accelerator_record.note(len(running.authority.inventory.accelerators()))
    log.info("the inference service has stopped")
    return stopping.status


class _Stopping:
    def __init__(self) -> None:
        self.task: asyncio.Task[None] | None = None
        self.watch: asyncio.Task[None] | None = None
        self.status = Exit.OK

    def cancel(self) -> None:
        for task in (self.task, self.watch):
            if task is not None:
                task.cancel()


def _handle_signals(running: Service, server: uvicorn.Server, reload: Callable[[], None]) -> _Stopping:
    loop = asyncio.get_running_loop()
    stopping = _Stopping()

    async def stop(linger_seconds: float) -> None:
        await asyncio.sleep(linger_seconds)
        running.close_streams()
        server.should_exit = True
        await asyncio.sleep(running.authority.state.settings.drain_seconds)
        log.warning("drain time is over: ending open streams")
        running.authority.stop_workers()

    def on_stop(name: str, linger_seconds: float = LINGER_SECONDS) -> None:
        if running.draining:
            log.warning("%s again: ending open streams", name)
            running.close_streams()
            running.authority.stop_workers()
            server.should_exit = True
            return
        log.info(
            "%s: shutting down; open streams have %g s to finish", name, running.authority.state.settings.drain_seconds
        )
        running.draining = True
        stopping.task = asyncio.ensure_future(stop(linger_seconds))

    def on_restart(why: str) -> None:
        log.error("the service ends and must be restarted: %s", why)
        if not running.draining:
            stopping.status = Exit.RESTART_OUTSIDE
            on_stop("a restart is needed")

    def on_broken_build(why: str) -> None:
        running.authority.stop_accepting(BrokenBuild())
        on_restart(why)

    async def watch() -> None:
        await running.authority.reached(lambda state: state.restart_reason is not None)
        on_restart(running.authority.state.restart_reason or "")

    stopping.watch = asyncio.ensure_future(watch())
    running.build_check.broken = on_broken_build
    loop.add_signal_handler(signal.SIGTERM, on_stop, signal.SIGTERM.name)
    loop.add_signal_handler(signal.SIGINT, on_stop, signal.SIGINT.name, 0.0)  # Ctrl-C: no balancer has to notice
    loop.add_signal_handler(signal.SIGHUP, reload)
    return stopping


def _reload(running: Service, config_dir: Path, overrides: Mapping[str, Any], tls: ServiceTls | None) -> None:
    """Reads models.yaml, environment (with `.env`) and certificates again. On any error the old ones stay in use."""
    try:
        fresh = settings.load(config_dir, load_environ(), overrides)
        problems = settings.check_devices(fresh, len(running.authority.inventory.accelerators()))
        if problems:
            raise ConfigError(problems)
        if tls is not None:
            tls.reload()
    except ConfigError as error:
        log.error("reload failed; the old configuration stays in force")  # noqa: TRY400 - the next lines say why
        for problem in error.problems:
            log.error("%s", problem)  # noqa: TRY400
        return
    changes = running.authority.reload(fresh)
    log.info("configuration reloaded: %s", "; ".join(changes) or "no difference")


# --- access -----------------------------------------------------------------------------------------------------------
class Guard:
    """Checks the bearer token of requests. KEYLESS_PATHS need none; requests that change something need the admin key.

    Every method except GET and HEAD changes something, except on `use_paths`. Without an admin key the token is enough
    for all requests. A refused request gets status 403 with the token, else 401. Keys are compared in constant time.
    """

    def __init__(self, app: App, token: str, admin_key: str | None = None, use_paths: Collection[str] = ()) -> None:
        self._app = app
        self._token = token.encode()
        self._admin_key = (admin_key or token).encode()
        self._use_paths = frozenset(use_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one ASGI request."""
        if scope["type"] != "http" or scope["path"] in KEYLESS_PATHS:
            await self._app(scope, receive, send)
            return
        given = _bearer(scope)
        is_admin = hmac.compare_digest(given, self._admin_key)
        changes = scope["method"] not in ("GET", "HEAD") and scope["path"] not in self._use_paths
        if is_admin or (not changes and hmac.compare_digest(given, self._token)):
            await self._app(scope, receive, send)
            return
        response = Response(send, request_id(scope))
        if hmac.compare_digest(given, self._token):
            problem = "this request needs the admin key of the inference service (INFERENCE_ADMIN_KEY), not its token"
            await response.json(403, error_body(Code.PERMISSION_DENIED, problem))
            return
        body = error_body(Code.INVALID_API_KEY, "the inference service needs its token: Authorization: Bearer TOKEN")
        await response.json(401, body, [(b"www-authenticate", b"Bearer")])


def _bearer(scope: Scope) -> bytes:
    """The bearer token of a request, empty without one."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, given = value.partition(b" ")
            return bytes(given.strip()) if scheme.lower() == b"bearer" else b""
    return b""


# --- errors in the envelope ------------------------------------------------------------------------------------------
def _envelope(request: Request, status: int, body: dict[str, Any], headers: Mapping[str, str]) -> JSONResponse:
    return JSONResponse(body, status, headers={**headers, H_REQUEST_ID: request_id(request.scope)})


async def _inference_error(request: Request, error: InferenceError) -> JSONResponse:
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return _envelope(request, error.status, error.body(), headers)


async def _http_error(request: Request, error: HTTPException) -> JSONResponse:
    path = request.url.path[:200]
    if error.status_code == 404:
        body = error_body(Code.NOT_FOUND, f"unknown path {path}")
    elif error.status_code == 405:
        body = error_body(Code.METHOD_NOT_ALLOWED, f"{path} does not support {request.method}")
    else:
        body = error_body(Code.INVALID_REQUEST, str(error.detail))
    return _envelope(request, error.status_code, body, error.headers or {})


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    where = [str(part) for part in first["loc"] if part not in ("body", "query", "path", "header")]
    if first["type"] == "json_invalid":
        return _envelope(request, 400, error_body(Code.INVALID_JSON, "the body is not valid JSON"), {})
    param = ".".join(where) or None
    message = f"{param or 'the body'}: {str(first['msg']).removeprefix('Value error, ')}{meant(first)}"
    return _envelope(request, 400, error_body(Code.INVALID_REQUEST, message, param=param), {})


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    log.error("request %s failed: internal error: %r", request_id(request.scope), error)
    message = "internal error of the inference service; see its log"
    return _envelope(request, 500, error_body(Code.INTERNAL_ERROR, message), {})
