"""A real worker that aborts in its next step once a request contains MARK, as with a bug in a kernel.

The abort is that of ggml, in the engine thread, while other requests run.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

MARK = "ends-its-worker"
_armed = threading.Event()


def _abort() -> None:
    import llama_cpp

    (library,) = (Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.so")
    ctypes.CDLL(str(library)).ggml_abort(b"/src/ggml.c", 4711, b"GGML_ASSERT(%s) failed", b"n_tokens > 0")


def main() -> int:
    from inference.worker import service as worker
    from inference.worker.api import worker_app
    from inference.worker.engine_stats import EngineCounters

    answer, begin = worker_app.App.__call__, EngineCounters.begin

    async def read(self: worker_app.App, scope: Any, receive: Any, send: Any) -> None:
        async def reading() -> Any:
            message = await receive()
            if MARK.encode() in message.get("body", b""):
                _armed.set()
            return message

        await answer(self, scope, reading, send)

    def step(self: EngineCounters, tokens: int) -> None:
        begin(self, tokens)
        if _armed.is_set():
            _abort()

    worker_app.App.__call__ = read  # type: ignore[method-assign]
    EngineCounters.begin = step  # type: ignore[method-assign]
    return worker.main()


if __name__ == "__main__":
    sys.exit(main())
