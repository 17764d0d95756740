"""The process that the checkpoint's test suspends: fills memory of the first device and says later whether it is whole.

stdout: `ready`, then after a line on stdin `whole` or what is wrong; decides nothing
"""

from __future__ import annotations

import ctypes
import os
import sys

from headgate.shared import tether
from inference.jobs.cuda_driver import Driver, DriverError

COUNT_BYTES = 32 * 2**20


def main() -> int:
    """Status 0 when the bytes were found again."""
    tether.hold(os.environ)
    pattern = os.urandom(4096) * (COUNT_BYTES // 4096)
    try:
        driver = Driver()
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        found = ctypes.create_string_buffer(COUNT_BYTES)
        driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(COUNT_BYTES), context=context)
        driver.call("cuMemcpyHtoD_v2", address, pattern, ctypes.c_size_t(COUNT_BYTES), context=context)
        _say("ready")
        sys.stdin.readline()
        driver.call("cuMemcpyDtoH_v2", found, address, ctypes.c_size_t(COUNT_BYTES), context=context)
    except DriverError as error:
        _say(str(error))
        return 1
    is_whole = found.raw == pattern
    _say("whole" if is_whole else "its bytes changed")
    return 0 if is_whole else 1


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
