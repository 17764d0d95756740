"""Renders a chat template in a child process with limits on time and memory.

A chat template is code from a model file. It can take seconds or gigabytes within one operation of Python, which only
the end of a process stops.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import orjson

from inference.worker import bounded_child

RENDER_SECONDS = 5.0
"""Computing time for one prompt."""
MEMORY_BYTES = 1 << 30
"""Address space of the child: 40 MB for the interpreter, 64 MiB for the stack, the rest for the template."""


class RefusedError(Exception):
    """The template refused its input, failed or reached a limit; the message says which."""


class OverLimitsError(RefusedError):
    """The template reached the limits of the child."""


class TemplateProcess:
    """The child process of one model's templates. Thread-safe; it renders one prompt at a time."""

    def __init__(self, render_seconds: float = RENDER_SECONDS) -> None:
        self._render_seconds = render_seconds
        orders = orjson.dumps([render_seconds, MEMORY_BYTES]).decode()
        self._child = bounded_child.BoundedChild("inference.worker.prompt.template_sandbox", orders)
        self._lock = threading.Lock()

    def run(self, source: str, variables: Mapping[str, Any] | None) -> tuple[str, str]:
        """The kind of the result ("text", "refused" or "invalid") and its text; without variables it only compiles.

        Raises RefusedError without a result.
        """
        try:
            with self._lock:
                answer = self._child.call(orjson.dumps([source, variables]))
        except bounded_child.OverLimitsError:
            raise OverLimitsError(
                f"it took longer than {self._render_seconds:g} s or more than {MEMORY_BYTES >> 20} MiB of memory"
            ) from None
        except (OSError, orjson.JSONEncodeError) as error:
            raise RefusedError(f"it cannot be rendered now ({type(error).__name__})") from None
        kind, text = orjson.loads(answer)
        return kind, text


class Rendering:
    """One template in a process. Thread-safe."""

    def __init__(self, source: str, process: TemplateProcess) -> None:
        """Raises ValueError with a sentence when the template does not compile."""
        self._source = source
        self._process = process
        try:
            kind, problem = process.run(source, None)
        except RefusedError as error:
            raise ValueError(f"the chat template does not compile: {error}") from None
        if kind == "invalid":
            raise ValueError(problem)

    def text(self, variables: Mapping[str, Any]) -> str:
        """The prompt for variables that are JSON; raises RefusedError."""
        kind, text = self._process.run(self._source, variables)
        if kind != "text":
            raise RefusedError(text)
        return text
