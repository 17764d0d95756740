"""The effects that `step` returns for the shell. Their results come back as events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from inference.authority.state import EstimateKey, LeaseRecord
from inference.devices.device import Reading
from inference.errors import InferenceError
from inference.settings import ModelSpec
from inference.worker_link import Forget, Grant, Hold, KvBudget, Limit, Threads
from inference.workers.exit_cause import WorkerExit


# --- time, records, listeners ----------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WakeAt:
    """Send `Tick` at this time of the clock."""

    at: float


@dataclass(frozen=True, slots=True)
class Log:
    """Write one log line; `level` is a name of the logging module."""

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
    """Send an event to listeners of /events."""

    kind: str
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class NotifyModels:
    """Send changed models to listeners within `seconds`."""

    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class RecordCrash:
    """Store a crash record with the shapes of the requests of `leases`."""

    model: str
    pid: int
    exit: WorkerExit
    leases: tuple[int, ...]


# --- requests and commands -------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class GrantLease:
    """Grant a lease on a worker to a ticket."""

    ticket: int
    lease: LeaseRecord


@dataclass(frozen=True, slots=True)
class Fail:
    """End the wait of a ticket with an error."""

    ticket: int
    error: InferenceError


@dataclass(frozen=True, slots=True)
class Answer:
    """Complete a command with its result."""

    command: int
    value: Any = None


@dataclass(frozen=True, slots=True)
class Refuse:
    """End a command with an error."""

    command: int
    error: InferenceError


# --- devices ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Observe:
    """Send the newest readings, and read the stamps of these models' files, at once (`Observed`)."""

    specs: tuple[ModelSpec, ...] = ()


@dataclass(frozen=True, slots=True)
class ReadDevices:
    """Measure all devices (`DevicesRead`)."""


@dataclass(frozen=True, slots=True)
class TryDevice:
    """Run a trial on a device (`TrialEnded`)."""

    device: str
    trial: int


@dataclass(frozen=True, slots=True)
class RenewProbes:
    """Restart the helper processes that read the devices (`ProbesRenewed`)."""

    command: int


@dataclass(frozen=True, slots=True)
class CheckSuspension:
    """Test whether processes on this device can be suspended (`SuspensionTested`)."""

    kind: str
    device: Reading


# --- workers ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Spawn:
    """Start a worker and send it `order` (`Spawned` or `SpawnFailed`, `Loaded` or `FileHeld`, `Exited`).

    `stores`: it gets the arena of the model, the host memory for stored sequences.
    """

    worker: str
    model: str
    environment: Mapping[str, str]
    order: Grant | Hold
    stores: bool = False


@dataclass(frozen=True, slots=True)
class SendOrder:
    """Make a worker restore the model that it keeps (`Loaded`)."""

    worker: str
    order: Grant


@dataclass(frozen=True, slots=True)
class StopWorker:
    """Stop a worker, and kill it after a while (`Exited`)."""

    worker: str


@dataclass(frozen=True, slots=True)
class KillWorker:
    """Kill a worker (`Exited`); `hang` is the reason."""

    worker: str
    hang: str | None = None


@dataclass(frozen=True, slots=True)
class LoseWorker:
    """Kill a worker whose device is lost (`Exited`)."""

    worker: str
    why: str


@dataclass(frozen=True, slots=True)
class Instruct:
    """Send a worker a message that changes how it computes; there is no answer."""

    worker: str
    message: Limit | KvBudget | Forget | Threads


@dataclass(frozen=True, slots=True)
class DropKv:
    """Free the host memory of the stored sequences of a model, as soon as no worker uses it."""

    model: str


@dataclass(frozen=True, slots=True)
class FreeContext:
    """Store the retained sequences and free the context, then stay or end (`ContextFreed`)."""

    worker: str
    stays: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Have the driver suspend or resume a worker within `seconds` (`CheckpointEnded`)."""

    operation: Literal["suspend", "resume"]
    worker: str
    kind: str
    device: str
    pid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasureWorkers:
    """Read the host memory of workers (`WorkersMeasured`)."""

    workers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class TrimWorkers:
    """Make workers drop retained prefixes and trim their heaps; the service trims its own (`Trimmed`)."""

    job: str | int
    workers: tuple[str, ...]
    fresh_first: bool = False
    """wait for new heartbeats first, which contain the retained cells"""


# --- measuring and learning ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Estimate:
    """Measure a model (`Estimated`); `capacities` are the bytes for models on each device."""

    key: EstimateKey
    devices: tuple[Reading, ...]
    capacities: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class CheckFiles:
    """Read the stamps of these models' files in the background (`FilesChecked`), because a file system may hang."""

    specs: tuple[ModelSpec, ...]


@dataclass(frozen=True, slots=True)
class CheckBuild:
    """Check whether llama.cpp computes (`BuildChecked`). `error`: that of the load that crashed, if one did."""

    model: str
    error: InferenceError | None


@dataclass(frozen=True, slots=True)
class Short:
    """A device on which a worker ran out of memory, with the bytes that were planned for it."""

    device: Reading
    planned_bytes: int
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class LearnShortage:
    """Learn that memory ran out (`ShortageLearned`). `computing`: after the load, while the worker computed."""

    worker: str
    spec: ModelSpec
    exit: WorkerExit
    short: tuple[Short, ...]
    computing: bool


@dataclass(frozen=True, slots=True)
class LearnGoodEnd:
    """Learn that a worker on these devices ended normally (`HeadroomChanged` if the head-room changes)."""

    spec: ModelSpec
    devices: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class CheckHeadrooms:
    """Check whether learned head-room has decayed below `planned`: bytes of a model on a device (`HeadroomChanged`)."""

    planned: tuple[tuple[ModelSpec, Reading, int], ...]


@dataclass(frozen=True, slots=True)
class LearnOverhead:
    """Learn the use of a device by a worker beyond its buffers, for models of the same `shape` (`shape_of`)."""

    device: Reading
    observed_bytes: int
    shape: str


Effect = (
    WakeAt | Log | Count | Publish | NotifyModels | RecordCrash | GrantLease | Fail | Answer | Refuse | Observe
    | ReadDevices | TryDevice | RenewProbes | CheckSuspension | Spawn | SendOrder | StopWorker | KillWorker
    | LoseWorker | Instruct | DropKv | FreeContext | Checkpoint | MeasureWorkers | TrimWorkers | Estimate
    | CheckFiles | CheckBuild | LearnShortage | LearnGoodEnd | CheckHeadrooms | LearnOverhead
)  # fmt: skip
