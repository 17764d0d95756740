"""Runs helper processes with a deadline.

A helper that times out, crashes or returns an invalid answer is killed, and HelperError is raised. One that hangs in a
driver cannot be killed; with MAX_STUCK of them no further helpers of that job are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from headgate.shared import child_process
from inference.workers.child_environment import NOTICE, child_environment

MAX_ANSWER_BYTES = 16 * 2**20
MAX_OUTPUT_BYTES = 16 * 2**10
END_SECONDS = 2.0
"""A killed process that still runs after this time hangs in the kernel."""
MAX_STUCK = 3
"""Limit of hanging helpers of one job, so that a hanging driver does not accumulate processes."""

log = logging.getLogger(__name__)
_reaping: set[asyncio.Task[None]] = set()
_stuck: dict[str, set[asyncio.Future[int]]] = {}


class HelperError(Exception):
    """A helper gave no answer. `output` is the end of its stderr, `status` its exit status (None after a timeout or a
    failed start).
    """

    def __init__(self, message: str, output: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.output = output
        self.status = status


async def run_helper(
    job: str, data: Mapping[str, Any], *, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The answer of one helper. Raises HelperError after `seconds`, if it cannot start, crashes, or answers wrongly."""
    process = await _start(job, environment or {})
    try:
        async with asyncio.timeout(seconds):
            question = await asyncio.to_thread(json.dumps, data)  # in a thread, because it can contain a whole request
            out, err = await _communicate(process, question.encode())
    except TimeoutError:
        raise HelperError(f"the {job} helper did not answer within {seconds:g} s") from None
    finally:
        await _end(process, job)
    try:
        answer = await asyncio.to_thread(json.loads, out)
    except ValueError:
        output = err[-MAX_OUTPUT_BYTES:].decode("utf-8", "replace").strip()
        lines = output.splitlines()
        how = child_process.exit_text(process.returncode or 0)
        message = f"the {job} helper ended with {how}{': ' + lines[-1] if lines else ''}"
        raise HelperError(message, output, process.returncode) from None
    if not isinstance(answer, dict):
        raise HelperError(f"the answer of the {job} helper is not an object")
    return answer


class ServingHelper:
    """A long-running helper with one answer per request. Started on first use, restarted after a failure.

    `on_notice` is called for each NOTICE message.
    """

    def __init__(self, job: str) -> None:
        self.on_notice: Callable[[], None] | None = None
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, *, seconds: float) -> dict[str, Any]:
        """One answer. Raises HelperError; the next call then starts a new process."""
        async with self._turn:
            try:
                async with asyncio.timeout(seconds):
                    if self._process is None:
                        self._process, self._answers = await _start(self._job, {}), asyncio.Queue()
                        self._listening = asyncio.create_task(self._listen(self._process, self._answers))
                    assert self._process.stdin is not None
                    self._process.stdin.write(b"\n")
                    await self._process.stdin.drain()
                    answer = json.loads(await self._answers.get())
            except (TimeoutError, OSError, ValueError, RuntimeError) as error:  # for RuntimeError see _communicate
                await self.close()
                raise HelperError(f"the {self._job} helper failed ({str(error) or 'no answer in time'})") from error
            except BaseException:
                await self.close()
                raise
        if not isinstance(answer, dict):
            await self.close()
            raise HelperError(f"the answer of the {self._job} helper is not an object")
        return answer

    @property
    def is_running(self) -> bool:
        """Whether the process runs."""
        return self._process is not None

    async def close(self) -> None:
        """Ends the process if it runs."""
        process, self._process = self._process, None
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
        if process is not None:
            await _end(process, self._job)

    async def _listen(self, process: asyncio.subprocess.Process, answers: asyncio.Queue[bytes]) -> None:
        """Separates notices from answers. An empty answer stands for the end of the process or an invalid answer."""
        assert process.stdout is not None
        line = b" "
        while line:
            try:
                line = await process.stdout.readline()
            except (OSError, ValueError):  # a line beyond the limit
                line = b""
            if line != NOTICE:
                answers.put_nowait(line)
            elif self.on_notice is not None:
                self.on_notice()


async def _start(job: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    if len(_stuck.get(job, ())) >= MAX_STUCK:
        raise HelperError(f"{MAX_STUCK} {job} helpers hang in a driver and cannot be ended")
    try:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.helper",
            job,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=child_environment(environment),
            limit=MAX_ANSWER_BYTES,
        )
    except OSError as error:
        raise HelperError(f"cannot start the {job} helper ({error})") from error


async def _communicate(process: asyncio.subprocess.Process, question: bytes) -> tuple[bytes, bytes]:
    """Stdout and stderr of the process for `question`; empty when it ended before it read the question."""
    try:
        return await process.communicate(question)
    except RuntimeError:  # uvloop raises this for a closed pipe, where asyncio only warns
        return b"", b""


async def _end(process: asyncio.subprocess.Process, job: str, seconds: float = END_SECONDS) -> None:
    """Kills and reaps the process, also when the caller is cancelled. A hanging process is reaped later."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            process.kill()
    reaping = asyncio.create_task(_reap(process, job, seconds))
    _reaping.add(reaping)
    reaping.add_done_callback(_reaping.discard)
    await asyncio.shield(reaping)


async def _reap(process: asyncio.subprocess.Process, job: str, seconds: float) -> None:
    reaped = asyncio.ensure_future(process.wait())
    await asyncio.wait({reaped}, timeout=seconds)
    if not reaped.done():
        log.warning("the %s helper (pid %d) hangs in a driver and cannot be killed", job, process.pid)
        stuck = _stuck.setdefault(job, set())
        stuck.add(reaped)
        reaped.add_done_callback(stuck.discard)
