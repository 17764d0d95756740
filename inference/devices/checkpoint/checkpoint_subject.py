"""The process that is suspended by the test of checkpoints: it puts data on a device and verifies it later.

`python -m inference.devices.checkpoint.checkpoint_subject [ENDPOINT]` uses the first NVIDIA GPU, or the simulated
device at ENDPOINT. It writes `ready` to stdout and, after a line on stdin, `whole` or an error.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator

from headgate.shared import child_process
from inference.devices.checkpoint.cuda_driver import Driver, DriverError
from inference.devices.simgpu.rpc_server import library, rpc_library

COUNT_BYTES = 32 * 2**20
REMOTE_BYTES = 2**18
"""Data on a simulated device, which can be small, and which moves data in pages of 4 KiB."""
_I8 = 24
"""ggml's type number for bytes."""
_CONTEXT_BYTES = 2**16


def main() -> int:
    """Returns 0 when the data is unchanged."""
    child_process.die_with_parent(os.environ)
    pattern = os.urandom(4096) * ((REMOTE_BYTES if sys.argv[1:] else COUNT_BYTES) // 4096)
    kept = _on_simulated(sys.argv[1], pattern) if sys.argv[1:] else _on_nvidia(pattern)
    try:
        next(kept)
        _print("ready")
        sys.stdin.readline()
        is_whole = next(kept) == pattern
    except DriverError as error:
        _print(str(error))
        return 1
    _print("whole" if is_whole else "its bytes changed")
    return 0 if is_whole else 1


def _on_nvidia(pattern: bytes) -> Iterator[bytes]:
    """Writes `pattern` to the device, then reads it back. Raises DriverError."""
    driver = Driver()
    size = ctypes.c_size_t(len(pattern))
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    driver.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
    driver.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    found = ctypes.create_string_buffer(len(pattern))
    driver.call("cuMemAlloc_v2", ctypes.byref(address), size, context=context)
    driver.call("cuMemcpyHtoD_v2", address, pattern, size, context=context)
    yield b""
    driver.call("cuMemcpyDtoH_v2", found, address, size, context=context)
    yield found.raw


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _on_simulated(endpoint: str, pattern: bytes) -> Iterator[bytes]:
    """As `_on_nvidia`, with ggml's RPC client."""
    lib = _declared(library())
    buffer_type = rpc_library().ggml_backend_rpc_buffer_type
    buffer_type.restype, buffer_type.argtypes = ctypes.c_void_p, [ctypes.c_char_p, ctypes.c_uint32]
    kind = buffer_type(endpoint.encode(), 0)
    buffer = lib.ggml_backend_buft_alloc_buffer(kind, len(pattern)) if kind else None
    if not buffer:
        raise DriverError(f"cannot allocate {len(pattern)} bytes on {endpoint}")
    context = lib.ggml_init(_InitParams(_CONTEXT_BYTES, None, True))
    tensor = lib.ggml_new_tensor_1d(context, _I8, len(pattern))
    lib.ggml_backend_tensor_alloc(buffer, tensor, lib.ggml_backend_buffer_get_base(buffer))
    lib.ggml_backend_tensor_set(tensor, pattern, 0, len(pattern))
    found = ctypes.create_string_buffer(len(pattern))
    yield b""
    lib.ggml_backend_tensor_get(tensor, found, 0, len(pattern))
    yield found.raw


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, restype, argtypes in (
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, size]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, ctypes.c_int64]),
        ("ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
