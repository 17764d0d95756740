"""Errors of the inference service.

InferenceError
├── InvalidRequestError             the request is wrong: invalid JSON, wrong types, unknown model, body too large
│   ├── ModelNotFound               unknown model
│   └── PoisonRequest               the request ends the worker each time it runs alone
├── RefusedError                    the request is valid but cannot be served now
│   ├── MemoryLimitExceededError    the model does not fit
│   ├── MemoryRefused               the device refused memory that the plan had allowed
│   ├── QueueFull                   the queue of the model is full
│   ├── ModelLoading                the model is still loading at the deadline
│   ├── DeadlineExceeded            the deadline passed in another wait, as in the queue
│   ├── ShuttingDown                the service drains
│   └── BrokenBuild                 llama.cpp does not compute on this CPU
└── ModelUnavailableError           the request failed while it was served
    ├── ModelFailed                 the worker crashed or could not load
    └── DeviceLost                  the device is lost
"""

# ruff: noqa: N818 - the names follow `error.code`
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.shared.units import format_bytes
from inference.protocol import CODES, RETRY_AFTER, Code, error_body


class InferenceError(Exception):
    """Base class. Clients see `code`, `status`, `param`, `details` and `retry_after` (seconds)."""

    code: Code = Code.INTERNAL_ERROR

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
        """The OpenAI error envelope, with `details` and `retry_after` in `error.headgate`."""
        details = dict(self.details)
        if self.retry_after is not None:
            details[RETRY_AFTER] = round(self.retry_after, 3)
        return error_body(self.code, self.message, param=self.param, details=details or None)


class InvalidRequestError(InferenceError):
    """The request is invalid; a retry does not help."""

    code = Code.INVALID_REQUEST


class ModelNotFound(InvalidRequestError):
    """No model has this id or alias."""

    code = Code.MODEL_NOT_FOUND

    def __init__(self, model: str, known: Sequence[str]) -> None:
        names = ", ".join(known[:20]) or "none"
        super().__init__(f"unknown model {model[:200]!r}; configured models: {names}", param="model")


class PoisonRequest(InvalidRequestError):
    """The request ended the worker each time it ran alone. `details` contains the seconds left of its quarantine."""

    code = Code.POISON_REQUEST


class RefusedError(InferenceError):
    """The request is valid but cannot be served now."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The shortfall on a device. `bound` names the limit that applies, see `Ledger.room`."""

    device: str
    need_bytes: int
    free_bytes: int
    bound: str

    @property
    def short_bytes(self) -> int:
        """The missing bytes, 0 or more."""
        return max(0, self.need_bytes - self.free_bytes)

    def to_json(self) -> dict[str, Any]:
        """The entry in `error.headgate.devices`."""
        return {
            "device": self.device,
            "need_bytes": self.need_bytes,
            "free_bytes": self.free_bytes,
            "short_bytes": self.short_bytes,
            "bound": self.bound,
        }


class MemoryLimitExceededError(RefusedError):
    """The model does not fit; nothing was allocated.

    `fix`: settings with which it would fit. `reason`: used without `shortages`. `undivided`: why several devices
    cannot share the model. `lost`: which devices are unusable.
    """

    code = Code.MEMORY_LIMIT_EXCEEDED

    def __init__(
        self,
        model: str,
        shortages: Sequence[Shortage],
        *,
        reason: str = "",
        fix: Mapping[str, Any] | None = None,
        undivided: str = "",
        lost: str = "",
        retry_after: float | None = None,
    ) -> None:
        numbers = "; ".join(
            f"{item.device} needs {_mib(item.need_bytes)} and has {_mib(item.free_bytes)} "
            f"({_mib(item.short_bytes)} short, limited by {item.bound})"
            for item in shortages
        )
        message = f"the model {model!r} does not fit: {numbers or reason}"
        if fix:
            message += "; it would fit with " + " and ".join(f"{key}: {value}" for key, value in fix.items())
        if undivided:
            message += f"; several devices cannot share it: {undivided}"
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
    """A device refused memory that the plan had allowed. No memory is reserved; `retry_after` is the backoff."""

    code = Code.MEMORY_LIMIT_EXCEEDED

    def __init__(
        self, model: str, shortages: Sequence[Shortage], reason: str, *, retry_after: float, cause: str
    ) -> None:
        numbers = "; ".join(
            f"{item.device} has {_mib(item.free_bytes)} free; the next load plans {_mib(item.need_bytes)}"
            for item in shortages
        )
        super().__init__(
            f"out of memory while loading the model {model!r}: {reason} ({numbers})",
            retry_after=retry_after,
            details={"devices": [item.to_json() for item in shortages], "fix": None, "cause": cause},
        )


class QueueFull(RefusedError):
    """The queue of the model is full at this priority."""

    code = Code.QUEUE_FULL


class ModelLoading(RefusedError):
    """The model is still loading at the deadline of the request."""

    code = Code.MODEL_LOADING


class DeadlineExceeded(RefusedError):
    """The deadline of the request passed before the model was available."""

    code = Code.DEADLINE_EXCEEDED


class ShuttingDown(RefusedError):
    """The service drains and takes no new requests."""

    code = Code.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__("the inference service is shutting down; try again later", retry_after=5.0)


class BrokenBuild(RefusedError):
    """llama.cpp does not compute on this CPU, so the service ends."""

    code = Code.SHUTTING_DOWN

    def __init__(self) -> None:
        super().__init__(
            "the inference service stops: llama.cpp does not compute on this machine's CPU; see its log",
            retry_after=5.0,
        )


class ModelUnavailableError(InferenceError):
    """The request failed while it was served."""


class ModelFailed(ModelUnavailableError):
    """The worker crashed, or the model could not be loaded. `retry_after` is the rest of the backoff."""

    code = Code.MODEL_FAILED


class DeviceLost(ModelUnavailableError):
    """The device of the model is lost."""

    code = Code.DEVICE_LOST


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count < 2**40 else format_bytes(count)
