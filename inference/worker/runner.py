"""The thread of an engine: turns until it is told to stop or fails too often in a row; never knows what a turn does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from inference.protocol import Code
from inference.worker.errors import WorkerError

FATAL_FAILURES = 3
"""After this many failed steps in a row the process gives up, so that a fresh one can take over."""

_IDLE_SECONDS = 5.0


class Runner:
    """Runs `turn` as long as it says that there is more to do, sleeps until `wake` otherwise, and runs `end` last."""

    def __init__(
        self,
        name: str,
        turn: Callable[[], bool],
        end: Callable[[WorkerError], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """`end` gets the reason that every request is to be told; `on_fatal` a sentence, on this thread."""
        self.failures = 0
        """Failed steps in a row."""
        self._turn = turn
        self._end = end
        self._on_fatal = on_fatal
        self._wake = threading.Event()
        self._stopping: WorkerError | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to do; from any thread."""
        self._wake.set()

    def stop(self, reason: WorkerError, seconds: float) -> bool:
        """Ends the thread with `reason` after the running turn; whether it ended within `seconds`. From any thread."""
        self._stopping = reason
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def succeeded(self) -> None:
        """A step went well."""
        self.failures = 0

    def failed(self, message: str) -> None:
        """A step failed; the last of too many in a row ends the thread after this turn."""
        self.failures += 1
        if self.failures >= FATAL_FAILURES:
            self._stopping = WorkerError(Code.MODEL_FAILED, message)
            self._on_fatal(message)

    def _run(self) -> None:
        while self._stopping is None:
            self._wake.clear()
            if not self._turn():
                self._wake.wait(_IDLE_SECONDS)
        self._end(self._stopping)
