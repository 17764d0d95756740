"""The inference service of a Ray node with small programs in its place: readiness, restarts, configuration errors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
import sys
import textwrap
import threading
from collections.abc import AsyncIterator, Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import headgate
from headgate.ray_cluster.node_report import NodeReport, ServiceSettings, State
from headgate.ray_cluster.node_service import NodeActor, NodeService, health, service_environ
from headgate.supervisor import RestartDelays
from tests.rigs.processes import free_port, is_alive
from tests.rigs.tls import CERTIFICATE, server_context

UNUSED_ROOT = CERTIFICATE.with_name("unused_root.pem")

SETTINGS = ServiceSettings(headgate.__version__, token="shared")
ANSWERS = """
    import http.server, json, os
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps({"epoch": f"e{os.getpid()}"}).encode())
        def log_message(self, *_):
            pass
    http.server.HTTPServer(("127.0.0.1", PORT), Handler).serve_forever()
"""
Start = Callable[..., NodeService]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a service that runs a script."""
    started: list[NodeService] = []

    def begin(script: str, port: int, **options: float) -> NodeService:
        settings = ServiceSettings(headgate.__version__, token="shared", port=port)
        argv = [sys.executable, "-c", textwrap.dedent(script).replace("PORT", str(port))]
        delays = RestartDelays(first_seconds=0.05)
        service = NodeService("n", "127.0.0.1", settings, dict(os.environ), argv, delays, **options)
        started.append(service)
        service.begin()
        return service

    yield begin
    for service in started:
        await service.stop()


async def _report(service: NodeService, wanted: Callable[[NodeReport], bool]) -> NodeReport:
    async with asyncio.timeout(20):
        while not wanted(service.report):
            await service.changed.wait()
    return service.report


async def test_killed_process_is_restarted_and_reported_with_its_new_epoch(start: Start) -> None:
    service = start(ANSWERS, free_port())
    first = await _report(service, lambda report: report.state is State.READY)
    assert first.pid is not None
    assert (first.epoch, first.restarts, first.was_ready) == (f"e{first.pid}", 0, True)
    os.kill(first.pid, signal.SIGKILL)
    again = await _report(service, lambda report: report.state is State.READY and report.pid != first.pid)
    assert (again.epoch, again.restarts, again.url) == (f"e{again.pid}", 1, first.url)
    assert again.last_exit == "was ended by signal SIGKILL"
    await service.stop()
    assert again.pid is not None
    assert not is_alive(again.pid)


async def test_configuration_error_is_reported_and_tried_again(start: Start, tmp_path: Path) -> None:
    """The start succeeds after the configuration was corrected, without a command."""
    corrected = tmp_path / "corrected"
    fails = (
        f"import os, sys\nif not os.path.exists({str(corrected)!r}):\n    print('models.yaml:3: bad')\n    sys.exit(2)"
    )
    service = start(fails + textwrap.dedent(ANSWERS), free_port(), retry_seconds=0.3)
    failed = await _report(service, lambda report: report.state is State.FAILED)
    assert (failed.last_exit, failed.detail, failed.was_ready) == ("ended with status 2", "models.yaml:3: bad", False)
    corrected.touch()
    ready = await _report(service, lambda report: report.state is State.READY)
    assert ready.detail == ""


async def test_another_process_at_the_port_is_not_the_service(start: Start) -> None:
    """A service that is about to end answers at the same address."""
    port = free_port()
    other = await _report(start(ANSWERS, port), lambda report: report.state is State.READY)
    assert other.pid is not None
    assert health(other.url, {}, other.pid) == {"epoch": other.epoch}
    assert health(other.url, {}, os.getpid()) is None


def test_environment_has_the_token_and_not_the_thread_limit_of_ray() -> None:
    given = {"OMP_NUM_THREADS": "1", "HOME": "/h", "INFERENCE_TOKEN": "own"}
    environ = service_environ(given, "gpu-1", SETTINGS)
    assert environ == {"HOME": "/h", "PYTHONUNBUFFERED": "1", "INFERENCE_NODE": "gpu-1", "INFERENCE_TOKEN": "shared"}
    assert service_environ(given, "gpu-1", ServiceSettings("1"))["INFERENCE_TOKEN"] == "own"


async def test_node_with_another_version_starts_nothing() -> None:
    actor = NodeActor("gpu-1", "127.0.0.1", ServiceSettings("9.9"))
    report = await actor.report(None, 0.0)
    assert (report.state, report.pid, report.url) == (State.FAILED, None, "")
    assert "`headgate ray up` was run with 9.9: install headgate 9.9" in report.detail
    assert await actor.report(report, 0.0) == report
    await actor.stop()


@pytest.mark.parametrize("trusts_itself", [True, False])
def test_service_with_tls_is_ready_also_when_it_asks_for_another_certificate(trusts_itself: bool) -> None:
    """Without an epoch then: its health cannot be read."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Health) as server:
        context = server_context()
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(CERTIFICATE if trusts_itself else UNUSED_ROOT)
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        url = f"https://127.0.0.1:{server.server_address[1]}"
        environ = {"INFERENCE_TLS_CERTIFICATE": str(CERTIFICATE), "INFERENCE_TLS_KEY": str(CERTIFICATE)}
        found = health(url, environ, os.getpid())
        server.shutdown()
    assert found == ({"epoch": "e"} if trusts_itself else {})
    assert health(url, environ, os.getpid()) is None


def test_service_that_cannot_be_asked_is_not_ready(tmp_path: Path) -> None:
    """Its certificate is missing, or another program answers at its port."""
    missing = {"INFERENCE_TLS_CERTIFICATE": str(tmp_path / "missing.pem")}
    with socket.create_server(("127.0.0.1", 0)) as other:
        url = f"127.0.0.1:{other.getsockname()[1]}"
        assert health(f"https://{url}", missing, os.getpid()) is None

        def answer() -> None:
            connection, _ = other.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 mail.example.org\r\n")

        answering = threading.Thread(target=answer)
        answering.start()
        assert health(f"http://{url}", {}, os.getpid()) is None
        answering.join(5)


class _Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"epoch": "e"}')

    def log_message(self, *_: object) -> None:
        """Nothing."""
