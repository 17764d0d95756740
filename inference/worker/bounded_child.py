"""Asks a child process that the system may end, one question after the other; knows no question and no answer.

Some work on what strangers wrote takes exponential time or memory within one call, in which a thread cannot be stopped.
A process can: what ends the child under its limits would have ended the worker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import BinaryIO

WALL_SECONDS = 30.0
"""For one answer, on a machine that has no time for it."""
IDLE_SECONDS = 60.0
"""The process ends when nothing came for so long."""
_HEAD = struct.Struct("<I")


class OverLimitsError(Exception):
    """The answer did not come within the limits."""


class _LeftError(Exception):
    """The process left in good order before it read the question."""


class BoundedChild:
    """The parent's side. One thread at a time may ask."""

    def __init__(self, module: str, orders: str) -> None:
        """`module` is run with `orders` as its argument and has to call `serve`, with the first question."""
        self._argv = [sys.executable, "-m", module, orders]
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, question: bytes) -> bytes:
        """The answer; raises OverLimitsError, or OSError without a process."""
        try:
            return self._asked(question)
        except _LeftError:  # it had nothing to do for too long
            self.close()
        try:
            return self._asked(question)
        except _LeftError:
            self.close()
            raise OverLimitsError from None

    def close(self) -> None:
        """Ends the process; so does the end of this object, or of the program."""
        if self._process is not None:
            self._process = None
            self._finalizer()

    def _asked(self, question: bytes) -> bytes:
        if self._process is None:
            self._process = subprocess.Popen(
                self._argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
            )
            self._finalizer = weakref.finalize(self, _end, self._process)
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(WALL_SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(_HEAD.pack(len(question)) + question)
            process.stdin.flush()
            head = process.stdout.read(_HEAD.size)
            size = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else -1
            answer = process.stdout.read(size) if size >= 0 else b""
            if not head and process.wait() == 0:
                raise BrokenPipeError
        except BrokenPipeError:
            raise _LeftError from None
        finally:
            timer.cancel()
        if len(answer) != size:
            self.close()
            raise OverLimitsError
        return answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what it did not read is lost on purpose
            assert stream is not None
            stream.close()


def serve(answer: Callable[[bytes], bytes], *, cpu_seconds: float, memory_bytes: int, stack_bytes: int) -> None:
    """The child's side: answers until its input ends or nothing comes, on a thread with a stack of `stack_bytes`.

    `cpu_seconds` are for one answer: a signal that nobody handles ends the process. `memory_bytes` are of address
    space, the stack included.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    threading.stack_size(stack_bytes)
    stdin = os.fdopen(0, "rb", closefd=False)
    stdout = os.fdopen(1, "wb", closefd=False)
    left = threading.Event()

    def work() -> None:
        _answer(answer, cpu_seconds, stdin, stdout)
        left.set()

    server = threading.Thread(target=work)
    server.start()
    server.join()
    if not left.is_set():
        os._exit(1)  # it had no memory to answer with


def _answer(answer: Callable[[bytes], bytes], cpu_seconds: float, stdin: BinaryIO, stdout: BinaryIO) -> None:
    while select.select([stdin], [], [], IDLE_SECONDS)[0]:
        head = stdin.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        question = stdin.read(_HEAD.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        raw = answer(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(_HEAD.pack(len(raw)) + raw)
        stdout.flush()
