"""Helper job that measures the memory of a model exactly, without allocating it.

llama.cpp opens the file with `no_alloc` and reserves its compute graphs. `llama_get_memory_breakdown` then gives the
bytes of weights, KV cache and compute per buffer type that a real load allocates. The function returns a C++
`std::map`, whose tree is read here (libstdc++ and libc++ have different layouts). Figures that do not
agree with the header are replaced by the formula.
"""

from __future__ import annotations

import ctypes
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from inference.estimate.gguf import BadGgufError, read_facts
from inference.estimate.header_formula import Facts, Parameters, Parts, formula_on, plausible
from inference.estimate.layers import Sizes
from inference.protocol import ExitCause
from inference.worker.cpu_cores import usable_cores

if TYPE_CHECKING:
    from inference.worker_link import Grant

COPIED_BYTES = 128 * 2**20
"""Copied by all cores together; more than their caches hold, on most machines."""
ROUNDS = 3

_SYMBOL = "_Z26llama_get_memory_breakdownPK13llama_context"
_MAX_NODES = 256
MAX_CELLS = 2**24
"""llama.cpp allocates 52 bytes of host memory per cell (measured), also with `no_alloc`: here 832 MiB."""


def run(job: Mapping[str, Any]) -> dict[str, Any]:
    """Takes `{"path", "parameters", "accelerators", "counts", "split_mode", "capabilities", "mmproj", "draft", "exact",
    "host_bytes_per_second"}`.

    `accelerators` is empty for the CPU, else a list of `{"id", "ggml_name"?, "rpc_endpoint"?}`; `counts` are the layers
    of each when there are several, which share the model in `split_mode`. Returns
    `{"parts": {device: {...}}, "rough": ..., "source": "llama.cpp" | "header",
    "note": ..., "output_bytes": ..., "checkpoint_bytes": ..., "projector_bytes": {device: ...},
    "draft_bytes": {device: ...}, "layers": [[weights, kv, grows, experts], ...], "facts": {...}, "capabilities": [...],
    "host_bytes_per_second": ..., "split_problem": ...}`, or `{"error": message}` for an unusable file. `split_problem`:
    why the accelerators cannot share the model in `split_mode`; empty if they can. `rough`: `parts` by the header
    formula. The rate of host memory is 0 unless the model has experts; it is measured unless the job has it.
    """
    path = Path(job["path"])
    parameters = Parameters(**job["parameters"])
    accelerators: Sequence[Mapping[str, Any]] = job.get("accelerators") or ()
    counts: Sequence[int] = job.get("counts") or ()
    mmproj: str | None = job.get("mmproj")
    draft: str | None = job.get("draft")
    read: list[Facts] = []
    for file in (path, *([Path(draft)] if draft else [])):
        try:
            read.append(read_facts(file))
        except BadGgufError as error:
            return {"error": f"{file} is not a usable GGUF file: {error}"}
        except OSError as error:
            return {"error": f"{file} cannot be read: {error.strerror or error}"}
    facts = read[0]
    shares = {item["id"]: count for item, count in zip(accelerators, counts or [-1], strict=False)}
    rough = formula_on(facts, parameters, shares)
    trace = LayerTrace()
    found, source, note = rough, "header", ""
    capabilities: tuple[str, ...] = ()
    output_bytes = checkpoint_bytes = 0
    mode: str = job.get("split_mode") or "layer"
    split_problem = ""
    draft_bytes = _formula_bytes(read[1], parameters, accelerators) if draft else {}
    projector: dict[str, int] = {}
    is_exact = job.get("exact", True)
    if is_exact and (cells := parameters.cells) > MAX_CELLS:
        is_exact, note = False, f"a cache of {cells} cells is estimated from the header; the limit is {MAX_CELLS}"
    if is_exact:
        try:
            exact, output_bytes, checkpoint_bytes, capabilities, split_problem, measured_draft = _exact(
                path, facts, parameters, accelerators, counts, mode, job.get("capabilities"), mmproj, draft, trace
            )
        except _UnusableError as error:
            return {"error": f"{path} cannot be loaded by llama.cpp: {error}"}
        except _NoBreakdownError as error:
            note = str(error)
        else:
            if why := plausible(exact, facts, parameters):
                note = f"llama.cpp's figures were not plausible: {why}"
            else:
                found, source, draft_bytes = exact, "llama.cpp", measured_draft
    if counts and mode != "layer" and source == "header":  # the formula knows whole layers only
        why = note or "llama.cpp does not measure it"
        return {
            "error": f"{path} cannot be shared by several devices with split_mode {mode}: {why}; set split_mode: layer"
        }
    if mmproj is not None:
        device = accelerators[0] if accelerators else None
        try:
            projector = _projector_bytes(Path(mmproj), device, measured=job.get("exact", True))
        except OSError as error:
            return {"error": f"{mmproj} cannot be read: {error.strerror or error}"}
    return {
        "parts": {device: _plain(parts) for device, parts in found.items()},
        "rough": {device: _plain(parts) for device, parts in rough.items()},
        "source": source,
        "note": note,
        "output_bytes": output_bytes,
        "checkpoint_bytes": checkpoint_bytes,
        "projector_bytes": projector,
        "draft_bytes": draft_bytes,
        "layers": trace.layers(facts, sum(parts.kv_bytes for parts in found.values())),
        "facts": _facts(facts),
        "capabilities": list(capabilities),
        "host_bytes_per_second": _host_rate(job) if facts.experts else 0.0,
        "split_problem": split_problem,
    }


def _host_rate(job: Mapping[str, Any]) -> float:
    return float(job.get("host_bytes_per_second") or host_bytes_per_second(usable_cores()))


def host_bytes_per_second(cores: int) -> float:
    """Bytes read and written per second by `cores` threads that copy their own memory; the best of some rounds."""
    import numpy as np

    blocks = [np.ones(COPIED_BYTES // cores, dtype=np.uint8) for _ in range(cores)]
    copies = [np.zeros_like(block) for block in blocks]
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.copyto, copies, blocks))
            best = max(best, 2 * COPIED_BYTES / (time.perf_counter() - began))
    return best


class _UnusableError(Exception):
    """llama.cpp refuses the file."""


class _NoBreakdownError(Exception):
    """The memory breakdown of this build of llama.cpp cannot be read."""


def _exact(
    path: Path,
    facts: Facts,
    parameters: Parameters,
    accelerators: Sequence[Mapping[str, Any]],
    counts: Sequence[int],
    mode: str,
    wanted: Sequence[str] | None,
    mmproj: str | None,
    draft: str | None,
    trace: LayerTrace,
) -> tuple[dict[str, Parts], int, int, tuple[str, ...], str, dict[str, int]]:
    """Opens model and context as a worker does, without allocating memory.

    Returns the parts, the host memory for outputs (allocated with the first large batch) and for the checkpoints of all
    sequences, the capabilities, why the accelerators cannot share the model in this mode, and the bytes of the draft
    model per device.
    """
    from inference.worker import llama, loading
    from inference.worker.kv.checkpoints import max_checkpoints
    from inference.worker.llama import draft_loading, ggml_library, split_modes
    from inference.worker.llama.llama_process import LogTail
    from inference.worker.worker_errors import LoadError
    from inference.worker_link import DeviceGrant, Grant

    class _TracingLog(LogTail):
        """Passes the log to the trace as well."""

        def __init__(self, echo: Callable[[str], None], trace: LayerTrace) -> None:
            super().__init__(echo)
            self._trace = trace

        def feed(self, level: int, text: str, *, counts: bool = True) -> None:
            self._trace.feed(text)
            super().feed(level, text, counts=counts)

    errors: list[str] = []
    llama.start(_TracingLog(errors.append, trace))
    devices = tuple(
        DeviceGrant(item["id"], "gpu", item.get("ggml_name"), item.get("rpc_endpoint")) for item in accelerators
    )
    grant = Grant(
        model_id=path.name,
        path=str(path),
        devices=devices or (DeviceGrant("cpu", "cpu"),),
        gpu_layers=parameters.gpu_layers if devices else 0,
        tensor_split=tuple(map(float, counts)),
        split_mode=mode,
        context_length=parameters.context_length,
        parallel=parameters.parallel,
        kv_cells=parameters.kv_cells,
        kv_type=parameters.kv_type,
        batch=parameters.batch,
        ubatch=parameters.ubatch,
        host_expert_layers=parameters.host_expert_layers,
        flash_attention=parameters.flash_attention,
        swa_full=parameters.swa_full,
        capabilities=tuple(wanted) if wanted is not None else None,
        mmproj=mmproj,
        draft=draft,
    )
    try:
        params = llama.model_params(grant, no_alloc=True)
        problem = split_modes.obstacle(mode, params.handles)
        if mode == "tensor" and params.handles and not problem:
            problem = _tensor_problem(grant, errors)
        problem = problem and f"{problem}; set split_mode: layer"
        errors.clear()
        if problem and counts:
            raise _UnusableError(problem)
        model, context, pooling = loading.open_context(grant, params)
        capabilities = loading.capabilities_of(grant, pooling, loading.template_of(model)[0])
    except LoadError as error:
        message = "; ".join(line.strip() for line in errors[-2:])
        raise _UnusableError(message or str(error)) from error
    trace.stop()
    drafting = None
    if draft is not None:
        try:
            drafting = draft_loading.open_draft(grant, model, context, no_alloc=True)
        except LoadError as error:
            lines = [] if error.cause is ExitCause.STARTUP else errors[-2:]
            raise _UnusableError("; ".join([str(error), *(line.strip() for line in lines)])) from error
    names = {
        ggml_library.buffer_name(handle): device.id for handle, device in zip(params.handles, devices, strict=False)
    }
    sums: dict[str, list[int]] = {}
    for where, *amounts in _breakdown(context.handle):
        if counts and where.startswith(split_modes.META):
            division = split_modes.division(model.handle, len(devices))
            caches = [size.kv_bytes for size in trace.layers(facts, amounts[1])]
            each = zip(division.weights, division.cache_bytes(amounts[1], caches), strict=True)
            sums |= {device.id: [*mine, amounts[2]] for device, mine in zip(devices, each, strict=True)}
            continue
        if counts and where.endswith(split_modes.ROWS):
            for device, count in zip(devices, counts, strict=True):
                sums.setdefault(device.id, [0, 0, 0])[0] += math.ceil(amounts[0] * count / sum(counts))
            continue
        here = sums.setdefault(_owner(where, names), [0, 0, 0])
        for index, count in enumerate(amounts):
            here[index] += count
    sharing = parameters.parallel if context.cells else 1
    one_checkpoint = trace.checkpoint_bytes(parameters.parallel, context.window, sharing) if pooling is None else 0
    checkpoint_bytes = parameters.parallel * one_checkpoint * max_checkpoints(one_checkpoint, parameters.kv_checkpoints)
    parts = {device: Parts(*counts) for device, counts in sums.items()}
    output_bytes = context.output_bytes
    draft_bytes: dict[str, int] = {}
    if drafting is not None:
        output_bytes += drafting.context.output_bytes
        for where, *amounts in _breakdown(drafting.context.handle):
            owner = _owner(where, names)
            draft_bytes[owner] = draft_bytes.get(owner, 0) + sum(amounts)
    return parts, output_bytes, checkpoint_bytes, capabilities, problem, draft_bytes


def _owner(where: str, names: Mapping[str, str]) -> str:
    """The device of a buffer type; `names` maps those of accelerators to their ids."""
    return next((ours for name, ours in names.items() if where == name or where.startswith(name + "_S")), "cpu")


def _tensor_problem(grant: Grant, errors: list[str]) -> str:
    """Why llama.cpp does not load this model in mode `tensor`; it checks the architecture before the vocabulary."""
    from inference.worker import llama
    from inference.worker.llama import split_modes
    from inference.worker.worker_errors import LoadError

    params = llama.model_params(grant, vocab_only=True, split_mode=split_modes.mode_of("tensor"))
    try:
        llama.Model(grant.path, params).close()
    except LoadError:
        found = next((line for line in errors if "error loading model: " in line), "llama.cpp cannot use it")
        return f"split_mode tensor: {found.partition('error loading model: ')[2].strip() or found}"
    return ""


def _formula_bytes(facts: Facts, parameters: Parameters, accelerators: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """The bytes of a draft model per device by the formula: all of its layers are on the first device."""
    has_layers = bool(accelerators) and parameters.gpu_layers != 0
    own = replace(parameters, gpu_layers=-1 if has_layers else 0, host_expert_layers=0)
    shares = {accelerators[0]["id"]: -1} if has_layers else {}
    return {device: parts.total_bytes for device, parts in formula_on(facts, own, shares).items()}


def _projector_bytes(path: Path, accelerator: Mapping[str, Any] | None, *, measured: bool) -> dict[str, int]:
    """Bytes of an image projector per device: from mtmd, else the file size plus PROJECTOR_COMPUTE_BYTES.

    The host also holds the embeddings of queued images.
    """
    from inference.worker.prompt.vision import HELD_BYTES

    here = accelerator["id"] if accelerator else "cpu"
    found = _mtmd_bytes(path, on_gpu=accelerator is not None) if measured else 0
    sums = {here: found or path.stat().st_size + PROJECTOR_COMPUTE_BYTES}
    sums["cpu"] = sums.get("cpu", 0) + HELD_BYTES
    return sums


PROJECTOR_COMPUTE_BYTES = 2**28
_MTMD_SYMBOL = "_Z21mtmd_get_memory_usagePKc19mtmd_context_params"


def _mtmd_bytes(path: Path, *, on_gpu: bool) -> int:
    """The bytes of a projector on all devices according to mtmd; 0 when this build does not report them.

    The function returns a C++ `std::map` of device to bytes.
    """
    from llama_cpp import mtmd_cpp as mtmd

    function = getattr(mtmd._libmtmd, _MTMD_SYMBOL, None)
    if function is None:
        return 0
    apple = sys.platform == "darwin"
    function.restype = _AppleMap if apple else _Map
    function.argtypes = [ctypes.c_char_p, mtmd.mtmd_context_params]
    params = mtmd.mtmd_context_params_default()
    params.use_gpu = on_gpu
    tree = function(str(path).encode(), params)
    if tree.count > _MAX_NODES:
        return 0
    return sum(size for _device, size, *_rest in _walk(tree.root, *((0, 1) if apple else (2, 3)), values=2))


def _breakdown(context: Any) -> Iterator[tuple[str, int, int, int]]:
    """(buffer type, weights, context, compute) of each buffer type."""
    from inference.worker.llama.binding import lib

    try:
        function = getattr(lib._lib, _SYMBOL)
    except AttributeError:
        raise _NoBreakdownError("this llama.cpp has no memory breakdown") from None
    apple = sys.platform == "darwin"
    function.restype = _AppleMap if apple else _Map
    function.argtypes = [ctypes.c_void_p]
    tree = function(context)
    if tree.count > _MAX_NODES:
        raise _NoBreakdownError(f"llama.cpp's memory breakdown has {tree.count} entries; the maximum is {_MAX_NODES}")
    from inference.worker.llama import ggml_library

    name_of = ggml_library.library().ggml_backend_buft_name
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    nodes = list(_walk(tree.root, *((0, 1) if apple else (2, 3))))
    if len(nodes) != tree.count:
        raise _NoBreakdownError(f"llama.cpp's memory breakdown has {len(nodes)} entries instead of {tree.count}")
    for buffer_type, *counts in nodes:
        yield (name_of(buffer_type).decode(), *counts)


class _Map(ctypes.Structure):
    """libstdc++: std::map with a stateless comparator (six words)."""

    _fields_ = (
        ("compare", ctypes.c_uint64),
        ("color", ctypes.c_uint64),
        ("root", ctypes.c_uint64),
        ("leftmost", ctypes.c_uint64),
        ("rightmost", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
    )


class _AppleMap(ctypes.Structure):
    """libc++: first node, root, size."""

    _fields_ = (("first", ctypes.c_uint64), ("root", ctypes.c_uint64), ("count", ctypes.c_uint64))


def _walk(node: int, left: int, right: int, depth: int = 0, *, values: int = 4) -> Iterator[tuple[int, ...]]:
    """The values of a red-black tree. A node has four words (color and three links), then the key and its counts."""
    if not node or depth > 32:
        return
    words = (ctypes.c_uint64 * (4 + values)).from_address(node)
    yield from _walk(words[left], left, right, depth + 1, values=values)
    yield tuple(words[4:])
    yield from _walk(words[right], left, right, depth + 1, values=values)


def _plain(parts: Parts) -> dict[str, int]:
    return {"weights_bytes": parts.weights_bytes, "kv_bytes": parts.kv_bytes, "compute_bytes": parts.compute_bytes}


def _facts(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}


_LAYER_OF_CACHE = re.compile(r"llama_(?:kv_cache|memory_recurrent)[^:]*?[:,]\s+layer\s+(\d+): dev = ")


_SIZE_OF_CACHE = re.compile(
    r"llama_(?P<what>kv_cache|memory_recurrent): size =\s+(?P<size>[\d.]+) MiB \(\s*(?P<cells>\d+) cells"
)


_KIND_OF_CACHE = re.compile(r"llama_kv_cache_iswa: creating\s+(?P<other>non-)?SWA KV cache")


class LayerTrace:
    """Sizes of the caches of layers, read from the log of a load.

    The log has a line `layer   3: dev = ...` for each layer of a cache, then a line `size = 1.00 MiB (2048 cells, ...`.
    A line `creating     SWA KV cache` comes before those of sliding-window layers.
    """

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._found: dict[int, tuple[float, int]] = {}
        self._windows: set[int] = set()
        self._is_window = False
        self._text = ""
        self._is_stopped = False

    def stop(self) -> None:
        """Ignores the rest of the log, which is that of a draft model."""
        self._is_stopped = True

    def feed(self, text: str) -> None:
        """Adds a piece of the log."""
        if self._is_stopped:
            return
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if match := _LAYER_OF_CACHE.match(line):
                self._waiting.append(int(match[1]))
            elif match := _KIND_OF_CACHE.match(line):
                self._is_window = match["other"] is None
            elif match := _SIZE_OF_CACHE.match(line):
                cells = int(match["cells"]) if match["what"] == "kv_cache" else 0  # a recurrent state does not grow
                if self._is_window and cells:
                    self._windows.update(self._waiting)
                for layer in self._waiting:
                    self._found[layer] = (float(match["size"]) * 2**20 / len(self._waiting), cells)
                self._waiting = []

    def checkpoint_bytes(self, parallel: int, window: int, sharing: int = 1) -> int:
        """The bytes of the states and of the `window` tokens of one sequence.

        `sharing`: number of sequences that share the cells of a layer.
        """
        most = max((cells for _size, cells in self._found.values()), default=0)
        shares = (
            (size, window * sharing / cells if cells else 1.0)
            for layer, (size, cells) in self._found.items()
            if cells < most or not cells or layer in self._windows
        )
        return round(sum(size * share for size, share in shares) / parallel)

    def layers(self, facts: Facts, kv_bytes: int) -> list[Sizes]:
        """The bytes of each layer.

        The figures are those of the log if their sum agrees with `kv_bytes`, else those of the header.
        """
        logged = sum(size for size, _cells in self._found.values())
        if not self._found or abs(logged - kv_bytes) > 0.05 * kv_bytes + 0.02 * 2**20 * len(self._found):
            return [Sizes(weights, values, True, experts) for weights, values, experts in facts.by_layer]
        most = max(cells for _size, cells in self._found.values())
        found = []
        for layer, (weights, _values, experts) in enumerate(facts.by_layer):
            size, cells = self._found.get(layer, (0.0, 0))
            found.append(Sizes(weights, round(size), cells == most > 0, experts))
        return found
