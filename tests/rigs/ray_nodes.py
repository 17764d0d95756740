"""A local Ray cluster of several nodes in a process of its own, and `headgate ray` on it.

python -m tests.rigs.ray_nodes TEMPORARY NAME ROOT      # prints the address; then obeys `add NAME`, `kill NAME`,
                                                        # `stop head` and `start head`
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.rigs.processes import private_env

START_SECONDS = 60.0
OBJECT_STORE_BYTES = 80 * 2**20


class RayNodes:
    """The cluster, seen from a test. Every node has a state directory and a machine lock of its own."""

    def __init__(self, process: subprocess.Popen[str], environ: Mapping[str, str]) -> None:
        self._process = process
        self.address = str(self._answer()["address"])
        self.environ = {**environ, "RAY_ADDRESS": self.address}

    def order(self, word: str, name: str) -> None:
        """`add` or `kill` a node, `stop` or `start` the control service of the `head`. Returns when it is done."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{word} {name}\n")
        self._process.stdin.flush()
        assert self._answer() == {"done": f"{word} {name}"}

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        assert select.select([self._process.stdout], [], [], START_SECONDS)[0], "the cluster does not answer"
        return dict(json.loads(self._process.stdout.readline()))

    def headgate(self, *words: str, status: int = 0) -> str:
        """Output of `headgate ray WORDS`."""
        done = subprocess.run(
            [sys.executable, "-m", "headgate", "ray", *words],
            env=self.environ, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == status, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout or done.stderr

    def services(self) -> dict[str, dict[str, Any]]:
        """The nodes in `headgate ray status --json`, by name."""
        return {node["name"]: node for node in json.loads(self.headgate("status", "--json"))["nodes"]}


@contextlib.contextmanager
def cluster(root: Path, first: str, store: Mapping[str, str] | None = None) -> Iterator[RayNodes]:
    """A cluster of one node with the name `first`; it ends with the block. `store`: Ray's variables of a Redis server,
    without which nothing survives the end of the head.
    """
    environ = private_env(root, {"INFERENCE_TOKEN": "the-token-of-the-nodes", **(store or {})})
    environ.pop("RAY_ADDRESS", None)
    # The paths of Ray's sockets are too long below the directories of pytest.
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as temporary:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.ray_nodes", temporary, first, str(root)],
            env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        try:
            yield RayNodes(process, environ)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)
            assert process.stdout is not None
            process.stdout.close()


def _main(temporary: str, first: str, root: str) -> None:
    from ray.cluster_utils import Cluster

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: str) -> None:
        out.write(json.dumps(fields) + "\n")
        out.flush()

    def options(name: str) -> dict[str, Any]:
        own = private_env(Path(root) / name)
        return {
            "num_cpus": 0,
            "include_dashboard": False,
            "include_log_monitor": False,
            "no_monitor": True,  # of the autoscaler
            "object_store_memory": OBJECT_STORE_BYTES,
            "node_name": name.partition("/")[0],
            "env_vars": {key: own[key] for key in ("HEADGATE_STATE_DIR", "HEADGATE_LOCK_DIR")},
        }

    nodes = Cluster(initialize_head=True, head_node_args={**options(first), "temp_dir": temporary})
    others = {}
    answer(address=nodes.address)
    for line in sys.stdin:
        word, name = line.split()
        if name == "head":
            nodes.head_node.kill_gcs_server() if word == "stop" else nodes.head_node.start_gcs_server()
        elif word == "add":
            others[name] = nodes.add_node(**options(name))
        else:
            nodes.remove_node(others.pop(name), allow_graceful=False)
        answer(done=f"{word} {name}")
    nodes.shutdown()


if __name__ == "__main__":
    _main(*sys.argv[1:])
