"""How property tests draw: the same examples in every run, so that a red suite is red again; `explore` draws anew.

Names of cases are the same in every process, or tests cannot be divided among several: none may hold an address.
A suite that was started in the background ignores Ctrl-C, and so would every program it tests: that is undone.
Bytecode is kept whatever the environment says: the suite starts hundreds of processes, and each would compile its own.
What collecting made stays, so the garbage collector need not look through it again in every full round.
One authority that signed nothing is all that TLS trusts here: reading those of the system takes 35 ms for every client.

HYPOTHESIS_PROFILE=explore make test ARGS="tests/property"
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("rigs") / "nobody.pem")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses names that differ from process to process."""
    strange = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if strange:
        raise pytest.UsageError(f"name these cases with ids=: {strange[0]}")


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import: a tenth of the time of what runs in these processes."""
    gc.collect()
    gc.freeze()
