"""The protocol between clients, gateway, inference service and workers: headers, codes, states, frames.

It is the only module of `inference` that the gateway may import, so it imports only the standard library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any, Literal

# --- headers ---------------------------------------------------------------------------------------------------------
H_REQUEST_ID = "x-request-id"
H_TIER = "x-headgate-tier"
H_MODEL = "x-headgate-model"
H_ATTEMPTS = "x-headgate-attempts"
H_REASON = "x-headgate-reason"
H_OVERHEAD = "x-headgate-overhead-ms"
H_POLICY = "x-headgate-policy"
H_PRIORITY = "x-headgate-priority"
H_KV = "x-headgate-kv"
H_PROBE = "x-headgate-probe"
H_TENANT = "x-headgate-tenant"
"""A keyed hash of the client's API key, set by the gateway; it limits prefix reuse to one client."""
H_CONVERSATION = "x-headgate-conversation"
"""A hash of the client and the beginning of its conversation, set by the gateway: requests with the same value go to
the same replica of a model if possible."""
H_PREFIX = "x-headgate-prefix"
"""Hashes of the prompt's last blocks, comma-separated: labels of the sequence that the worker stores. The gateway sends
them where it has several inference services."""
MAX_PREFIX_HASHES = 32
H_FENCE = "x-headgate-fence"
"""With a load: the number of the lease under which the gateway decided it. A later lease has a larger number."""
H_DEADLINE = "x-headgate-deadline-ms"
"""How long the client of the inference service waits for the first token, in milliseconds."""
H_STREAM_INTERVAL = "x-headgate-stream-interval-ms"
"""How long the worker may hold back text of a stream to send larger pieces, in milliseconds."""
H_SHOULD_RETRY = "x-should-retry"
H_NODE = "x-headgate-node"
"""The node that answered, where the gateway has several inference services."""
H_DEVICE = "x-headgate-device"
"""The devices that computed a local answer, comma-separated; a stream that has already begun gets a comment instead."""


class Priority(StrEnum):
    """Priority of a request; `high` is served first."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"


class Tier(StrEnum):
    """The kind of the candidate that answered, for `x-headgate-tier`."""

    LOCAL = "local"
    LOCAL_FALLBACK = "local-fallback"
    CLOUD = "cloud"
    NONE = "none"


# --- errors ----------------------------------------------------------------------------------------------------------
class Code(StrEnum):
    """Values of `error.code` that Headgate sets; codes of providers are passed on unchanged."""

    MODEL_NOT_FOUND = "model_not_found"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MEMORY_LIMIT_EXCEEDED = "memory_limit_exceeded"
    QUEUE_FULL = "queue_full"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    BUDGET_EXCEEDED = "budget_exceeded"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    MODEL_LOADING = "model_loading"
    DEVICE_LOST = "device_lost"
    MODEL_FAILED = "model_failed"
    POISON_REQUEST = "poison_request"
    NO_TIER_AVAILABLE = "no_tier_available"
    INVALID_REQUEST = "invalid_request"
    INVALID_JSON = "invalid_json"
    BODY_TOO_LARGE = "body_too_large"
    HEADERS_TOO_LARGE = "headers_too_large"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    NOT_FOUND = "not_found"
    PREVIOUS_RESPONSE_NOT_FOUND = "previous_response_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    STORE_UNAVAILABLE = "store_unavailable"
    SHUTTING_DOWN = "shutting_down"
    INTERNAL_ERROR = "internal_error"


@dataclass(frozen=True, slots=True)
class CodeSpec:
    """HTTP status and OpenAI `error.type` of a code, and whether a retry may succeed."""

    status: int
    type: str
    retryable: bool


CODES: Mapping[Code, CodeSpec] = {
    Code.MODEL_NOT_FOUND: CodeSpec(404, "invalid_request_error", False),
    Code.CONTEXT_LENGTH_EXCEEDED: CodeSpec(400, "invalid_request_error", False),
    Code.MEMORY_LIMIT_EXCEEDED: CodeSpec(503, "service_unavailable_error", True),
    Code.QUEUE_FULL: CodeSpec(429, "rate_limit_error", True),
    Code.RATE_LIMIT_EXCEEDED: CodeSpec(429, "rate_limit_error", True),
    Code.BUDGET_EXCEEDED: CodeSpec(429, "insufficient_quota", False),
    Code.DEADLINE_EXCEEDED: CodeSpec(504, "timeout_error", True),
    Code.MODEL_LOADING: CodeSpec(503, "service_unavailable_error", True),
    Code.DEVICE_LOST: CodeSpec(503, "service_unavailable_error", True),
    Code.MODEL_FAILED: CodeSpec(503, "service_unavailable_error", True),
    Code.POISON_REQUEST: CodeSpec(422, "invalid_request_error", False),
    Code.NO_TIER_AVAILABLE: CodeSpec(503, "service_unavailable_error", True),
    Code.INVALID_REQUEST: CodeSpec(400, "invalid_request_error", False),
    Code.INVALID_JSON: CodeSpec(400, "invalid_request_error", False),
    Code.BODY_TOO_LARGE: CodeSpec(413, "invalid_request_error", False),
    Code.HEADERS_TOO_LARGE: CodeSpec(431, "invalid_request_error", False),
    Code.UNSUPPORTED_MEDIA_TYPE: CodeSpec(415, "invalid_request_error", False),
    Code.UNSUPPORTED_PARAMETER: CodeSpec(400, "invalid_request_error", False),
    Code.INVALID_API_KEY: CodeSpec(401, "authentication_error", False),
    Code.PERMISSION_DENIED: CodeSpec(403, "permission_error", False),
    Code.NOT_FOUND: CodeSpec(404, "invalid_request_error", False),
    Code.PREVIOUS_RESPONSE_NOT_FOUND: CodeSpec(400, "invalid_request_error", False),
    Code.METHOD_NOT_ALLOWED: CodeSpec(405, "invalid_request_error", False),
    Code.STORE_UNAVAILABLE: CodeSpec(503, "service_unavailable_error", True),
    Code.SHUTTING_DOWN: CodeSpec(503, "service_unavailable_error", True),
    Code.INTERNAL_ERROR: CodeSpec(500, "server_error", False),
}


RETRY_AFTER = "retry_after"
"""The key under `error.headgate` for the seconds of Retry-After, because error frames have no headers."""

FULL_FOR = "full_for"
"""The key under `error.headgate` of `queue_full` for the priorities whose queue is full, so that other requests of
these priorities would be rejected too. It is missing if only requests like this one are rejected (many answers at once,
a constraint to compile, a large body, images)."""


def context_overflow(context_length: int, but: str) -> str:
    """The first sentences of a `context_length_exceeded` message; `but` states the length of the request.

    The text is OpenAI's, with the code in it: LangChain, LiteLLM and others recognize the error by its text, and then
    shorten the prompt or use another model. For an error inside a stream LangChain looks for `context window`.
    """
    code = Code.CONTEXT_LENGTH_EXCEEDED
    limit = f"This model's maximum context length is {context_length} tokens"
    return f"{limit}, but {but} ({code}). The request exceeds the context window."


def error_body(
    code: Code | str,
    message: str,
    *,
    param: str | None = None,
    type: str | None = None,
    details: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The OpenAI error envelope; `details` (the numbers in the message) goes to `error.headgate`.

    `type` defaults to the type of the code; for codes of providers to `server_error`.
    """
    spec = CODES.get(code) if isinstance(code, Code) else None
    error: dict[str, Any] = {
        "message": message,
        "type": type or (spec.type if spec else "server_error"),
        "param": param,
        "code": str(code),
    }
    if details is not None:
        error["headgate"] = dict(details)
    return {"error": error}


def prefix_hashes(value: str) -> tuple[str, ...]:
    """The hashes in a value of H_PREFIX. Raises ValueError."""
    if _PREFIX.fullmatch(value) is None:
        raise ValueError(f"must be 1 to {MAX_PREFIX_HASHES} hashes of 16 hexadecimal digits, separated by commas")
    return tuple(value.split(","))


_PREFIX = re.compile(rf"[0-9a-f]{{16}}(,[0-9a-f]{{16}}){{0,{MAX_PREFIX_HASHES - 1}}}")


# --- states ----------------------------------------------------------------------------------------------------------
class ModelState(StrEnum):
    """The lifecycle state of a model; the transitions are in `inference.authority.lifecycle`."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    BUSY = "busy"
    DRAINING = "draining"
    OFFLOADING = "offloading"
    WARM = "warm"
    RESTORING = "restoring"
    UNLOADING = "unloading"
    FAILED = "failed"


class DeviceState(StrEnum):
    """Health of a device."""

    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DRAINING = "draining"
    QUARANTINED = "quarantined"
    PROBING = "probing"
    LOST = "lost"


class ExitCause(StrEnum):
    """Why a worker process ended."""

    REQUESTED = "requested"
    OOM_LOAD = "oom_load"
    OOM_COMPUTE = "oom_compute"
    DEVICE_LOST = "device_lost"
    ASSERT = "assert"
    BROKEN_BUILD = "broken_build"
    """It crashed at its first step, for example by an instruction that this CPU does not have."""
    KILLED = "killed"
    HANG = "hang"
    STARTUP = "startup"


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """One replica of a model that is configured with several; the fields are those of `ModelStatus`."""

    id: str
    state: ModelState
    devices: tuple[str, ...] = ()
    actual_bytes: int | None = None
    in_flight: int = 0
    queued: int = 0
    parallel: int = 1
    idle_seconds: float | None = None
    pid: int | None = None
    reason: str | None = None
    predicted_bytes: int | None = None

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ReplicaStatus:
        """The inverse of `dataclasses.asdict`; unknown keys are ignored."""
        fields = {key: value for key, value in data.items() if key in cls.__dataclass_fields__}
        fields |= {"state": ModelState(data["state"]), "devices": tuple(data.get("devices") or ())}
        return cls(**fields)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """One model as `/v1/models`, `/events` and `ps` show it. Sizes are in bytes, times in seconds.

    `kv_cells`: KV cells that all requests share, None if each has its own. `experts`: where they are, as configured, or
    the number of layers whose experts are in host memory.
    `fits`: whether the model could be loaded now, evictions included, with the `reason` if not; None while unknown.
    `devices` are device ids such as `cpu` or `gpu-0`. `retry_after_seconds` is set during a backoff. `pid` is the
    worker process, if any. `headroom_bytes` is the learned part of the predicted bytes. `reduced` lists settings that
    differ from the configured ones because these do not fit (`fit`, `experts: auto`, `oom_policy`). `steps`: what was
    done to make it fit, in order, with `step` (fit, cleanup, reduce, cpu) and `settings`. `fallback`: the model is
    on the CPU although it is configured for accelerators (`oom_policy: cpu`). `load_seconds`: expected time until it
    can serve a request (0 if ready). `queue_seconds`: expected wait of a new request after that. `answer_seconds`: time
    between two answers under load. These and the prefill rate (which includes reused tokens) are recent measurements,
    None without any.
    `template_problem`: why a chat template of the loaded file is not used. `replicas`: each replica of a model that is
    configured with several; the other fields are then those of all together, `parallel` of the loaded ones. `growth`: a
    sentence per device on which it uses more than planned, with the evidence.
    """

    id: str
    state: ModelState
    aliases: tuple[str, ...] = ()
    context_length: int = 0
    parallel: int = 1
    kv_cells: int | None = None
    gpu_layers: int = -1
    experts: str | int = "device"
    devices: tuple[str, ...] = ()
    predicted_bytes: int | None = None
    actual_bytes: int | None = None
    in_flight: int = 0
    queued: int = 0
    idle_seconds: float | None = None
    loads: int = 0
    capabilities: tuple[str, ...] = ()
    fits: bool | None = None
    reason: str | None = None
    retry_after_seconds: float | None = None
    pid: int | None = None
    headroom_bytes: int = 0
    reduced: tuple[str, ...] = ()
    steps: tuple[dict[str, Any], ...] = ()
    fallback: bool = False
    load_seconds: float | None = None
    queue_seconds: float | None = None
    answer_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    template_problem: str | None = None
    replicas: tuple[ReplicaStatus, ...] = ()
    growth: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """The OpenAI model object with the status under `headgate`."""
        return {
            "id": self.id,
            "object": "model",
            "created": 0,
            "owned_by": "headgate",
            "headgate": {name: _plain(getattr(self, name)) for name in self.__dataclass_fields__ if name != "id"},
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelStatus:
        """The inverse of `to_json`; unknown keys are ignored, so that versions can differ."""
        fields = {key: value for key, value in data.get("headgate", {}).items() if key in cls.__dataclass_fields__}
        for name in ("aliases", "devices", "capabilities", "reduced", "steps", "growth"):
            fields[name] = tuple(fields.get(name) or ())
        fields["state"] = ModelState(fields.get("state", "cold"))
        fields["replicas"] = tuple(map(ReplicaStatus.from_json, fields.get("replicas") or ()))
        return cls(id=data["id"], **fields)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [asdict(item) if isinstance(item, ReplicaStatus) else item for item in value]
    return value


# --- streams ---------------------------------------------------------------------------------------------------------
DONE = b"data: [DONE]\n\n"
PROGRESS_INTERVAL_SECONDS = 2.0
"""The inference service is never silent longer than this on a stream that makes progress."""

Stage = Literal["queued", "loading", "prefill"]
_DEVICE = re.compile(rb": headgate device ([\x21-\x7e]{1,200})")
_PROGRESS = re.compile(rb": headgate (queued|loading|prefill) (\d+)(?:/(\d+))?")
_RESTORED = re.compile(rb": headgate restored (hot|ram|disk) (\d{1,12}) (\d{1,9}(?:\.\d{1,9})?) (\d{1,9})")

KvTier = Literal["hot", "ram", "disk"]
"""Where stored tokens are: in a slot of the context, in host memory, on disk."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The progress of a waiting stream: place in the queue, percent loaded, or computed and total prompt tokens."""

    stage: Stage
    done: int
    total: int | None = None

    def frame(self) -> bytes:
        """The SSE comment for it: `: headgate queued 3`, `: headgate loading 40/100`, `: headgate prefill 512/2048`."""
        amount = f"{self.done}" if self.total is None else f"{self.done}/{self.total}"
        return f": headgate {self.stage} {amount}\n\n".encode()

    @classmethod
    def parse(cls, frame: bytes) -> Progress | None:
        """The progress in an SSE comment frame, or None for any other comment."""
        if (match := _PROGRESS.match(frame)) is None:
            return None
        return cls(match[1].decode(), int(match[2]), int(match[3]) if match[3] else None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Restored:
    """The prompt tokens that a choice did not compute, where they were, and how long it took to restore them."""

    tier: KvTier
    tokens: int
    milliseconds: float
    choice: int = 0

    def frame(self) -> bytes:
        """The SSE comment for it, before the first chunk of the choice: `: headgate restored ram 1024 5.4 0`."""
        return f": headgate restored {self.tier} {self.tokens} {self.milliseconds:.1f} {self.choice}\n\n".encode()

    @classmethod
    def parse(cls, frame: bytes) -> Restored | None:
        """The restore in an SSE comment frame, or None for any other comment."""
        if (match := _RESTORED.match(frame)) is None:
            return None
        return cls(match[1].decode(), int(match[2]), float(match[3]), int(match[4]))  # type: ignore[arg-type]


def device_frame(devices: str) -> bytes:
    """The SSE comment with the value of H_DEVICE: `: headgate device gpu-0`."""
    return f": headgate device {devices}\n\n".encode()


def device_of(frame: bytes) -> str | None:
    """The devices in a comment of `device_frame`, or None for any other."""
    match = _DEVICE.match(frame)
    return None if match is None else match[1].decode()
