"""Has a helper compute on one device and check the result; decides nothing about what follows from it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from inference.devices.device import Reading
from inference.helpers.helper_client import HelperError, run_helper
from inference.protocol import ExitCause
from inference.workers.exit_cause import cause_of_text

log = logging.getLogger(__name__)

TRIAL_SECONDS = 30.0
"""A healthy device takes well under a second of it; opening a driver that powers devices up can take many."""

Trial = Callable[[Reading], Awaitable[None]]
Run = Callable[..., Awaitable[dict[str, Any]]]
"""As `run_helper`."""


async def trial(reading: Reading, *, seconds: float = TRIAL_SECONDS, run: Run = run_helper) -> None:
    """Returns when the device computed right; raises HelperError when it did not, or not within `seconds`.

    A device that is too full even for a trial passes: it is there and answers a new process, and models may be on it.
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
        if cause_of_text(error.said) not in (ExitCause.OOM_COMPUTE, ExitCause.OOM_LOAD):
            raise
        answer = {"full": str(error)}
    if "error" in answer:
        raise HelperError(f"the trial of {reading.id} failed: {answer['error']}")
    if "full" in answer:
        log.info("%s is too full for a trial, and answers: %s", reading.id, answer["full"])
