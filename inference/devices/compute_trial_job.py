"""Helper job that computes a small matrix product on one device and checks it.

The factors are small integers, so that the product is exact in every precision and one wrong bit shows.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

LONG, WIDE, HIGH = 256, 128, 64
"""Matrices of WIDE x LONG and HIGH x LONG numbers: more rows than llama.cpp's kernels for single tokens."""
_F32 = 0
_SUCCESS = 0
_ERROR = 4
_GRAPH_BYTES = 2**20
"""Host memory for the metadata of a ggml graph, which needs less than half of it."""


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Tests the device `{"id", "kind", "ggml_name", "rpc_endpoint"}`, to which the environment pins this process.

    Returns `{"checked": numbers}`, `{"full": message}` without memory for the trial, or `{"error": message}`. Some
    backends abort instead, with a message on stderr.
    """
    import llama_cpp

    from inference.worker.llama import ggml_library
    from inference.worker.worker_errors import LoadError
    from inference.worker_link import DeviceGrant

    callback = llama_cpp.llama_log_callback(_print_errors)
    llama_cpp.llama_log_set(callback, None)
    llama_cpp.llama_backend_init()
    lib = _declared(ggml_library.library())
    if job["kind"] == "cpu":
        return check_product(lib, lib.ggml_backend_dev_by_name(b"CPU"))
    grant = DeviceGrant(job["id"], job["kind"], ggml_name=job["ggml_name"], rpc_endpoint=job["rpc_endpoint"])
    try:
        (device,) = ggml_library.resolve([grant])
    except LoadError as error:
        return {"error": str(error)}
    return check_product(lib, device)


def _print_errors(level: int, text: bytes, _data: Any) -> None:
    if level == _ERROR:
        os.write(2, text)


def check_product(lib: ctypes.CDLL, device: int) -> dict[str, Any]:
    """Multiplies two matrices on `device` (a ggml device) and returns the answer of `run`."""
    import numpy as np

    backend = lib.ggml_backend_dev_init(device, None)
    if not backend:
        return {"error": "it cannot be opened"}
    context = lib.ggml_init(_InitParams(_GRAPH_BYTES, None, True))
    a = lib.ggml_new_tensor_2d(context, _F32, LONG, WIDE)
    b = lib.ggml_new_tensor_2d(context, _F32, LONG, HIGH)
    product = lib.ggml_mul_mat(context, a, b)
    graph = lib.ggml_new_graph(context)
    lib.ggml_build_forward_expand(graph, product)
    if not lib.ggml_backend_alloc_ctx_tensors(context, backend):
        return {"full": "it has no memory left"}
    left = (np.arange(WIDE * LONG, dtype=np.float32).reshape(WIDE, LONG) * 7) % 5 - 2
    right = (np.arange(HIGH * LONG, dtype=np.float32).reshape(HIGH, LONG) * 11) % 7 - 3
    found = np.full((HIGH, WIDE), np.nan, dtype=np.float32)
    for tensor, values in ((a, left), (b, right)):
        lib.ggml_backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)
    if (status := lib.ggml_backend_graph_compute(backend, graph)) != _SUCCESS:
        return {"error": f"it does not compute (status {status})"}
    lib.ggml_backend_tensor_get(product, found.ctypes.data, 0, found.nbytes)
    wrong = int(np.count_nonzero(found != right @ left.T))
    return {"error": f"it computes {wrong} of {found.size} numbers wrong"} if wrong else {"checked": found.size}


def _declared(lib: ctypes.CDLL) -> ctypes.CDLL:
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    for name, restype, argtypes in (
        ("ggml_backend_dev_init", pointer, [pointer, ctypes.c_char_p]),
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]),
        ("ggml_mul_mat", pointer, [pointer, pointer, pointer]),
        ("ggml_new_graph", pointer, [pointer]),
        ("ggml_build_forward_expand", None, [pointer, pointer]),
        ("ggml_backend_alloc_ctx_tensors", pointer, [pointer, pointer]),
        ("ggml_backend_tensor_set", None, [pointer, pointer, size, size]),
        ("ggml_backend_tensor_get", None, [pointer, pointer, size, size]),
        ("ggml_backend_graph_compute", ctypes.c_int, [pointer, pointer]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
    return lib
