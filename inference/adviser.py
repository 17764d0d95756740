"""Collects what advice is given from, and says which alerts there are now; decides nothing about them.

What is collected is a little more than the ledger knows: who was refused and turned away, what outgrew its plan, how
much others used of a device when it was full. The planner itself is asked whether a recommended value would help.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from inference import views
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import Held, Placement, Refusal, Standing, plan
from inference.authority.pressure.advice import (
    GIB,
    MIB,
    SWAP_SECONDS,
    TURNED_AWAY_SECONDS,
    Alert,
    Change,
    Crowd,
    Fact,
    Full,
    Misfit,
    Outgrown,
    Swapping,
    TurnedAway,
    advise,
    changes_of,
    swaps,
)
from inference.authority.pressure.levels import Bounds, Level, Use
from inference.authority.pressure.relief import Rung
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.evictions import Reason
from inference.model import Model, Running
from inference.protocol import Priority
from inference.wishes import candidates, held_models, request_for

if TYPE_CHECKING:
    from inference.authority.shell import Authority

log = logging.getLogger(__name__)

LATELY_SECONDS = 600.0
"""How long a refusal, and how full a device was, are worth an alert."""
MOST_REFUSED = 10
ROOM_FOR = "room for "


@dataclass(frozen=True, slots=True)
class _Growth:
    """What a worker held beyond its plan, and what of the plan was for what llama.cpp does not count."""

    holding: str
    bytes: int
    overhead_bytes: int
    at: float


class Adviser:
    """One per authority, on its loop. Times are seconds of the loop's clock."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority
        self._peaks: dict[str, tuple[float, int]] = {}
        self._refused: dict[str, float] = {}
        self._turned_away: deque[tuple[float, Priority, int]] = deque(maxlen=1000)
        self._outgrown: dict[str, _Growth] = {}
        self._told: dict[tuple[str, str], Alert] = {}

    # --- what happened ---------------------------------------------------------------------------------------------
    def looked(self, use: Use, level: Level, shortfall_bytes: int) -> None:
        """A device at a check: what others use of it counts while it is too full."""
        now = self._authority.loop.time()
        at, peak = self._peaks.get(use.device, (-math.inf, 0))
        if level >= Level.CRITICAL or shortfall_bytes:
            kept = peak if now - at < LATELY_SECONDS else 0
            self._peaks[use.device] = (now, max(kept, use.foreign_bytes))

    def refused(self, model: str) -> None:
        """A load was refused for good."""
        self._refused.pop(model, None)
        self._refused[model] = self._authority.loop.time()
        while len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def turned_away(self, priority: Priority) -> None:
        """A request found the queue full."""
        limit = self._authority.settings.queue_limits[priority]
        self._turned_away.append((self._authority.loop.time(), priority, limit))

    def outgrew(self, model: Model, running: Running, grown_bytes: int) -> None:
        """A worker was seen to hold more than is booked for it."""
        before = self._outgrown.get(model.id)
        if before is not None and before.holding == running.holding:
            grown_bytes += before.bytes
        overhead = max((item.overhead_bytes.get(CPU, 0) for item in model.estimates.values()), default=0)
        self._outgrown[model.id] = _Growth(running.holding, grown_bytes, overhead, self._authority.loop.time())

    # --- what follows ----------------------------------------------------------------------------------------------
    def alerts(self) -> tuple[Alert, ...]:
        """Every alert there is now; none without INFERENCE_ENABLE_MEMORY_ALERTS."""
        if not self._authority.settings.enable_memory_alerts:
            return ()
        return advise(self._facts())

    def tell(self) -> None:
        """Logs each alert once, and once that it is over."""
        alerts = {(str(alert.kind), alert.subject): alert for alert in self.alerts()}
        for key, alert in alerts.items():
            if key not in self._told or self._told[key].changes != alert.changes:
                log.warning("alert %s: %s%s", alert.kind, alert.message, _recommended(alert.changes))
        for key in self._told.keys() - alerts.keys():
            log.info("alert %s is over: %s", *key)
        self._told = alerts

    def _facts(self) -> Iterator[Fact]:
        yield from self._devices()
        yield from self._swapping()
        yield from self._misfits()
        yield from self._outgrowths()
        now = self._authority.loop.time()
        for priority, limit in self._authority.settings.queue_limits.items():
            recent = [at for at, who, full in self._turned_away if (who, full) == (priority, limit)]
            yield TurnedAway(str(priority), limit, sum(now - at < TURNED_AWAY_SECONDS for at in recent))

    def _outgrowths(self) -> Iterator[Fact]:
        """Of workers that run, and for a while of those that are gone."""
        now = self._authority.loop.time()
        for name, growth in self._outgrown.items():
            model = self._authority.models.get(name)
            if model is None:
                continue
            runs = model.running is not None and model.running.holding == growth.holding
            if runs or now - growth.at < LATELY_SECONDS:
                yield Outgrown(name, growth.bytes, growth.overhead_bytes, model.spec.memory_overhead)

    def _devices(self) -> Iterator[Fact]:
        authority = self._authority
        bounds = authority.governor.bounds
        now = authority.loop.time()
        for use in authority.governor.uses():
            device, level = use.device, authority.governor.level(use)
            rung = authority.governor.rungs().get(device, Rung.NONE)
            yield Full(device, level, rung, use.used_bytes, use.foreign_bytes, use.total_bytes)
            at, peak = self._peaks.get(device, (-math.inf, 0))
            if now - at < LATELY_SECONDS:
                yield self._crowd(device, peak, use, bounds)

    def _crowd(self, device: str, peak: int, use: Use, bounds: Bounds) -> Crowd:
        budget = self._authority.ledger.accounts[device].budget_bytes
        return Crowd(device, peak, budget, use.total_bytes, bounds, host=device == CPU)

    def _swapping(self) -> Iterator[Fact]:
        since = time.time() - SWAP_SECONDS
        records = [
            (record.model_name, record.explanation[0].removeprefix(ROOM_FOR))
            for record in self._authority.evictions.records
            if record.timestamp >= since and record.reason is Reason.MEMORY_WANTED and record.explanation
        ]
        models = self._authority.models
        found = swaps([pair for pair in records if pair[0] in models and pair[1] in models])
        if found is None:
            return
        names, count = found
        residency = min(models[name].spec.min_residency for name in names)
        for pair in (names, names[::-1]):
            fix = self._fix_beside(models[pair[0]], models[pair[1]])
            if fix is None:
                return  # they can be loaded together
            if fix:
                yield Swapping(pair, count, residency, fix)
                return
        yield Swapping(names, count, residency, {})

    def _fix_beside(self, first: Model, second: Model) -> Mapping[str, Any] | None:
        """Settings with which `second` would fit where `first` is loaded and all else but what stays left; {} if there
        are none, None if it fits as it is.
        """
        ledger, held = self._staying({first.id, second.id})
        placed = self._place(first, ledger, held)
        if not isinstance(placed, Placement):
            return {}
        ledger = ledger.reserve("advice", first.id, placed.need)
        now = self._authority.loop.time()
        decision = self._place(second, ledger, [*held, Held(first.id, "advice", Standing.FIXED, placed.need, now)])
        if isinstance(decision, Refusal):
            return decision.fix
        return None if decision else {}

    def _staying(self, without: set[str]) -> tuple[Ledger, list[Held]]:
        """The ledger with those only who leave by hand alone, and them."""
        authority = self._authority
        held = held_models(authority.models.values(), authority.ledger, authority.loop.time())
        stay = [item for item in held if item.standing is Standing.FIXED and item.model not in without]
        kept = {item.holding for item in stay}
        return authority.ledger.without(authority.ledger.holdings.keys() - kept), stay

    def _place(self, model: Model, ledger: Ledger, held: Sequence[Held]) -> Placement | Refusal | None:
        authority = self._authority
        request = request_for(model, candidates(model.spec, authority.inventory.readings(), authority.settings))
        if request is None:
            return None
        return plan(request, ledger, held, views.policy(authority.settings, authority.loop.time()))

    def _misfits(self) -> Iterator[Fact]:
        now = self._authority.loop.time()
        for name, at in self._refused.items():
            model = self._authority.models.get(name)
            if model is None or now - at >= LATELY_SECONDS:
                continue
            refusal = self._authority.outlook.of(model)
            if isinstance(refusal, Refusal) and refusal.lacks and not refusal.waits_for:
                yield Misfit(name, refusal.reason, changes_of(name, refusal.fix) or self._allowing(model, refusal))

    def _allowing(self, model: Model, refusal: Refusal) -> tuple[Change, ...]:
        """The service's own limit that, raised, lets the model in: tried with the planner, so that it is true."""
        ledger, held = self._staying({model.id})
        short = {lack.device: lack.need_bytes - lack.room_bytes for lack in refusal.lacks}
        if ledger.limit_bytes is not None:
            limit = math.ceil((ledger.limit_bytes + max(short.values())) / GIB * 10) / 10
            if isinstance(self._place(model, replace(ledger, limit_bytes=int(limit * GIB)), held), Placement):
                return (Change("INFERENCE_MEMORY_LIMIT_GB", f"{limit:g}"),)
        for device, missing in short.items():
            reading = self._authority.reading(device)
            if reading is None or reading.total_bytes <= 0:
                continue
            name, value = self._larger_share(reading, ledger.accounts[device].budget_bytes + missing)
            if value > (1 if name.endswith("percent") else math.inf):
                continue
            allowance = views.allowance(reading, self._authority.settings.model_copy(update={name: value}))
            if isinstance(self._place(model, ledger.open(Account(device, *allowance)), held), Placement):
                return (Change(f"INFERENCE_{name.upper()}", f"{value:g}"),)
        return ()

    def _larger_share(self, reading: Reading, wanted_bytes: int) -> tuple[str, float]:
        """The setting that bounds our share of a device, and the value with which it is `wanted_bytes`."""
        percent = math.ceil(wanted_bytes / reading.total_bytes * 100) / 100
        if reading.id == CPU:
            return "cpu_memory_max_percent", percent
        if self._authority.settings.gpu_memory_limit_mb is not None:
            return "gpu_memory_limit_mb", math.ceil(wanted_bytes / MIB)
        return "gpu_memory_max_percent", percent


def _recommended(changes: Sequence[Change]) -> str:
    said = ", ".join(f"{change.setting}={change.value}" for change in changes)
    return f"; recommended: {said}" if said else ""
