"""The inference service of one node: a supervised `headgate inference`, and a report of its state."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import http.client
import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import headgate
from headgate.ray_cluster.node_report import NodeReport, ServiceSettings, State
from headgate.shared import ports
from headgate.shared.errors import Problem
from headgate.shared.log import LineWriter
from headgate.shared.state_directory import load_environ
from headgate.supervisor import Child, RestartDelays, Supervisor, describe, headgate_argv

POLL_SECONDS = 0.25
"""Interval of checks of the process. A process that is ready gets no health requests."""
HEALTH_SECONDS = 3.0
RETRY_SECONDS = 30.0
"""Delay after a start that failed with a usage error: configuration files can be corrected in the meantime."""
DRAIN_MARGIN_SECONDS = 10.0
_MAX_DETAIL_CHARS = 400


class NodeService:
    """Supervises the service and keeps `report` current. All calls must come from one event loop.

    `changed` is set at each new report, and a new event takes its place. `argv` replaces `headgate inference` in tests.
    """

    def __init__(
        self,
        name: str,
        address: str,
        settings: ServiceSettings,
        environ: Mapping[str, str],
        argv: Sequence[str] = (),
        delays: RestartDelays | None = None,
        retry_seconds: float = RETRY_SECONDS,
    ) -> None:
        host = settings.host or address
        self._port = settings.port or _free_port(host)
        self._retry_seconds = retry_seconds
        self._environ = service_environ(environ, name, settings)
        self._environ_with_dotenv = load_environ(self._environ)  # the service itself reads `.env`, too
        scheme = "https" if self._environ_with_dotenv.get("INFERENCE_TLS_CERTIFICATE") else "http"
        url = f"{scheme}://{f'[{address}]' if ':' in address else address}:{self._port}"
        words = ["inference", "--host", host, "--port", str(self._port)]
        if settings.config_dir is not None:
            words += ["--config-dir", settings.config_dir]
        self._child = Child(
            "inference",
            argv or headgate_argv(*words),
            self._environ,
            _drain_seconds(self._environ_with_dotenv) + DRAIN_MARGIN_SECONDS,
            was_ready=True,  # a failed first start is tried again, too
        )
        self._lines = LineWriter()
        self._supervisor = Supervisor([self._child], self._on_line, self._on_note, delays)
        self._last_line = ""
        self.report = NodeReport(name, url, version=headgate.__version__)
        self.changed = asyncio.Event()
        self._observing: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """Starts the service."""
        self._supervisor.begin()
        self._observing = asyncio.ensure_future(self._observe())

    async def stop(self) -> None:
        """Ends the service. Running requests can finish within the drain time of the service."""
        if self._observing is not None:
            self._observing.cancel()
        await self._supervisor.stop()

    async def next_report(self, seen: NodeReport | None, seconds: float) -> NodeReport:
        """The report as soon as it differs from `seen`, at the latest after `seconds`."""
        if self.report == seen:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), seconds)
        return self.report

    def _on_line(self, _: str, text: str) -> None:
        self._last_line = text
        self._lines.put(text)

    def _on_note(self, text: str) -> None:
        self._lines.put(f"headgate {text}")

    def _set(self, **fields: Any) -> None:
        report = dataclasses.replace(self.report, **fields)
        if report != self.report:
            self.report = report
            changed, self.changed = self.changed, asyncio.Event()
            changed.set()

    async def _observe(self) -> None:
        """Follows the process: requests the health of a new process until it answers."""
        child = self._child
        known: asyncio.subprocess.Process | None = None
        while True:
            process = child.process
            if process is not known or process is None:
                known = process
                self._set(
                    state=State.FAILED if child.has_usage_error else State.STARTING,
                    restarts=max(child.starts - 1, 0),
                    pid=None if process is None else process.pid,
                    last_exit="" if child.last_status is None else describe(child.last_status),
                    detail="" if child.last_status is None else self._last_line[-_MAX_DETAIL_CHARS:],
                )
            if child.has_usage_error:
                await asyncio.sleep(self._retry_seconds)
                self._supervisor.begin()
            elif process is not None and self.report.state is not State.READY:
                answer = await asyncio.to_thread(health, self.report.url, self._environ_with_dotenv, process.pid)
                if answer is not None and child.process is process:
                    self._set(state=State.READY, was_ready=True, epoch=str(answer.get("epoch", "")), detail="")
            await asyncio.sleep(POLL_SECONDS)


def service_environ(environ: Mapping[str, str], name: str, settings: ServiceSettings) -> dict[str, str]:
    """The variables of the service: those of the node, its name, and the token (arguments are visible in `ps`)."""
    # Ray sets OMP_NUM_THREADS to 1 in actors without a share of the CPUs.
    own = {key: value for key, value in environ.items() if key not in ("OMP_NUM_THREADS", "PYTHONBREAKPOINT")}
    own |= {"PYTHONUNBUFFERED": "1", "INFERENCE_NODE": name}
    return own | {"INFERENCE_TOKEN": settings.token} if settings.token else own


def health(url: str, environ: Mapping[str, str], pid: int) -> dict[str, Any] | None:
    """The answer of `url`/health; None without one, or if another process than `pid` is seen to listen there.

    The answer is empty if the service requires a certificate that this process does not have.
    """
    port = int(url.rpartition(":")[2])
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    if url.startswith("https:"):
        try:
            handlers.append(urllib.request.HTTPSHandler(context=_own_tls(environ)))
        except OSError:
            return None  # the service reports what is wrong with its files
    try:
        try:
            with urllib.request.build_opener(*handlers).open(f"{url}/health", timeout=HEALTH_SECONDS) as reply:
                body = reply.read()
        except urllib.error.HTTPError as error:  # 503: a device is unhealthy
            body = error.read()
        found = json.loads(body)
    except (OSError, ValueError, http.client.HTTPException) as error:
        # A service that rejects this certificate ends the connection, which shows that it listens.
        refusal = error.reason if isinstance(error, urllib.error.URLError) else error
        if not (url.startswith("https:") and isinstance(refusal, ssl.SSLError | ConnectionResetError)):
            return None
        found = {}
    # Another service may use the port, for example one that is about to end.
    return found if isinstance(found, dict) and ports.owner_pid(port) in (pid, None) else None


def _own_tls(environ: Mapping[str, str]) -> ssl.SSLContext:
    """TLS to a process of this machine, with its own certificate. `health` verifies the process and not a name."""
    context = ssl._create_unverified_context()  # noqa: S323
    context.load_cert_chain(environ["INFERENCE_TLS_CERTIFICATE"], environ.get("INFERENCE_TLS_KEY"))
    return context


def _free_port(host: str) -> int:
    with ports.listen(host, 0) as sock:
        return int(sock.getsockname()[1])


def _drain_seconds(environ: Mapping[str, str]) -> float:
    from inference.environment_settings import read

    problems: list[Problem] = []  # the service reports them
    return read(environ, {}, problems).drain_seconds


class NodeActor:
    """The actor of one node. Supervises the service, which ends with the actor's process. Starts no service if
    `settings` has another version of Headgate.
    """

    def __init__(self, name: str, address: str, settings: ServiceSettings) -> None:
        self._service: NodeService | None = None
        if settings.version == headgate.__version__:
            self._service = NodeService(name, address, settings, os.environ)
            self._service.begin()
            return
        detail = wrong_version(settings.version)
        self._refusal = NodeReport(name, "", State.FAILED, version=headgate.__version__, detail=detail)

    async def report(self, seen: NodeReport | None, seconds: float) -> NodeReport:
        """The report as soon as it differs from `seen`, at the latest after `seconds`."""
        if self._service is not None:
            return await self._service.next_report(seen, seconds)
        await asyncio.sleep(seconds if seen == self._refusal else 0)
        return self._refusal

    async def stop(self) -> None:
        """Ends the service; see `NodeService.stop`."""
        if self._service is not None:
            await self._service.stop()


def wrong_version(wanted: str) -> str:
    """The message about a node that has another version of Headgate than `headgate ray up`."""
    return (
        f"this node has headgate {headgate.__version__}, but `headgate ray up` was run with {wanted}: install headgate "
        f"{wanted} into {sys.prefix} of the node, then run `headgate ray down` and `headgate ray up`"
    )
