"""One worker process as its parent has it: what it is told and says, how it ended; decides when it is dead or hung.

It is known dead the moment its pidfd says so (elsewhere: when its link ends), and hung when it is silent longer than
allowed or one step takes longer than its batch explains. What is loaded is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.protocol import ExitCause
from inference.workers.exit_cause import Remains, classify, is_wordless, telling
from inference.workers.hang_detection import Patience
from inference.workers.hang_watch import TICK_SECONDS, Watch
from inference.workers.kernel_oom_kills import HostKills
from inference.workers.launch import launch
from inference.workers.worker_link import (
    Beat,
    Drain,
    Failed,
    Forget,
    Grant,
    Held,
    Hello,
    Hold,
    Limit,
    LoadProgress,
    Message,
    Offload,
    Offloaded,
    Ready,
    Stop,
    Threads,
    decode,
    encode,
)

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""A worker told to stop is killed after this."""
KEPT_LINES = 200
_MOST_LINE_BYTES = 2**20
_STARVED = "the kernel killed the worker because host memory ran out (killed)"


@dataclass(frozen=True, slots=True)
class WorkerExit:
    """How a worker ended. `message` is one sentence; `last_lines` what it wrote last; `status` as waitpid tells it;
    `starved` says that the kernel ended it because host memory ran out; `wordless` that it aborted and said nothing
    about it, as if somebody had sent the signal; `beat` is its last sign of life.
    """

    cause: ExitCause
    status: int
    message: str
    last_lines: tuple[str, ...]
    was_ready: bool
    starved: bool = False
    wordless: bool = False
    beat: Beat | None = None


class WorkerGone(Exception):  # noqa: N818 - what happened
    """The worker ended before it was ready; carries the exit."""

    def __init__(self, exit: WorkerExit) -> None:
        super().__init__(exit.message)
        self.exit = exit


class WorkerProcess:
    """One worker. `ready` is done once it loaded (or raises WorkerGone), `exited` once it was reaped.

    `held` and `offloaded` are done when it has done what `hold` and the last `offload` asked for; `ready` anew after
    every `grant`.
    """

    def __init__(
        self,
        name: str,
        path: Path,
        command: Sequence[str],
        environment: Mapping[str, str],
        patience: Patience,
        on_change: Callable[[], None],
        keep: int | None = None,
        kills: HostKills | None = None,
        build_is_trusted: Callable[[], bool] = lambda: False,
    ) -> None:
        """`keep`: a descriptor of memory for sequences that outlive the process; from here on it is the worker's.
        `build_is_trusted`: whether a death at the first step cannot be llama.cpp's.

        Raises HeadgateError.
        """
        self.name = name
        self._keep = keep
        self._kills = kills
        self._build_is_trusted = build_is_trusted
        self._has_computed = False
        self.socket_path = path
        self.progress = 0.0
        self.beat: Beat | None = None
        self._on_change = on_change
        self._loop = asyncio.get_running_loop()
        self.hello: asyncio.Future[Hello] = self._loop.create_future()
        self.ready: asyncio.Future[Ready] = self._loop.create_future()
        self.held: asyncio.Future[Held] = self._loop.create_future()
        self.offloaded: asyncio.Future[Offloaded] = self._loop.create_future()
        self.exited: asyncio.Future[WorkerExit] = self._loop.create_future()
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._partial = b""
        self._inbox = b""
        self._requested = False
        self._suspended = False
        self._hang: str | None = None
        self._failed: Failed | None = None
        self._stop_timer: asyncio.TimerHandle | None = None
        launched = launch(name, path, command, environment, keep)
        self._process, self._link = launched.process, launched.link
        self._errors, self._pidfd = launched.errors, launched.ended
        self.pid = self._process.pid
        self._loop.add_reader(self._link.fileno(), self._on_link)
        self._loop.add_reader(self._errors, self._on_errors)
        if self._pidfd is not None:
            self._loop.add_reader(self._pidfd, self._on_exit)
        self._watch = Watch(patience, self._loop.time())
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)

    # --- speaking --------------------------------------------------------------------------------------------------
    def grant(self, grant: Grant) -> None:
        """Tells the worker what to load, or to take up again."""
        if self.ready.done():
            self.ready = self._loop.create_future()
        self.progress = 0.0
        self._watch.asked(self._loop.time())
        self._send(grant)

    def hold(self, path: str) -> None:
        """Tells a fresh worker to take a file into its memory and to wait."""
        self._watch.asked(self._loop.time())
        self._send(Hold(path))

    def offload(self, most_bytes: int, *, stays: bool) -> None:
        """Asks a worker that nobody uses to save its sequences and to free its context, and then to stay or to end."""
        if self.offloaded.done():
            self.offloaded = self._loop.create_future()
        self._requested = self._requested or not stays
        self._send(Offload(most_bytes, stays))

    def suspend(self) -> None:
        """Somebody suspends it: nobody waits for a word of it, and it cannot stop by itself."""
        self._suspended = True

    def resumed(self) -> None:
        """It can speak again."""
        self._suspended = False
        self._watch.heard(self._loop.time())
        self.beat = None

    def shared_keep(self) -> int | None:
        """A descriptor of one's own for the memory in which this worker saves sequences; None where there is none."""
        if self._keep is not None:
            with contextlib.suppress(OSError):  # none are left: the sequences are not taken along
                return os.dup(self._keep)
        return None

    def limit(self, sequences: int) -> None:
        """Tells it how many sequences it may compute at once."""
        self._send(Limit(sequences))

    def use_threads(self, count: int) -> None:
        """Tells it how many threads to compute with."""
        self._send(Threads(count))

    def forget(self) -> None:
        """Tells it to drop the prefixes that it retains."""
        self._send(Forget())

    def drain(self) -> None:
        """Asks the worker to finish what runs and to take nothing new."""
        self._requested = True
        self._send(Drain())

    def stop(self) -> None:
        """Ends the worker: asked first, killed after STOP_SECONDS, or at once if suspended. May be called again."""
        self._requested = True
        if self._suspended:
            self.kill()
            return
        self._send(Stop())
        if self._stop_timer is None and not self.exited.done():
            self._stop_timer = self._loop.call_later(STOP_SECONDS, self.kill)

    def kill(self, hang: str | None = None) -> None:
        """Ends the worker and whatever it started at once; `hang` is the sentence for its crash record."""
        if self.exited.done() or self._process.returncode is not None:
            return
        if hang is not None and self._hang is None:
            self._hang = hang
        with contextlib.suppress(ProcessLookupError):  # it left its group, or is a zombie we reap in a moment
            os.killpg(self.pid, signal.SIGKILL)

    def lose(self, why: str) -> None:
        """Its device is lost: ends it at once, and its exit says so in the words of `why`."""
        self._failed = self._failed or Failed(ExitCause.DEVICE_LOST, why)
        self.kill()

    def _send(self, message: Message) -> None:
        with contextlib.suppress(OSError):  # a dead worker hears nothing; its exit is told by the pidfd
            self._link.send(encode(message))

    # --- hearing ---------------------------------------------------------------------------------------------------
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
            else:  # a worker that closes its link must be about to end
                self._stop_timer = self._stop_timer or self._loop.call_later(STOP_SECONDS, self.kill)
            return
        self._watch.heard(self._loop.time())
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        if len(self._inbox) > _MOST_LINE_BYTES:
            self.kill("it sent a message without an end")
        for line in lines:
            try:
                self._take(decode(line))
            except ValueError:
                log.exception("worker %s (pid %d) sent something else than a message", self.name, self.pid)

    def _take(self, message: Message) -> None:
        match message:
            case Hello():
                if not self.hello.done():
                    self.hello.set_result(message)
            case LoadProgress(fraction):
                self.progress = min(1.0, max(self.progress, fraction))
                self._on_change()
            case Held():
                self._watch.done()
                if not self.held.done():
                    self.held.set_result(message)
            case Offloaded():
                if not self.offloaded.done():
                    self.offloaded.set_result(message)
            case Ready():
                self.progress = 1.0
                self._watch.done()
                if not self.ready.done():
                    self.ready.set_result(message)
            case Failed():
                self._failed = message
            case Beat():
                self.beat = message
                self._has_computed = self._has_computed or message.prompt_tokens + message.generated_tokens > 0
                self._on_change()
            case _:
                log.error("worker %s sent %s, which is ours to send", self.name, message.tag)

    def _on_errors(self) -> None:
        try:
            data = os.read(self._errors, 65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._errors)
            return
        *lines, self._partial = (self._partial + data).split(b"\n")
        self._partial = self._partial[-4096:]
        for line in lines:
            self._lines.append(line[-1000:].decode("utf-8", "replace").rstrip())

    # --- watching --------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        now = self._loop.time()
        self._watch.tick(now)
        self._ticker = self._loop.call_later(TICK_SECONDS, self._tick)
        if self._suspended:
            return
        if complaint := self._watch.complaint(now, self.beat, greeted=self.hello.done()):
            log.error("worker %s (pid %d) hangs: %s", self.name, self.pid, complaint)
            self.kill(complaint)

    def _on_exit(self) -> None:
        """The pidfd is readable: the process is a zombie and its group can still be signaled safely."""
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it was alone in its group
            os.killpg(self.pid, signal.SIGKILL)
        status = self._process.wait()
        self._close(status)

    def _poll_exit(self) -> None:
        """Without a pidfd: the link has ended, so the exit is a moment away."""
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
        self._loop.remove_reader(self._errors)
        self._link.close()
        os.close(self._errors)
        self.socket_path.unlink(missing_ok=True)
        if self._keep is not None:
            os.close(self._keep)
        exit = self._exit(status)
        promises: tuple[asyncio.Future[Any], ...] = (self.hello, self.held, self.ready, self.offloaded)
        for promise in promises:
            if not promise.done():
                promise.set_exception(WorkerGone(exit))
                promise.exception()  # whoever awaited it is told; nobody has to
        self.exited.set_result(exit)

    def _drain_pipes(self) -> None:
        """Takes what the worker said last: its reason is often there."""
        with contextlib.suppress(OSError):  # nothing more, or closed
            while data := self._link.recv(65536):
                *lines, self._inbox = (self._inbox + data).split(b"\n")
                for line in lines:
                    with contextlib.suppress(ValueError):  # cut off in the middle
                        self._take(decode(line))
        with contextlib.suppress(OSError):
            while data := os.read(self._errors, 65536):
                self._partial += data
        for line in self._partial.split(b"\n"):
            if line:
                self._lines.append(line[-1000:].decode("utf-8", "replace").rstrip())

    def _exit(self, status: int) -> WorkerExit:
        remains = Remains(
            status=status,
            requested=self._requested,
            hang=self._hang is not None,
            failed_cause=self._failed.cause if self._failed else None,
            greeted=self.hello.done(),
            ready=self._watch.is_ready,
            has_computed=self._has_computed,
            build_is_trusted=self._build_is_trusted(),
            last_text="\n".join(self._lines),
        )
        cause = classify(remains)
        starved = cause is ExitCause.KILLED and status == -signal.SIGKILL and self._starved()
        said = _STARVED if starved else self._sentence(cause, status)
        wordless, lines = is_wordless(remains), tuple(self._lines)
        return WorkerExit(cause, status, said, lines, remains.ready, starved, wordless, self.beat)

    def _starved(self) -> bool:
        return self._kills is not None and self._kills.lately(self._loop.time())

    def _sentence(self, cause: ExitCause, status: int) -> str:
        if self._failed is not None:
            return self._failed.message
        if self._hang is not None:
            return f"the worker hung: {self._hang}"
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        told = cause not in (ExitCause.KILLED, ExitCause.REQUESTED)  # then its last line has nothing to do with it
        last = telling(self._lines) if told else ""
        name = "broken build" if cause is ExitCause.BROKEN_BUILD else cause
        return f"the worker ended with {how} ({name}){': ' + last[:300] if last else ''}"
