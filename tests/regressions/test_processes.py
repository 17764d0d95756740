"""Services start, log and stop as expected under unusual conditions."""

from __future__ import annotations

import fcntl
import http.client
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from headgate.shared import child_process
from headgate.shared.state_directory import INFERENCE_TOKEN
from inference import helper
from inference.devices.simgpu import rpc_server
from inference.worker import service
from inference.worker_link import LINK_FD_ENV, PARENT_ENV, SOCKET_FD_ENV
from tests.rigs.processes import free_port, private_env, wait_until
from tests.rigs.stack import Stack, chat_body

LINES = 700
MODEL, REQUEST = "m" * 256, "r" * 128
"""700 log lines with names of this length fill all pipes between a service and its reader."""


def _fill(port: int, key: str) -> int:
    """Makes the gateway log LINES lines; returns the last status."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = b'{"model": "%b", "messages": [{"role": "user", "content": "hi"}]}' % MODEL.encode()
    for _ in range(LINES):
        connection.request(
            "POST", "/v1/chat/completions", body, {"Authorization": f"Bearer {key}", "x-request-id": REQUEST}
        )
        answer = connection.getresponse()
        answer.read()
    connection.close()
    return answer.status


@pytest.mark.skipif(sys.platform != "linux", reason="the size of a pipe is set")
@pytest.mark.timeout(90)
@pytest.mark.parametrize("verb", ["up", "gateway"])
def test_unread_stderr_does_not_block_requests_or_signals(tmp_path: Path, verb: str) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gateway.yaml").write_text("{}")
    (tmp_path / "config" / "models.yaml").write_text("models: {}\n")
    port = free_port()
    argv = [sys.executable, "-m", "headgate", verb, "--config-dir", str(tmp_path / "config"), "--port", str(port)]
    more = ["--inference-port", str(free_port())] if verb == "up" else []
    unread, stderr = os.pipe()
    fcntl.fcntl(stderr, fcntl.F_SETPIPE_SZ, 4096)
    env = private_env(tmp_path, {"INFERENCE_DEVICES": "cpu", "GATEWAY_API_KEY": "key"})
    with subprocess.Popen([*argv, *more], env=env, stdout=subprocess.PIPE, stderr=stderr) as process:
        try:
            if verb == "up":
                assert process.stdout is not None
                while b"Stop:" not in process.stdout.readline():
                    continue
            else:
                os.read(unread, 1)  # the first line is logged when the gateway listens
            assert _fill(port, "key") in (404, 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
        finally:
            process.kill()
            os.close(unread)
            os.close(stderr)


STARTING = """
import os, signal, sys, types
service = types.ModuleType("{name}.__main__")
service.main = lambda words: os.kill(os.getpid(), signal.SIGHUP) or 0
sys.modules["{name}.__main__"] = service
from headgate.cli.main import main
sys.exit(main(["{name}"]))
"""


@pytest.mark.parametrize("name", ["gateway", "inference"])
def test_reload_signal_before_the_handler_is_installed_is_ignored(name: str) -> None:
    """The configuration is read after that anyway."""
    ended = subprocess.run([sys.executable, "-c", STARTING.format(name=name)], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr


ENDS = """
import logging, logging.handlers, sys
import {service}.__main__ as service
from headgate.shared.errors import HeadgateError

def end(*_arguments):
    held = logging.handlers.MemoryHandler(99, logging.CRITICAL, logging.StreamHandler(sys.stderr))
    logging.getLogger().handlers = [held]  # buffers its lines until it is flushed
    logging.getLogger("x").warning("the last line")
    raise {error}("the end")

service._serve = end
sys.exit(service.main([]))
"""


@pytest.mark.parametrize("service", ["inference", "gateway"])
@pytest.mark.parametrize("error", ["HeadgateError", "ZeroDivisionError"])
def test_final_error_is_written_after_the_log_lines(tmp_path: Path, service: str, error: str) -> None:
    argv = [sys.executable, "-c", ENDS.format(service=service, error=error)]
    ended = subprocess.run(argv, env=private_env(tmp_path, {}), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert ended.stderr.startswith("the last line\n")
    assert ended.stderr.rstrip().endswith("the end")


_ABORTS = "import os; from headgate.shared import child_process; child_process.disable_core_dumps(); os.abort()"


@pytest.mark.skipif(sys.platform != "linux", reason="the meaning of a limit of one byte is specific to Linux")
def test_aborting_process_leaves_no_core_dump(tmp_path: Path) -> None:
    """The process starts with a limit that allows a core dump."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    ended = subprocess.run(
        [sys.executable, "-c", _ABORTS],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_CORE, (hard, hard)),
        check=False,
        timeout=30,
    )
    assert ended.returncode == -signal.SIGABRT
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("module", [service, helper, rpc_server], ids=["worker", "helper", "server"])
def test_core_dumps_are_disabled_before_native_code_runs(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:

    class DisabledError(Exception):
        """Core dumps were disabled."""

    def disable() -> None:
        raise DisabledError

    monkeypatch.setattr(child_process, "disable_core_dumps", disable)
    monkeypatch.setattr(child_process, "die_with_parent", lambda _environ: None)
    arguments = {service: [dict.fromkeys((PARENT_ENV, LINK_FD_ENV, SOCKET_FD_ENV), "1")], helper: [["devices"]]}
    with pytest.raises(DisabledError):
        module.main(*arguments.get(module, []))


@pytest.mark.parametrize("module", ["inference.app", "inference.worker.service"])
def test_start_does_not_load_llama_cpp(module: str) -> None:
    code = f"import sys, {module}; print('llama_cpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"


def test_request_before_the_devices_are_known_is_answered(tmp_path: Path) -> None:
    """The port accepts connections before the service has read its devices."""
    stack = Stack(tmp_path)
    token = stack.state.secret(INFERENCE_TOKEN)
    url = f"{stack.inference.url}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps(chat_body("Hello!", "demo-mini", max_tokens=2)).encode()

    def ask() -> Any:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            return None  # the port is not open yet

    answers: list[Any] = []
    client = threading.Thread(target=lambda: answers.append(wait_until("an answer", ask, seconds=60)), daemon=True)
    client.start()
    try:
        stack.inference.start(wait_for="/livez")
        client.join(60)
        assert answers, stack.inference.log
        assert answers[0]["choices"][0]["message"]["content"]
    finally:
        stack.kill()
