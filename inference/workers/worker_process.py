"""The service's side of one worker process: start, messages, output, hang detection, and exit.

A worker has ended when its pidfd or kqueue is readable (on systems with neither: when its connection has ended and the
process can be reaped).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from headgate.shared import child_process
from headgate.shared.errors import HeadgateError
from inference.protocol import ExitCause
from inference.worker_link import (
    ARENA_FD_ENV,
    LINK_FD_ENV,
    PARENT_ENV,
    SOCKET_FD_ENV,
    Failed,
    Grant,
    Heartbeat,
    Held,
    Hello,
    Hold,
    KvLabels,
    LoadProgress,
    Message,
    Offload,
    Offloaded,
    Ready,
    Stop,
    Timings,
    decode,
    encode,
)
from inference.workers.child_environment import child_environment
from inference.workers.exit_cause import ExitEvidence, WorkerExit, classify, is_silent_abort, most_telling_line
from inference.workers.hang_detection import TICK_SECONDS, HangTimeouts, HangWatch
from inference.workers.os_api import KernelOomKills, exit_descriptor
from inference.workers.worker_warnings import WarningSelector

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""Time between a stop message and SIGKILL."""
KEPT_LINES = 200
_MAX_LINE_BYTES = 2**20
_STARVED = "the kernel killed the worker because host memory ran out (killed)"


class WorkerGone(Exception):  # noqa: N818 - an event, not an error
    """The worker ended before it sent the awaited message."""

    def __init__(self, exit: WorkerExit) -> None:
        super().__init__(exit.message)
        self.exit = exit


class WorkerProcess:
    """One worker. Its futures are resolved by messages: `hello` at its start, `ready` after each `grant`, `held` after
    `hold`, `offloaded` after each `offload`; they raise WorkerGone when the worker ends before.
    `exited` is resolved when the process is reaped.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        timeouts: HangTimeouts,
        on_change: Callable[[], None],
        arena: int | None = None,
        kills: KernelOomKills | None = None,
        build_is_trusted: Callable[[], bool] = lambda: False,
        on_timings: Callable[[Timings], None] = lambda _timings: None,
        on_labels: Callable[[WorkerProcess, KvLabels | None], None] = lambda _process, _labels: None,
    ) -> None:
        """Starts the process. Raises HeadgateError.

        `arena`: descriptor of the memory file for stored sequences, which the process inherits.
        `build_is_trusted`: whether llama.cpp is known to compute, so that a crash at the first step has other causes.
        """
        self.name = name
        self._kills = kills
        self._build_is_trusted = build_is_trusted
        self._has_computed = False
        self.socket_path = path
        self.progress = 0.0
        self.beat: Heartbeat | None = None
        self._on_change = on_change
        self._on_timings = on_timings
        self._on_labels = on_labels
        self._loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.held: asyncio.Future[Held] = self._loop.create_future()
        self.offloaded: asyncio.Future[Offloaded] = self._loop.create_future()
        self.exited: asyncio.Future[WorkerExit] = self._loop.create_future()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._warnings = WarningSelector()
        self._partial = b""
        self._inbox = b""
        self._requested = False
        self._suspended = False
        self._hang: str | None = None
        self._failed: Failed | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        self._process, self._link, self._output = launch(name, path, command, environment, arena)
        self.pid = self._process.pid
        self._pidfd = exit_descriptor(self.pid)
        self._loop.add_reader(self._link.fileno(), self._on_link)
        self._loop.add_reader(self._output, self._on_output)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_exit)
        self._watch = HangWatch(timeouts, self._loop.time())
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)

    # --- messages to the worker ------------------------------------------------------------------------------------
    def grant(self, grant: Grant) -> None:
        """Makes the worker load a model, or restore an offloaded one."""
        if self.ready.done():
            self.ready = self._loop.create_future()
        self.progress = 0.0
        self._watch.begin_task(self._loop.time())
        self.send(grant)

    def hold(self, path: str) -> None:
        """Makes a new worker read a file into its memory and wait."""
        self._watch.begin_task(self._loop.time())
        self.send(Hold(path))

    def offload(self, *, stays: bool) -> None:
        """Makes an idle worker save its sequences and free its context, and then stay or end."""
        if self.offloaded.done():
            self.offloaded = self._loop.create_future()
        self._requested = self._requested or not stays
        self.send(Offload(stays))

    def note_suspending(self) -> None:
        """The process is about to be suspended: hang detection pauses, and `stop` kills."""
        self._suspended = True

    def note_resumed(self) -> None:
        """The process runs again."""
        self._suspended = False
        self._watch.note_message(self._loop.time())
        self.beat = None

    def stop(self) -> None:
        """Ends the worker: by message, by SIGKILL after STOP_SECONDS, or by SIGKILL now if suspended. Idempotent."""
        self._requested = True
        if self._suspended:
            self.kill()
            return
        self.send(Stop())
        if self._stop_timer is None and not self.exited.done():
            self._stop_timer = self._loop.call_later(STOP_SECONDS, self.kill)

    def kill(self, hang: str | None = None) -> None:
        """Kills the worker and its children. With the reason `hang` its exit counts as a hang and has this reason."""
        if self.exited.done() or self._process.returncode is not None:
            return
        if hang is not None and self._hang is None:
            self._hang = hang
        with contextlib.suppress(ProcessLookupError):  # it left its group, or is a zombie that is about to be reaped
            os.killpg(self.pid, signal.SIGKILL)

    def lose(self, reason: str) -> None:
        """Kills the worker because its device is lost. `reason` becomes the message of its exit."""
        self._failed = self._failed or Failed(ExitCause.DEVICE_LOST, reason)
        self.kill()

    def send(self, message: Message) -> None:
        """Sends a message to the worker, unless it has ended."""
        with contextlib.suppress(OSError):  # the worker has ended, which the pidfd shows
            self._link.send(encode(message))

    # --- messages and output of the worker -------------------------------------------------------------------------
    def _on_link(self) -> None:
        try:
            data = self._link.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._link.fileno())
            if self._pidfd is None:
                self._poll_exit()
            else:  # a worker that closes its link is about to end
                self._stop_timer = self._stop_timer or self._loop.call_later(STOP_SECONDS, self.kill)
            return
        self._watch.note_message(self._loop.time())
        self._receive(data)
        if len(self._inbox) > _MAX_LINE_BYTES:
            self.kill("it sent a message that is too long")

    def _receive(self, data: bytes) -> None:
        """Handles the complete messages in the bytes so far."""
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            try:
                self._take(decode(line))
            except ValueError:
                log.exception("ignored an invalid message of worker %s (pid %d)", self.name, self.pid)

    def _take(self, message: Message) -> None:
        match message:
            case Hello():
                if not self.hello.done():
                    self.hello.set_result(message)
            case LoadProgress(fraction):
                self.progress = min(1.0, max(self.progress, fraction))
                self._on_change()
            case Held():
                self._watch.end_task()
                if not self.held.done():
                    self.held.set_result(message)
            case KvLabels():
                self._on_labels(self, message)
            case Offloaded():
                self._on_labels(self, None)
                if not self.offloaded.done():
                    self.offloaded.set_result(message)
            case Ready():
                self.progress = 1.0
                self._watch.end_task()
                if not self.ready.done():
                    self.ready.set_result(message)
            case Failed():
                self._failed = message
            case Heartbeat():
                self.beat = message
                self._has_computed = self._has_computed or message.prompt_tokens + message.generated_tokens > 0
                self._on_change()
            case Timings():
                self._on_timings(message)
            case _:
                log.error(
                    "ignored a message from worker %s: only the service sends messages of type %s",
                    self.name,
                    message.tag,
                )

    def _on_output(self) -> None:
        try:
            data = os.read(self._output, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._output)
            return
        self._keep_lines(data)

    def _keep_lines(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-4096:]
        for raw in lines:
            line = raw[-1000:].decode("utf-8", "replace").rstrip()
            self._lines.append(line)
            if (found := self._warnings.select(line, self._loop.time())) is not None:
                log.log(found[0], "%s: %s", self.name, found[1])

    # --- hang detection and exit -----------------------------------------------------------------------------------
    def _tick(self) -> None:
        now = self._loop.time()
        self._watch.tick(now)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        if self._suspended:
            return
        if reason := self._watch.hang_reason(now, self.beat, hello_received=self.hello.done()):
            log.error("worker %s (pid %d) hangs: %s", self.name, self.pid, reason)
            self.kill(reason)

    def _on_exit(self) -> None:
        """The process is a zombie, so its group can still be signaled safely."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has no children
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        self._close(status)

    def _poll_exit(self) -> None:
        """Waits for the exit after the end of the link, on systems without pidfds and kqueues."""
        if (status := self._process.poll()) is not None:
            self._close(status)
        else:
            self._loop.call_later(0.01, self._poll_exit)
            self._stop_timer = self._stop_timer or self._loop.call_later(STOP_SECONDS, self.kill)

    def _close(self, status: int) -> None:
        if self.exited.done():
            return
        self._ticker.cancel()
        if self._stop_timer is not None:
            self._stop_timer.cancel()
        self._drain_pipes()
        if self._pidfd is not None:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        self._loop.remove_reader(self._link.fileno())
        self._loop.remove_reader(self._output)
        self._link.close()
        os.close(self._output)
        self.socket_path.unlink(missing_ok=True)
        exit = self._exit(status)
        futures: tuple[asyncio.Future[Any], ...] = (self.hello, self.held, self.ready, self.offloaded)
        for future in futures:
            if not future.done():
                future.set_exception(WorkerGone(exit))
                future.exception()  # marks it as retrieved, because it is not always awaited
        self._on_labels(self, None)
        self.exited.set_result(exit)

    def _drain_pipes(self) -> None:
        """Reads the remaining messages and output, which often contain the reason of the exit."""
        with contextlib.suppress(OSError):  # nothing left, or closed
            while data := self._link.recv(65536):
                self._receive(data)
        with contextlib.suppress(OSError):
            while data := os.read(self._output, 65536):
                self._keep_lines(data)
        if self._partial:
            self._keep_lines(b"\n")

    def _exit(self, status: int) -> WorkerExit:
        evidence = ExitEvidence(
            status=status,
            requested=self._requested,
            hang=self._hang is not None,
            failed_cause=self._failed.cause if self._failed else None,
            hello_received=self.hello.done(),
            ready=not self._watch.has_task,
            has_computed=self._has_computed,
            build_is_trusted=self._build_is_trusted(),
            last_text="\n".join(self._lines),
        )
        cause = classify(evidence)
        starved = cause is ExitCause.KILLED and status == -signal.SIGKILL and self._starved()
        message = _STARVED if starved else self._exit_message(cause, status)
        return WorkerExit(
            cause,
            status,
            message,
            tuple(self._lines),
            evidence.ready,
            starved,
            is_silent_abort(evidence),
            self.beat,
        )

    def _starved(self) -> bool:
        return self._kills is not None and self._kills.is_recent(self._loop.time())

    def _exit_message(self, cause: ExitCause, status: int) -> str:
        if self._failed is not None:
            return self._failed.message
        if self._hang is not None:
            return f"the worker hung: {self._hang}"
        is_external = cause in (ExitCause.KILLED, ExitCause.REQUESTED)  # its output does not explain the exit
        last = "" if is_external else most_telling_line(self._lines)
        name = "broken build" if cause is ExitCause.BROKEN_BUILD else cause
        return f"the worker ended with {child_process.exit_text(status)} ({name}){': ' + last[:300] if last else ''}"


def launch(
    name: str, path: Path, command: Sequence[str], environment: Mapping[str, str], arena: int | None
) -> tuple[subprocess.Popen[bytes], socket.socket, int]:
    """Starts a worker for `name` that listens on the Unix socket `path` and inherits the descriptor `arena`.

    Returns the process, the service's end of its link, and a descriptor of its output, both non-blocking. A failure
    leaves no descriptor, socket or process behind. Raises HeadgateError.
    """
    with contextlib.ExitStack() as ours, contextlib.ExitStack() as theirs:
        try:
            # Only the worker keeps the socket, so that it closes with the worker and no client waits in its backlog.
            listener = theirs.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            link, far_link = socket.socketpair()
            ours.enter_context(link)
            theirs.enter_context(far_link)
            output, far_output = os.pipe()
            ours.callback(os.close, output)
            theirs.callback(os.close, far_output)
            ours.callback(path.unlink, missing_ok=True)
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(1024)
            link.setblocking(False)
            os.set_blocking(output, False)
            given = {} if arena is None else {ARENA_FD_ENV: str(arena)}
            process = subprocess.Popen(
                command,
                env=child_environment(
                    {
                        **environment,
                        **given,
                        LINK_FD_ENV: str(far_link.fileno()),
                        SOCKET_FD_ENV: str(listener.fileno()),
                        PARENT_ENV: str(os.getpid()),
                        "PYTHONUNBUFFERED": "1",
                    }
                ),
                stdin=subprocess.DEVNULL,
                stdout=far_output,
                stderr=far_output,
                pass_fds=(far_link.fileno(), listener.fileno(), *([] if arena is None else [arena])),
                process_group=0,
            )
        except OSError as error:
            raise HeadgateError(f"cannot start a worker for {name} ({error})") from error
        ours.pop_all()
    return process, link, output
