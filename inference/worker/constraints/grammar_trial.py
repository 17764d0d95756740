"""Compiles grammars of requests in a child process with limits, before they are compiled in the worker.

Some patterns and schemas take exponential time or memory to compile. Only a compilation shows which.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from inference.worker import bounded_child

CPU_SECONDS = 3.0
"""For one grammar; ordinary ones take milliseconds."""
MEMORY_BYTES = 1536 << 20


class Trial(bounded_child.BoundedChild):
    """The parent's side. One thread at a time may call `check`."""

    def __init__(self, limits: Mapping[str, Any], stack_bytes: int, cpu_seconds: float = CPU_SECONDS) -> None:
        """`limits` are those of llguidance; `stack_bytes` is the stack of the compiling thread."""
        super().__init__(__name__, json.dumps([dict(limits), stack_bytes, cpu_seconds]))

    def check(self, source: str) -> str:
        """The problem of the grammar, empty without one; raises OverLimitsError, or OSError without a process."""
        return self.call(source.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")


def main(argv: list[str]) -> None:
    """The child process."""
    limits, stack_bytes, cpu_seconds = json.loads(argv[0])

    def answer(source: bytes) -> bytes:
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = source.decode("utf-8", "surrogatepass")
            problem = LLMatcher.validate_grammar(text, None, limits=LLParserLimits(**limits))
        except Exception as error:
            problem = str(error) or type(error).__name__
        return problem.encode("utf-8", "replace")[: 1 << 16]

    bounded_child.serve(answer, cpu_seconds=cpu_seconds, memory_bytes=MEMORY_BYTES, stack_bytes=stack_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
