"""The head of a real Ray cluster ends and returns: its services keep running, and the gateway keeps its nodes."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.processes import gateway_service, wait_until
from tests.rigs.ray_nodes import RayNodes, cluster
from tests.rigs.redis_server import RedisServer
from tests.rigs.stack import chat_body

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'headgate[ray]'"
    ),
    pytest.mark.skipif("HEADGATE_TEST_RAY" not in os.environ, reason="takes a minute: make test-ray"),
    pytest.mark.timeout(300),
    pytest.mark.slow,
]
AWAY_SECONDS = 6.0
MODELS = {"models": {"demo": {"path": "bundled:demo", "context_length": 512, "gpu_layers": 0}}}
KEY = "key-of-a-test"


def test_requests_are_answered_while_the_head_is_away(tmp_path: Path) -> None:
    """Afterwards a killed service is restarted, and its node is used again."""
    config = tmp_path / "config"
    config.mkdir()
    (config / "models.yaml").write_text(json.dumps(MODELS))
    server = RedisServer(tmp_path)
    try:
        with cluster(tmp_path, "a", {"RAY_REDIS_ADDRESS": f"127.0.0.1:{server.port}"}) as nodes:
            nodes.order("add", "b")
            nodes.headgate("up", "--json", "--port", "0", "--config-dir", str(config))
            with _gateway(tmp_path, nodes) as url:
                _check(nodes, url)
            nodes.headgate("down")
    finally:
        server.kill()


@contextmanager
def _gateway(root: Path, nodes: RayNodes) -> Iterator[str]:
    config = root / "gateway"
    config.mkdir()
    settings = {
        "inference": {"nodes": [f"ray:{nodes.address}"], "replicas": {"demo": 2}},
        "routes": {"*": {"chain": ["local/*"]}},
    }
    (config / "gateway.yaml").write_text(json.dumps(settings))
    env = {
        "GATEWAY_API_KEY": KEY, "INFERENCE_TOKEN": nodes.environ["INFERENCE_TOKEN"],
    }  # fmt: skip
    service = gateway_service(root / "gateway", config, env=env)
    try:
        yield service.start(wait_for="/readyz").url
    finally:
        service.kill()


def _check(nodes: RayNodes, url: str) -> None:
    wait_until("both nodes are used", lambda: _nodes(url) == {"a", "b"}, seconds=60)
    asking = _Asking(url)
    nodes.order("stop", "head")
    time.sleep(AWAY_SECONDS)
    nodes.order("start", "head")
    time.sleep(AWAY_SECONDS)
    asking.end()
    assert asking.texts == {asking.expected}
    assert asking.count > 5

    before = _service(nodes, "b")
    os.kill(before["pid"], signal.SIGKILL)
    wait_until("the service of b is restarted", lambda: _service(nodes, "b")["restarts"] == 1, seconds=60, every=0.5)
    wait_until("both nodes are used again", lambda: _nodes(url) == {"a", "b"}, seconds=60)


class _Asking:
    """Sends requests one after the other until `end`, and collects their answers."""

    def __init__(self, url: str) -> None:
        self.expected, _ = _ask(url)
        self.texts: set[str] = set()
        self.count = 0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(url,))
        self._thread.start()

    def _run(self, url: str) -> None:
        while not self._ending.wait(0.2):
            try:
                text, _ = _ask(url)
            except OSError as error:
                text = repr(error)
            self.texts.add(text)
            self.count += 1

    def end(self) -> None:
        self._ending.set()
        self._thread.join(60)


def _nodes(url: str) -> set[str]:
    """The nodes of several requests that share no prefix."""
    return {_ask(url, f"{time.monotonic_ns()} What is a mill?")[1] for _ in range(6)}


def _ask(url: str, question: str = "What is a mill?") -> tuple[str, str]:
    """The text of an answer and its node."""
    body = json.dumps(chat_body(question, max_tokens=8, seed=time.monotonic_ns() % 2**31)).encode()
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
    with urllib.request.urlopen(
        urllib.request.Request(f"{url}/v1/chat/completions", body, headers), timeout=60
    ) as answer:
        return json.load(answer)["choices"][0]["message"]["content"], answer.headers["x-headgate-node"]


def _service(nodes: RayNodes, name: str) -> dict[str, Any]:
    return nodes.services()[name]
