"""Turns a grant into llama.cpp's parameters, the same for estimates and for loads; opens nothing but devices."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from inference.worker.cpu_cores import usable_cores
from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib
from inference.workers.worker_link import Grant

KV_TYPES = {"f32": 0, "f16": 1, "q8_0": 8, "q4_0": 2}
SCORING_OUTPUTS = 16
"""Tokens of a prompt whose logits can be read in one step. Each costs 4 bytes times the vocabulary, on the device and
on the host: 16 MiB in all for a vocabulary of 128 k. With fewer scoring is as slow as generating; more would lie idle.
"""
POOLING_NONE = int(lib.LLAMA_POOLING_TYPE_NONE)
POOLING_MEAN = int(lib.LLAMA_POOLING_TYPE_MEAN)
POOLING_LAST = int(lib.LLAMA_POOLING_TYPE_LAST)
POOLING_RANK = int(lib.LLAMA_POOLING_TYPE_RANK)


def model_params(grant: Grant, on_progress: Callable[[float], bool] | None = None, **overrides: object) -> Any:
    """llama.cpp's model parameters for `grant`; overrides such as `no_alloc=True` or `vocab_only=True` go on top.

    The device list is always explicit: an empty one for CPU, because with none llama.cpp initializes every GPU it sees.
    Weights are read, not mapped (load mode NONE), on CPU as well: what the ledger reserved is then what is resident, a
    file replaced or truncated under a running worker cannot kill it (SIGBUS), and no page fault lands inside a step.
    """
    params = lib.llama_model_default_params()
    handles = [] if grant.gpu_layers == 0 else ggml_library.resolve(grant.devices)
    devices = (ctypes.c_void_p * (len(handles) + 1))(*handles, None)
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.n_gpu_layers = grant.gpu_layers if handles else 0
    params.split_mode = lib.LLAMA_SPLIT_MODE_LAYER if len(handles) > 1 else lib.LLAMA_SPLIT_MODE_NONE
    params.main_gpu = 0
    params.load_mode = lib.LLAMA_LOAD_MODE_NONE
    keep: list[object] = [devices]
    if grant.tensor_split and len(handles) > 1:
        split = (ctypes.c_float * lib.LLAMA_MAX_DEVICES)(*grant.tensor_split)
        params.tensor_split = split
        keep.append(split)
    if on_progress is not None:
        callback = lib.llama_progress_callback(lambda fraction, _data: on_progress(fraction))
        params.progress_callback = callback
        keep.append(callback)
    for name, value in overrides.items():
        setattr(params, name, value)
    params.handles = handles
    params.kept = keep  # arrays and callbacks must outlive the load
    return params


def context_params(grant: Grant, *, pooling: int | None, in_pieces: bool = False, on_gpu: bool = False) -> Any:
    """llama.cpp's context parameters for `grant`; `pooling` opens a context that pools so, None one that generates.

    A sequence that generates has cells of its own (`kv_unified` false): attention then walks over those of its own and
    not over everybody's. What pools keeps nothing, and one stream takes inputs of any lengths as one batch.

    Logits are reserved for one row per sequence and some to score prompts with (`n_outputs_max`): by default llama.cpp
    reserves a whole batch times the vocabulary. A pooled input must fit one physical batch, so both batch sizes become
    the context length there, unless it can go through in pieces.
    """
    params = lib.llama_context_default_params()
    params.n_ctx = grant.context_length * grant.parallel
    params.n_seq_max = grant.parallel
    params.n_batch = grant.batch
    params.n_ubatch = min(grant.ubatch, grant.batch)
    params.kv_unified = pooling is not None
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
