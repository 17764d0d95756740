"""`headgate ray` on real local Ray clusters: services start, are restarted, follow the nodes and end."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rigs.processes import command_of, http_status, is_alive, wait_until
from tests.rigs.ray_nodes import RayNodes, cluster

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'headgate[ray]'"
)
LONG = "HEADGATE_TEST_RAY"


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[RayNodes]:
    config = tmp_path / "config"
    config.mkdir()
    (config / "models.yaml").write_text("models: {}\n")
    with cluster(tmp_path, "a") as started:
        yield started


class Watch:
    """The process that tells a gateway the nodes of a cluster."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def until(self, *names: str) -> dict[str, dict[str, str]]:
        """The nodes by name, as soon as they are exactly `names`."""
        assert self._process.stdout is not None
        while True:
            assert select.select([self._process.stdout], [], [], 60)[0], f"no membership of {names}"
            found = json.loads(self._process.stdout.readline())["nodes"]
            if sorted(names) == [node["name"] for node in found]:
                return {node["name"]: node for node in found}


@contextlib.contextmanager
def _watch(nodes: RayNodes) -> Iterator[Watch]:
    """The process ends when its stdin is closed."""
    argv = [sys.executable, "-m", "headgate.ray_cluster.watch", nodes.address]
    with subprocess.Popen(argv, env=nodes.environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        try:
            yield Watch(process)
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait(10) == 0
        finally:
            process.kill()


def _status_of(url: str, token: str) -> int:
    request = urllib.request.Request(f"{url}/v1/models", headers={"authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def _up(nodes: RayNodes, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """The services by name."""
    words = ("up", "--json", "--port", "0", "--config-dir", str(tmp_path / "config"))
    return {node["name"]: node for node in json.loads(nodes.headgate(*words))["nodes"]}


def test_service_starts_is_published_and_ends(nodes: RayNodes, tmp_path: Path) -> None:
    """The token reaches the node, and does not appear in a command line."""
    service = _up(nodes, tmp_path)["a"]
    with _watch(nodes) as watch:
        member = watch.until("a")["a"]
        assert member == {"name": "a", "url": service["url"], "epoch": service["epoch"]}
        assert member["epoch"]
        token = nodes.environ["INFERENCE_TOKEN"]
        assert (_status_of(member["url"], token), _status_of(member["url"], "wrong")) == (200, 401)
        assert token not in command_of(service["pid"])
        assert "ended 1" in nodes.headgate("down")
        assert not is_alive(service["pid"])


@pytest.mark.skipif(LONG not in os.environ, reason="takes a minute: make test-ray")
@pytest.mark.timeout(240)
@pytest.mark.slow
def test_services_follow_the_nodes(nodes: RayNodes, tmp_path: Path) -> None:
    """Three nodes: a killed service and killed actors come back, a lost node goes, a new node gets a service."""
    nodes.order("add", "b")
    nodes.order("add", "c")
    first = _up(nodes, tmp_path)
    with _watch(nodes) as watch:
        _follow(nodes, watch, first)


def _follow(nodes: RayNodes, watch: Watch, first: dict[str, dict[str, Any]]) -> None:
    members = watch.until("a", "b", "c")
    assert len({member["url"] for member in members.values()}) == 3

    os.kill(first["b"]["pid"], signal.SIGKILL)
    restarted = _service(nodes, "b", lambda node: node["state"] == "ready" and node["restarts"] == 1)
    assert (restarted["url"], restarted["last_exit"]) == (first["b"]["url"], "was ended by signal SIGKILL")

    actor = int(Path(f"/proc/{first['c']['pid']}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(actor, signal.SIGKILL)
    wait_until("the service ends with its actor", lambda: not is_alive(first["c"]["pid"]))
    _service(nodes, "c", lambda node: node["state"] == "ready" and node["pid"] != first["c"]["pid"])
    watch.until("a", "b", "c")

    nodes.order("kill", "b")
    watch.until("a", "c")
    wait_until("the service ends with its node", lambda: not is_alive(restarted["pid"]))
    nodes.order("add", "b/again")
    assert http_status(f"{watch.until('a', 'b', 'c')['b']['url']}/livez") == 200

    pids = [node["pid"] for node in nodes.services().values()]
    assert "ended 3" in nodes.headgate("down")
    assert not any(map(is_alive, pids))
    assert "headgate ray up" in nodes.headgate("status", status=3)


def _service(nodes: RayNodes, name: str, wanted: Any) -> dict[str, Any]:
    def look() -> dict[str, Any] | None:
        found = nodes.services().get(name)
        return found if found is not None and wanted(found) else None

    found = wait_until(f"the service of {name}", look, seconds=60, every=0.5)
    assert found is not None
    return found
