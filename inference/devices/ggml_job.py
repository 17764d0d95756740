"""Helper jobs that list the compute devices of llama.cpp, and that compute on one device to try it.

llama-cpp-python binds no function of ggml, so this module declares them for the helper jobs.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

LONG, WIDE, HIGH = 256, 128, 64
"""The trial multiplies matrices of WIDE x LONG and HIGH x LONG numbers; kernels for single tokens are not used."""
F32 = 0
"""ggml's number of the type float32."""
_METADATA_BYTES = 2**20
"""Host memory for the metadata of tensors or of a graph, which needs less than half of it."""
_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


class NoMemoryError(Exception):
    """The device has no memory for small matrices."""


class ComputeError(Exception):
    """The device refused to compute; the message has the status."""


class _InitParams(ctypes.Structure):
    """ggml_init_params."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


class _Caps(ctypes.Structure):
    _fields_ = (
        ("async_", ctypes.c_bool),
        ("host_buffer", ctypes.c_bool),
        ("buffer_from_host_ptr", ctypes.c_bool),
        ("events", ctypes.c_bool),
    )


class _Props(ctypes.Structure):
    """ggml_backend_dev_props. `device_id` is the PCI address (`0000:01:00.0`) if the backend knows it."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("description", ctypes.c_char_p),
        ("memory_free", ctypes.c_size_t),
        ("memory_total", ctypes.c_size_t),
        ("type", ctypes.c_int),
        ("device_id", ctypes.c_char_p),
        ("caps", _Caps),
        ("reserve", ctypes.c_uint64 * 8),
    )


_pointer, _size = ctypes.c_void_p, ctypes.c_size_t
_FUNCTIONS: Mapping[str, tuple[Any, list[Any]]] = {
    "ggml_backend_alloc_ctx_tensors": (_pointer, [_pointer, _pointer]),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_pointer, [_pointer, _pointer]),
    "ggml_backend_buffer_free": (None, [_pointer]),
    "ggml_backend_dev_backend_reg": (_pointer, [_pointer]),
    "ggml_backend_dev_get_props": (None, [_pointer, ctypes.POINTER(_Props)]),
    "ggml_backend_dev_init": (_pointer, [_pointer, ctypes.c_char_p]),
    "ggml_backend_dev_supports_op": (ctypes.c_bool, [_pointer, _pointer]),
    "ggml_backend_graph_compute": (ctypes.c_int, [_pointer, _pointer]),
    "ggml_backend_reg_name": (ctypes.c_char_p, [_pointer]),
    "ggml_backend_tensor_get": (None, [_pointer, _pointer, _size, _size]),
    "ggml_backend_tensor_set": (None, [_pointer, ctypes.c_char_p, _size, _size]),
    "ggml_build_forward_expand": (None, [_pointer, _pointer]),
    "ggml_free": (None, [_pointer]),
    "ggml_init": (_pointer, [_InitParams]),
    "ggml_mul_mat": (_pointer, [_pointer, _pointer, _pointer]),
    "ggml_new_graph": (_pointer, [_pointer]),
    "ggml_new_tensor_2d": (_pointer, [_pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
}


def declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    """`lib` (ggml) with the types of the functions that helper jobs call."""
    for name, (restype, argtypes) in _FUNCTIONS.items():
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib


def list_devices(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"devices": [{"ggml_name", "backend", "name", "type", "pci", "total_bytes", "free_bytes"}]}`."""
    del job
    lib = _started(lambda line: None)
    found = []
    for index in range(lib.ggml_backend_dev_count()):
        device = lib.ggml_backend_dev_get(index)
        props = _Props()
        lib.ggml_backend_dev_get_props(device, ctypes.byref(props))
        found.append(
            {
                "ggml_name": props.name.decode(),
                "backend": lib.ggml_backend_reg_name(lib.ggml_backend_dev_backend_reg(device)).decode(),
                "name": (props.description or b"").decode("utf-8", "replace"),
                "type": _TYPES.get(props.type, "accel"),
                "pci": props.device_id.decode() if props.device_id else None,
                "total_bytes": props.memory_total,
                "free_bytes": props.memory_free,
            }
        )
    return {"devices": found}


def try_device(job: Mapping[str, Any]) -> dict[str, Any]:
    """Tries the device `{"id", "kind", "ggml_name", "rpc_endpoint"}`, to which the environment pins this process.

    Returns `{"checked": numbers}`, `{"full": message}` without memory for the trial, or `{"error": message}`. Some
    backends abort instead, with a message on stderr.
    """
    from inference.worker.llama import ggml_library
    from inference.worker.worker_errors import LoadError
    from inference.worker_link import DeviceGrant

    lib = _started(functools.partial(print, file=sys.stderr))
    if job["kind"] == "cpu":
        return check_product(lib, lib.ggml_backend_dev_by_name(b"CPU"))
    grant = DeviceGrant(job["id"], job["kind"], ggml_name=job["ggml_name"], rpc_endpoint=job["rpc_endpoint"])
    try:
        (device,) = ggml_library.resolve([grant])
    except LoadError as error:
        return {"error": str(error)}
    return check_product(lib, device)


def _started(echo: Callable[[str], None]) -> ctypes.CDLL:
    """ggml, after llama.cpp was initialized; `echo` gets its warnings and errors."""
    from inference.worker import llama
    from inference.worker.llama import ggml_library
    from inference.worker.llama.llama_process import LogTail

    llama.start(LogTail(echo))
    return declared(ggml_library.library())


def check_product(lib: ctypes.CDLL, device: Any) -> dict[str, Any]:
    """Multiplies two matrices on `device` (a ggml device) and returns the answer of `try_device`.

    The factors are small integers, so that the product is exact in every precision and one wrong bit shows.
    """
    import numpy as np

    backend = lib.ggml_backend_dev_init(device, None)
    if not backend:
        return {"error": "it cannot be opened"}
    left = (np.arange(WIDE * LONG, dtype=np.float32).reshape(WIDE, LONG) * 7) % 5 - 2
    right = (np.arange(HIGH * LONG, dtype=np.float32).reshape(HIGH, LONG) * 11) % 7 - 3
    buffer_type = lib.ggml_backend_dev_buffer_type(device)
    try:
        found = product(lib, device, backend, buffer_type, (F32, left.tobytes(), WIDE), right)
    except NoMemoryError:
        return {"full": "it has no memory left"}
    except ComputeError as error:
        return {"error": f"it does not compute ({error})"}
    if found is None:
        return {"error": "it does not support products of matrices"}
    wrong = int(np.count_nonzero(found != right @ left.T))
    return {"error": f"it computes {wrong} of {found.size} numbers wrong"} if wrong else {"checked": found.size}


def product(
    lib: ctypes.CDLL, device: Any, backend: Any, buffer_type: Any, weights: tuple[int, bytes, int], right: np.ndarray
) -> np.ndarray | None:
    """`right` (float32, rows of L numbers) times the transposed weights; None when the buffer type does not support it.

    `weights`: ggml's number of their type, their data in the layout of a tensor in `buffer_type`, and the number of
    rows, also of L numbers. Raises NoMemoryError and ComputeError.
    """
    import numpy as np

    kind, data, rows = weights
    long = right.shape[1]
    held, graph_memory = (lib.ggml_init(_InitParams(_METADATA_BYTES, None, True)) for _ in range(2))
    a = lib.ggml_new_tensor_2d(held, kind, long, rows)
    b = lib.ggml_new_tensor_2d(graph_memory, F32, long, len(right))
    result = lib.ggml_mul_mat(graph_memory, a, b)
    graph = lib.ggml_new_graph(graph_memory)
    lib.ggml_build_forward_expand(graph, result)
    buffers = [
        lib.ggml_backend_alloc_ctx_tensors_from_buft(held, buffer_type),
        lib.ggml_backend_alloc_ctx_tensors(graph_memory, backend),
    ]
    try:
        if not all(buffers):
            raise NoMemoryError
        if not lib.ggml_backend_dev_supports_op(device, result):
            return None
        lib.ggml_backend_tensor_set(a, data, 0, len(data))
        lib.ggml_backend_tensor_set(b, right.tobytes(), 0, right.nbytes)
        if status := lib.ggml_backend_graph_compute(backend, graph):
            raise ComputeError(f"status {status}")
        found = np.full((len(right), rows), np.nan, dtype=np.float32)
        lib.ggml_backend_tensor_get(result, found.ctypes.data, 0, found.nbytes)
        return found
    finally:
        for buffer in filter(None, buffers):
            lib.ggml_backend_buffer_free(buffer)
        lib.ggml_free(held)
        lib.ggml_free(graph_memory)
