"""The sentence or traceback that a service ended with stood before, or among, the lines that it had logged until then.

Lines are written by a thread, and what ends the process wrote to stderr at once.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.processes import private_env

ENDS = """
import logging, logging.handlers, sys
import {service}.__main__ as service
from headgate.shared.errors import HeadgateError

def end(*_how):
    held = logging.handlers.MemoryHandler(99, logging.CRITICAL, logging.StreamHandler(sys.stderr))
    logging.getLogger().handlers = [held]  # holds its lines until they are asked for
    logging.getLogger("x").warning("the last line")
    raise {error}("the end")

service._serve = end
sys.exit(service.main([]))
"""


@pytest.mark.parametrize("service", ["inference", "gateway"])
@pytest.mark.parametrize("error", ["HeadgateError", "ZeroDivisionError"])
def test_what_a_service_ends_with_stands_behind_what_it_logged(tmp_path: Path, service: str, error: str) -> None:
    argv = [sys.executable, "-c", ENDS.format(service=service, error=error)]
    ended = subprocess.run(argv, env=private_env(tmp_path, {}), capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode != 0
    assert ended.stderr.startswith("the last line\n")
    assert ended.stderr.rstrip().endswith("the end")
