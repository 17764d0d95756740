"""Tries grammars of callers in a process of its own that can be ended; knows no vocabulary and decides no request.

Whether a pattern or a schema can be prepared is found out by preparing it, and some take exponential time or memory,
so each is prepared here first, without a vocabulary.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from inference.worker import bounded_child

CPU_SECONDS = 3.0
"""For one grammar. Ordinary ones take milliseconds."""
MEMORY_BYTES = 1536 << 20


class Trial(bounded_child.BoundedChild):
    """The parent's side. `check` may be called by one thread at a time."""

    def __init__(self, limits: Mapping[str, Any], stack_bytes: int, cpu_seconds: float = CPU_SECONDS) -> None:
        """`limits` are llguidance's, `stack_bytes` what the preparing thread may use."""
        super().__init__(__name__, json.dumps([dict(limits), stack_bytes, cpu_seconds]))

    def check(self, source: str) -> str:
        """What is wrong with the grammar, empty when nothing is; raises OverLimitsError, or OSError without a
        process.
        """
        return self.ask(source.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")


def main(argv: list[str]) -> None:
    """The child."""
    limits, stack_bytes, cpu_seconds = json.loads(argv[0])

    def answer(source: bytes) -> bytes:
        from llguidance import LLMatcher, LLParserLimits

        try:
            text = source.decode("utf-8", "surrogatepass")
            said = LLMatcher.validate_grammar(text, None, limits=LLParserLimits(**limits))
        except Exception as error:
            said = str(error) or type(error).__name__
        return said.encode("utf-8", "replace")[: 1 << 16]

    bounded_child.serve(answer, cpu_seconds=cpu_seconds, memory_bytes=MEMORY_BYTES, stack_bytes=stack_bytes)


if __name__ == "__main__":
    main(sys.argv[1:])
