"""Settings of the whole test suite.

Property tests draw the same examples in every run; the profile `explore` draws new ones:
HYPOTHESIS_PROFILE=explore make test ARGS="tests/property". Names of test cases must be the same in every process, so
that tests can be distributed. SIGINT is not ignored, and bytecode is always written: hundreds of processes would
compile again. Collected objects are frozen, so that the garbage collector skips them, and it runs less often. TLS
trusts only an unused authority here, because reading the authorities of the system takes 35 ms per client. Threads of
llama.cpp sleep while they wait for each other: there are more processes than cores, and spinning threads delay others.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

SLOW = (HealthCheck.too_slow,)  # depends on what else the machine does
settings.register_profile("repeatable", derandomize=True, max_examples=50, deadline=None, suppress_health_check=SLOW)
settings.register_profile("explore", max_examples=1000, deadline=None, suppress_health_check=SLOW)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeatable")
settings.load_profile(PROFILE)
if PROFILE == "repeatable":
    # Otherwise the examples depend on the modules that the process has imported so far, and so on the other tests.
    providers._get_local_constants = lambda: providers._local_constants

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # as the workers of the service have it; threads cost 50 ms at start
os.environ["SSL_CERT_FILE"] = str(Path(__file__).with_name("rigs") / "unused_root.pem")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuses names that differ between processes."""
    strange = [item.nodeid for item in items if " at 0x" in item.nodeid]
    if strange:
        raise pytest.UsageError(f"name these cases with ids=: {strange[0]}")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """Searches for garbage among thousands of tests, and after each 700 new objects, take a sixth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        gc.set_threshold(10_000)
