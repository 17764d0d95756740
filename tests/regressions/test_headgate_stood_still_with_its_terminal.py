"""A terminal that was stopped (Ctrl-S), or a pager that read no more, held up every request and every signal."""

from __future__ import annotations

import fcntl
import http.client
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import free_port, private_env

LINES = 700
MODEL, REQUEST = "m" * 256, "r" * 128
"""So many lines that hold such names fill all pipes between a service and whoever reads."""


def _fill(port: int, key: str) -> int:
    """Has the gateway write LINES lines; the last status."""
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
def test_who_reads_no_lines_holds_up_nothing(tmp_path: Path, verb: str) -> None:
    """Requests are answered, SIGTERM ends it, and its status is 0, though nobody reads its stderr."""
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
                os.read(unread, 1)  # it listens
            assert _fill(port, "key") in (404, 503)
            process.send_signal(signal.SIGTERM)
            assert process.wait(40) == 0
        finally:
            process.kill()
            os.close(unread)
            os.close(stderr)
