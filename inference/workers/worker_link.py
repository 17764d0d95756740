"""The messages between the authority and a worker over their inherited socketpair; decides nothing.

One JSON object per line, in this order:

    worker -> authority   hello        the process runs and has no device context yet
    authority -> worker   hold         only to a worker of the warm pool: copy this file into memory and wait
    worker -> authority   held         it is; or `failed`, then exit
    authority -> worker   grant        what to load and where; the listening socket was passed by descriptor at spawn
    worker -> authority   progress *   0.0 .. 1.0 while loading
    worker -> authority   ready        buffers actually allocated, and what the model is; or `failed`, then exit
    worker -> authority   beat *       every BEAT_SECONDS, and per decode step at most that often
    authority -> worker   offload      save the sequences and free the context; stay, or end with status 0
    worker -> authority   offloaded    done; one that stays waits for another grant
    authority -> worker   limit *      compute at most so many sequences at once
    authority -> worker   forget *     drop retained prefixes
    authority -> worker   threads      how many threads to compute with, any time
    authority -> worker   drain        finish what runs, take nothing new, then end with status 0
    authority -> worker   stop         end now

End of file means death in both directions.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

BEAT_SECONDS = 0.5
"""A worker is heard at least this often, busy or idle."""

LINK_FD_ENV = "HEADGATE_WORKER_LINK_FD"
SOCKET_FD_ENV = "HEADGATE_WORKER_SOCKET_FD"
PARENT_ENV = "HEADGATE_WORKER_PARENT"
"""`pid` of the authority: a worker whose parent is another process by the time it looks exits at once."""
KEEP_FD_ENV = "HEADGATE_WORKER_KEEP_FD"
"""Memory without a name, where sequences are saved that outlive the process; the authority holds it too."""


@dataclass(frozen=True, slots=True)
class DeviceGrant:
    """Where a model may live. `kind` is `cpu` or `gpu`; `id` is the authority's name for it (`cpu`, `gpu-0`).

    `ggml_name` picks the ggml device by name (`CUDA0`, `Metal`); `rpc_endpoint` (host:port) registers a remote ggml
    device first (simulated GPUs). `environment` was already applied at spawn (`CUDA_VISIBLE_DEVICES=GPU-uuid`).
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
class Grant:
    """What to load. Units: tokens for lengths and batches, bytes for memory, seconds for times.

    `reserved_bytes` is what the ledger holds per device id. `context_length` is per sequence; the KV cache has so
    many cells for each of `parallel` sequences. `threads` None: the physical cores this process may use.
    """

    tag: ClassVar[str] = "grant"
    model_id: str
    path: str
    devices: tuple[DeviceGrant, ...]
    gpu_layers: int = -1
    tensor_split: tuple[float, ...] = ()
    context_length: int = 4096
    parallel: int = 1
    kv_type: str = "f16"
    batch: int = 2048
    ubatch: int = 512
    threads: int | None = None
    flash_attention: bool = True
    lora: tuple[str, ...] = ()
    mmproj: str | None = None
    capabilities: tuple[str, ...] | None = None
    queue_limit: int = 512
    reserved_bytes: Mapping[str, int] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of a worker that was started before its devices were known: set before llama.cpp sees any."""

    @property
    def on_cpu(self) -> bool:
        """Whether no device but the CPU computes."""
        return all(device.kind == "cpu" for device in self.devices)


@dataclass(frozen=True, slots=True)
class Hold:
    """Copy the file at `path` into memory of your own; a later grant loads from there."""

    tag: ClassVar[str] = "hold"
    path: str


@dataclass(frozen=True, slots=True)
class Held:
    """`count_bytes` of a file are in memory; the worker has no device and waits."""

    tag: ClassVar[str] = "held"
    count_bytes: int


@dataclass(frozen=True, slots=True)
class Offload:
    """Save what the sequences hold, `most_bytes` of it, and free the context; then `stays` says whether to wait or end.

    Nothing is in flight when this is sent.
    """

    tag: ClassVar[str] = "offload"
    most_bytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Offloaded:
    """The context is free. `count_bytes` of `sequences` with `tokens` in all are saved."""

    tag: ClassVar[str] = "offloaded"
    count_bytes: int
    sequences: int
    tokens: int


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """Share of the load, or of a file's way into memory, that is done: 0.0 to 1.0."""

    tag: ClassVar[str] = "progress"
    fraction: float


@dataclass(frozen=True, slots=True)
class Buffer:
    """One allocation llama.cpp made: `kind` is weights, kv, compute or other."""

    device: str
    kind: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The model answers on its socket from now on."""

    tag: ClassVar[str] = "ready"
    load_seconds: float
    buffers: tuple[Buffer, ...]
    context_length: int
    capabilities: tuple[str, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    restored_tokens: int = 0
    """Of sequences that were saved before and are there again."""
    restore_seconds: float = 0.0
    """What putting those back took, of `load_seconds` or beside it."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The load failed cleanly; the process exits after saying so. `cause` is an ExitCause value."""

    tag: ClassVar[str] = "failed"
    cause: str
    message: str


@dataclass(frozen=True, slots=True)
class Beat:
    """Sign of life. `step_seconds` is how long the running decode step has taken so far, None between steps;
    `step_tokens` its batch size. Counts are since the worker became ready.
    """

    tag: ClassVar[str] = "beat"
    step_seconds: float | None
    step_tokens: int
    active: int
    queued: int
    prompt_tokens: int
    generated_tokens: int
    cells_used: int = 0
    """KV cells that hold something of a sequence that runs."""
    cells_retained: int = 0
    """KV cells that are kept for later requests that begin alike."""
    prefill_tokens_per_second: float | None = None
    """At which prompts were read lately, tokens that were there already included; None before the first."""


@dataclass(frozen=True, slots=True)
class Limit:
    """Compute at most `sequences` (1 or more) at once from now on; those that run already go on."""

    tag: ClassVar[str] = "limit"
    sequences: int


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop the prefixes that are retained for later requests, and give free memory back to the system."""

    tag: ClassVar[str] = "forget"


@dataclass(frozen=True, slots=True)
class Threads:
    """Compute with `count` threads (1 or more) from the next step on."""

    tag: ClassVar[str] = "threads"
    count: int


@dataclass(frozen=True, slots=True)
class Drain:
    """Finish what runs, take nothing new, then end with status 0."""

    tag: ClassVar[str] = "drain"


@dataclass(frozen=True, slots=True)
class Stop:
    """End now; running answers get an honest error frame."""

    tag: ClassVar[str] = "stop"


Message = (
    Hello
    | Hold
    | Held
    | Grant
    | LoadProgress
    | Ready
    | Failed
    | Beat
    | Offload
    | Offloaded
    | Limit
    | Forget
    | Threads
    | Drain
    | Stop
)
_TYPES: Mapping[str, type] = {
    kind.tag: kind
    for kind in (
        Hello,
        Hold,
        Held,
        Grant,
        LoadProgress,
        Ready,
        Failed,
        Beat,
        Offload,
        Offloaded,
        Limit,
        Forget,
        Threads,
        Drain,
        Stop,
    )
}


def encode(message: Message) -> bytes:
    """`message` as one JSON line."""
    return json.dumps({"tag": message.tag, **dataclasses.asdict(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line; raises ValueError for anything that is none."""
    data = json.loads(line)
    tag = data.pop("tag", None) if isinstance(data, dict) else None
    kind = _TYPES.get(tag) if isinstance(tag, str) else None
    if kind is None:
        raise ValueError(f"not a link message: {line[:80]!r}")
    try:
        for name, value in data.items():
            if name == "devices":
                data[name] = tuple(DeviceGrant(**item) for item in value)
            elif name == "buffers":
                data[name] = tuple(Buffer(**item) for item in value)
            elif isinstance(value, list):
                data[name] = tuple(value)
        message: Message = kind(**data)
    except TypeError as error:
        raise ValueError(f"not a {kind.__name__} message: {error}") from error
    return message
