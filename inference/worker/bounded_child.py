"""A child process with limits on time and memory that answers one request after the other.

Some inputs take exponential time or memory within one call of a library. A thread cannot be stopped in such a call, a
process can.
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
"""Upper bound for one answer, also on a busy machine."""
IDLE_SECONDS = 60.0
"""The process ends after this time without a request."""
_HEAD = struct.Struct("<I")


class OverLimitsError(Exception):
    """The child ended before it answered, for example at one of its limits."""


class _IdleExitError(Exception):
    """The process had ended before it read the request, because it was idle."""


class BoundedChild:
    """The parent's side. One thread at a time may call it."""

    def __init__(self, module: str, orders: str) -> None:
        """`module` is run with `orders` as its argument when the first request comes, and has to call `serve`."""
        self._argv = [sys.executable, "-m", module, orders]
        self._process: subprocess.Popen[bytes] | None = None

    def call(self, request: bytes) -> bytes:
        """The answer to `request`; raises OverLimitsError, or OSError when no process can be started."""
        try:
            return self._call(request)
        except _IdleExitError:
            self.close()
        try:
            return self._call(request)
        except _IdleExitError:
            self.close()
            raise OverLimitsError from None

    def close(self) -> None:
        """Ends the process. The end of this object or of the program does so too."""
        if self._process is not None:
            self._process = None
            self._finalizer()

    def _call(self, request: bytes) -> bytes:
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
            process.stdin.write(_HEAD.pack(len(request)) + request)
            process.stdin.flush()
            head = process.stdout.read(_HEAD.size)
            size = _HEAD.unpack(head)[0] if len(head) == _HEAD.size else -1
            answer = process.stdout.read(size) if size >= 0 else b""
            if not head and process.wait() == 0:
                raise BrokenPipeError
        except BrokenPipeError:
            raise _IdleExitError from None
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
        with contextlib.suppress(BrokenPipeError):  # unread requests are dropped
            assert stream is not None
            stream.close()


def serve(
    answer: Callable[[bytes], bytes],
    *,
    cpu_seconds: float,
    memory_bytes: int,
    stack_bytes: int,
    idle_seconds: float = IDLE_SECONDS,
) -> None:
    """The child's side: answers requests on a thread with a stack of `stack_bytes`, until its input ends or it is idle.

    `cpu_seconds` limits the computing time of one answer: an unhandled signal ends the process. `memory_bytes` limits
    the address space, which includes the stack.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    soft = memory_bytes if hard == resource.RLIM_INFINITY else min(memory_bytes, hard)
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    threading.stack_size(stack_bytes)
    stdin = os.fdopen(0, "rb", closefd=False)
    stdout = os.fdopen(1, "wb", closefd=False)
    done = threading.Event()

    def work() -> None:
        _answer(answer, cpu_seconds, idle_seconds, stdin, stdout)
        done.set()

    server = threading.Thread(target=work)
    server.start()
    server.join()
    if not done.is_set():
        os._exit(1)  # the thread ran out of memory


def _answer(
    answer: Callable[[bytes], bytes], cpu_seconds: float, idle_seconds: float, stdin: BinaryIO, stdout: BinaryIO
) -> None:
    while select.select([stdin], [], [], idle_seconds)[0]:
        head = stdin.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        request = stdin.read(_HEAD.unpack(head)[0])
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)
        raw = answer(request)
        signal.setitimer(signal.ITIMER_PROF, 0)
        stdout.write(_HEAD.pack(len(raw)) + raw)
        stdout.flush()
