"""Helper job that lists the compute devices that llama.cpp sees."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any


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


_TYPES = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel"}


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"devices": [{"ggml_name", "backend", "name", "type", "pci", "total_bytes", "free_bytes"}]}`."""
    del job
    from inference.worker.llama import ggml_library
    from inference.worker.llama.binding import lib as llama

    callback = llama.llama_log_callback(lambda level, text, data: None)
    llama.llama_log_set(callback, None)
    llama.llama_backend_init()
    lib = ggml_library.library()
    for name, restype, argtypes in (
        ("ggml_backend_dev_get_props", None, [ctypes.c_void_p, ctypes.POINTER(_Props)]),
        ("ggml_backend_dev_backend_reg", ctypes.c_void_p, [ctypes.c_void_p]),
        ("ggml_backend_reg_name", ctypes.c_char_p, [ctypes.c_void_p]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = restype, argtypes
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
