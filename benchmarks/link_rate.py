"""Measures the rate of copies between the host and the first CUDA device of this process.

`python -m benchmarks.link_rate [BYTES]` prints one line of JSON: bytes per second of `pinned` and `pageable` (to the
device) and `back` (from it, into pinned memory), or an `error`. It runs in its own process because a context stays on
the device until its process ends. CUDA_VISIBLE_DEVICES selects the device.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Callable, Sequence
from statistics import median

from inference.devices.checkpoint_job import Driver, DriverError

COUNT_BYTES = 256 * 2**20
"""Large enough that the cost of a call does not matter, and small enough for any device that runs a model."""
PASSES = 5
_PATTERN_BYTES = 4096


def rates(count_bytes: int) -> dict[str, float]:
    """Medians over PASSES copies after a warm-up. Raises DriverError, also if the bytes differ after the copy back."""
    driver = Driver(checkpoints=False)
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    count = ctypes.c_size_t(count_bytes)
    driver.call("cuMemAlloc_v2", ctypes.byref(address), count, context=context)
    pinned, back = ctypes.c_void_p(), ctypes.c_void_p()
    for memory in (pinned, back):
        driver.call("cuMemHostAlloc", ctypes.byref(memory), count, ctypes.c_uint(0), context=context)
    pageable = ctypes.create_string_buffer(count_bytes)
    pattern = os.urandom(_PATTERN_BYTES) * (count_bytes // _PATTERN_BYTES)
    ctypes.memmove(pinned, pattern, count_bytes)
    ctypes.memmove(pageable, pattern, count_bytes)

    def copied(name: str, *arguments: object) -> float:
        """Seconds until the copy is done. A copy from pageable memory returns early, so this synchronizes."""
        seconds = driver.call(name, *arguments, count, context=context)
        return seconds + driver.call("cuCtxSynchronize", context=context)

    found = {
        "pinned": _rate(count_bytes, lambda: copied("cuMemcpyHtoD_v2", address, pinned)),
        "pageable": _rate(count_bytes, lambda: copied("cuMemcpyHtoD_v2", address, pageable)),
        "back": _rate(count_bytes, lambda: copied("cuMemcpyDtoH_v2", back, address)),
    }
    if ctypes.string_at(back, count_bytes) != pattern:
        raise DriverError("the bytes copied back from the device differ from those copied to it")
    return found


def _rate(count_bytes: int, copy: Callable[[], float]) -> float:
    copy()
    return count_bytes / median(copy() for _ in range(PASSES))


def main(argv: Sequence[str] = sys.argv) -> int:
    """Prints the rates or the error; the status is 0 in both cases."""
    try:
        answer: dict[str, float | str] = dict(rates(int(argv[1]) if len(argv) > 1 else COUNT_BYTES))
    except DriverError as error:
        answer = {"error": str(error)}
    sys.stdout.write(json.dumps(answer) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
