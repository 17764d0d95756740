"""Runs child processes under the restart policy and ends them in order; what to run and what to say is `up`'s.

Children get a process group of their own (a terminal's Ctrl-C reaches only the supervisor) and are tethered: the
kernel kills them when the supervisor dies, however it dies.
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

from headgate.shared import restart, tether

LINE_LIMIT = 1 << 16


@dataclass
class Child:
    """One supervised program. `drain_seconds` is what it gets between SIGTERM and SIGKILL."""

    name: str
    argv: Sequence[str]
    environ: Mapping[str, str]
    drain_seconds: float
    state: restart.State = field(default_factory=restart.State)
    was_ready: bool = False
    process: asyncio.subprocess.Process | None = None
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no process runs."""


class Supervisor:
    """Starts children, restarts them by the policy, stops them last-to-first.

    `line` gets every line a child prints; `note` gets one sentence per decision; `final` says whether an exit status
    ends everything while the child has not been ready once.
    """

    def __init__(
        self,
        children: Sequence[Child],
        line: Callable[[str, str], None],
        note: Callable[[str], None],
        policy: restart.Policy | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.children = tuple(children)
        for child in self.children:
            child.idle.set()
        self._line = line
        self._note = note
        self._policy = policy or restart.Policy()
        self._clock = clock or asyncio.get_running_loop().time
        self._tasks: set[asyncio.Task[None]] = set()
        self._forced = False
        self.stopping = False
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        """Resolved with an exit status when going on makes no sense."""

    def begin(self) -> None:
        """Starts every child that does not run."""
        for child in self.children:
            self._feed(child, restart.Begin(self._clock()))

    def hang_up(self) -> None:
        """Passes SIGHUP on (the services reload), and starts again what had been given up."""
        for child in self.children:
            self._send(child, signal.SIGHUP, group=False)
        self.begin()

    def _feed(self, child: Child, event: restart.Event) -> None:
        child.state, effects = restart.step(child.state, event, self._policy)
        for effect in effects:
            match effect:
                case restart.Spawn():
                    self._task(self._life(child))
                case restart.Wait(seconds):
                    self._note(f"{child.name} is started again in {seconds:g} s")
                    self._task(self._due(child, seconds))
                case restart.GiveUp(status):
                    self._note(
                        f"{child.name} refused to start (status {status}) and would again; "
                        f"mend the configuration and send SIGHUP to pid {os.getpid()}"
                    )
                    self._gave_up(status)

    def _gave_up(self, status: int) -> None:
        if all(child.state.phase is restart.Phase.GIVEN_UP for child in self.children):
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
        self._feed(child, restart.Due(self._clock()))

    async def _life(self, child: Child) -> None:
        """One run of a child, from start to exit."""
        child.idle.clear()
        try:
            child.process = await asyncio.create_subprocess_exec(
                *child.argv,
                env={**child.environ, tether.PARENT_ENV: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                process_group=0,
                limit=LINE_LIMIT,
            )
        except OSError as error:
            self._note(f"{child.name} cannot be started: {error}")
            child.idle.set()
            self._feed(child, restart.Exited(self._clock(), 1))
            return
        if self.stopping:  # asked to stop while it was being started
            self._send(child, signal.SIGKILL if self._forced else signal.SIGTERM, group=True)
        status = await self._watch(child, child.process)
        child.process = None
        child.idle.set()
        if self.stopping:
            return
        self._note(f"{child.name} {describe(status)}")
        if not child.was_ready and status in (1, 2):
            # It said why, and nothing has worked yet: somebody is sitting in front of this and can mend it.
            self._end(status)
            return
        self._feed(child, restart.Exited(self._clock(), status))

    async def _watch(self, child: Child, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        reading = asyncio.ensure_future(self._relay(child, process.stdout))
        status = await process.wait()
        # Grandchildren may hold the pipe open for as long as they live; what was printed before the exit is there now.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, 1.0)
        return status

    async def _relay(self, child: Child, stream: asyncio.StreamReader) -> None:
        while True:
            try:
                raw = await stream.readuntil(b"\n")
            except asyncio.IncompleteReadError as end:
                if end.partial:
                    self._line(child.name, end.partial.decode("utf-8", "replace"))
                return
            except asyncio.LimitOverrunError as over:
                raw = await stream.readexactly(over.consumed)
            self._line(child.name, raw.decode("utf-8", "replace").rstrip("\r\n"))

    def _send(self, child: Child, number: int, *, group: bool) -> None:
        process = child.process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):  # it ended this very moment
            if group:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)

    async def stop(self) -> None:
        """Ends the children, last to first, each with its time to drain; returns when none is left."""
        self.stopping = True
        for child in self.children:
            child.state, _ = restart.step(child.state, restart.Stop(), self._policy)
        for child in reversed(self.children):
            if child.idle.is_set():
                continue
            self._note(f"stopping {child.name}")
            if not self._forced:
                self._send(child, signal.SIGTERM, group=False)
            try:
                await asyncio.wait_for(child.idle.wait(), child.drain_seconds)
            except TimeoutError:
                self._note(f"{child.name} did not end within {child.drain_seconds:g} s and is killed")
                self._send(child, signal.SIGKILL, group=True)
                await child.idle.wait()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def force(self) -> None:
        """Kills whatever is left, now; `stop` then returns at once."""
        self._forced = True
        for child in self.children:
            self._send(child, signal.SIGKILL, group=True)


def describe(status: int) -> str:
    """An exit status in words."""
    if status < 0:
        try:
            return f"was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"was ended by signal {-status}"
    return "asked to be restarted (status 70)" if status == 70 else f"ended with status {status}"


def headgate_argv(*words: str) -> list[str]:
    """The command line that runs `headgate` with this interpreter."""
    return [sys.executable, "-m", "headgate", *words]
