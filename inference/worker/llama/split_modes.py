"""What a build of llama.cpp supports of the split modes, and the bytes of each device in mode `tensor`.

In mode `tensor` all devices are one device of ggml (`Meta(...)`), and a log or a breakdown has one figure for them.
llama.cpp has an internal function for the division of each tensor, which is called here.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib

META = "Meta("
"""The beginning of the names of buffers that several devices share in mode `tensor`."""
ROWS = "_Split"
"""The end of the names of buffers that several devices share in mode `row`, such as `SYCL_Split`."""
_STATE = "_Z33llama_meta_device_get_split_statePK11ggml_tensorPv"
_TENSOR = "_ZNK11llama_model10get_tensorEPKc"
_MAP = "_Z29llama_internal_get_tensor_map"
_TENSORS = (f"{_MAP}B5cxx11PK11llama_model", f"{_MAP}PK11llama_model")
"""With libstdc++ and with libc++."""
_STRING_BYTES = (32, 24)
_ALIGNMENT = 128
_CACHES = ("attn_output.weight", "ssm_out.weight")
"""The cache of a layer is divided like this tensor of it, and copied to all devices if it has neither."""


class _State(ctypes.Structure):
    """ggml_backend_meta_split_state."""

    _fields_ = (
        ("axis", ctypes.c_int),
        ("ne", ctypes.c_int64 * 256),
        ("nr", ctypes.c_uint32 * 16),
        ("n_segments", ctypes.c_uint32),
    )


class _UserData(ctypes.Structure):
    """llama_meta_device_get_split_state_userdata."""

    _fields_ = (("n_devices", ctypes.c_size_t), ("model", ctypes.c_void_p))


def mode_of(name: str) -> int:
    """The number of a split mode in llama.cpp."""
    return int(getattr(lib, f"LLAMA_SPLIT_MODE_{name.upper()}"))


def obstacle(mode: str, handles: Sequence[int]) -> str:
    """Why these devices cannot share a model in this mode, as a sentence; empty if they can."""
    if mode == "row":
        ggml = ggml_library.library()
        for handle in handles:
            registry = ggml.ggml_backend_dev_backend_reg(handle)
            if not ggml.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_split_buffer_type"):
                backend = ggml.ggml_backend_reg_name(registry).decode().partition("[")[0]
                return f"split_mode row needs split buffers, and the backend {backend} of this llama.cpp has none"
    if mode == "tensor" and _functions() is None:
        return "split_mode tensor needs a newer llama.cpp: this one does not report how it divides tensors"
    return ""


@dataclass(frozen=True, slots=True)
class Division:
    """The parts of each device in mode `tensor`.

    `weights`: bytes. `caches`: per layer, the part of its cache on each device, 0 for a layer in host memory.
    """

    weights: tuple[int, ...]
    caches: tuple[tuple[float, ...], ...]

    def cache_bytes(self, total: int, sizes: Sequence[float]) -> list[int]:
        """How many of the `total` bytes of caches each device has. `sizes`: relative sizes of the caches of layers."""
        here = [size if any(parts) else 0.0 for size, parts in zip(sizes, self.caches, strict=True)]
        whole = sum(here) or 1.0
        each = ([part * size for part in parts] for size, parts in zip(here, self.caches, strict=True))
        return [math.ceil(total * sum(device) / whole) for device in zip(*each, strict=True)]

    def of_largest(self) -> Mapping[str, tuple[float, ...]]:
        """Per kind of buffer, the size on each device relative to the largest one, which the log has.

        That of the caches is a mean over the layers.
        """
        kv = [sum(parts) for parts in zip(*self.caches, strict=True)]
        return {"weights": _relative(self.weights), "kv": _relative(kv), "compute": (1.0,) * len(self.weights)}


def _relative(sizes: Sequence[float]) -> tuple[float, ...]:
    most = max(sizes) or 1
    return tuple(size / most for size in sizes)


def division(model: Any, devices: int) -> Division:
    """How `devices` devices share an open model (a `llama_model`) that was loaded in mode `tensor`."""
    functions = _functions()
    assert functions is not None
    user = _UserData(devices, ctypes.cast(model, ctypes.c_void_p))

    def parts_of(tensor: int | None) -> tuple[float, ...]:
        """The part of a tensor on each device, 0 if it is in host memory."""
        if not tensor:
            return (1.0,) * devices
        buffer = ctypes.c_void_p.from_address(tensor + 8).value
        if not buffer or not functions.is_meta(functions.type_of(buffer)):
            return (0.0,) * devices
        state = functions.state(tensor, ctypes.byref(user))
        if not 0 <= state.axis < 4:
            return (1.0,) * devices
        counts = [
            sum(state.ne[segment * devices + at] * state.nr[segment] for segment in range(state.n_segments))
            for at in range(devices)
        ]
        return tuple(count / sum(counts) for count in counts)

    weights = [0] * devices
    for tensor in functions.tensors(model):
        size = functions.size(tensor)
        for at, part in enumerate(parts_of(tensor)):
            weights[at] += math.ceil(size * part / _ALIGNMENT) * _ALIGNMENT
    caches = []
    for layer in range(lib.llama_model_n_layer(model)):
        names = (f"blk.{layer}.{name}".encode() for name in _CACHES)
        caches.append(parts_of(next(filter(None, (functions.tensor(model, name) for name in names)), None)))
    return Division(tuple(weights), tuple(caches))


def log_parts(mode: str, tensor_split: Sequence[float], model: Any) -> Mapping[str, Sequence[float]]:
    """Per kind of buffer, the part of each device of the size in the log; empty for a load on one device."""
    if not tensor_split:
        return {}
    if mode == "tensor":
        return division(model, len(tensor_split)).of_largest()
    if mode == "row":
        return {"weights": [count / sum(tensor_split) for count in tensor_split]}
    return {}


class _Functions:
    """The internal functions; raises AttributeError if a build has other ones."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.state = getattr(library, _STATE)
        self.state.restype, self.state.argtypes = _State, [ctypes.c_void_p, ctypes.c_void_p]
        self.tensor = getattr(library, _TENSOR)
        self.tensor.restype, self.tensor.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]
        found = next((at for at, name in enumerate(_TENSORS) if hasattr(library, name)), 0)
        self._tensors = getattr(library, _TENSORS[found])
        self._tensors.restype, self._tensors.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._string_bytes = _STRING_BYTES[found]
        self.type_of, self.is_meta = library.ggml_backend_buffer_get_type, library.ggml_backend_buft_is_meta
        self.type_of.restype, self.type_of.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self.is_meta.restype, self.is_meta.argtypes = ctypes.c_bool, [ctypes.c_void_p]
        self.size = library.ggml_nbytes
        self.size.restype, self.size.argtypes = ctypes.c_size_t, [ctypes.c_void_p]

    def tensors(self, model: Any) -> list[int]:
        """The tensors of a model, from its `std::vector<std::pair<std::string, ggml_tensor *>>`."""
        begin, end = (ctypes.c_uint64 * 2).from_address(self._tensors(model))
        each = self._string_bytes + 8
        return [ctypes.c_uint64.from_address(at + self._string_bytes).value for at in range(begin, end, each)]


@functools.cache
def _functions() -> _Functions | None:
    try:
        return _Functions(lib._lib)
    except AttributeError:
        return None
