"""Queues the compilation of forms.

Forms are compiled one at a time, off the event loop. A slow one delays only other forms that are not cached. Of several
requests for the same form only one is in the queue at a time. When it is done, the others find the form in the cache,
or the next one is queued behind the other forms. While the worker is idle, the vocabulary is read in advance.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field

from inference.protocol import Code
from inference.worker.backend import Constraint
from inference.worker.constraints.compiler import Compiler
from inference.worker.dialects.forms import Form
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError

log = logging.getLogger("headgate.worker.constraints")

MAX_WAITING = 16
"""Limit of forms that are compiled or wait. A compilation can take seconds, so more forms would miss deadlines."""
FORM_SECONDS = 30.0
"""Time limit for the compilation of a form, including those before it in the queue."""
HELP_SECONDS = 2.0
"""The time limit for a form that only helps the model: answers without the constraint are valid."""
IDLE_SECONDS = 1.0
"""The vocabulary is read after this time without a request: a client with consecutive requests sends the next one
earlier."""


@dataclass(slots=True)
class _Requests:
    """The requests for one form. The one that holds `turn` has it compiled."""

    count: int = 0
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)


class FormQueue:
    """The queue of one worker, used on the event loop."""

    def __init__(
        self,
        compiler: Compiler,
        lookups: Executor,
        compiling: Executor,
        *,
        max_waiting: int = MAX_WAITING,
        seconds: float = FORM_SECONDS,
        help_seconds: float = HELP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compiling` has one thread and no other work; `lookups` is any executor; `clock` is that of the deadlines."""
        self._compiler = compiler
        self._max_waiting = max_waiting
        self._seconds = seconds
        self._help_seconds = help_seconds
        self._clock = clock
        self._requests: dict[bytes, _Requests] = {}
        """Waiting requests by the key of their form."""
        self._lookups = lookups
        self._compiling = compiling
        self._reads_ahead = True
        self._idle_timer: asyncio.TimerHandle | None = None

    def busy(self) -> None:
        """A request is running: ends the wait of `idle`."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
            self._idle_timer = None

    def idle(self) -> None:
        """No request is running: the vocabulary is read once, after IDLE_SECONDS without a request."""
        if self._reads_ahead:
            self.busy()
            self._idle_timer = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._read_ahead)

    def _read_ahead(self) -> None:
        self._reads_ahead, self._idle_timer = False, None
        self._compiling.submit(self._compiler.read_vocabulary)

    async def constraint(
        self, form: Form, param: str, *, guaranteed: bool, deadline: float | None, gone: Callable[[], bool]
    ) -> Constraint | None:
        """The constraint of `form`; None if it was not `guaranteed` and cannot be had, or not within `help_seconds`.

        `deadline` is the time by which the request needs its first token; `gone` returns whether its client has
        disconnected: then nothing is compiled. Raises BadRequestError (unsupported_parameter, with `param`) for a form
        that cannot be enforced, WorkerError (queue_full, deadline_exceeded or memory_limit_exceeded), and GoneError.
        """
        try:
            return await self._found(form, param, self._seconds if guaranteed else self._help_seconds, deadline, gone)
        except WorkerError as error:
            if not guaranteed:
                log.info("an answer is generated without its optional constraint: %s", error.message)
                return None
            if isinstance(error, BadRequestError):
                # Another tier may support it.
                raise BadRequestError(error.message, error.param, code=Code.UNSUPPORTED_PARAMETER) from None
            raise

    async def _found(
        self, form: Form, param: str, seconds: float, deadline: float | None, gone: Callable[[], bool]
    ) -> Constraint:
        loop = asyncio.get_running_loop()
        key, known = await loop.run_in_executor(self._lookups, self._look, form, param)
        if known is not None:
            return known
        left = seconds if deadline is None else min(seconds, deadline - self._clock())
        if left <= 0:
            raise _late()
        try:
            async with asyncio.timeout(left):
                return await self._compiled(key, form, param, gone)
        except TimeoutError:
            raise (_full() if left == seconds else _late()) from None

    def _look(self, form: Form, param: str) -> tuple[bytes, Constraint | None]:
        key = self._compiler.key(form, param)
        return key, self._compiler.known(key)

    async def _compiled(self, key: bytes, form: Form, param: str, gone: Callable[[], bool]) -> Constraint:
        def work() -> Constraint:
            if gone():
                raise GoneError
            return self._compiler.compile(form, param)

        if key not in self._requests and self.waiting >= self._max_waiting:
            raise _full()
        same = self._requests.setdefault(key, _Requests())
        same.count += 1
        try:
            async with same.turn:
                if (known := self._compiler.known(key)) is not None:
                    return known
                return await asyncio.get_running_loop().run_in_executor(self._compiling, work)
        finally:
            same.count -= 1
            if not same.count:
                del self._requests[key]

    @property
    def waiting(self) -> int:
        """Number of forms that are compiled or wait."""
        return len(self._requests)


def _full() -> WorkerError:
    return WorkerError(Code.QUEUE_FULL, "this model is compiling other formats; retry later", retry_after=5.0)


def _late() -> WorkerError:
    return WorkerError(Code.DEADLINE_EXCEEDED, "the model did not start to answer within the deadline")
