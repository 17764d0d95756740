"""How a worker process ended."""

from __future__ import annotations

from dataclasses import dataclass

from inference.protocol import ExitCause
from inference.worker_link import Heartbeat


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended.

    `message` is one sentence, `last_lines` the end of its output, `status` the exit status or minus the signal number.
    `starved`: the kernel killed it because host memory ran out. `silent_abort`: it got SIGABRT without an error
    message, so another process may have sent it. `beat` is its last heartbeat.
    """

    cause: ExitCause
    status: int
    message: str
    last_lines: tuple[str, ...]
    was_ready: bool
    starved: bool = False
    silent_abort: bool = False
    beat: Heartbeat | None = None
