"""Loads ggml's backends in builds with a library per backend (GGML_BACKEND_DL). Other builds link their backends.

A build with GGML_BACKEND_DL contains the CPU backend for several generations of CPUs; ggml loads the best one.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path


def load(lib: ctypes.CDLL, folder: Path) -> ctypes.CDLL:
    """Loads the backends in `folder`, once per process, if `lib` (libggml) does not link them. Returns `lib`."""
    if not hasattr(lib, "ggml_backend_cpu_reg"):
        lib.ggml_backend_reg_count.restype = ctypes.c_size_t
        lib.ggml_backend_reg_count.argtypes = []
        lib.ggml_backend_load_all_from_path.restype = None
        lib.ggml_backend_load_all_from_path.argtypes = [ctypes.c_char_p]
        if not lib.ggml_backend_reg_count():
            lib.ggml_backend_load_all_from_path(str(folder).encode())
    return lib


def rpc(lib: ctypes.CDLL, folder: Path) -> ctypes.CDLL:
    """The library with the RPC backend. Raises OSError when the build has none."""
    if hasattr(lib, "ggml_backend_rpc_start_server"):
        return lib
    suffix = "dylib" if sys.platform == "darwin" else "so"
    return ctypes.CDLL(str(folder / f"libggml-rpc.{suffix}"))
