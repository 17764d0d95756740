"""Has a helper compute on one device and check the result; decides nothing about what follows from it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from inference.children import HelperError, run_helper
from inference.devices.base import Reading

TRIAL_SECONDS = 30.0
"""A healthy device takes well under a second of it; opening a driver that powers devices up can take many."""

Trial = Callable[[Reading], Awaitable[None]]


async def trial(reading: Reading, *, seconds: float = TRIAL_SECONDS) -> None:
    """Returns when the device computed right; raises HelperError when it did not, or not within `seconds`."""
    job = {
        "id": reading.id,
        "kind": reading.kind,
        "ggml_name": reading.ggml_name,
        "rpc_endpoint": reading.rpc_endpoint,
    }
    answer = await run_helper("trial", job, seconds=seconds, environment=reading.environment)
    if "error" in answer:
        raise HelperError(f"the trial of {reading.id} failed: {answer['error']}")
