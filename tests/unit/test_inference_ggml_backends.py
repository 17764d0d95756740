"""Opening the libraries of ggml: linked backends, and backends in separate libraries."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from inference.devices.simgpu import rpc_server
from inference.worker import ggml_backends
from inference.worker.llama import ggml_library
from inference.worker.llama.binding import lib as llama

LIB = Path("/site-packages/llama_cpp/lib")


class PaperFunction:
    """A C function that records its calls."""

    def __init__(self, result: Any = None) -> None:
        self.result = result
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self.result


def _library(backends: int, **more: PaperFunction) -> Any:
    functions = {"ggml_backend_reg_count": PaperFunction(backends), "ggml_backend_load_all_from_path": PaperFunction()}
    return SimpleNamespace(**functions, **more)


def test_separate_backends_are_loaded_from_the_folder_of_llama_cpp() -> None:
    lib = _library(0)
    assert ggml_backends.load(lib, LIB) is lib
    assert lib.ggml_backend_load_all_from_path.calls == [(str(LIB).encode(),)]


def test_backends_are_loaded_once() -> None:
    lib = _library(2)
    ggml_backends.load(lib, LIB)
    assert lib.ggml_backend_load_all_from_path.calls == []


def test_linked_backends_are_not_counted() -> None:
    """Counting would open each device."""
    lib = _library(0, ggml_backend_cpu_reg=PaperFunction())
    ggml_backends.load(lib, LIB)
    assert lib.ggml_backend_reg_count.calls == []
    assert lib.ggml_backend_load_all_from_path.calls == []


def test_rpc_is_found_in_the_linked_and_in_the_separate_library() -> None:
    linked = _library(1, ggml_backend_rpc_start_server=PaperFunction())
    assert ggml_backends.rpc(linked, LIB) is linked
    installed = rpc_server.package()
    assert installed is not None
    found = ggml_backends.rpc(_library(1), installed / "lib")
    assert isinstance(found, ctypes.CDLL)
    assert found.ggml_backend_rpc_start_server
    with pytest.raises(OSError, match="libggml-rpc"):
        ggml_backends.rpc(_library(1), LIB)


def test_worker_uses_the_registry_of_llama_cpp() -> None:
    """A wheel contains libggml twice; the copy has another registry."""
    ours = ctypes.cast(ggml_library.library().ggml_backend_reg_count, ctypes.c_void_p).value
    theirs = ctypes.cast(ctypes.CDLL(llama._lib._name).ggml_backend_reg_count, ctypes.c_void_p).value
    assert ours == theirs
    assert ggml_library.library().ggml_backend_dev_by_name(b"CPU")
