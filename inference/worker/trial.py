"""Tries grammars of callers in a process of its own that can be ended; knows no vocabulary and decides no request.

Whether a pattern or a schema can be prepared is found out by preparing it, and some take exponential time or memory,
which a thread cannot be stopped in. So each is prepared here first, without a vocabulary, under limits of the system:
what ends this process would have ended the worker.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any, BinaryIO

CPU_SECONDS = 3
"""For one grammar, rounded up to whole seconds of the process. Ordinary ones take milliseconds."""
WALL_SECONDS = 30.0
"""For one grammar, on a machine that has no time for it."""
MEMORY_BYTES = 1536 << 20
"""Of address space, the stack included."""
IDLE_SECONDS = 60.0
"""The process ends when nothing came for so long."""
_HEAD = struct.Struct("<I")


class TrialError(Exception):
    """The grammar did not end its preparation within the limits."""


class _LeftError(Exception):
    """The process left in good order before it read the question."""


class Trial:
    """The parent's side. `check` may be called by one thread at a time."""

    def __init__(self, limits: Mapping[str, Any], stack_bytes: int, cpu_seconds: int = CPU_SECONDS) -> None:
        """`limits` are llguidance's, `stack_bytes` what the preparing thread may use."""
        orders = json.dumps([dict(limits), stack_bytes, cpu_seconds])
        self._argv = [sys.executable, "-m", __name__, orders]
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, source: str) -> str:
        """What is wrong with the grammar, empty when nothing is; raises TrialError, or OSError without a process."""
        raw = source.encode("utf-8", "surrogatepass")
        try:
            return self._ask(raw)
        except _LeftError:  # it had nothing to do for too long
            self.close()
        try:
            return self._ask(raw)
        except _LeftError:
            self.close()
            raise TrialError from None

    def close(self) -> None:
        """Ends the process; so does the end of this object, or of the program."""
        if self._process is not None:
            self._process = None
            self._finalizer()

    def _ask(self, raw: bytes) -> str:
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
            process.stdin.write(_HEAD.pack(len(raw)) + raw)
            process.stdin.flush()
            head = process.stdout.read(_HEAD.size)
            said = process.stdout.read(_HEAD.unpack(head)[0]) if head else b""
            if not head and process.wait() == 0:
                raise BrokenPipeError
        except BrokenPipeError:
            raise _LeftError from None
        finally:
            timer.cancel()
        if not head:
            self.close()
            raise TrialError
        return said.decode("utf-8", "replace")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(BrokenPipeError):  # what it did not read is lost on purpose
            assert stream is not None
            stream.close()


def _serve(limits: Mapping[str, Any], cpu_seconds: int, stdin: BinaryIO, stdout: BinaryIO) -> None:
    from llguidance import LLMatcher, LLParserLimits

    bounds = LLParserLimits(**limits)
    while select.select([stdin], [], [], IDLE_SECONDS)[0]:
        head = stdin.read(_HEAD.size)
        if len(head) < _HEAD.size:
            return
        source = stdin.read(_HEAD.unpack(head)[0]).decode("utf-8", "surrogatepass")
        spent = time.process_time()
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(spent) + cpu_seconds, resource.RLIM_INFINITY))
        try:
            said = LLMatcher.validate_grammar(source, None, limits=bounds)
        except Exception as error:
            said = str(error) or type(error).__name__
        raw = said.encode("utf-8", "replace")[: 1 << 16]
        stdout.write(_HEAD.pack(len(raw)) + raw)
        stdout.flush()


def main(argv: list[str]) -> None:
    """The child: answers until its input ends."""
    limits, stack_bytes, cpu_seconds = json.loads(argv[0])
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, resource.RLIM_INFINITY))
    threading.stack_size(stack_bytes)
    stdin = os.fdopen(0, "rb", closefd=False)
    stdout = os.fdopen(1, "wb", closefd=False)
    server = threading.Thread(target=_serve, args=(limits, cpu_seconds, stdin, stdout))
    server.start()
    server.join()


if __name__ == "__main__":
    main(sys.argv[1:])
