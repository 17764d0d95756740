"""The thread of an engine: turns until it is told to stop or has to give up; never knows what a turn does.

Nothing that a turn raises ends the thread unnoticed: whoever waits would wait for ever, and the process look idle.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from inference.protocol import Code
from inference.worker.cores.thread_names import name_thread
from inference.worker.worker_errors import WorkerError

log = logging.getLogger("headgate.worker.runner")

FATAL_FAILURES = 3
"""After this many failed steps in a row the process gives up, so that a fresh one can take over."""

_IDLE_SECONDS = 5.0


class EngineThread:
    """Runs `iterate` as long as it says that there is more to do, sleeps until `wake` otherwise, and runs `end` last.

    Having given up it only runs `end`, at every `wake` and until it is told to stop: who comes meanwhile is told too.
    """

    def __init__(
        self,
        name: str,
        iterate: Callable[[], bool],
        end: Callable[[WorkerError], None],
        on_fatal: Callable[[str], None],
    ) -> None:
        """`end` gets the reason that every request is to be told; `on_fatal` a sentence, once and on this thread. What
        either of them or `iterate` raises is logged; from `iterate` it means giving up.
        """
        self.failures = 0
        """Failed steps in a row."""
        self._iterate = iterate
        self._end = end
        self._on_fatal = on_fatal
        self._wake = threading.Event()
        self._stopping: WorkerError | None = None
        self._stop_requested = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def wake(self) -> None:
        """There is something to do; from any thread."""
        self._wake.set()

    def pause(self, seconds: float) -> None:
        """Waits until there is something to do, so long at most. On the thread itself."""
        self._wake.wait(seconds)
        self._wake.clear()

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
        """A step went well."""
        self.failures = 0

    def failed(self, message: str) -> None:
        """A step failed; with the last of too many in a row it gives up after this turn."""
        self.failures += 1
        if self.failures >= FATAL_FAILURES:
            self.give_up(message)

    def give_up(self, message: str) -> None:
        """No turn follows this one. On the thread itself."""
        if self._stopping is None:
            self._stopping = WorkerError(Code.MODEL_FAILED, message)
            try:
                self._on_fatal(message)
            except BaseException:
                log.exception("that the engine gave up could not be told")

    def _run(self) -> None:
        name_thread(self._thread.name)
        while self._stopping is None:
            if self._wake.is_set():  # clearing takes a lock
                self._wake.clear()
            try:
                has_more = self._iterate()
            except BaseException as error:
                log.exception("the engine's thread failed")
                self.give_up(f"the engine failed ({type(error).__name__}: {error})")
                break
            if not has_more:
                self._wake.wait(_IDLE_SECONDS)
        self._end_all()
        while not self._stop_requested:
            self._wake.wait()
            self._wake.clear()
            self._end_all()

    def _end_all(self) -> None:
        assert self._stopping is not None
        try:
            self._end(self._stopping)
        except BaseException:
            log.exception("not every request could be told that the engine ended")
