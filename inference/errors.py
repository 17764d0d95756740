"""Every error the inference service raises, with what a client may be told; decides no policy.

InferenceError
├── InvalidRequestError             the caller's fault: bad JSON, wrong types, unknown model, body too large
│   ├── ModelNotFound          no such model
│   └── PoisonRequest          it ended a worker that did nothing else
├── RefusedError                    ours and known beforehand
│   ├── MemoryLimitExceededError   does not fit; carries the numbers
│   ├── MemoryRefused          was planned to fit, and the device refused all the same
│   ├── QueueFull              too many wait for this model already
│   ├── ModelLoading           still loading when the caller's patience ended
│   ├── DeadlineExceeded       waited in vain for something else
│   └── ShuttingDown           the service drains
└── ModelUnavailableError           met on the way
    ├── ModelFailed            the worker died or could not load; carries the backoff
    └── DeviceLost             the device is gone
"""

# ruff: noqa: N818 - leaves are named after what happened, as clients see it in `error.code`
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from headgate.shared.units import format_bytes
from inference.protocol import CODES, RETRY_AFTER, Code, error_body


class Origin(StrEnum):
    """Whose fault an error is."""

    CALLER = "caller"
    SERVICE = "service"
    WORKER = "worker"
    DEVICE = "device"


class InferenceError(Exception):
    """Base. `code`, `status`, `param`, `details` and `retry_after` (seconds) reach the client; `origin` is for us."""

    code: Code = Code.INTERNAL_ERROR
    origin: Origin = Origin.SERVICE

    def __init__(
        self,
        message: str,
        *,
        code: Code | None = None,
        param: str | None = None,
        retry_after: float | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or type(self).code
        self.param = param
        self.retry_after = retry_after
        self.details = dict(details or {})

    @property
    def status(self) -> int:
        """The HTTP status of the code."""
        return CODES[self.code].status

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return CODES[self.code].retryable

    def body(self) -> dict[str, Any]:
        """The OpenAI error envelope; numbers and `retry_after` stand under `error.headgate`."""
        details = dict(self.details)
        if self.retry_after is not None:
            details[RETRY_AFTER] = round(self.retry_after, 3)
        return error_body(self.code, self.message, param=self.param, details=details or None)


class InvalidRequestError(InferenceError):
    """The request cannot be served, now or later."""

    code = Code.INVALID_REQUEST
    origin = Origin.CALLER


class ModelNotFound(InvalidRequestError):
    """No model has this id or alias; names those there are."""

    code = Code.MODEL_NOT_FOUND

    def __init__(self, model: str, known: Sequence[str]) -> None:
        names = ", ".join(known[:20]) or "none is configured"
        super().__init__(f"the model {model[:200]!r} does not exist; there are: {names}", param="model")


class PoisonRequest(InvalidRequestError):
    """The request ended a worker that computed nothing else; `details` say until when it is refused."""

    code = Code.POISON_REQUEST


class RefusedError(InferenceError):
    """The request is fine and cannot be served now."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """What one device lacks. `bound` names what limits it: the device, a percentage, a limit, what others use."""

    device: str
    need_bytes: int
    free_bytes: int
    bound: str

    @property
    def short_bytes(self) -> int:
        """How many bytes are missing; never negative."""
        return max(0, self.need_bytes - self.free_bytes)

    def to_json(self) -> dict[str, Any]:
        """As it stands in `error.headgate.devices`."""
        return {
            "device": self.device,
            "need_bytes": self.need_bytes,
            "free_bytes": self.free_bytes,
            "short_bytes": self.short_bytes,
            "bound": self.bound,
        }


class MemoryLimitExceededError(RefusedError):
    """A model does not fit; refused before anything was allocated, with numbers and the nearest thing that fits."""

    code = Code.MEMORY_LIMIT_EXCEEDED

    def __init__(
        self,
        model: str,
        shortages: Sequence[Shortage],
        *,
        reason: str = "",
        fix: Mapping[str, Any] | None = None,
        lost: str = "",
        retry_after: float | None = None,
    ) -> None:
        said = "; ".join(
            f"{item.device} needs {_mib(item.need_bytes)} and has {_mib(item.free_bytes)} "
            f"({_mib(item.short_bytes)} short, bound by {item.bound})"
            for item in shortages
        )
        message = f"the model {model!r} does not fit: {said or reason}"
        if fix:
            message += "; it would fit with " + " and ".join(f"{key}: {value}" for key, value in fix.items())
        if lost:
            message += f"; {lost}"
        super().__init__(
            message,
            retry_after=retry_after,
            details={"devices": [item.to_json() for item in shortages], "fix": dict(fix) if fix else None},
        )
        self.shortages = tuple(shortages)
        self.fix = fix


class MemoryRefused(RefusedError):
    """Memory was refused during a load that the plan had allowed; nothing is held, and `retry_after` is the backoff."""

    code = Code.MEMORY_LIMIT_EXCEEDED

    def __init__(self, model: str, shortages: Sequence[Shortage], said: str, *, retry_after: float, cause: str) -> None:
        numbers = "; ".join(
            f"{item.device} shows {_mib(item.free_bytes)} free, and {_mib(item.need_bytes)} are planned from now on"
            for item in shortages
        )
        super().__init__(
            f"the model {model!r} did not get the memory that was planned for it: {said} ({numbers})",
            retry_after=retry_after,
            details={"devices": [item.to_json() for item in shortages], "fix": None, "cause": cause},
        )


class QueueFull(RefusedError):
    """The model's queue has no place at this priority."""

    code = Code.QUEUE_FULL


class ModelLoading(RefusedError):
    """The model was still loading when the caller's patience ended."""

    code = Code.MODEL_LOADING


class DeadlineExceeded(RefusedError):
    """The caller's deadline passed before the model could be used."""

    code = Code.DEADLINE_EXCEEDED


class ShuttingDown(RefusedError):
    """The service drains and takes nothing new."""

    code = Code.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__("the inference service is shutting down; try again in a moment", retry_after=5.0)


class BrokenBuild(RefusedError):
    """llama.cpp does not compute on this CPU any more, so the service ends; no model can answer."""

    code = Code.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__(
            "the inference service stops: llama.cpp does not compute on this machine's CPU; its log says what to do",
            retry_after=5.0,
        )


class ModelUnavailableError(InferenceError):
    """Something broke on the way to the answer."""


class ModelFailed(ModelUnavailableError):
    """The worker died, or the model could not be loaded; `retry_after` is the rest of the backoff."""

    code = Code.MODEL_FAILED
    origin = Origin.WORKER


class DeviceLost(ModelUnavailableError):
    """The device the model needs is gone."""

    code = Code.DEVICE_LOST
    origin = Origin.DEVICE


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**40 else format_bytes(count)
