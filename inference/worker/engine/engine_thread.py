"""The thread of an engine: runs iterations until it is stopped or gives up.

An exception of an iteration is reported, so that waiting requests end with an error instead of waiting forever.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inference.protocol import Code
from inference.worker.worker_errors import WorkerError

log = logging.getLogger("headgate.worker.runner")

FATAL_FAILURES = 3
"""After this many consecutive failed steps the worker gives up and is replaced."""

_IDLE_SECONDS = 5.0


class EngineThread:
    """Calls `iterate` again and again: at once after True, otherwise after `wake`, after the time of `rest` or after
    _IDLE_SECONDS. Calls `end` at the end.

    After giving up it calls `end` at every `wake` until `stop`, so that requests that arrive in this time also end.
    `ended` is set before the last call of `end`: what was queued before is still ended, what is queued after is not.
    """

    def __init__(
        self,
        name: str,
        iterate: Callable[[], bool],
        end: Callable[[WorkerError], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """`end` gets the error for all requests. `on_fatal` gets a message, once, on this thread.

        Exceptions of all three are logged; after an exception of `iterate` the thread gives up.
        """
        self.failures = 0
        """Consecutive failed steps."""
        self.ended: WorkerError | None = None
        """Why the thread ended."""
        self._iterate = iterate
        self._end = end
        self._on_fatal = on_fatal
        self._wake = threading.Event()
        self._rest_seconds = _IDLE_SECONDS
        self._stopping: WorkerError | None = None
        self._stop_requested = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """Requests an iteration. Thread-safe."""
        self._wake.set()

    def rest(self, seconds: float) -> None:
        """Makes the thread sleep at most `seconds` after this iteration. Call it on the engine thread only."""
        self._rest_seconds = min(self._rest_seconds, seconds)

    def stop(self, reason: WorkerError, seconds: float) -> bool:
        """Ends the thread with `reason` after the running iteration; returns whether it ended within `seconds`.

        Thread-safe.
        """
        self._stopping = self._stopping or reason
        self._stop_requested = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def succeeded(self) -> None:
        """Records a successful step."""
        self.failures = 0

    def failed(self, message: str) -> None:
        """Records a failed step; after FATAL_FAILURES consecutive ones the thread gives up after this iteration."""
        self.failures += 1
        if self.failures >= FATAL_FAILURES:
            self.give_up(message)

    def give_up(self, message: str) -> None:
        """Makes this iteration the last one. Call it on the engine thread only."""
        if self._stopping is None:
            self._stopping = WorkerError(Code.MODEL_FAILED, message)
            try:
                self._on_fatal(message)
            except BaseException:
                log.exception("internal error: the fatal error of the engine could not be reported")

    def _run(self) -> None:
        while self._stopping is None:
            if self._wake.is_set():  # clearing takes a lock
                self._wake.clear()
            try:
                has_more = self._iterate()
            except BaseException as error:
                log.exception("internal error: the engine thread failed")
                self.give_up(f"the engine failed ({type(error).__name__}: {error})")
                break
            if not has_more:
                self._wake.wait(self._rest_seconds)
            self._rest_seconds = _IDLE_SECONDS
        while not self._stop_requested:
            self._end_all()
            self._wake.wait()
            self._wake.clear()
        self.ended = self._stopping
        self._end_all()

    def _end_all(self) -> None:
        assert self._stopping is not None
        try:
            self._end(self._stopping)
        except BaseException:
            log.exception("internal error: not all requests could be ended")
