"""Decides who waits for a form to be compiled, and for how long; compiles nothing itself.

Forms are compiled one after the other, off the event loop, so that one that takes long keeps only other forms waiting,
and those that are known keep nobody. Who wants one that is being compiled waits for it with whoever asked first, and
keeps its place when that one leaves.
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
from inference.worker.dialects.forms import Form
from inference.worker.worker_errors import BadRequestError, GoneError, WorkerError

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

    def known(self, key: bytes) -> Constraint | None:
        """The constraint of a form that needs no compiling. Never waits."""
        ...

    def compile(self, form: Form, param: str) -> Constraint:
        """The constraint of a form, after seconds; raises BadRequestError, or WorkerError."""
        ...


@dataclass(slots=True, eq=False)
class _Job:
    """A form that is compiled or waits for it, and for whom, in the order in which they asked: where each awaits it,
    and whether the client left. What comes of it is the constraint, and whether all may have this one.
    """

    askers: dict[asyncio.Future[Constraint], Callable[[], bool]]
    future: Future[tuple[Constraint, bool]] = field(default_factory=Future)


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
        loop = asyncio.get_running_loop()
        key, known = await loop.run_in_executor(self._looking, self._look, form, param)
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
        """What comes of the job for the form, somebody else's where there is one, its refusal too."""
        asker: asyncio.Future[Constraint] = asyncio.get_running_loop().create_future()
        if (job := self._jobs.get((param, key))) is not None:
            job.askers[asker] = gone
        elif self.waiting >= self._most:
            raise _full()
        else:
            job = self._jobs[param, key] = _Job({asker: gone})
            self._begin(job, key, form, param)
        try:
            return await asker
        finally:
            job.askers.pop(asker, None)
            if not job.askers:
                job.future.cancel()

    def _begin(self, job: _Job, key: bytes, form: Form, param: str) -> None:
        def work() -> tuple[Constraint, bool]:
            if all(gone() for gone in list(job.askers.values())):
                raise GoneError
            constraint = self._compiler.compile(form, param)
            return constraint, self._compiler.known(key) is constraint

        def heard() -> None:
            _tell(job)
            if job.askers:
                self._begin(job, key, form, param)
            else:
                del self._jobs[param, key]

        def over(_future: Future[tuple[Constraint, bool]]) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(heard)

        loop = asyncio.get_running_loop()
        job.future = self._compiling.submit(work)
        job.future.add_done_callback(over)

    @property
    def waiting(self) -> int:
        """Forms that are compiled or wait for it."""
        return len(self._jobs)


def _tell(job: _Job) -> None:
    """Those for whom the end of a job is leave it: all, or the first where each needs a constraint of his own.

    Who asked when the job was given up, because all before had left, stays.
    """
    if job.future.cancelled():
        return
    error = job.future.exception()
    for asker, gone in list(job.askers.items()):
        if isinstance(error, GoneError) and not gone():
            continue
        del job.askers[asker]
        if asker.done():  # cancelled just now
            continue
        if error is not None:
            asker.set_exception(error)
            continue
        constraint, is_shared = job.future.result()
        asker.set_result(constraint)
        if not is_shared:
            return


def _full() -> WorkerError:
    return WorkerError(Code.QUEUE_FULL, "this model prepares other forms; ask again", retry_after=5.0)


def _late() -> WorkerError:
    return WorkerError(Code.DEADLINE_EXCEEDED, "the model did not start to answer within the deadline")
