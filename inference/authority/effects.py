"""What `step` asks the shell to do. Answers come back as events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.authority.state import EstimateKey, LeaseRecord
from inference.devices.device import Reading
from inference.errors import InferenceError
from inference.settings import ModelSpec
from inference.worker_link import Grant as LoadOrder
from inference.worker_link import Hold
from inference.workers.exit_cause import WorkerExit


# --- time, records, listeners ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Tick` at this time of the clock."""

    at: float


@dataclass(frozen=True, slots=True)
class Log:
    """One line of the log; `level` is a name of the logging module."""

    level: str
    message: str


@dataclass(frozen=True, slots=True)
class Count:
    """Add to a counter of the metrics, or to a histogram."""

    metric: str
    labels: tuple[str, ...] = ()
    amount: float = 1.0


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell listeners of /events."""

    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotifyModels:
    """Tell listeners within `seconds` which models changed."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordCrash:
    """Keep a crash record with the shapes of the requests of `leases`."""

    model: str
    pid: int
    exit: WorkerExit
    leases: tuple[int, ...]


# --- requests and commands -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Grant:
    """The request of a ticket may use a worker."""

    ticket: int
    lease: LeaseRecord


@dataclass(frozen=True, slots=True)
class Fail:
    """The wait of a ticket ends with an error."""

    ticket: int
    error: InferenceError


@dataclass(frozen=True, slots=True)
class Answer:
    """A command is done."""

    command: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """A command ends with an error."""

    command: int
    error: InferenceError


# --- devices ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observe:
    """Send the newest readings at once (`Observed`)."""


@dataclass(frozen=True, slots=True)
class ReadDevices:
    """Measure all devices anew (`DevicesRead`)."""


@dataclass(frozen=True, slots=True)
class TryDevice:
    """Compute on a device (`TrialEnded`)."""

    device: str
    trial: int


@dataclass(frozen=True, slots=True)
class RenewProbes:
    """Have the probes start afresh (`ProbesRenewed`)."""

    command: int


@dataclass(frozen=True, slots=True)
class ProveSuspension:
    """Find out whether processes on this device can be suspended (`SuspensionTested`)."""

    kind: str
    device: Reading


# --- workers ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker and send it `order` (`Spawned` or `SpawnFailed`, `Loaded` or `FileHeld`, `Exited`).

    It can read what the worker `after` saves.
    """

    worker: str
    model: str
    environment: Mapping[str, str]
    order: LoadOrder | Hold
    after: str | None = None


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Tell a worker that keeps a model to take it up again (`Loaded`)."""

    worker: str
    order: LoadOrder


@dataclass(frozen=True, slots=True)
class StopWorker:
    """End a worker: asked first, killed after a while (`Exited`)."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """End a worker at once (`Exited`); `hang` says what it did not do in time."""

    worker: str
    hang: str | None = None


@dataclass(frozen=True, slots=True)
class LoseWorker:
    """End a worker whose device is lost (`Exited`)."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class LimitWorker:
    """Admit at most `sequences` at once."""

    worker: str
    sequences: int


@dataclass(frozen=True, slots=True)
class ForgetPrefixes:
    """Drop the prefixes that a worker retains."""

    worker: str


@dataclass(frozen=True, slots=True)
class SetThreads:
    """Compute with `count` threads."""

    worker: str
    count: int


@dataclass(frozen=True, slots=True)
class FreeContext:
    """Save sequences in at most `most_bytes` and free the context, then stay or end (`ContextFreed`)."""

    worker: str
    most_bytes: int
    stays: bool


@dataclass(frozen=True, slots=True)
class Suspend:
    """Have the driver suspend a worker within `seconds` (`SuspendEnded`)."""

    worker: str
    kind: str
    device: str
    pid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Resume:
    """Have the driver resume a worker within `seconds` (`ResumeEnded`)."""

    worker: str
    kind: str
    device: str
    pid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Connect:
    """Open the HTTP session of a worker."""

    worker: str


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Close the HTTP session of a worker."""

    worker: str


@dataclass(frozen=True, slots=True)
class MeasureWorkers:
    """Read the host memory of workers (`WorkersMeasured`)."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrimWorkers:
    """Have workers drop what they retain and trim their heaps, the service's own too (`Trimmed`)."""

    job: str | int
    workers: tuple[str, ...]
    fresh_first: bool = False
    """wait for fresh beats before it, which tell what is retained"""


# --- measuring and learning ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Estimate:
    """Measure a model (`Estimated`); `capacities` is what models may have of each device."""

    key: EstimateKey
    devices: tuple[Reading, ...]
    capacities: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ReadFiles:
    """Look at the files of a model at once (`FilesRead`)."""

    model: str
    spec: ModelSpec


@dataclass(frozen=True, slots=True)
class LookAtFiles:
    """Look at the files of these models, beside (`FilesSeen`): a file system may hang."""

    specs: tuple[ModelSpec, ...]


@dataclass(frozen=True, slots=True)
class CheckBuild:
    """Find out whether llama.cpp still computes (`BuildChecked`)."""

    model: str
    error: InferenceError | None


@dataclass(frozen=True, slots=True)
class Short:
    """One device on which a worker ran out of memory; `planned_bytes` is what was planned for it there."""

    device: Reading
    planned_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class LearnShortage:
    """Remember that memory ran out (`ShortageLearned`)."""

    worker: str
    spec: ModelSpec
    exit: WorkerExit
    short: tuple[Short, ...]
    computing: bool


@dataclass(frozen=True, slots=True)
class LearnGoodEnd:
    """Remember that a worker on these devices ended in good order (`HeadroomChanged` if that changes anything)."""

    spec: ModelSpec
    devices: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class EaseHeadrooms:
    """Look whether more was planned for these models than still counts (`HeadroomChanged`)."""

    planned: tuple[tuple[ModelSpec, Reading, int], ...]


@dataclass(frozen=True, slots=True)
class LearnOverhead:
    """Remember what a worker takes of a device beside its buffers."""

    device: Reading
    observed_bytes: int


Effect = (
    WakeAt | Log | Count | Publish | NotifyModels | RecordCrash | Grant | Fail | Answer
    | Refuse | Observe | ReadDevices | TryDevice | RenewProbes | ProveSuspension | Spawn | SendOrder | StopWorker
    | KillWorker | LoseWorker | LimitWorker | ForgetPrefixes | SetThreads | FreeContext | Suspend | Resume | Connect
    | Disconnect | MeasureWorkers | TrimWorkers | Estimate | ReadFiles | LookAtFiles | CheckBuild | LearnShortage
    | LearnGoodEnd | EaseHeadrooms | LearnOverhead
)  # fmt: skip
