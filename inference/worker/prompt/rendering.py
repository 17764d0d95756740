"""Renders a chat template within limits: on a thread where it is frugal, else in a child; never looks at the messages.

A template of a GGUF is foreign code. Nearly all are frugal (`frugal.py`): they run on a thread, which an exception
stops between two operations when the time is up. What a template does besides may take seconds or gigabytes within a
single operation, so it runs in a child of the worker under limits of the system.
"""

from __future__ import annotations

import ctypes
import json
import sys
import threading
from collections.abc import Mapping
from typing import Any

import jinja2

from inference.worker import bounded_child
from inference.worker.prompt import template_metering
from inference.worker.prompt.template_sandbox import Sandbox, problem, written

RENDER_SECONDS = 5.0
"""In the child of computing time."""
MEMORY_BYTES = 1 << 30
"""Address space of the child, of which the interpreter takes some 40 MB and the stack as much as follows."""
STACK_BYTES = 64 << 20


class RefusedError(Exception):
    """The template refused, failed or met a limit; says what happened."""


class OverLimitsError(RefusedError):
    """It did not end within the limits of the child."""


class _TimeUpError(BaseException):
    """Raised inside a rendering thread that took too long; no `except Exception` of a template's filters stops it."""


class Rendering:
    """Of one template. Thread-safe; in the child one text is rendered after the other."""

    def __init__(self, source: str) -> None:
        """Raises ValueError with a sentence when the template does not compile."""
        self._source = source
        self._turn = threading.Lock()
        self._outside: bounded_child.BoundedChild | None = None
        try:
            self._template = template_metering.Frugal().from_string(source)
        except (RecursionError, MemoryError) as error:
            raise ValueError(f"the chat template is nested too deeply ({type(error).__name__})") from None
        except Exception as error:
            raise ValueError(f"the chat template does not compile: {error}") from None

    def text(self, variables: Mapping[str, Any]) -> str:
        """The text, for variables that are JSON; raises RefusedError."""
        try:
            return _Threaded(self._template, variables).text(RENDER_SECONDS)
        except _TimeUpError:
            raise RefusedError(f"it took longer than {RENDER_SECONDS:g} s") from None
        except template_metering.CostlyError:
            pass
        except Exception as error:
            raise RefusedError(problem(error)) from None
        with self._turn:
            return self._written_outside(variables)

    def _written_outside(self, variables: Mapping[str, Any]) -> str:
        if self._outside is None:
            self._outside = bounded_child.BoundedChild(__name__, json.dumps([RENDER_SECONDS, MEMORY_BYTES]))
        try:
            question = json.dumps([self._source, variables]).encode()
            said, text = json.loads(self._outside.ask(question))
        except bounded_child.OverLimitsError:
            raise OverLimitsError(
                f"it took longer than {RENDER_SECONDS:g} s or more than {MEMORY_BYTES >> 20} MiB of memory"
            ) from None
        except (OSError, RecursionError) as error:
            raise RefusedError(f"it cannot be rendered now ({type(error).__name__})") from None
        if said == "refused":
            raise RefusedError(text)
        return str(text)


class _Threaded:
    """One rendering in a thread of its own, which is interrupted when its time is up."""

    def __init__(self, template: jinja2.Template, variables: Mapping[str, Any]) -> None:
        self._template = template
        self._variables = variables
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._text = ""
        self._error: BaseException | None = None

    def text(self, seconds: float) -> str:
        thread = threading.Thread(target=self._work, name="template", daemon=True)
        thread.start()
        if not self._over.wait(seconds):
            with self._lock:
                if not self._over.is_set() and thread.ident is not None:
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(thread.ident), ctypes.py_object(_TimeUpError)
                    )
            raise _TimeUpError
        if self._error is not None:
            raise self._error
        return self._text

    def _work(self) -> None:
        try:
            self._render()
        except _TimeUpError:
            self._over.set()  # the exception arrived after the last check; nobody waits any more

    def _render(self) -> None:
        try:
            template_metering.begin()
            self._text = written(self._template, dict(self._variables))
        except BaseException as error:  # handed to the thread that waits
            self._error = error
        with self._lock:
            self._over.set()


def main(argv: list[str]) -> None:
    """The child: renders what it is asked, as JSON: `["text" or "refused", the text or why]`."""
    cpu_seconds, memory_bytes = json.loads(argv[0])
    compiled: dict[str, jinja2.Template] = {}

    def answer(question: bytes) -> bytes:
        try:
            source, variables = json.loads(question)
            if source not in compiled:
                compiled[source] = Sandbox().from_string(source)
            said = ["text", written(compiled[source], variables)]
        except Exception as error:
            said = ["refused", problem(error)]
        return json.dumps(said).encode()

    bounded_child.serve(answer, cpu_seconds=cpu_seconds, memory_bytes=memory_bytes, stack_bytes=STACK_BYTES)


if __name__ == "__main__":
    main(sys.argv[1:])
