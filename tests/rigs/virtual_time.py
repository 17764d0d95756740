"""An event loop whose clock jumps to the next timer: hours pass in milliseconds without sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

START = 1000.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """`time` moves only while all tasks wait. Threads and sockets are not supported."""

    def __init__(self) -> None:
        super().__init__()
        self._now = START
        selector: Any = self._selector  # type: ignore[attr-defined]
        select = selector.select

        def leap(timeout: float | None) -> Any:
            assert timeout is not None, "all tasks wait without a timer"
            self._now += max(0.0, timeout)
            return select(0)

        selector.select = leap

    def time(self) -> float:
        """Virtual seconds."""
        return self._now


def run(main: Coroutine[Any, Any, T]) -> T:
    """The result of `main` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
