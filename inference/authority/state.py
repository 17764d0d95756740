"""The state of the authority: frozen data that `step` replaces.

Processes, HTTP sessions, futures and timers are not here. The shell keeps them under the ids that this state uses: a
worker has the id of its first ledger holding, tickets, leases and commands have numbers. Times are seconds of the event
loop's clock unless a name says otherwise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from inference.authority.device_health import DeviceHealth
from inference.authority.lifecycle import Backoff, Departure, Eviction
from inference.authority.pending_commands import Command
from inference.authority.placement.device_growth import Grown, Mark
from inference.authority.placement.ledger import Holding, Ledger
from inference.authority.placement.observed_overhead import Before
from inference.authority.placement.plan import EvictionState, Placement
from inference.authority.placement.smaller_settings import Reduction
from inference.authority.placement.turns import Claim
from inference.authority.pressure.advice import Alert
from inference.authority.pressure.relief import DevicePressure
from inference.authority.quarantine import Quarantine
from inference.authority.retention import MIN_STORE_SECONDS, SLOWEST_COPY_BYTES_PER_SECOND, Mechanism
from inference.authority.wait_queue import Pace, Waiter, WaitQueue
from inference.devices.device import Reading
from inference.devices.signs import Sign
from inference.environment_settings import InferenceSettings
from inference.errors import InferenceError, Shortage
from inference.estimate.model_estimate import Estimate
from inference.file_stamp import Fingerprint
from inference.protocol import ModelState, Priority
from inference.settings import InferenceConfig, ModelSpec
from inference.worker_link import Heartbeat, KvCounts, Offloaded, Ready

SIMULATED = frozenset({"sim"})
"""Kinds of simulated devices: they hold buffers and nothing else, and suspending their processes needs no test."""


@dataclass(frozen=True, slots=True)
class DeviceSample:
    """One device, in MiB of 2**20 bytes. `free_mb` is not in use; `ours_mb` is booked for models, in any phase."""

    used_mb: float
    free_mb: float
    foreign_mb: float
    ours_mb: float
    pressure_level: str


@dataclass(frozen=True, slots=True)
class Sample:
    """The figures of one pressure check. `timestamp` is Unix seconds.

    `pool_utilization`: of the sequences that all loaded models can compute at once, the share that is in use.
    """

    timestamp: float
    devices: Mapping[str, DeviceSample]
    active_requests: int
    queued_requests: int
    pool_utilization: float
    models_loaded: int
    models_warm: int

    def to_json(self) -> dict[str, Any]:
        """As `/memory/history` shows it."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Timing:
    """Bounds of single steps, in seconds. Storing and copying get more in proportion to their bytes."""

    store_seconds: float = MIN_STORE_SECONDS
    """to store sequences, or to take a file into host memory"""
    suspend_seconds: float = 15.0
    """for one call of the driver that suspends or resumes a process"""
    return_seconds: float = 5.0
    """for an accelerator to show the memory of an ended worker as free; after it the rest counts as foreign"""
    alone_seconds: float = 30.0
    """how long a request that runs alone, or waits to, may block others"""
    watch_seconds: float = 2.0
    """interval of checks of the memory of workers and the files of models"""

    def store(self, count_bytes: int) -> float:
        """How long storing or copying that much may take."""
        return self.store_seconds + count_bytes / SLOWEST_COPY_BYTES_PER_SECOND

    def driver_call(self, count_bytes: int) -> float:
        """How long one call of the driver may take that copies this much between device and host."""
        return self.suspend_seconds + count_bytes / 500e6

    def checkpoint(self, count_bytes: int) -> float:
        """How long suspending or resuming a process may take in all: three calls of the driver, and their helper."""
        return 3 * self.driver_call(count_bytes) + 15.0


class TimerKind(StrEnum):
    """The kind of a timer."""

    PERIODIC = "periodic"
    TICKET = "ticket"
    ALONE = "alone"
    """end of the time for a request that runs alone, or waits to"""
    STOP = "stop"
    """end of the time for running requests of a leaving model"""
    WARM_POOL = "warm pool"
    """a worker takes too long to release or hold its model, to store sequences, or to be suspended or resumed"""
    ROOM_TO_KEEP = "room to keep"
    RETURN = "return"
    """memory of an ended worker is read again, or is overdue"""
    PLAN = "plan"
    THREADS = "threads"
    COMMAND = "command"


Timer = tuple[TimerKind, str | int]


class Purpose(StrEnum):
    """The purpose of a ticket."""

    CLIENT = "client"
    MOVE = "move"
    RELOAD = "load again"
    """a model that lost its device"""
    STARTUP = "load at start"
    REPLICA = "load a further replica"
    """a further replica of a model in use; no model in use is evicted for it"""


@dataclass(frozen=True, slots=True)
class EstimateKey:
    """One measurement: a model with these settings on one device, or divided over several."""

    spec: ModelSpec
    devices: tuple[str, ...]
    counts: tuple[int, ...] = ()

    @property
    def placement(self) -> str:
        """The key among the estimates of `spec`."""
        return placement_key(self.devices, self.counts)


HelperKey = EstimateKey | tuple[str, int]
"""A measurement, or the trial with this number on a device."""


def placement_key(devices: tuple[str, ...], counts: tuple[float, ...] = ()) -> str:
    """The key of an estimate: the device, or the devices and how many layers each takes."""
    return "+".join(f"{name}:{count:g}" for name, count in zip(devices, counts, strict=True)) if counts else devices[0]


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """One request in flight on one worker. A probe does not count as use."""

    id: int
    model: str
    worker: str
    counts_as_use: bool = True


@dataclass(frozen=True, slots=True)
class TicketRecord:
    """One request that waits for a lease; its waiter is in the queue of the model."""

    id: int
    model: str
    waiter: Waiter
    wait_seconds: float
    counts_as_use: bool = True
    purpose: Purpose = Purpose.CLIENT
    conversation: str | None = None
    """the key of its conversation, by which it finds the same replica again"""
    movable: bool = False
    """any replica of the model may serve it"""
    evicts: bool = True
    """other models may leave for it"""


@dataclass(frozen=True, slots=True)
class Suspended:
    """What a suspended worker gets back: bytes per device, and its `ready` message."""

    need: Mapping[str, int]
    ready: Ready


@dataclass(frozen=True, slots=True)
class WorkerRecord:
    """One worker process, from its reservation until it has ended. `holding` is the id of its present holding."""

    id: str
    model: str
    holding: str
    placement: Placement
    device: Reading
    began_at: float
    spec: ModelSpec
    """the settings it was loaded with"""
    estimate: Estimate
    pid: int | None = None
    progress: float = 0.0
    beat: Heartbeat | None = None
    ready: Ready | None = None
    ready_at: float = 0.0
    threads: int | None = None
    """the last number of threads that was sent to it"""
    limit: int | None = None
    """the last limit of sequences that was sent to it"""
    leases: Mapping[int, LeaseRecord] = field(default_factory=dict)
    alone: int | None = None
    """the lease that keeps other requests out"""
    failure: InferenceError | None = None
    files: Fingerprint = ()
    """the files that were loaded, or are held"""
    reported_files: Fingerprint = ()
    """the files of the last log line about their change"""
    extra: str | None = None
    """a second holding, of host memory, while the model leaves its device or comes back"""
    suspended: Suspended | None = None
    predecessor: str | None = None
    """the worker whose file this one keeps in memory"""
    left_device: str | None = None
    """the device that its model has left"""
    held_bytes: int | None = None
    locked_bytes: int = 0
    saved: Offloaded | None = None
    kv_bytes: int | None = None
    """the last budget for stored sequences that was sent to it; None without an arena"""
    by_hand: bool = False
    """an operator chose its device"""
    has_waited: bool = False
    """whether its departure has already waited once for room in the warm pool"""
    room_awaited: tuple[str, ...] = ()
    """workers that end so that this model can be kept"""
    departure: Departure | None = None
    grown_bytes: int = 0
    """host memory that was booked because it grew beyond its reservation"""
    device_growth: Mapping[str, Grown] = field(default_factory=dict)
    """the same on accelerators"""
    active_at: float = 0.0
    """when its load ended, or when a request last began or ended"""
    before: Mapping[str, Before] = field(default_factory=dict)
    """its devices before the load"""
    overhead_read: int | None = None
    """the read from which its overhead is learned"""
    has_full_batch: bool = False
    """it has computed a full batch, after which its pools have their size"""
    counted: Mapping[str, int] = field(default_factory=dict)
    """tokens that were added to the metrics, by kind"""
    kv_counts: KvCounts = field(default_factory=KvCounts)
    """its last report about stored sequences"""
    ending: bool = False
    """it has ended, and learning from its end is pending"""


@dataclass(frozen=True, slots=True)
class Kept:
    """A model in the warm pool. `since` is Unix seconds; `sequences` with `tokens` were stored when it left."""

    mechanism: Mechanism
    original_device: str
    since: float
    count_bytes: int
    sequences: int
    tokens: int
    locked_bytes: int = 0
    """the part of its weights that cannot be written to swap"""


@dataclass(frozen=True, slots=True)
class Scaling:
    """What the replicas of one model share. `served` maps the key of a conversation to its last replica, newest last.

    `retry_at`: no further replica is loaded before.
    """

    served: Mapping[str, str] = field(default_factory=dict)
    crowded_since: float = math.inf
    spare_since: float = math.inf
    retry_at: float = 0.0


@dataclass(frozen=True, slots=True)
class TakenStep:
    """A step because of missing memory, and the settings that it changed. `step`: fit, cleanup, reduce or cpu."""

    step: str
    settings: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The entry in the status of a model."""
        return {"step": self.step, "settings": dict(self.settings)}


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """One configured model, or one replica of it."""

    spec: ModelSpec
    state: ModelState = ModelState.COLD
    queue: WaitQueue = field(default_factory=WaitQueue)
    worker: str | None = None
    backoff: Backoff = field(default_factory=Backoff)
    retry_at: float = 0.0
    failure: str | None = None
    quarantine: Quarantine = field(default_factory=Quarantine)
    divisions: int = 0
    """ways to divide it over devices that were measured since the last decision"""
    cleaning: bool = False
    """other models are dropping retained prefixes for it"""
    checking_build: bool = False
    """its worker crashed at the first step, and llama.cpp is checked before the next load"""
    cleans_host: bool = False
    """warm models are dropped for it, because host memory is short"""
    last_used_at: float = 0.0
    wanted_at: float = 0.0
    """since when requests have waited for it without a gap"""
    eviction_began_at: float = math.inf
    """when the first eviction of another model for it began"""
    room_at: float = 0.0
    """when evictions for it may begin, if known"""
    pace: Pace = field(default_factory=Pace)
    answered_at: float = 0.0
    target: str | None = None
    """the device of its next load, while it is moved"""
    old_device: str | None = None
    """the device it returns to if the move fails"""
    move_error: InferenceError | None = None
    reload_seconds: float = 1.0
    restore_seconds: float | None = None
    prefill_tokens_per_second: float | None = None
    loads: int = 0
    uses: int = 0
    """requests that were given to a worker, without probes"""
    capabilities: tuple[str, ...] = ()
    removed: bool = False
    reduced: ModelSpec | None = None
    """other settings, because it did not fit (`fit`, `experts: auto`, `oom_policy`)"""
    steps: tuple[TakenStep, ...] = ()
    """what was done because it did not fit or ran out of memory, in order"""
    reduction: Reduction = field(default_factory=Reduction)
    on_cpu_until: float = 0.0
    """it is loaded on the CPU alone until then (`oom_policy: cpu`)"""
    shortages: tuple[Shortage, ...] = ()
    """of its last load: devices refused memory that the plan had allowed"""
    kept: Kept | None = None
    kv_counts: KvCounts = field(default_factory=KvCounts)
    """stored sequences: as last reported, with the counters of all its workers together"""
    files: Fingerprint | None = None
    """the files that its estimates and failures belong to; None before they were first read"""
    seen_files: Fingerprint = ()
    """its files as last seen"""
    scaling: Scaling = field(default_factory=Scaling)
    """in the first replica: what the replicas share"""

    @property
    def effective(self) -> ModelSpec:
        """The settings of its next load."""
        return self.reduced or self.spec

    @property
    def id(self) -> str:
        """Its id."""
        return self.spec.id

    @property
    def reload_again_seconds(self) -> float:
        """Time to load or restore it if it were unloaded or moved to the warm pool now."""
        keeps = self.spec.warm and self.restore_seconds is not None and self.state is not ModelState.WARM
        return self.restore_seconds if keeps and self.restore_seconds is not None else self.reload_seconds


@dataclass(frozen=True, slots=True)
class Return:
    """Memory of an ended worker that its devices do not show as free yet.

    `foreign`: foreign use of each device when the worker ended. The readings from number `awaited_read` on decide.
    """

    worker: str
    model: str
    holding: str
    devices: tuple[str, ...]
    foreign: Mapping[str, int]
    deadline: float
    pause: float
    awaited_read: int
    departure: Departure | None = None


@dataclass(frozen=True, slots=True)
class Devices:
    """The state of the devices.

    `measured` are the readings of the probes, without the state that was decided for a device. Reads are numbered:
    `reads_begun` and `reads_done` count them.
    """

    measured: tuple[Reading, ...] = ()
    health: Mapping[str, DeviceHealth] = field(default_factory=dict)
    reported_signs: Mapping[str, tuple[int, Sign, str]] = field(default_factory=dict)
    reads_begun: int = 0
    read_begun_at: float = -math.inf
    booked: Mapping[str, Holding] = field(default_factory=dict)
    """the holdings when the last read began"""
    growth: Mapping[str, Mark] = field(default_factory=dict)
    reads_done: int = 0
    reads_wanted: int = 0
    """the number of the last requested read"""
    refreshed_at: float = -math.inf
    lost_models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    """models in use that were on a lost device, by device, until they are loaded again"""
    trials: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """trials that wait for a read: its number, and the number of the trial"""
    published: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    """the published status of each device; None for a removed one"""
    suspenders: Mapping[str, str] = field(default_factory=dict)
    """names of drivers that can suspend processes, by kind of device"""
    suspension: Mapping[str, str | None] = field(default_factory=dict)
    """why processes on a kind of device are not suspended; None where they are"""


@dataclass(frozen=True, slots=True)
class FixCheck:
    """A suggested setting that is being verified: `fix` for the model with `spec`."""

    model: str
    spec: ModelSpec
    kinds: tuple[str, ...]
    fix: Mapping[str, Any]
    tries: int = 1
    divisions: int = 0


FixKey = tuple[ModelSpec, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Growth:
    """The bytes of a worker beyond its plan, and the planned overhead, None where it cannot be configured."""

    holding: str
    bytes: int
    overhead_bytes: int | None
    at: float


@dataclass(frozen=True, slots=True)
class Advice:
    """Facts for alerts, besides the ledger."""

    peaks: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    """when foreign use last filled a device, and the highest bytes of it lately"""
    refused: Mapping[str, float] = field(default_factory=dict)
    """when the load of a model was last refused"""
    rejections: tuple[tuple[float, Priority, int], ...] = ()
    """requests that a full queue rejected: time, priority, and the limit of the queue"""
    outgrown: Mapping[str, Growth] = field(default_factory=dict)
    """by model"""
    logged: Mapping[tuple[str, str], Alert] = field(default_factory=dict)
    """the alerts in the log that are not over, by kind and subject"""


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full devices were at the last check, and when the last regular one began."""

    devices: Mapping[str, DevicePressure] = field(default_factory=dict)
    checked_at: float = 0.0
    awaited_read: int | None = None
    """a regular check waits for this read"""
    check_requested: bool = False
    """an additional check was requested, because a load was refused"""
    history: tuple[Sample, ...] = ()


@dataclass(frozen=True, slots=True)
class CpuReturn:
    """A model on the CPU by fallback that may go back to an accelerator; `awaited_read` is the read it waits for."""

    awaited_read: int | None = None
    check_again_at: float = 0.0


@dataclass(frozen=True, slots=True)
class State:
    """The state of the authority."""

    config: InferenceConfig
    cores: int = 1
    linux: bool = True
    timing: Timing = field(default_factory=Timing)
    ledger: Ledger = field(default_factory=Ledger)
    models: Mapping[str, ModelRecord] = field(default_factory=dict)
    workers: Mapping[str, WorkerRecord] = field(default_factory=dict)
    tickets: Mapping[int, TicketRecord] = field(default_factory=dict)
    returns: Mapping[str, Return] = field(default_factory=dict)
    devices: Devices = field(default_factory=Devices)
    estimates: Mapping[ModelSpec, Mapping[str, Estimate]] = field(default_factory=dict)
    measuring: frozenset[EstimateKey] = frozenset()
    helpers: Mapping[HelperKey, str] = field(default_factory=dict)
    """the holdings of running helpers"""
    reloads: tuple[str, ...] = ()
    """models that lost their device and are wanted again"""
    to_measure: tuple[str, ...] = ()
    """models that are still to be measured before a request comes"""
    startup: tuple[str, ...] = ()
    """models that are still to be loaded at the start"""
    checks: Mapping[FixKey, FixCheck] = field(default_factory=dict)
    fixes: Mapping[FixKey, tuple[float, Mapping[str, Any]]] = field(default_factory=dict)
    """verified suggestions, and when they expire"""
    claims: tuple[Claim, ...] = ()
    commands: Mapping[int, Command] = field(default_factory=dict)
    cpu_returns: Mapping[str, CpuReturn] = field(default_factory=dict)
    kv_directory: Path | None = None
    """where sequences are stored on disk unless INFERENCE_KV_DIR is set"""
    pressure: Pressure = field(default_factory=Pressure)
    advice: Advice = field(default_factory=Advice)
    evictions: tuple[Eviction, ...] = ()
    departures: Counter[str] = field(default_factory=Counter)
    """number of models that were unloaded or moved to the warm pool, by action"""
    restorations: int = 0
    bytes_per_second: float | None = None
    """rate of the last load of any model"""
    read_rates: Mapping[str, float] = field(default_factory=dict)
    """bytes per second that models read from the memory of each device; the largest measured"""
    timers: Mapping[Timer, float] = field(default_factory=dict)
    wake_at: float = math.inf
    """the time of the last WakeAt"""
    ticks_at: float = math.inf
    memory_check_at: float = 0.0
    headroom_check_at: float = 0.0
    unix_offset: float = 0.0
    """Unix seconds minus seconds of the loop's clock"""
    unplanned: bool = False
    """something changed since the last reconciliation"""
    numbers: int = 0
    """the last number that was given to a holding, ticket, lease or command"""
    revision: int = 0
    """number of published changes"""
    started: bool = False
    restart_reason: str | None = None
    """why only a restart of the service can help"""
    closing: bool = False

    @property
    def settings(self) -> InferenceSettings:
        """The current INFERENCE_* settings."""
        return self.config.settings

    def worker_of(self, model: ModelRecord) -> WorkerRecord | None:
        """The worker of a model."""
        return None if model.worker is None else self.workers[model.worker]

    def in_flight(self, model: ModelRecord) -> int:
        """Requests that the worker of a model has."""
        return 0 if model.worker is None else len(self.workers[model.worker].leases)

    def estimates_of(self, spec: ModelSpec) -> Mapping[str, Estimate]:
        """The estimates of these settings, by placement."""
        return self.estimates.get(spec, {})

    def eviction_state(self, model: ModelRecord, now: float) -> EvictionState:
        """Whether the memory of a model can be evicted now."""
        if model.state in (ModelState.DRAINING, ModelState.UNLOADING):
            return EvictionState.LEAVING
        if model.state is ModelState.OFFLOADING and self.workers[model.worker or ""].predecessor is None:
            return EvictionState.LEAVING  # its process stays; its device memory is being released
        if model.state in (ModelState.LOADING, ModelState.OFFLOADING, ModelState.RESTORING):
            return EvictionState.LOADING
        if model.state is ModelState.WARM:
            return EvictionState.BUSY if model.queue.waiters else EvictionState.WARM
        if model.spec.pinned or model.spec.dedicated:
            return EvictionState.FIXED
        if self.in_flight(model) or model.queue.waiters:
            return EvictionState.BUSY
        if now - model.last_used_at < model.spec.min_residency:
            return EvictionState.YOUNG
        return EvictionState.IDLE

    def is_measuring(self, spec: ModelSpec) -> bool:
        """Whether a measurement with these settings is under way."""
        # the ids first: the comparison of two specs compares all settings
        return any(key.spec.id == spec.id and key.spec == spec for key in self.measuring)

    def is_estimating(self, model: ModelRecord) -> bool:
        """Whether a measurement, a cleanup or a check for the model is under way."""
        spec = model.effective
        return (
            model.cleaning or self.is_measuring(spec) or any(check.model == model.id for check in self.checks.values())
        )
