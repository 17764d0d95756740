"""Runs helper processes with a deadline and takes their answers; decides nothing about models or devices.

A helper that is late, dies or answers nonsense is killed and becomes a HelperError; the service goes on. One that hangs
inside a driver, where no signal reaches it, is left alone, and with a few of them no more of their kind are started.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from inference.helpers import NOTICE
from inference.helpers.child_environment import child_environment

MOST_ANSWER_BYTES = 16 * 2**20
MOST_LAST_WORDS_BYTES = 16 * 2**10
END_SECONDS = 2.0
"""A killed process that is still there after so long hangs in the kernel, maybe for ever."""
MOST_STUCK = 3
"""Helpers of one job that may hang so at a time: a driver that does not come back must not collect processes."""

log = logging.getLogger(__name__)
_reaping: set[asyncio.Task[None]] = set()
_stuck: dict[str, set[asyncio.Future[int]]] = {}


class HelperError(Exception):
    """A helper gave no answer; the message says which job and why, `said` are its last words, and `status` is how it
    ended (None where it was killed for being late, or did not start).
    """

    def __init__(self, message: str, said: str = "", status: int | None = None) -> None:
        super().__init__(message)
        self.said = said
        self.status = status


async def run_helper(
    job: str, data: Mapping[str, Any], *, seconds: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The answer of one helper; raises HelperError after `seconds`, on a death, or on an unreadable answer."""
    process = await _start(job, environment or {})
    try:
        async with asyncio.timeout(seconds):
            question = await asyncio.to_thread(json.dumps, data)  # some hold a whole request
            out, err = await _converse(process, question.encode())
    except TimeoutError:
        raise HelperError(f"the {job} helper gave no answer within {seconds:g} s") from None
    finally:
        await _end(process, job)
    try:
        answer = await asyncio.to_thread(json.loads, out)
    except ValueError:
        said = err[-MOST_LAST_WORDS_BYTES:].decode("utf-8", "replace").strip()
        words = said.splitlines()
        raise HelperError(
            f"the {job} helper ended with {_ending(process.returncode)}{': ' + words[-1] if words else ''}",
            said,
            process.returncode,
        ) from None
    if not isinstance(answer, dict):
        raise HelperError(f"the {job} helper answered nonsense")
    return answer


def _ending(status: int | None) -> str:
    """An exit status in words."""
    if status is None or status >= 0:
        return f"status {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"


class ServingHelper:
    """A helper that stays and answers one line per question; started on first use, killed and restarted on trouble.

    `notice`, a callable without arguments, is called for each NOTICE.
    """

    def __init__(self, job: str) -> None:
        self.notice: Callable[[], None] | None = None
        self._job = job
        self._process: asyncio.subprocess.Process | None = None
        self._answers: asyncio.Queue[bytes] = asyncio.Queue()
        self._listening: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()

    async def ask(self, *, seconds: float) -> dict[str, Any]:
        """One answer; raises HelperError, after which the next question meets a fresh process."""
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
            except (TimeoutError, OSError, ValueError, RuntimeError) as error:  # the last of a pipe, see _converse
                await self.close()
                raise HelperError(f"the {self._job} helper failed ({str(error) or 'no answer in time'})") from error
            except BaseException:
                await self.close()
                raise
        if not isinstance(answer, dict):
            await self.close()
            raise HelperError(f"the {self._job} helper answered nonsense")
        return answer

    @property
    def is_running(self) -> bool:
        """Whether the next question meets a process that answered before."""
        return self._process is not None

    async def close(self) -> None:
        """Ends the process, if there is one."""
        process, self._process = self._process, None
        listening, self._listening = self._listening, None
        if listening is not None:
            listening.cancel()
        if process is not None:
            await _end(process, self._job)

    async def _listen(self, process: asyncio.subprocess.Process, answers: asyncio.Queue[bytes]) -> None:
        """Tells notices and answers apart; the last answer, empty, is the end of the process or of its good sense."""
        assert process.stdout is not None
        line = b" "
        while line:
            try:
                line = await process.stdout.readline()
            except (OSError, ValueError):  # longer than any answer
                line = b""
            if line != NOTICE:
                answers.put_nowait(line)
            elif self.notice is not None:
                self.notice()


async def _start(job: str, environment: Mapping[str, str]) -> asyncio.subprocess.Process:
    if len(_stuck.get(job, ())) >= MOST_STUCK:
        raise HelperError(f"{MOST_STUCK} {job} helpers hang in a driver and cannot be ended")
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
            limit=MOST_ANSWER_BYTES,
        )
    except OSError as error:
        raise HelperError(f"the {job} helper cannot be started ({error})") from error


async def _converse(process: asyncio.subprocess.Process, question: bytes) -> tuple[bytes, bytes]:
    """What it writes to stdout and stderr, asked `question`; nothing of one that died before it could be asked."""
    try:
        return await process.communicate(question)
    except RuntimeError:  # uvloop's word for a pipe that is closed already, where asyncio only warns
        return b"", b""


async def _end(process: asyncio.subprocess.Process, job: str, seconds: float = END_SECONDS) -> None:
    """Kills what still runs and reaps it, also for a caller who is cancelled; what cannot be killed is reaped later."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            process.kill()
    reaping = asyncio.create_task(_reap(process, job, seconds))
    _reaping.add(reaping)
    reaping.add_done_callback(_reaping.discard)
    await asyncio.shield(reaping)


async def _reap(process: asyncio.subprocess.Process, job: str, seconds: float) -> None:
    reaped = asyncio.ensure_future(process.wait())
    await asyncio.wait({reaped}, timeout=seconds)
    if not reaped.done():
        log.warning("the %s helper (pid %d) hangs in a driver and cannot be ended", job, process.pid)
        stuck = _stuck.setdefault(job, set())
        stuck.add(reaped)
        reaped.add_done_callback(stuck.discard)
