"""A reload was the end of a service that was still starting: nobody listened for the signal yet, and it ended by it."""

from __future__ import annotations

import subprocess
import sys

import pytest

STARTING = """
import os, signal, sys, types
service = types.ModuleType("{name}.__main__")
service.main = lambda words: os.kill(os.getpid(), signal.SIGHUP) or 0
sys.modules["{name}.__main__"] = service
from headgate.cli.main import main
sys.exit(main(["{name}"]))
"""


@pytest.mark.parametrize("name", ["gateway", "inference"])
def test_a_service_that_is_starting_outlives_a_reload(name: str) -> None:
    """The signal comes before there is a handler: its configuration is read afterwards anyway."""
    ended = subprocess.run([sys.executable, "-c", STARTING.format(name=name)], capture_output=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
