"""Supervises child processes: starts them, restarts them after an exit, and stops them in reverse order.

Each child has a process group of its own, so that Ctrl-C in a terminal reaches only the supervisor. Children that call
`child_process.die_with_parent` are killed when the supervisor ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from headgate.shared import child_process
from headgate.shared.errors import Exit

LINE_LIMIT = 1 << 16


@dataclass(frozen=True, slots=True)
class RestartDelays:
    """Delays before a restart, as in Docker: doubled after each exit, reset by a run of `healthy_seconds` or more."""

    first_seconds: float = 0.1
    max_seconds: float = 60.0
    healthy_seconds: float = 10.0

    def after(self, exits: int) -> float:
        """Seconds to wait after `exits` (1 or more) exits in a row."""
        return min(self.first_seconds * 2.0 ** min(exits - 1, 64), self.max_seconds)


@dataclass
class Child:
    """One supervised program. It has `kill_seconds` between the signal that stops it and SIGKILL."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    kill_seconds: float
    was_ready: bool = False
    """Whether it has been ready once. The user of the supervisor sets it."""
    process: asyncio.subprocess.Process | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no process runs."""
    has_usage_error: bool = False
    """Whether it ended with a usage error, which a restart would repeat: it waits for SIGHUP."""
    starts: int = 0
    last_status: int | None = None
    """Exit status of its last process, minus the number of the signal that ended it, or None before the first end."""
    task: asyncio.Task[None] | None = None
    """Runs and restarts it."""


class Supervisor:
    """Starts children, restarts them after a delay, and stops them in reverse order.

    `on_line` receives the name of a child and a line of its output, `note` one sentence per decision. `over` is
    resolved when a child exits with status 1, 2 or 70 before it was ready for the first time, or when all children
    wait after a usage error; the caller then calls `stop`.
    """

    def __init__(
        self,
        children: Sequence[Child],
        on_line: Callable[[str, str], None],
        note: Callable[[str], None],
        delays: RestartDelays | None = None,
    ) -> None:
        self.children = tuple(children)
        for child in self.children:
            child.idle.set()
        self._on_line = on_line
        self._note = note
        self._delays = delays or RestartDelays()
        self._forced = False
        self.stopping = False
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """The exit status for `up`, once a failure of a child ends all children."""

    def begin(self) -> None:
        """Starts the children that do not run, and those that wait after a usage error."""
        for child in self.children:
            if child.task is None or child.task.done():
                child.has_usage_error = False
                child.task = asyncio.ensure_future(self._keep_running(child))

    def hang_up(self) -> None:
        """Forwards SIGHUP, so that the services reload, and starts the children that wait after a usage error."""
        for child in self.children:
            self._send(child, signal.SIGHUP, group=False)
        self.begin()

    async def _keep_running(self, child: Child) -> None:
        """Runs a child again and again until it fails before it was ready, has a usage error, or `stop` is called."""
        loop = asyncio.get_running_loop()
        exits = 0
        while not self.stopping:
            started_at = loop.time()
            status = await self._run(child)
            if self.stopping:
                return
            if status is not None:
                child.last_status = status
                self._note(f"{child.name} {describe(status)}")
                if not child.was_ready and status in (1, 2, 70):  # the first start failed with an error message
                    self._end(status)
                    return
            if status == Exit.USAGE:
                self._note(
                    f"{child.name} cannot start with this configuration (status {status}); "
                    f"correct it and send SIGHUP to pid {os.getpid()}"
                )
                child.has_usage_error = True
                if all(child.has_usage_error for child in self.children):
                    self._end(status)
                return
            exits = 1 if loop.time() - started_at >= self._delays.healthy_seconds else exits + 1
            seconds = self._delays.after(exits)
            self._note(f"restarting {child.name} in {seconds:g} s")
            await asyncio.sleep(seconds)

    def _end(self, status: int) -> None:
        if not self.over.done():
            self.over.set_result(status)

    async def _run(self, child: Child) -> int | None:
        """One run of a child, from start to exit. Returns its status, or None when it could not be started."""
        child.idle.clear()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env={**child.environ, child_process.PARENT_ENV: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,  # and with it a process group; uvloop has no `process_group`
                limit=LINE_LIMIT,
            )
            child.starts += 1
            if self.stopping:  # `stop` was called during the start
                self._send(child, signal.SIGKILL if self._forced else signal.SIGTERM, group=True)
            return await self._watch(child, child.process)
        except OSError as error:
            self._note(f"cannot start {child.name}: {error}")
            return None
        finally:
            child.process = None
            child.idle.set()

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        reading = asyncio.ensure_future(self._relay(child, process.stdout))
        status = await process.wait()
        # Grandchildren can keep the pipe open; the child's own output is already in it.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, 1.0)
        return status

    async def _relay(self, child: Child, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                if end.partial:
                    self._on_line(child.name, end.partial.decode("utf-8", "replace"))
                return
            except asyncio.LimitOverrunError as over:
                raw = await stream.readexactly(over.consumed)
            self._on_line(child.name, raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _send(self, child: Child, number: int, *, group: bool) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it has just ended
            if group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ends the children in reverse order by the signal `number`. Kills a child after its `kill_seconds`.

        Returns when all have ended.
        """
        self.stopping = True
        for child in reversed(self.children):
            if child.idle.is_set():
                continue
            self._note(f"stopping {child.name}")
            if not self._forced:
                self._send(child, number, group=False)
            try:
                await asyncio.wait_for(child.idle.wait(), child.kill_seconds)
            except TimeoutError:
                self._note(f"killing {child.name}: it did not end within {child.kill_seconds:g} s")
                self._send(child, signal.SIGKILL, group=True)
                await child.idle.wait()
        tasks = [child.task for child in self.children if child.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def force(self) -> None:
        """Kills all running children. `stop` then returns without waiting for them to drain."""
        self._forced = True
        for child in self.children:
            self._send(child, signal.SIGKILL, group=True)


def describe(status: int) -> str:
    """An exit status (negative: a signal) as the end of a sentence."""
    if status == Exit.RESTART_OUTSIDE:
        return f"requests a restart (status {status})"
    how = child_process.exit_text(status)
    return f"was ended by {how}" if status < 0 else f"ended with {how}"


def headgate_argv(*words: str) -> list[str]:
    """The command line that runs `headgate` with this interpreter."""
    return [sys.executable, "-m", "headgate", *words]
