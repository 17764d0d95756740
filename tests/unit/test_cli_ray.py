"""`headgate ray` without ray, without a cluster, and with other settings than the running services."""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import headgate
from headgate.cli.command import Session, UsageError
from headgate.cli.fleet import ray_verb
from headgate.cli.main import main
from headgate.cli.terminal import Terminal
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
