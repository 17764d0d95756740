"""A process with data on a simulated device: `python -m tests.rigs.sim_subject ENDPOINT`.

It writes `ready` to stdout and waits for a line on stdin. ENDPOINT is the host and port of the device.
"""

from __future__ import annotations

import ctypes
import os
import sys

from inference.devices.simgpu.rpc_server import library, rpc_library

COUNT_BYTES = 2**18
BYTES = 24
"""ggml's number of the type for bytes."""


class InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def main() -> None:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    lib, buffer_type = library(), rpc_library().ggml_backend_rpc_buffer_type
    buffer_type.restype, buffer_type.argtypes = pointer, [ctypes.c_char_p, ctypes.c_uint32]
    for name, restype, argtypes in (
        ("ggml_backend_buft_alloc_buffer", pointer, [pointer, size]),
        ("ggml_backend_buffer_get_base", pointer, [pointer]),
        ("ggml_init", pointer, [InitParams]),
        ("ggml_new_tensor_1d", pointer, [pointer, ctypes.c_int, ctypes.c_int64]),
        ("ggml_backend_tensor_alloc", ctypes.c_int, [pointer, pointer, pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    buffer = lib.ggml_backend_buft_alloc_buffer(buffer_type(sys.argv[1].encode(), 0), COUNT_BYTES)
    tensor = lib.ggml_new_tensor_1d(lib.ggml_init(InitParams(2**16, None, True)), BYTES, COUNT_BYTES)
    lib.ggml_backend_tensor_alloc(buffer, tensor, lib.ggml_backend_buffer_get_base(buffer))
    lib.ggml_backend_tensor_set(tensor, os.urandom(COUNT_BYTES), 0, COUNT_BYTES)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


if __name__ == "__main__":
    main()
