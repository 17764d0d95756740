"""The messages between the service and a worker over their inherited socketpair.

One JSON object per line, in this order (`*`: any number of times):

    worker -> service   hello        the process runs and has no device context yet
    service -> worker   hold         for the warm pool only: read this file into memory and wait
    worker -> service   held         the file is in memory; or `failed`, then exit
    service -> worker   grant        the model and its devices; the worker inherited the listening socket
    worker -> service   progress *   0.0 .. 1.0 while loading
    worker -> service   ready        allocated buffers and capabilities; or `failed`, then exit
    worker -> service   beat *       heartbeat every BEAT_SECONDS
    worker -> service   timings *    the times of a traced request that has ended
    worker -> service   kv_labels *  which labels of prompts its sequences have
    service -> worker   offload      save the sequences and free the context; then wait for a grant, or exit
    worker -> service   offloaded    the context is freed
    service -> worker   limit *      the number of concurrent sequences
    service -> worker   kv_budget *  the host memory for sequences without a slot
    service -> worker   forget *     drop retained prefixes
    service -> worker   threads *    the number of compute threads
    service -> worker   stop         exit now

The end of the stream means that the other side has ended.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, get_args

import msgspec

BEAT_SECONDS = 0.5
"""Interval between heartbeats of a worker."""

LINK_FD_ENV = "HEADGATE_WORKER_LINK_FD"
SOCKET_FD_ENV = "HEADGATE_WORKER_SOCKET_FD"
PARENT_ENV = "HEADGATE_WORKER_PARENT"
"""Process id of the service. A worker with another parent exits at its start."""
ARENA_FD_ENV = "HEADGATE_WORKER_ARENA_FD"
"""Descriptor of an anonymous memory file for saved sequences. The service holds it too, so that they survive."""

EXPERT_TENSOR = r"\.ffn_(up|down|gate|gate_up)_(ch|)exps"
"""A part of the names of tensors with one matrix per expert, as a regular expression (LLM_FFN_EXPS_REGEX of llama.cpp).
Shared experts are not among them. The same tensors are estimated and loaded into host memory."""


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """A device for a model. `kind` is `cpu` or `gpu`; `id` is the service's name for it (`cpu`, `gpu-0`).

    `ggml_name` is the name of the ggml device (`CUDA0`, `Metal`). `rpc_endpoint` (host:port) is the address of a remote
    ggml device that must be registered first (simulated GPUs).
    """

    id: str
    kind: str
    ggml_name: str | None = None
    rpc_endpoint: str | None = None


@dataclass(frozen=True, slots=True)
class Hello:
    """The worker process runs."""

    tag: ClassVar[str] = "hello"
    pid: int
    version: str


@dataclass(frozen=True, slots=True)
class KvTiers:
    """Where sequences without a slot are stored. `directory` None means not on disk.

    `policy`: lru, priority or hybrid. `threshold`: idle sequences are saved while others run when at least this share
    of the slots is in use. `prefetch`: waiting requests have their sequences read from disk.
    """

    ram_bytes: int = 0
    disk_bytes: int = 0
    directory: str | None = None
    policy: str = "hybrid"
    threshold: float = 0.9
    prefetch: bool = True


@dataclass(frozen=True, slots=True)
class Grant:
    """The model to load. Units: tokens for lengths and batches, bytes for memory.

    `reserved_bytes` is the reservation per device id. `context_length` is the maximum length of each of `parallel`
    sequences. They share a pool of `kv_cells` KV cells; None gives each sequence its own `context_length` cells.
    `threads` None means the physical cores of this process.
    """

    tag: ClassVar[str] = "grant"
    model_id: str
    path: str
    devices: tuple[DeviceGrant, ...]
    gpu_layers: int = -1
    tensor_split: tuple[float, ...] = ()
    split_mode: str = "layer"
    """How several devices share the model: `layer`, `row` or `tensor`."""
    host_expert_layers: int = 0
    """Layers, from the first one on, whose experts are in host memory."""
    context_length: int = 4096
    parallel: int = 1
    kv_cells: int | None = None
    kv_type: str = "f16"
    batch: int = 2048
    ubatch: int = 512
    threads: int | None = None
    flash_attention: bool = True
    swa_full: bool = False
    checkpoint_bytes: int = 0
    """Host memory for the checkpoints of each sequence."""
    speculation: str = "off"
    """`off`, or `ngram`: steps verify proposed tokens."""
    kv: KvTiers = KvTiers()
    lora: tuple[str, ...] = ()
    mmproj: str | None = None
    draft: str | None = None
    """A file with a smaller model of the same vocabulary, which proposes tokens instead of `speculation`."""
    capabilities: tuple[str, ...] | None = None
    queue_limit: int = 512
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables to set before llama.cpp initializes, for a worker that was started before its devices were known."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Read the file at `path` into memory and keep it there. A later grant loads from it."""

    tag: ClassVar[str] = "hold"
    path: str


@dataclass(frozen=True, slots=True)
class Held:
    """`count_bytes` of a file are in memory, `locked_bytes` of them locked. The worker has no device and waits."""

    tag: ClassVar[str] = "held"
    count_bytes: int
    locked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Offload:
    """Store the retained sequences and free the context; then wait if `stays`, else exit.

    It is sent only when no request is in flight.
    """

    tag: ClassVar[str] = "offload"
    stays: bool


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The context is freed, and `sequences` with `tokens` in total are saved in `count_bytes`."""

    tag: ClassVar[str] = "offloaded"
    count_bytes: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Completed share of a load, or of reading a file into memory: 0.0 to 1.0."""

    tag: ClassVar[str] = "progress"
    fraction: float


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation of llama.cpp. `kind` is weights, kv, compute or other."""

    device: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model is loaded and serves requests on its socket."""

    tag: ClassVar[str] = "ready"
    load_seconds: float
    buffers: tuple[Buffer, ...]
    context_length: int
    capabilities: tuple[str, ...]
    template_problem: str = ""
    """Why a chat template of the file is not used; empty where all are."""
    stored_tokens: int = 0
    """Tokens of sequences in host memory, which prompts may continue."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The load failed, and the process exits. `cause` is an ExitCause value."""

    tag: ClassVar[str] = "failed"
    cause: str
    message: str


@dataclass(slots=True)
class KvCounts:
    """Stored sequences of a worker, and counters. Only its store changes an instance; messages contain copies.

    `hot_sequences`: sequences in slots, running or retained.
    `hits_hot`, `hits_ram`, `hits_disk`, `misses`: prompts that were continued from a slot, from host memory, from disk,
    or not at all. `evicted`: sequences removed for room. `invalid`: damaged or foreign entries that were removed.
    `prefetched`, `prefetched_used`: sequences read from disk for waiting requests, and how many of them were restored.
    """

    hot_sequences: int = 0
    ram_sequences: int = 0
    ram_bytes: int = 0
    ram_tokens: int = 0
    disk_sequences: int = 0
    disk_bytes: int = 0
    disk_tokens: int = 0
    hits_hot: int = 0
    hits_ram: int = 0
    hits_disk: int = 0
    misses: int = 0
    evicted: int = 0
    invalid: int = 0
    prefetched: int = 0
    prefetched_used: int = 0
    saves: int = 0
    saved_bytes: int = 0
    save_seconds: float = 0.0
    loads: int = 0
    loaded_bytes: int = 0
    load_seconds: float = 0.0
    disk_written_bytes: int = 0
    disk_write_seconds: float = 0.0
    disk_read_bytes: int = 0
    disk_read_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The worker is alive. `step_seconds` is the time of the running step so far, None between steps; `step_tokens` is
    its batch size. The counters start when the worker becomes ready.
    """

    tag: ClassVar[str] = "beat"
    step_seconds: float | None
    step_tokens: int
    active: int
    queued: int
    prompt_tokens: int
    generated_tokens: int
    cells_used: int = 0
    """KV cells of running sequences."""
    cells_retained: int = 0
    """KV cells of retained prefixes."""
    prefill_tokens_per_second: float | None = None
    """Recent prefill rate, including reused tokens; None before the first prompt."""
    decode_tokens_per_second: float | None = None
    """Recent rate of steps with one token of one sequence; None before the first."""
    proposed_tokens: int = 0
    """Tokens that were computed as guesses of the next tokens of an answer."""
    accepted_tokens: int = 0
    """Proposed tokens that became tokens of the answer."""
    kv: KvCounts = field(default_factory=KvCounts)
    largest_step: int = 0
    """Tokens of the largest step that has ended."""


@dataclass(frozen=True, slots=True)
class Timings:
    """The times of a request with the header `traceparent`, in Unix seconds; None where it did not get so far.

    `arrived`: at the worker. `queued`: the prompt is tokenized. `begun`: the first step with its tokens began.
    `prefilled`: all its choices have a first token.
    """

    tag: ClassVar[str] = "timings"
    traceparent: str
    arrived: float
    queued: float
    begun: float | None
    prefilled: float | None
    ended: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class KvLabels:
    """Labels that the sequences of the model have since the last message, and those that none has any more."""

    tag: ClassVar[str] = "kv_labels"
    added: tuple[str, ...]
    removed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Limit:
    """Compute at most `sequences` (1 or more) concurrently. Running ones continue."""

    tag: ClassVar[str] = "limit"
    sequences: int


@dataclass(frozen=True, slots=True)
class KvBudget:
    """Store at most `ram_bytes` of sequences in host memory."""

    tag: ClassVar[str] = "kv_budget"
    ram_bytes: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop retained prefixes and return free memory to the system."""

    tag: ClassVar[str] = "forget"


@dataclass(frozen=True, slots=True)
class Threads:
    """Use `count` threads (1 or more) from the next step on."""

    tag: ClassVar[str] = "threads"
    count: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Exit now. Running streams end with an error frame."""

    tag: ClassVar[str] = "stop"


Message = (
    Hello
    | Hold
    | Held
    | Grant
    | LoadProgress
    | Ready
    | Failed
    | Heartbeat
    | Timings
    | KvLabels
    | Offload
    | Offloaded
    | Limit
    | Forget
    | KvBudget
    | Threads
    | Stop
)
_TYPES: Mapping[str, type[Message]] = {kind.tag: kind for kind in get_args(Message)}


class _Tagged(msgspec.Struct):
    tag: str


def encode(message: Message) -> bytes:
    """`message` as one JSON line."""
    return msgspec.json.encode({"tag": message.tag, **msgspec.to_builtins(message)}) + b"\n"


def decode(line: bytes) -> Message:
    """The message in `line`. Raises ValueError for an invalid one."""
    try:
        kind = _TYPES[msgspec.json.decode(line, type=_Tagged).tag]
        return msgspec.json.decode(line, type=kind)
    except (msgspec.DecodeError, KeyError) as error:
        raise ValueError(f"not a link message: {line[:80]!r} ({error})") from error
