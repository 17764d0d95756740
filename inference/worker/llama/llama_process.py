"""Initializes llama.cpp in this process, handles its log and abort messages, and binds its short functions."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib
from inference.worker.llama.llama_log import LogTail

_keep_alive: list[object] = []
"""Callbacks that C may call until the process ends."""
_library_callbacks: list[Any] = []


def start(tail: LogTail) -> None:
    """Initializes llama.cpp and sends its log to `tail`. Call it once per process."""

    def on_log(level: int, text: bytes | None, _data: object) -> None:
        tail.feed(level, _decoded(text))

    callback = lib.llama_log_callback(on_log)
    _keep_alive.append(callback)
    beside = lib.llama_log_callback(lambda level, text, _data: tail.feed(level, _decoded(text), counts=False))
    _library_callbacks.append(beside)
    lib.llama_log_set(callback, ctypes.c_void_p(0))
    ggml_library.library()
    lib.llama_backend_init()


def library_log_callback() -> Any:
    """The log callback for other libraries, such as mtmd. Call it after `start`."""
    return _library_callbacks[-1]


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode("utf-8", "replace")


def on_abort(write: Callable[[str], None]) -> None:
    """Calls `write` with the message of ggml when it aborts the process, if the build supports it."""
    setter = getattr(ggml_library.library(), "ggml_set_abort_callback", None)
    if setter is None:
        return
    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(lambda text: write((text or b"").decode("utf-8", "replace")))
    setter.restype = ctypes.c_void_p
    _keep_alive.append(callback)
    setter(callback)


def without_gil_release(name: str) -> Callable[..., Any]:
    """The function `name` of llama.cpp, called without releasing the GIL; for calls of microseconds only.

    If the GIL were released, another thread could hold it for longer than the call takes. Loading, decoding,
    synchronizing and tokenizing release it.
    """
    described = getattr(lib._lib, name)
    function = getattr(_library_holding_gil(), name)
    function.argtypes = described.argtypes
    function.restype = described.restype
    return function  # type: ignore[no-any-return]


@functools.cache
def _library_holding_gil() -> ctypes.PyDLL:
    return ctypes.PyDLL(lib._lib._name)
