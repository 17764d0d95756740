"""Supervises child processes: starts them, restarts them by the restart policy, and stops them in order.

Each child has a process group of its own, so that Ctrl-C in a terminal reaches only the supervisor. The kernel kills
the children when the supervisor dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headgate.cli.supervise import restart_policy
from headgate.shared import child_process

LINE_LIMIT = 1 << 16


@dataclass
class Child:
    """One supervised program. `drain_seconds` is the time between SIGTERM and SIGKILL."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    drain_seconds: float
    state: restart_policy.ProcessState = field(default_factory=restart_policy.ProcessState)
    was_ready: bool = False
    process: asyncio.subprocess.Process | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no process runs."""


class Supervisor:
    """Starts children, restarts them by the policy, and stops them in reverse order.

    `on_line` receives the name of a child and a line of its output, `note` one sentence per decision. A child that
    exits with status 1, 2 or 70 before it was ready for the first time ends the supervisor.
    """

    def __init__(
        self,
        children: Sequence[Child],
        on_line: Callable[[str, str], None],
        note: Callable[[str], None],
        policy: restart_policy.Policy | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.children = tuple(children)
        for child in self.children:
            child.idle.set()
        self._on_line = on_line
        self._note = note
        self._policy = policy or restart_policy.Policy()
        self._clock = clock or asyncio.get_running_loop().time
        self._tasks: set[asyncio.Task[None]] = set()
        self._forced = False
        self.stopping = False
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Resolved with the exit status for `up` when a failed child ends everything."""

    def begin(self) -> None:
        """Starts the children that do not run."""
        for child in self.children:
            self._feed(child, restart_policy.Begin(self._clock()))

    def hang_up(self) -> None:
        """Forwards SIGHUP, so that the services reload, and starts the children that were given up."""
        for child in self.children:
            self._send(child, signal.SIGHUP, group=False)
        self.begin()

    def _feed(self, child: Child, event: restart_policy.ProcessEvent) -> None:
        child.state, effects = restart_policy.step(child.state, event, self._policy)
        for effect in effects:
            match effect:
                case restart_policy.Spawn():
                    self._task(self._life(child))
                case restart_policy.Wait(seconds):
                    self._note(f"restarting {child.name} in {seconds:g} s")
                    self._task(self._due(child, seconds))
                case restart_policy.GiveUp(status):
                    self._note(
                        f"{child.name} cannot start with this configuration (status {status}); "
                        f"correct it and send SIGHUP to pid {os.getpid()}"
                    )
                    self._gave_up(status)

    def _gave_up(self, status: int) -> None:
        if all(child.state.phase is restart_policy.Phase.GIVEN_UP for child in self.children):
            self._end(status)

    def _end(self, status: int) -> None:
        if not self.over.done():
            self.over.set_result(status)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _due(self, child: Child, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._feed(child, restart_policy.Due(self._clock()))

    async def _life(self, child: Child) -> None:
        """One run of a child, from start to exit."""
        child.idle.clear()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env={**child.environ, child_process.PARENT_ENV: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                limit=LINE_LIMIT,
            )
        except OSError as error:
            self._note(f"cannot start {child.name}: {error}")
            child.idle.set()
            self._feed(child, restart_policy.Exited(self._clock(), 1))
            return
        if self.stopping:  # `stop` was called during the start
            self._send(child, signal.SIGKILL if self._forced else signal.SIGTERM, group=True)
        status = await self._watch(child, child.process)
        child.process = None
        child.idle.set()
        if self.stopping:
            return
        self._note(f"{child.name} {describe(status)}")
        if not child.was_ready and status in (1, 2, 70):  # the first start failed with an error message
            self._end(status)
            return
        self._feed(child, restart_policy.Exited(self._clock(), status))

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

    async def stop(self) -> None:
        """Ends the children in reverse order, each within its drain time. Returns when all have ended."""
        self.stopping = True
        for child in self.children:
            child.state, _ = restart_policy.step(child.state, restart_policy.Stop(), self._policy)
        for child in reversed(self.children):
            if child.idle.is_set():
                continue
            self._note(f"stopping {child.name}")
            if not self._forced:
                self._send(child, signal.SIGTERM, group=False)
            try:
                await asyncio.wait_for(child.idle.wait(), child.drain_seconds)
            except TimeoutError:
                self._note(f"killing {child.name}: it did not end within {child.drain_seconds:g} s")
                self._send(child, signal.SIGKILL, group=True)
                await child.idle.wait()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def force(self) -> None:
        """Kills all running children. `stop` then returns without waiting for them to drain."""
        self._forced = True
        for child in self.children:
            self._send(child, signal.SIGKILL, group=True)


def describe(status: int) -> str:
    """An exit status as the end of a sentence."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return "requests a restart (status 70)" if status == 70 else f"ended with status {status}"


def headgate_argv(*words: str) -> list[str]:
    """The command line that runs `headgate` with this interpreter."""
    return [sys.executable, "-m", "headgate", *words]
