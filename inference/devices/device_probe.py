"""The base class of device probes, and the trial of one device by a helper that computes on it."""

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

Run = Callable[..., Awaitable[dict[str, Any]]]
"""The signature of `run_helper`."""


async def trial(reading: Reading, *, run: Run = run_helper) -> None:
    """Raises HelperError when the device computes wrong results, fails, or does not answer within TRIAL_SECONDS.

    A device without memory for the trial passes, because it answers a new process.
    """
    job = {
        "id": reading.id,
        "kind": reading.kind,
        "ggml_name": reading.ggml_name,
        "rpc_endpoint": reading.rpc_endpoint,
    }
    try:
        answer = await run("trial", job, seconds=TRIAL_SECONDS, environment=reading.environment)
    except HelperError as error:
        if cause_of_text(error.output) not in (ExitCause.OOM_COMPUTE, ExitCause.OOM_LOAD):
            raise
        answer = {"full": str(error)}
    if "error" in answer:
        raise HelperError(f"the trial of {reading.id} failed: {answer['error']}")
    if "full" in answer:
        log.info("%s answers, but has no memory for a trial: %s", reading.id, answer["full"])


class Probe:
    """Measures one kind of devices."""

    def readings(self) -> tuple[Reading, ...]:
        """The newest readings. Does not block."""
        raise NotImplementedError

    async def start(self) -> None:
        """Finds the devices. Called once. Finding none is not an error."""

    async def refresh(self) -> None:
        """Measures again, with a deadline of its own. A device that cannot be read keeps its last figures."""

    def listen(self, on_event: Callable[[], None]) -> None:
        """Calls `on_event` on the event loop as soon as something happens to a device; the next refresh reports it."""

    async def renew(self) -> None:
        """Restarts the helper of the probe at the next refresh, without waiting for its backoff."""

    async def trial(self, device: str) -> None:
        """Computes on a device and checks the result, with a deadline. Raises HelperError."""
        await trial(next(reading for reading in self.readings() if reading.id == device))

    async def close(self) -> None:
        """Ends the processes of the probe."""
