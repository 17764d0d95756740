"""What can happen to the authority. Everything that is measured outside arrives in one of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.authority.lifecycle.departures import Action
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
    """The start: the devices of the machine, and what can suspend processes on a kind of device."""

    readings: tuple[Reading, ...]
    carriers: Mapping[str, str]
    unix: float


@dataclass(frozen=True, slots=True)
class Tick:
    """The time of `WakeAt` has come."""

    readings: tuple[Reading, ...]
    unix: float


@dataclass(frozen=True, slots=True)
class Observed:
    """The newest readings, as they lie in the probes; answers `Observe`."""

    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class DevicesRead:
    """All devices were measured anew, or could not be: then `problem` says why."""

    readings: tuple[Reading, ...]
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class PressureChecked:
    """An operator's tool wants a check of how full the devices are, with these readings."""

    readings: tuple[Reading, ...]
    regular: bool


@dataclass(frozen=True, slots=True)
class DeviceNoticed:
    """A probe saw something that only a fresh reading shows."""


@dataclass(frozen=True, slots=True)
class TrialEnded:
    """A computation on a device ended: None when its result was right."""

    device: str
    trial: int
    failure: str | None


@dataclass(frozen=True, slots=True)
class ProbesRenewed:
    """The probes start afresh at their next reading."""

    command: int


@dataclass(frozen=True, slots=True)
class SuspensionTested:
    """Whether processes on a kind of device can be suspended: None when the test succeeded."""

    kind: str
    problem: str | None


# --- requests --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Wanted:
    """A request wants to use a model and waits for `seconds` at most.

    `alone`: no other request may run beside it. `retries`: number of earlier attempts of the same request.
    """

    ticket: int
    model: str
    priority: Priority = Priority.NORMAL
    seconds: float | None = None
    counts: bool = True
    alone: bool = False
    retries: int = 0
    purpose: Purpose = Purpose.CLIENT


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The request of a ticket is gone."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Released:
    """A request has ended; `completed` says that the worker answered to the end."""

    worker: str
    lease: int
    completed: bool


@dataclass(frozen=True, slots=True)
class CrashReported:
    """A worker ended by what it computed while the request `key` was in flight."""

    model: str
    key: str
    crash: Crash


@dataclass(frozen=True, slots=True)
class RequestAnswered:
    """The request `key` was answered; `crashes` is how many workers ended under it before."""

    model: str
    key: str
    crashes: int


@dataclass(frozen=True, slots=True)
class CaseCleared:
    """An operator takes a request out of quarantine."""

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
    """A worker reported the progress of its load, or sent a beat."""

    worker: str
    progress: float
    beat: Heartbeat | None


@dataclass(frozen=True, slots=True)
class Loaded:
    """A worker is ready, after a load or a restoration."""

    worker: str
    ready: Ready
    files: Fingerprint = ()
    """of the model, as they are now"""


@dataclass(frozen=True, slots=True)
class FileHeld:
    """A worker has taken a model's file into its memory."""

    worker: str
    count_bytes: int


@dataclass(frozen=True, slots=True)
class ContextFreed:
    """A worker has saved its sequences and freed its context."""

    worker: str
    saved: Offloaded


@dataclass(frozen=True, slots=True)
class SuspendEnded:
    """The driver suspended a worker, or could not. `of_state`: because of the device's state, not of the way."""

    worker: str
    problem: str | None = None
    of_state: bool = False


@dataclass(frozen=True, slots=True)
class ResumeEnded:
    """The driver resumed a worker, or could not."""

    worker: str
    problem: str | None = None
    of_state: bool = False


@dataclass(frozen=True, slots=True)
class Exited:
    """The process of a worker has ended."""

    worker: str
    exit: WorkerExit
    files: Fingerprint = ()
    """of the model, as they are now"""


@dataclass(frozen=True, slots=True)
class BuildChecked:
    """Whether llama.cpp still computes, after a worker died at its first step; `error` is what the load ended with."""

    model: str
    holds: bool
    error: InferenceError | None


@dataclass(frozen=True, slots=True)
class WorkersMeasured:
    """Bytes of host memory in the processes of workers, with readings of the same moment."""

    bytes: Mapping[str, int]
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Workers dropped what they retained and trimmed their heaps. `bytes` is what each has left."""

    job: str | int
    freed_bytes: int
    bytes: Mapping[str, int]
    retained: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """cells that each retained before and after"""


# --- estimates and what is learned -----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Estimated:
    """A measurement ended with an estimate or an error."""

    key: EstimateKey
    result: Estimate | InferenceError


@dataclass(frozen=True, slots=True)
class FilesRead:
    """The files of a model as they are now; answers `ReadFiles`."""

    model: str
    files: Fingerprint


@dataclass(frozen=True, slots=True)
class FilesSeen:
    """The files of all models as they were a moment ago; answers `LookAtFiles`."""

    files: Mapping[str, Fingerprint]


@dataclass(frozen=True, slots=True)
class ShortageLearned:
    """What a model needs from now on on the devices where a worker of it ran out of memory."""

    worker: str
    exit: WorkerExit
    shortages: tuple[Shortage, ...]


@dataclass(frozen=True, slots=True)
class HeadroomChanged:
    """What was learned of these models counts less than before: they are measured anew."""

    specs: tuple[ModelSpec, ...]


# --- operators -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SettingsChanged:
    """Another configuration is in force."""

    config: InferenceConfig


@dataclass(frozen=True, slots=True)
class Unload:
    """Let a model leave once its answers are complete, or at once."""

    model: str
    now: bool = False


@dataclass(frozen=True, slots=True)
class Offload:
    """Let a model leave its device for the warm pool."""

    model: str


@dataclass(frozen=True, slots=True)
class Move:
    """Move a model to a device."""

    model: str
    device: str
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Evict:
    """Let a model leave, and report its memory."""

    model: str
    action: Action = Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Collect:
    """Unload every idle model and trim the rest."""


@dataclass(frozen=True, slots=True)
class Defragment:
    """Bring free memory together on one device."""


@dataclass(frozen=True, slots=True)
class Recover:
    """Read and try a device now."""

    device: str


@dataclass(frozen=True, slots=True)
class Plan:
    """Where would the model go, with these changes of its settings?"""

    model: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Refresh:
    """Measure all devices anew."""


Request = Unload | Offload | Move | Evict | Collect | Defragment | Recover | Plan | Refresh


@dataclass(frozen=True, slots=True)
class Commanded:
    """An operator's request; `Answer` or `Refuse` with its number ends it."""

    command: int
    request: Request


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The client that waited for a command is gone."""

    command: int


@dataclass(frozen=True, slots=True)
class DepartureWanted:
    """A model leaves as if the authority had decided it; for operators' tools and tests of the way out."""

    model: str
    reason: str
    action: Action = Action.UNLOAD


@dataclass(frozen=True, slots=True)
class Quiesced:
    """The service takes nothing new from now on; waiting requests fail with `error`, by default ShuttingDown."""

    error: InferenceError | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The drain is over: every worker ends."""


Event = (
    DevicesFound | Tick | Observed | DevicesRead | PressureChecked | DeviceNoticed | TrialEnded | ProbesRenewed
    | SuspensionTested | Wanted | Withdrawn | Released | CrashReported | RequestAnswered | CaseCleared | Spawned
    | SpawnFailed | Progressed | Loaded | FileHeld | ContextFreed | SuspendEnded | ResumeEnded | Exited | BuildChecked
    | WorkersMeasured | Trimmed | Estimated | FilesRead | FilesSeen | ShortageLearned | HeadroomChanged
    | SettingsChanged | Commanded | Abandoned | DepartureWanted | Quiesced | Ended
)  # fmt: skip
