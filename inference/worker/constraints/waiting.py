"""Decides who waits for a form to be compiled, and for how long; compiles nothing itself.

Forms are compiled one after the other, off the event loop, so that one that takes long keeps only other forms waiting,
and those that are known keep nobody. Who wants one that is being compiled waits for it with whoever asked first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol

from inference.protocol import Code
from inference.worker.backend import Constraint
from inference.worker.core.forms import Form
from inference.worker.errors import BadRequestError, GoneError, WorkerError

log = logging.getLogger("headgate.worker.constraints")

MAX_WAITING = 16
"""Forms being compiled or waiting for it. One takes up to some seconds, so that more would wait in vain."""
FORM_SECONDS = 30.0
"""For a form to be compiled, and for those before it."""
HELP_SECONDS = 2.0
"""The same for a form that only helps the model: without it the answer is still what was asked for."""


class Compiles(Protocol):
    """Makes constraints; `Compiler` is one."""

    def key(self, form: Form, param: str) -> bytes:
        """The same for forms that are the same; raises BadRequestError."""
        ...

    def known(self, form: Form, param: str) -> Constraint | None:
        """The constraint of a form that needs no compiling. Never waits; raises BadRequestError."""
        ...

    def compile(self, form: Form, param: str) -> Constraint:
        """The constraint of a form, after seconds; raises BadRequestError, or WorkerError."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """A form that is compiled or waits for it; `over` is set once the loop has heard that it ended, however it did."""

    future: Future[Constraint]
    over: asyncio.Event = field(default_factory=asyncio.Event)


class FormQueue:
    """One per worker, on the event loop."""

    def __init__(
        self,
        compiler: Compiles,
        looking: Executor,
        compiling: Executor | None = None,
        *,
        most: int = MAX_WAITING,
        seconds: float = FORM_SECONDS,
        help_seconds: float = HELP_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`compiling` has one thread and only this work, `looking` is any; `clock` is that of the deadlines."""
        self._compiler = compiler
        self._most = most
        self._seconds = seconds
        self._help_seconds = help_seconds
        self._clock = clock
        self._jobs: dict[tuple[str, bytes], _Job] = {}
        self._looking = looking
        self._compiling = compiling or ThreadPoolExecutor(1, thread_name_prefix="forms")

    async def constraint(
        self, form: Form, param: str, *, promised: bool, deadline: float | None, gone: Callable[[], bool]
    ) -> Constraint | None:
        """The constraint of `form`; None where it was not `promised` and there is none within `help_seconds`.

        `deadline` is when the request must have its first token, `gone` whether its client left: nothing is compiled
        for nobody. Raises BadRequestError (unsupported_parameter, with `param`) for a form that cannot be enforced,
        WorkerError(queue_full or deadline_exceeded), and GoneError.
        """
        try:
            return await self._found(form, param, self._seconds if promised else self._help_seconds, deadline, gone)
        except WorkerError as error:
            if not promised:
                log.info("answers are not held to their form: %s", error.message)
                return None
            if isinstance(error, BadRequestError):
                # Another tier may be able to do it.
                raise BadRequestError(error.message, error.param, code=Code.UNSUPPORTED_PARAMETER) from None
            raise

    async def _found(
        self, form: Form, param: str, seconds: float, deadline: float | None, gone: Callable[[], bool]
    ) -> Constraint:
        compiler, loop = self._compiler, asyncio.get_running_loop()
        known = await loop.run_in_executor(self._looking, compiler.known, form, param)
        if known is not None:
            return known
        left = seconds if deadline is None else min(seconds, deadline - self._clock())
        if left <= 0:
            raise _late()
        key = param, await loop.run_in_executor(self._looking, compiler.key, form, param)
        try:
            async with asyncio.timeout(left):
                return await self._of_another(key, form) or await self._compiled(key, form, gone)
        except TimeoutError:
            raise (_full() if left == seconds else _late()) from None

    async def _of_another(self, key: tuple[str, bytes], form: Form) -> Constraint | None:
        """What comes of the same form of somebody else that is being compiled, its refusal too; None where none is.

        Where nothing came of it, because its client left, or nothing that may be shared, the next one does it.
        """
        param, _form = key
        while (job := self._jobs.get(key)) is not None:
            await job.over.wait()
            error = None if job.future.cancelled() else job.future.exception()
            if isinstance(error, WorkerError):
                raise error
            looked = asyncio.get_running_loop().run_in_executor(self._looking, self._compiler.known, form, param)
            if (known := await looked) is not None:
                return known
        return None

    async def _compiled(self, key: tuple[str, bytes], form: Form, gone: Callable[[], bool]) -> Constraint:
        param, _form = key

        def work() -> Constraint:
            if gone():
                raise GoneError
            return self._compiler.compile(form, param)

        if self.waiting >= self._most:
            raise _full()
        loop = asyncio.get_running_loop()
        job = self._jobs[key] = _Job(self._compiling.submit(work))
        job.future.add_done_callback(lambda _future: self._leave(loop, key))
        return await asyncio.wrap_future(job.future)

    @property
    def waiting(self) -> int:
        """Forms that are compiled or wait for it."""
        return len(self._jobs)

    def _leave(self, loop: asyncio.AbstractEventLoop, key: tuple[str, bytes]) -> None:
        """Called by whoever ends a job, compiled or given up."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._left, key)

    def _left(self, key: tuple[str, bytes]) -> None:
        self._jobs.pop(key).over.set()


def _full() -> WorkerError:
    return WorkerError(Code.QUEUE_FULL, "this model prepares other forms; ask again", retry_after=5.0)


def _late() -> WorkerError:
    return WorkerError(Code.DEADLINE_EXCEEDED, "the model did not start to answer within the deadline")
