"""The state the authority keeps of one model, and the tickets and leases its users hold; decides nothing.

Written by the authority alone, on its loop. A ticket is a place in the queue that becomes a lease; a lease is one
request in flight on one worker, and is counted against that worker, so that a late release cannot touch its successor.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from inference.authority.lifecycle.retry_after import Pace
from inference.authority.lifecycle.transitions import Backoff
from inference.authority.lifecycle.wait_queue import Waiter, WaitQueue
from inference.authority.placement.plan import Placement, Standing
from inference.authority.placement.reduction import Descent
from inference.authority.quarantine.docket import Docket
from inference.devices.device import Reading
from inference.errors import InferenceError, Shortage
from inference.estimate.estimator import Estimate
from inference.estimate.file_stamp import Fingerprint, changed
from inference.estimate.overheads import Before
from inference.evictions import Departure
from inference.protocol import ModelState, Priority, Progress
from inference.settings import ModelSpec
from inference.workers.worker_link import Ready
from inference.workers.worker_process import WorkerProcess

MOST_WAYS = 8
"""To divide a model over devices, that stay remembered."""


@dataclass(frozen=True, slots=True)
class Suspended:
    """What a suspended worker has to get back: bytes per device, and what it said when it was ready."""

    need: Mapping[str, int]
    ready: Ready


@dataclass(eq=False)
class Running:
    """One worker of a model, from reservation to exit. `holding` is its id in the ledger."""

    holding: str
    placement: Placement
    device: Reading
    began_at: float
    worker: WorkerProcess
    session: aiohttp.ClientSession | None = None
    ready: Ready | None = None
    ready_at: float = 0.0
    threads: int | None = None
    """What the worker was told to compute with last."""
    leases: set[Lease] = field(default_factory=set)
    solo: Lease | None = None
    """Who has it alone, while others wait (`inference.solo`)."""
    shut: asyncio.TimerHandle | None = None
    """Ends the time in which others may be kept out."""
    failure: InferenceError | None = None
    files: Fingerprint = ()
    """The files that were loaded, or are held."""
    reported_files: Fingerprint = ()
    """The files of the last log line that says that they changed."""
    extra: str | None = None
    """A second holding, of host memory, while the model leaves its device or comes back."""
    suspended: Suspended | None = None
    """While the driver keeps it (`inference.checkpoint`)."""
    leaves_free: int = 0
    """Bytes of host memory that sequences may not be saved in: whoever it leaves for needs them."""
    by_hand: bool = False
    """Somebody named the device it is on."""
    has_waited: bool = False
    """For the room to be kept in, once."""
    departure: Departure | None = None
    """Why it leaves, from the moment it was told to."""
    grown_bytes: int = 0
    """Of what it holds in host memory, what was booked because its worker grew beyond its reservation."""
    before: Mapping[str, Before] = field(default_factory=dict)
    """Its devices before it was loaded."""
    counted: dict[str, int] = field(default_factory=dict)
    """Tokens of this worker that the metrics have seen, by kind."""


@dataclass(eq=False)
class Model:
    """One configured model. Times are seconds of the loop's clock."""

    spec: ModelSpec
    state: ModelState = ModelState.COLD
    queue: WaitQueue = field(default_factory=WaitQueue)
    tickets: dict[int, Ticket] = field(default_factory=dict)
    running: Running | None = None
    backoff: Backoff = field(default_factory=Backoff)
    retry_at: float = 0.0
    failure: str | None = None
    docket: Docket = field(default_factory=Docket)
    """Requests that may have ended its workers."""
    files: Fingerprint | None = None
    """The files that `estimates` and all else that is known belong to; None before the first look (`see_files`)."""
    estimates: dict[str, Estimate] = field(default_factory=dict)
    estimating: asyncio.Task[None] | None = None
    divisions: int = 0
    """Ways to divide it over devices that were measured since the last decision."""
    last_used_at: float = 0.0
    wanted_at: float = 0.0
    """Since when somebody has waited for it without a gap, while somebody does."""
    called_at: float = math.inf
    """When others were first told to leave for it."""
    room_at: float = 0.0
    """When the room that it waits for may begin to be made, as far as that is known."""
    pace: Pace = field(default_factory=Pace)
    answered_at: float = 0.0
    """When its last answer was complete, or the first request since then came."""
    target: str | None = None
    """The device its next load has to go to, while it is being moved."""
    home: str | None = None
    """The device it goes back to if that fails."""
    moved_in_vain: InferenceError | None = None
    reload_seconds: float = 1.0
    """What its last load from the file took."""
    restore_seconds: float | None = None
    """What its last return from the warm pool took."""
    prefill_tokens_per_second: float | None = None
    """At which its workers read prompts lately."""
    loads: int = 0
    uses: int = 0
    """Requests that were given to a worker; probes do not count."""
    capabilities: tuple[str, ...] = ()
    removed: bool = False
    reduced: ModelSpec | None = None
    """What it was reduced to because it did not fit (`oom_policy: reduce`)."""
    descent: Descent = field(default_factory=Descent)
    """What was tried for that."""
    sheltered_until: float = 0.0
    """It is loaded on the CPU alone until then: an accelerator had no memory for it (`oom_policy: cpu`)."""
    shortages: tuple[Shortage, ...] = ()
    """Of its last load, when memory was refused that the plan had allowed."""

    @property
    def effective(self) -> ModelSpec:
        """What a load goes by."""
        return self.reduced or self.spec

    @property
    def id(self) -> str:
        """The model's id."""
        return self.spec.id

    @property
    def in_flight(self) -> int:
        """Requests the worker has now."""
        return len(self.running.leases) if self.running else 0

    def unreduce(self) -> None:
        """The next load begins with the configured sizes again."""
        if self.reduced is not None:
            self.reduced = None
            self.estimates.clear()

    def see_files(self) -> str:
        """Looks at its files; returns the paths of those that changed, and then forgets what was known of them.

        A loaded model keeps what is known: its worker serves what it has loaded. Called before every plan.
        """
        now = self.effective.files
        if self.running is not None or now == self.files:
            return ""
        found = "" if self.files is None else changed(self.files, now)
        self.files = now
        if found:
            self.forget()
            self.reduced, self.capabilities = None, ()
        return found

    def forget(self) -> None:
        """Another file, or other settings: estimates and failures of the model so far say nothing any more."""
        self.estimates.clear()
        self.divisions = 0
        self.backoff, self.retry_at, self.failure = Backoff(), 0.0, None
        self.docket, self.shortages = Docket(), ()

    def remember_division(self, key: str, found: Estimate) -> None:
        """Keeps what was measured for one way to divide it over devices; of many, the newest."""
        self.estimates[key] = found
        ways = [name for name, item in self.estimates.items() if item.counts]
        for name in ways[:-MOST_WAYS]:
            del self.estimates[name]

    @property
    def comeback_seconds(self) -> float:
        """How long it would take to have it back if it left now: measured from the warm pool, or from its file."""
        keeps = self.spec.warm and self.restore_seconds is not None and self.state is not ModelState.WARM
        return self.restore_seconds if keeps and self.restore_seconds is not None else self.reload_seconds

    def standing(self, now: float) -> Standing:
        """Whether it could leave now."""
        if self.state in (ModelState.DRAINING, ModelState.UNLOADING):
            return Standing.LEAVING
        if self.state in (ModelState.LOADING, ModelState.OFFLOADING, ModelState.RESTORING):
            return Standing.LOADING
        if self.state is ModelState.WARM:
            return Standing.BUSY if self.queue.waiters else Standing.WARM
        if self.spec.pinned or self.spec.dedicated:
            return Standing.FIXED
        if self.in_flight or self.queue.waiters:
            return Standing.BUSY
        if now - self.last_used_at < self.spec.min_residency:
            return Standing.YOUNG
        return Standing.IDLE

    def progress(self, waiter: Waiter) -> Progress:
        """What this waiter waits for."""
        if self.state in (ModelState.LOADING, ModelState.RESTORING) and self.running is not None:
            return Progress("loading", int(self.running.worker.progress * 100), 100)
        return Progress("queued", self.queue.position(waiter.id) or 0)


class Lease:
    """The right to send one request to a worker; `release` exactly once (later calls do nothing)."""

    def __init__(
        self, model: Model, running: Running, on_release: Callable[[Lease, bool], None], *, counts: bool
    ) -> None:
        self.model = model
        self.running = running
        self.counts = counts
        self.shape: dict[str, Any] = {}
        self._on_release = on_release
        self._open = True

    @property
    def alone(self) -> bool:
        """Whether the worker has had nothing else to do since this request came."""
        return self.running.solo is self

    @property
    def session(self) -> aiohttp.ClientSession:
        """The HTTP client of the worker."""
        assert self.running.session is not None
        return self.running.session

    def release(self, *, completed: bool = False) -> None:
        """Ends it; `completed` says that the worker answered to the end."""
        if self._open:
            self._open = False
            self._on_release(self, completed)


class Ticket:
    """A wish for a lease. Use as a context manager: leaving it gives up the place or the lease, whichever it is."""

    def __init__(self, model: Model, waiter: Waiter, patience: float, on_close: Callable[[Ticket], None]) -> None:
        self.model = model
        self.waiter = waiter
        self.patience = patience
        self.counts = True
        self.timer: asyncio.TimerHandle | None = None
        self._on_close = on_close
        self._future: asyncio.Future[Lease] = asyncio.get_running_loop().create_future()

    @property
    def priority(self) -> Priority:
        """Its class in the queue."""
        return self.waiter.priority

    @property
    def pending(self) -> bool:
        """Whether it still waits."""
        return not self._future.done()

    def grant(self, lease: Lease) -> None:
        """Fulfils the wish."""
        if self._future.done():
            lease.release()
        else:
            self._future.set_result(lease)

    def fail(self, error: InferenceError) -> None:
        """Ends the wait with `error`."""
        if not self._future.done():
            self._future.set_exception(error)
            self._future.exception()  # the holder may have left without looking

    async def wait(self, seconds: float | None = None) -> Lease | None:
        """The lease, or None when it is not there within `seconds`; raises the InferenceError that ended the wait."""
        if not self._future.done():
            await asyncio.wait({self._future}, timeout=seconds)
        return self._future.result() if self._future.done() else None

    def progress(self) -> Progress:
        """What it waits for."""
        return self.model.progress(self.waiter)

    def close(self) -> None:
        """Gives up the place in the queue, or releases the lease if nobody did."""
        if self._future.done():
            if not self._future.cancelled() and self._future.exception() is None:
                self._future.result().release()
        else:
            self._future.cancel()
            self._on_close(self)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
