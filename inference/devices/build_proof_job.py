"""Helper job that checks that this build of llama.cpp computes correctly on this CPU. A broken build can crash it.

Two checks on the CPU, which take one or two seconds:

- matrix products with f16, q8_0 and q4_0 weights, for one row and for a batch, in each buffer type that llama.cpp uses
  for weights on this CPU (AMX and repacked weights have buffer types and kernels of their own), compared with numpy;
- the bundled demo model: a prompt in one batch and token by token, then some tokens of both sequences together. The
  logits must agree, and the answer must begin with the text that the model has learned.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from inference.devices import ggml_job
from inference.devices.device import HIDDEN

if TYPE_CHECKING:
    import numpy as np

LONG, WIDE = 512, 64
"""Weights of WIDE rows of LONG numbers, a shape for all kernels: AMX needs multiples of 64 and 32."""
ROWS = (1, 33)
"""A single token, and a batch with an odd number of rows, which includes the remainder code of kernels."""
BLOCK = 32
MAX_ERROR = 0.03
"""Highest relative error (Frobenius norm) of a product or of logits. Quantizing the right side to 8 bits causes 0.006,
wrong kernels about 1.
"""
QUESTION = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "I am a small demo model that comes with Headgate."
TOKENS = 12
"""Number of decoded tokens of the answer."""
_F16, _Q4_0, _Q8_0 = 1, 2, 8


class ProofError(Exception):
    """The build computes wrong results."""


@dataclass(frozen=True)
class Weights:
    """Weights of one type (`kind` is its number in ggml): `data` in the layout of a tensor, `values` as float32."""

    name: str
    kind: int
    data: bytes
    values: np.ndarray


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Returns `{"buffers": [names], "answer": text, "system_info": text}`, or `{"error": message}`. `job` is empty.

    `system_info` lists the instruction sets of the build, as llama.cpp prints them.
    """
    os.environ.update(HIDDEN)
    import llama_cpp

    from inference.worker import llama
    from inference.worker.llama.llama_process import LogTail

    llama.start(LogTail(lambda _line: None))
    try:
        buffers = _check_products()
        answer = _check_model()
    except ProofError as error:
        return {"error": str(error)}
    return {"buffers": buffers, "answer": answer, "system_info": llama_cpp.llama_print_system_info().decode()}


# --- products --------------------------------------------------------------------------------------------------------
def _check_products() -> list[str]:
    """Checks products in each buffer type and returns the names of the types. Raises ProofError for a wrong result."""
    import numpy as np

    from inference.worker.llama import ggml_library

    lib = ggml_job.declared(ggml_library.library())
    cpu = lib.ggml_backend_dev_by_name(b"CPU")
    if not cpu:
        raise ProofError("llama.cpp has no CPU backend")
    backend = lib.ggml_backend_dev_init(cpu, None)
    chance = np.random.default_rng(1)
    matrix = chance.standard_normal((WIDE, LONG)).astype(np.float32)
    rights = [chance.standard_normal((rows, LONG)).astype(np.float32) for rows in ROWS]
    names = []
    for buffer_type in _buffer_types(lib, cpu):
        name = lib.ggml_backend_buft_name(buffer_type).decode()
        computed = 0
        for weights in quantized(matrix):
            for right in rights:
                found = _product(lib, cpu, backend, buffer_type, weights, right)
                if found is not None:
                    check_close(f"{weights.name} x {len(right)} rows ({name})", found, right @ weights.values.T)
                    computed += 1
        if computed:
            names.append(name)
    return names


def quantized(matrix: np.ndarray) -> Iterator[Weights]:
    """`matrix` (float32, row length a multiple of BLOCK) as f16, q8_0 and q4_0 in ggml's block layout."""
    import numpy as np

    half = matrix.astype(np.float16)
    yield Weights("f16", _F16, half.tobytes(), half.astype(np.float32))
    blocks = matrix.reshape(-1, BLOCK)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    for name, kind, top in (("q8_0", _Q8_0, 127), ("q4_0", _Q4_0, 7)):
        scale = (largest / top).astype(np.float16)
        numbers = np.rint(blocks / scale.astype(np.float32)).clip(-top, top)
        if kind == _Q8_0:
            body = numbers.astype(np.int8).view(np.uint8)
        else:
            shifted = (numbers + 8).astype(np.uint8)
            body = shifted[:, : BLOCK // 2] | (shifted[:, BLOCK // 2 :] << 4)
        data = np.hstack([scale.view(np.uint8), body]).tobytes()
        yield Weights(name, kind, data, (numbers * scale.astype(np.float32)).astype(np.float32).reshape(matrix.shape))


def _buffer_types(lib: ctypes.CDLL, cpu: Any) -> list[Any]:
    """The buffer types for weights on this CPU: plain memory first, then those with a layout of their own."""
    found = [lib.ggml_backend_dev_buffer_type(cpu)]
    registry = lib.ggml_backend_dev_backend_reg(cpu)
    if address := lib.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts"):
        extra = ctypes.CFUNCTYPE(ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p)(address)(cpu)
        index = 0
        while extra and extra[index]:
            found.append(extra[index])
            index += 1
    return found


def _product(
    lib: ctypes.CDLL, cpu: Any, backend: Any, buffer_type: Any, weights: Weights, right: np.ndarray
) -> np.ndarray | None:
    """`right` times the transposed weights, as float32; None when the buffer type does not support these weights."""
    try:
        return ggml_job.product(lib, cpu, backend, buffer_type, (weights.kind, weights.data, WIDE), right)
    except ggml_job.NoMemoryError:
        raise ProofError("out of memory for a product of small matrices") from None
    except ggml_job.ComputeError as error:
        raise ProofError(f"a product with {weights.name} weights ended with {error}") from None


def check_close(what: str, found: np.ndarray, expected: np.ndarray) -> None:
    """Raises ProofError when `found` differs from `expected` by more than MAX_ERROR."""
    import numpy as np

    if not np.isfinite(found).all():
        raise ProofError(f"{what}: {np.count_nonzero(~np.isfinite(found))} of {found.size} numbers are not finite")
    if not found.any():
        raise ProofError(f"{what}: all {found.size} numbers are zero")
    error = float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
    if not error <= MAX_ERROR:
        raise ProofError(f"{what}: the numbers are off by {error:.0%}")


# --- the model -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Row:
    slot: int
    start: int
    tokens: Sequence[int]
    sample: bool = True
    every: bool = False


def _check_model() -> str:
    """The beginning of the demo model's answer. Raises ProofError when it is not the learned text."""
    from inference.demo import bundled_path
    from inference.worker import llama
    from inference.worker.loading import open_context
    from inference.worker.worker_errors import LoadError
    from inference.worker_link import DeviceGrant, Grant

    grant = Grant(
        "demo", str(bundled_path("demo")), (DeviceGrant("cpu", "cpu"),), gpu_layers=0, context_length=128, parallel=2
    )
    try:
        model, context, _pooling = open_context(grant, llama.model_params(grant))
    except LoadError as error:
        raise ProofError(f"the demo model cannot be loaded: {error.message}") from error
    prompt = model.tokenize(QUESTION, parse_special=True)
    at_once = _decoded(context, [_Row(0, 0, prompt)])[0]
    for position, token in enumerate(prompt):
        (one_by_one,) = _decoded(context, [_Row(1, position, [token])])
    check_close("a prompt in one batch and token by token", at_once, one_by_one)
    return _check_answer(context, model.detokenize, len(prompt), int(at_once.argmax()))


def _check_answer(context: Any, text_of: Callable[[list[int]], str], position: int, first: int) -> str:
    """Decodes both sequences together, greedily, from the first token of the answer on. Raises ProofError."""
    tokens = [first]
    for step in range(TOKENS):
        logits, twin = _decoded(context, [_Row(slot, position + step, tokens[-1:]) for slot in (0, 1)])
        check_close("two sequences with the same tokens", twin, logits)
        tokens.append(int(logits.argmax()))
    answer = text_of(tokens)
    if not (answer.startswith(ANSWER) or ANSWER.startswith(answer)):
        raise ProofError(f"the demo model answers {answer!r} instead of {ANSWER!r}")
    return answer


def _decoded(context: Any, rows: list[_Row]) -> list[np.ndarray]:
    """A copy of the logits after each row. Raises ProofError when decoding fails or logits are not finite."""
    import numpy as np

    status, last = context.decode(rows)
    if status:
        raise ProofError(f"llama.cpp could not decode {len(rows)} rows ({status.name.lower()})")
    found = [context.logits(index).copy() for index in last]
    if not all(np.isfinite(logits).all() and logits.any() for logits in found):
        raise ProofError("the demo model's logits are zero or not finite")
    return found
