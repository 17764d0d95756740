"""Calls NVIDIA's driver library (`libcuda.so.1`), each call with a deadline.

Signatures and numbers are from the reference of the CUDA driver API (cuda.h).
"""

from __future__ import annotations

import ctypes
import threading
import time
from typing import Any

LIBRARY = "libcuda.so.1"
LEAST_VERSION = 12080
"""The API version of driver 570, the first one with these functions: 1000 x major + 10 x minor."""
FUNCTIONS = (
    "cuCheckpointProcessLock",
    "cuCheckpointProcessCheckpoint",
    "cuCheckpointProcessRestore",
    "cuCheckpointProcessUnlock",
    "cuCheckpointProcessGetState",
)
STATES = ("running", "locked", "checkpointed", "failed")
"""CUprocessState."""
CALL_SECONDS = 10.0


class DriverError(Exception):
    """The library is missing, or a call failed or timed out."""


class LockArgs(ctypes.Structure):
    """CUcheckpointLockArgs: a timeout in milliseconds; the reserved fields must be zero."""

    _fields_ = (
        ("timeout_ms", ctypes.c_uint),
        ("reserved0", ctypes.c_uint),
        ("reserved1", ctypes.c_uint64 * 7),
    )


class Driver:
    """The initialized library. The timeout of a call is `seconds`, at most CALL_SECONDS. Raises DriverError.

    `checkpoints`: whether the driver must support checkpoints.
    """

    def __init__(self, seconds: float = CALL_SECONDS, *, checkpoints: bool = True) -> None:
        self._seconds = min(seconds, CALL_SECONDS)
        try:
            self._library = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise DriverError(f"cannot open {LIBRARY} ({error})") from None
        if checkpoints:
            self._expect_checkpoints()
        self.call("cuInit", ctypes.c_uint(0))

    def _expect_checkpoints(self) -> None:
        if missing := [name for name in FUNCTIONS if not hasattr(self._library, name)]:
            raise DriverError(f"the driver is older than 570: it has no {missing[0]}")
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        if version.value < LEAST_VERSION:
            raise DriverError(f"the driver is older than 570: its API is {version.value}, not {LEAST_VERSION}")

    def call(self, name: str, *arguments: Any, seconds: float | None = None, context: Any = None) -> float:
        """Calls a function, within `context` if given, and returns its duration in seconds. A call that times out
        continues in its thread until this process ends.
        """
        results: list[int] = []
        took: list[float] = []
        seconds = self._seconds if seconds is None else seconds
        function = getattr(self._library, name)

        def do() -> None:
            if context is not None and (code := self._library.cuCtxSetCurrent(context)):
                results.append(code)
            else:
                began = time.perf_counter()
                code = function(*arguments)
                took.append(time.perf_counter() - began)
                results.append(code)

        thread = threading.Thread(target=do, name=name, daemon=True)
        thread.start()
        thread.join(seconds)
        if not results:
            raise DriverError(f"{name} did not return within {seconds:g} s")
        if results[0]:
            raise DriverError(f"{name} failed with {self._name(results[0])}")
        return took[0]

    def state(self, pid: int) -> str:
        """The state of a process in the driver: one of STATES."""
        state = ctypes.c_int()
        self.call("cuCheckpointProcessGetState", ctypes.c_int(pid), ctypes.byref(state))
        return STATES[state.value] if 0 <= state.value < len(STATES) else f"state {state.value}"

    def _name(self, code: int) -> str:
        text = ctypes.c_char_p()
        if self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) or not text.value:
            return f"CUresult {code}"
        return f"{text.value.decode('utf-8', 'replace')} ({code})"
