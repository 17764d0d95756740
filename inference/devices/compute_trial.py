"""Tests one device: a helper computes on it and checks the result."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from inference.devices.device import Reading
from inference.protocol import ExitCause
from inference.workers.exit_cause import cause_of_text
from inference.workers.helper_client import HelperError, run_helper

log = logging.getLogger(__name__)

TRIAL_SECONDS = 30.0
"""A healthy device takes less than a second, but a driver that powers devices up can take many."""

Trial = Callable[[Reading], Awaitable[None]]
Run = Callable[..., Awaitable[dict[str, Any]]]
"""The signature of `run_helper`."""


async def trial(reading: Reading, *, seconds: float = TRIAL_SECONDS, run: Run = run_helper) -> None:
    """Raises HelperError when the device computes wrong results, fails, or does not answer within `seconds`.

    A device without memory for the trial passes, because it answers a new process.
    """
    job = {
        "id": reading.id,
        "kind": reading.kind,
        "ggml_name": reading.ggml_name,
        "rpc_endpoint": reading.rpc_endpoint,
    }
    try:
        answer = await run("trial", job, seconds=seconds, environment=reading.environment)
    except HelperError as error:
        if cause_of_text(error.output) not in (ExitCause.OOM_COMPUTE, ExitCause.OOM_LOAD):
            raise
        answer = {"full": str(error)}
    if "error" in answer:
        raise HelperError(f"the trial of {reading.id} failed: {answer['error']}")
    if "full" in answer:
        log.info("%s answers, but has no memory for a trial: %s", reading.id, answer["full"])
