"""Converts a grant to parameters of llama.cpp, for estimates and for loads."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from inference.worker.cpu_cores import usable_cores
from inference.worker.llama import ggml_library, split_modes
from inference.worker.llama.binding import lib
from inference.worker_link import EXPERT_TENSOR, Grant

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}
SCORING_OUTPUTS = 16
"""Maximum prompt tokens per step whose logits can be read. Each costs 4 bytes times the vocabulary size on the device
and on the host: 16 MiB in total for a vocabulary of 128 k. With fewer tokens, scoring is as slow as generating.
"""
POOLING_NONE = int(lib.LLAMA_POOLING_TYPE_NONE)
POOLING_MEAN = int(lib.LLAMA_POOLING_TYPE_MEAN)
POOLING_LAST = int(lib.LLAMA_POOLING_TYPE_LAST)
POOLING_RANK = int(lib.LLAMA_POOLING_TYPE_RANK)


def model_params(grant: Grant, on_progress: Callable[[float], bool] | None = None, **overrides: object) -> Any:
    """Model parameters of llama.cpp for `grant`; `overrides` are set last, such as `no_alloc=True`.

    The device list is always explicit and empty for the CPU, because llama.cpp otherwise initializes all visible GPUs.
    Weights are read instead of mapped (load mode NONE), on the CPU too. The resident memory then equals the
    reservation, a replaced or truncated file cannot end the worker with SIGBUS, and steps have no page faults.
    """
    params = lib.llama_model_default_params()
    handles = [] if grant.gpu_layers == 0 else ggml_library.resolve(grant.devices)
    devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = grant.gpu_layers if handles else 0
    params.split_mode = split_modes.mode_of(grant.split_mode if len(handles) > 1 else "none")
    params.main_gpu = 0
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    keep: list[object] = [devices]
    if grant.tensor_split and len(handles) > 1:
        split = (ctypes.c_float * lib.LLAMA_MAX_DEVICES)(*grant.tensor_split)
        params.tensor_split = split
        keep.append(split)
    if grant.host_expert_layers and handles:
        overrides_ = _experts_on_host(grant.host_expert_layers)
        params.tensor_buft_overrides = ctypes.cast(overrides_, ctypes.c_void_p)
        keep.append(overrides_)
    if on_progress is not None:
        callback = lib.llama_progress_callback(lambda fraction, _data: on_progress(fraction))
        params.progress_callback = callback
        keep.append(callback)
    for name, value in overrides.items():
        setattr(params, name, value)
    params.handles = handles
    params.kept = keep  # arrays and callbacks must outlive the load
    return params


class _BufferOverride(ctypes.Structure):
    """llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buffer_type", ctypes.c_void_p))


def _experts_on_host(layers: int) -> ctypes.Array[_BufferOverride]:
    """The overrides that put the experts of the first `layers` layers into host memory, ended by an empty one.

    One pattern for all layers: llama.cpp compiles each pattern for each tensor.
    """
    numbers = "|".join(map(str, range(layers)))
    pattern = rf"^blk\.({numbers}){EXPERT_TENSOR}".encode()
    host = ggml_library.library().ggml_backend_cpu_buffer_type()
    return (_BufferOverride * 2)(_BufferOverride(pattern, host), _BufferOverride(None, None))


def context_params(grant: Grant, *, pooling: int | None, in_pieces: bool = False, on_gpu: bool = False) -> Any:
    """Context parameters of llama.cpp for `grant`. `pooling` is the pooling type, None for a generating context.

    In a generating context each sequence has its own cells (`kv_unified` false), so attention reads only these, or all
    sequences share the `kv_cells` of the grant. A pooling context retains nothing and uses one stream, which takes
    inputs of different lengths in one batch.

    `n_outputs_max` reserves logits for one row per sequence and for scoring; the default of llama.cpp is a whole batch
    times the vocabulary. A pooled input must fit into one physical batch, so both batch sizes are at least the context
    length, unless inputs can be computed in pieces (`in_pieces`).
    """
    params = lib.llama_context_default_params()
    params.n_ctx = grant.kv_cells or grant.context_length * grant.parallel
    params.n_seq_max = grant.parallel
    params.n_batch = grant.batch
    params.n_ubatch = min(grant.ubatch, grant.batch)
    params.kv_unified = pooling is not None or grant.kv_cells is not None
    params.context_length = grant.context_length  # of one sequence; not a parameter of llama.cpp
    params.swa_full = grant.swa_full
    params.type_k = params.type_v = KV_TYPES[grant.kv_type]
    params.flash_attn_type = (
        lib.LLAMA_FLASH_ATTN_TYPE_ENABLED if grant.flash_attention else lib.LLAMA_FLASH_ATTN_TYPE_DISABLED
    )
    params.n_threads = params.n_threads_batch = grant.threads or usable_cores()
    params.no_perf = True
    params.offload_kqv = params.op_offload = on_gpu
    if pooling is not None:
        params.embeddings = True
        params.pooling_type = pooling
        if not in_pieces:
            params.n_batch = params.n_ubatch = max(grant.context_length, grant.ubatch)
    else:
        params.n_outputs_max = min(grant.parallel + SCORING_OUTPUTS, params.n_batch)
    return params
