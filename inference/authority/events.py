"""The events of the authority. Every external measurement arrives as an event.

`arenas` of several events are the bytes of stored sequences in host memory, by model, at that moment. Without an entry
a model has what it had before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inference.authority.lifecycle import Action
from inference.authority.quarantine import Crash
from inference.authority.state import EstimateKey, Purpose
from inference.devices.device import Reading
from inference.errors import InferenceError, Shortage
from inference.estimate.model_estimate import Estimate
from inference.file_stamp import Fingerprint
from inference.protocol import Priority
from inference.settings import InferenceConfig, ModelSpec
from inference.worker_link import Heartbeat, Offloaded, Ready
from inference.workers.exit_cause import WorkerExit


# --- time and devices ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class DevicesFound:
    """The devices were found at the start; with the names of the drivers that can suspend processes."""

    readings: tuple[Reading, ...]
    suspenders: Mapping[str, str]
    unix: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `WakeAt` is reached."""

    readings: tuple[Reading, ...]
    unix: float
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Observed:
    """The newest readings of the probes, and the current stamps of models' files: the result of `Observe`.

    The service also sends this event, without stamps, before it shows figures.
    """

    readings: tuple[Reading, ...]
    files: Mapping[str, Fingerprint] = field(default_factory=dict)
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DevicesRead:
    """All devices were measured, or could not be measured because of `problem`."""

    readings: tuple[Reading, ...]
    problem: str | None = None
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DeviceNoticed:
    """A probe reported an event; a new reading has the details."""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A trial on a device ended; `failure` is None if it passed."""

    device: str
    trial: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class ProbesRenewed:
    """The helpers that read the devices restart at the next reading."""

    command: int


@dataclass(frozen=True, slots=True)
class SuspensionTested:
    """The result of a suspension test on a kind of device; `problem` is None if it succeeded."""

    kind: str
    problem: str | None


# --- requests --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Wanted:
    """A request for a model, which waits at most `seconds`.

    `alone`: no other request may run beside it. `retries`: number of earlier attempts of the same request.
    `conversation`: a key that requests of one conversation share. `any_replica`: another replica may serve it.
    `evicts`: other models may leave for it.
    """

    ticket: int
    model: str
    priority: Priority = Priority.NORMAL
    seconds: float | None = None
    counts_as_use: bool = True
    alone: bool = False
    retries: int = 0
    purpose: Purpose = Purpose.CLIENT
    conversation: str | None = None
    any_replica: bool = False
    evicts: bool = True


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The client of a waiting ticket has disconnected."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Released:
    """A request has ended. `completed`: the worker's answer was complete."""

    worker: str
    lease: int
    completed: bool


@dataclass(frozen=True, slots=True)
class CrashReported:
    """A worker crashed while the request `key` was in flight."""

    model: str
    key: str
    crash: Crash


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """The request `key` was answered; `crashes` is the number of workers that crashed before with it."""

    model: str
    key: str
    crashes: int


@dataclass(frozen=True, slots=True)
class CaseCleared:
    """An operator removed a request from quarantine."""

    model: str
    key: str


# --- workers ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawned:
    """The process of a worker was started."""

    worker: str
    pid: int


@dataclass(frozen=True, slots=True)
class SpawnFailed:
    """The process of a worker could not be started."""

    worker: str
    reason: str


@dataclass(frozen=True, slots=True)
class Progressed:
    """A worker reported load progress, or sent a heartbeat."""

    worker: str
    progress: float
    beat: Heartbeat | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker is ready, after a load or a restoration."""

    worker: str
    ready: Ready
    files: Fingerprint = ()
    """the current stamps of the model's files"""


@dataclass(frozen=True, slots=True)
class FileHeld:
    """A worker has read a model's file into memory; `locked_bytes` cannot be written to swap."""

    worker: str
    count_bytes: int
    locked_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ContextFreed:
    """A worker has stored its sequences and freed its context."""

    worker: str
    saved: Offloaded
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointEnded:
    """The driver suspended or resumed a worker, or failed.

    `by_device_state`: the cause of the failure is the current state of the device.
    """

    worker: str
    operation: Literal["suspend", "resume"]
    problem: str | None = None
    by_device_state: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a worker has ended."""

    worker: str
    exit: WorkerExit
    files: Fingerprint = ()
    """the current stamps of the model's files"""
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class BuildChecked:
    """Whether llama.cpp computes, after a worker crashed at its first step; `error` is the error of the load."""

    model: str
    computes: bool
    error: InferenceError | None


@dataclass(frozen=True, slots=True)
class WorkersMeasured:
    """Host memory of worker processes, not counting stored sequences, with readings of the same moment."""

    bytes: Mapping[str, int]
    readings: tuple[Reading, ...]
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Workers dropped retained prefixes and trimmed their heaps. `bytes` is the remaining memory of each."""

    job: str | int
    """the model that ran out of memory, or the number of the operator's command"""
    freed_bytes: int
    bytes: Mapping[str, int]
    retained: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """retained cells of each before and after"""


# --- estimates and what is learned -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Estimated:
    """A measurement of a model ended with an estimate or an error."""

    key: EstimateKey
    result: Estimate | InferenceError


@dataclass(frozen=True, slots=True)
class FilesChecked:
    """The recent stamps of the files of models; the result of `CheckFiles`."""

    files: Mapping[str, Fingerprint]


@dataclass(frozen=True, slots=True)
class ShortageLearned:
    """The future need of a model on the devices where its worker ran out of memory."""

    worker: str
    exit: WorkerExit
    shortages: tuple[Shortage, ...]


@dataclass(frozen=True, slots=True)
class HeadroomChanged:
    """The learned head-room of these models has decayed: they are measured again."""

    specs: tuple[ModelSpec, ...]


# --- operators -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Another configuration is in force."""

    config: InferenceConfig


@dataclass(frozen=True, slots=True)
class Unload:
    """Unload a model after its running requests, or at once."""

    model: str
    now: bool = False


@dataclass(frozen=True, slots=True)
class Offload:
    """Move a model into the warm pool."""

    model: str


@dataclass(frozen=True, slots=True)
class Move:
    """Move a model to a device. The load there waits at most `seconds`."""

    model: str
    device: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Evict a model, and report the released memory."""

    model: str
    action: Action = Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Collect:
    """Unload every idle model and trim the rest."""


@dataclass(frozen=True, slots=True)
class Defragment:
    """Defragment free memory onto one device."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Read and try a device now."""

    device: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Plan a model without loading it, with these changes of its settings."""

    model: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Measure all devices."""


Request = Unload | Offload | Move | Evict | Collect | Defragment | Recover | Plan | Refresh


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator's command; the effect `Answer` or `Refuse` with its number ends it."""

    command: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The client of a command has disconnected."""

    command: int


@dataclass(frozen=True, slots=True)
class Closing:
    """The service accepts no new requests; waiting ones fail with `error`, by default ShuttingDown.

    `stops_workers`: the drain time is over, and all workers end.
    """

    error: InferenceError | None = None
    stops_workers: bool = False


Event = (
    DevicesFound | Tick | Observed | DevicesRead | DeviceNoticed | TrialEnded | ProbesRenewed | SuspensionTested
    | Wanted | Withdrawn | Released | CrashReported | RequestAnswered | CaseCleared | Spawned | SpawnFailed | Progressed
    | Loaded | FileHeld | ContextFreed | CheckpointEnded | Exited | BuildChecked | WorkersMeasured | Trimmed | Estimated
    | FilesChecked | ShortageLearned | HeadroomChanged | SettingsChanged | Commanded | Abandoned | Closing
)  # fmt: skip
