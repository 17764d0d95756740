"""`headgate ray` without ray, without a cluster, and with other settings than the running services."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import headgate
from headgate.cli.command import Session, UsageError
from headgate.cli.fleet import ray_verb
from headgate.cli.main import main
from headgate.cli.terminal import Terminal
from headgate.ray_cluster import cluster
from headgate.ray_cluster.node_actors import CONTROLLER, NAMESPACE, NODE_PREFIX
from headgate.ray_cluster.node_report import ServiceSettings
from tests.rigs.processes import forget_own, free_port, private_env


@pytest.mark.parametrize("action", ["up", "status", "down"])
def test_without_ray_the_message_names_the_extra(
    action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["ray", action]) == 2
    assert "pip install 'headgate[ray]'" in capsys.readouterr().err


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed")
@pytest.mark.parametrize("command", [["headgate", "ray", "status", "--address"], ["headgate.ray_cluster.watch"]])
def test_missing_cluster_is_reported_at_once(command: list[str], tmp_path: Path) -> None:
    """Ray itself would try to connect for two minutes."""
    address = f"127.0.0.1:{free_port()}"
    stdin, other_end = os.pipe()  # an end of stdin would end the watch
    done = subprocess.run(
        [sys.executable, "-m", *command, address],
        env=private_env(tmp_path), stdin=stdin, capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    os.close(stdin)
    os.close(other_end)
    assert (done.returncode, done.stdout) == (3, "")
    assert f"no Ray cluster answers at {address}" in done.stderr


def _session(tmp_path: Path, **given: object) -> Session:
    args = argparse.Namespace(**({"config_dir": None, "host": None, "port": 8085, "token_from": "here"} | given))
    environ = {"HEADGATE_STATE_DIR": str(tmp_path / "state")}
    return Session(args, environ, Terminal(sys.stdout, sys.stderr))


def test_token_of_this_machine_is_sent_unless_the_nodes_have_it(tmp_path: Path) -> None:
    sent = ray_verb.settings_of(_session(tmp_path)).token
    assert sent == (tmp_path / "state" / "inference.token").read_text().strip()
    assert ray_verb.settings_of(_session(tmp_path, token_from="nodes")).token == ""


def test_settings_are_checked_before_the_cluster_is_used(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="from 0 to 65535"):
        ray_verb.settings_of(_session(tmp_path, port=70000))
    assert ray_verb.settings_of(_session(tmp_path, config_dir="etc")).config_dir == str(Path.cwd() / "etc")


def test_setting_that_differs_from_the_running_services_is_named() -> None:
    running = ServiceSettings(headgate.__version__, "", None, "", 8085)
    assert ray_verb.difference(running, replace(running, token="t")) is None
    assert ray_verb.difference(running, replace(running, port=0)) == "--port 8085"
    assert ray_verb.difference(running, replace(running, config_dir="/etc/x")) == "--config-dir (default)"
    assert ray_verb.difference(replace(running, version="9.9"), running) == "headgate 9.9"


class _RayError(Exception):
    """Raised by the results of lost actors."""


class _Method:
    """The method `stop` of an actor. Its result is the name of the actor."""

    def __init__(self, name: str) -> None:
        self.name = name

    def remote(self) -> str:
        return self.name


class FakeRay(ModuleType):
    """A cluster with one named actor for each of `ends`: it ends in time, is lost, or is late."""

    def __init__(self, ends: Mapping[str, str]) -> None:
        super().__init__("ray")
        self.ends = ends
        self.killed: list[str] = []
        self.exceptions = SimpleNamespace(RayError=_RayError)
        listed = [{"namespace": NAMESPACE, "name": name} for name in ends]
        self.util = SimpleNamespace(list_named_actors=lambda all_namespaces: listed)

    def get_actor(self, name: str, namespace: str) -> Any:
        assert namespace == NAMESPACE
        return SimpleNamespace(name=name, stop=_Method(name))

    def wait(self, references: list[str], *, num_returns: int, timeout: float) -> tuple[list[str], list[str]]:
        assert num_returns == len(references)
        late = [name for name in references if self.ends[name] == "late"]
        return [name for name in references if name not in late], late

    def get(self, reference: str, *, timeout: float) -> None:
        if self.ends[reference] == "lost":
            raise _RayError

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor.name)


def test_down_reports_killed_and_lost_services_separately(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, c = (f"{NODE_PREFIX}{name}" for name in "abc")
    ray = FakeRay({a: "in time", b: "lost", c: "late", CONTROLLER: "late"})
    monkeypatch.setitem(sys.modules, "ray", ray)
    monkeypatch.setattr(cluster, "connect", lambda address: None)
    session = _session(tmp_path, action="down", drain=5.0, address="auto")
    assert ray_verb.run(session) == 0
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "ended 3 inference services",
        f"killed, because they did not end within 5s: {c}",
        f"lost before they were ended: {b}",
    ]
    assert ray.killed == [CONTROLLER, a, b, c]
