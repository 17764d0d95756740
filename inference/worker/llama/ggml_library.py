"""Finds compute devices of ggml by name, and tensors in the header of a GGUF file.

llama-cpp-python has no bindings for the functions of ggml, so they are bound here with ctypes.
"""

from __future__ import annotations

import ctypes
import functools
import socket
from collections.abc import Sequence
from pathlib import Path

from inference.protocol import ExitCause
from inference.worker import ggml_backends
from inference.worker.worker_errors import LoadError
from inference.worker_link import DeviceGrant

DEVICE_TYPE_CPU = 0
CONNECT_SECONDS = 5.0


@functools.cache
def library() -> ctypes.CDLL:
    """The ggml library that llama.cpp itself uses, with its backends loaded.

    The functions are looked up through libllama. A wheel contains `libggml.so` as a copy of `libggml.so.0`, and the
    copy would have another registry of backends than llama.cpp.
    """
    from inference.worker.llama.binding import lib as llama

    lib = ggml_backends.load(ctypes.CDLL(llama._lib._name), Path(llama._base_path))
    for function, restype, argtypes in (
        ("ggml_backend_dev_by_name", ctypes.c_void_p, [ctypes.c_char_p]),
        ("ggml_backend_dev_count", ctypes.c_size_t, []),
        ("ggml_backend_dev_get", ctypes.c_void_p, [ctypes.c_size_t]),
        ("ggml_backend_dev_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ggml_backend_dev_type", ctypes.c_int, [ctypes.c_void_p]),
        ("ggml_backend_dev_buffer_type", ctypes.c_void_p, [ctypes.c_void_p]),
        ("ggml_backend_dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p]),
        ("ggml_backend_buft_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ggml_backend_cpu_buffer_type", ctypes.c_void_p, []),
        ("ggml_backend_reg_by_name", ctypes.c_void_p, [ctypes.c_char_p]),
        ("ggml_backend_reg_get_proc_address", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]),
        ("ggml_backend_reg_name", ctypes.c_char_p, [ctypes.c_void_p]),
        ("ggml_backend_reg_dev_count", ctypes.c_size_t, [ctypes.c_void_p]),
        ("ggml_backend_reg_dev_get", ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t]),
        ("ggml_backend_register", None, [ctypes.c_void_p]),
        ("ggml_backend_device_register", None, [ctypes.c_void_p]),
    ):
        bound = getattr(lib, function)
        bound.restype = restype
        bound.argtypes = argtypes
    return lib


class _GgufParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


def has_tensor(path: str, name: str) -> bool:
    """Whether the GGUF file at `path` lists a tensor of that name; False for a file that cannot be read."""
    lib = library()
    lib.gguf_init_from_file.restype = ctypes.c_void_p
    lib.gguf_init_from_file.argtypes = [ctypes.c_char_p, _GgufParams]
    lib.gguf_find_tensor.restype = ctypes.c_int64
    lib.gguf_find_tensor.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
    lib.gguf_free.argtypes = [ctypes.c_void_p]
    header = lib.gguf_init_from_file(path.encode(), _GgufParams(True, None))
    if not header:
        return False
    try:
        return bool(lib.gguf_find_tensor(header, name.encode()) >= 0)
    finally:
        lib.gguf_free(header)


def device_name(device: int) -> str:
    """The name of a device in ggml, as in the log lines of llama.cpp."""
    return str(library().ggml_backend_dev_name(device).decode())


def buffer_name(device: int) -> str:
    """The prefix of buffer names of a device: the device name, or the name of the buffer type of a remote device.

    ggml numbers remote devices in a process (`RPC1`) and names their buffers by server (`RPC0[127.0.0.1:50052]`).
    """
    lib = library()
    name = str(lib.ggml_backend_buft_name(lib.ggml_backend_dev_buffer_type(device)).decode())
    return name if "[" in name else device_name(device)


def resolve(grants: Sequence[DeviceGrant]) -> list[int]:
    """Device handles of the accelerators in `grants`, in order; raises LoadError for a missing device.

    A grant without a name gets the next visible accelerator; the environment of the process limits the visible ones.
    """
    wanted = [grant for grant in grants if grant.kind != "cpu"]
    handles: list[int] = []
    for grant in wanted:
        handle = _remote(grant.rpc_endpoint) if grant.rpc_endpoint else _local(grant, handles)
        handles.append(handle)
    return handles


def _local(grant: DeviceGrant, taken: Sequence[int]) -> int:
    lib = library()
    if grant.ggml_name:
        handle = lib.ggml_backend_dev_by_name(grant.ggml_name.encode())
        if handle:
            return int(handle)
        raise LoadError(
            ExitCause.DEVICE_LOST,
            f"device {grant.id} ({grant.ggml_name}) is not visible; visible devices: {_visible()}",
        )
    for index in range(lib.ggml_backend_dev_count()):
        handle = lib.ggml_backend_dev_get(index)
        is_accelerator = lib.ggml_backend_dev_type(handle) not in (DEVICE_TYPE_CPU, _CPU_LIBRARY)
        if is_accelerator and handle not in taken:
            return int(handle)
    raise LoadError(
        ExitCause.DEVICE_LOST, f"no accelerator is visible for device {grant.id}; visible devices: {_visible()}"
    )


_CPU_LIBRARY = 3
"""Device type ACCEL: CPU libraries such as BLAS, which hold no weights (GPU is 1, integrated GPU 2)."""


def _visible() -> str:
    lib = library()
    names = [device_name(lib.ggml_backend_dev_get(index)) for index in range(lib.ggml_backend_dev_count())]
    return ", ".join(names) or "none"


def _remote(endpoint: str) -> int:
    lib = library()
    rpc = lib.ggml_backend_reg_by_name(b"RPC")
    if not rpc:
        raise LoadError(
            ExitCause.STARTUP,
            f"device {endpoint} is remote, and this llama.cpp was built without RPC; rebuild it with GGML_RPC=ON",
        )
    host, _colon, port = endpoint.rpartition(":")
    try:
        # ggml aborts the process if the connection is refused.
        socket.create_connection((host, int(port)), CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:
        raise LoadError(ExitCause.DEVICE_LOST, f"the device at {endpoint} does not answer ({error})") from None
    if address := lib.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_server"):
        add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
        registry = add(endpoint.encode())
        if registry and lib.ggml_backend_reg_dev_count(registry):
            lib.ggml_backend_register(registry)
            return int(lib.ggml_backend_reg_dev_get(registry, 0))
    elif address := lib.ggml_backend_reg_get_proc_address(rpc, b"ggml_backend_rpc_add_device"):
        add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address)
        if device := add(endpoint.encode()):
            lib.ggml_backend_device_register(device)
            return int(device)
    raise LoadError(
        ExitCause.DEVICE_LOST,
        f"the RPC server at {endpoint} accepts connections but offers no device; check that it is a compatible "
        f"rpc-server",
    )
