"""The authority's `step` with a clock of its own and effects that are answered in order, for tests of decisions."""

from __future__ import annotations

import math
from typing import Any

from inference.authority import effects, events
from inference.authority.state import EstimateKey, ModelRecord
from inference.devices.device import Reading
from inference.errors import InferenceError
from inference.estimate.header_formula import Parts
from inference.estimate.model_estimate import Estimate
from inference.settings import ModelSpec
from tests.rigs.authority_checks import CheckedWorld
from tests.rigs.authority_world import MIB, configuration

__all__ = ["MIB", "StepWorld", "begin"]

TICK_SECONDS = 0.5
OVERHEAD_BYTES = 10 * MIB


class StepWorld(CheckedWorld):
    """`grants` are the leases of requests, by ticket; `errors` are the errors of requests and commands."""

    def __post_init__(self) -> None:
        self.grants: dict[int, int] = {}
        self.errors: dict[int, InferenceError] = {}
        self.log: list[str] = []
        self.overheads: list[int] = []
        """MiB beyond buffers that were learned, oldest first"""
        self.levels: dict[str, str] = {}
        """The level of each message in `log`."""
        self.learned_from: list[ModelSpec] = []
        """The settings whose head-room was learned from ends of workers, oldest first."""
        super().__post_init__()

    def _perform(self, effect: effects.Effect) -> None:
        match effect:
            case effects.GrantLease(ticket, lease):
                self.grants[ticket] = lease.id
            case effects.Fail(ticket, error):
                self.errors[ticket] = error
            case effects.Refuse(command, error):
                self.errors[command] = error
            case effects.LearnOverhead(_, observed_bytes, _):
                self.overheads.append(observed_bytes // MIB)
            case effects.LearnShortage(_, spec, _, _, _) | effects.LearnGoodEnd(spec, _):
                self.learned_from.append(spec)
            case effects.Log(level, message):
                self.log.append(message)
                self.levels[message] = level
        super()._perform(effect)

    def _estimate(self, key: EstimateKey, devices: tuple[Reading, ...]) -> Estimate | InferenceError:
        """Exactly the size of the model."""
        size = self.sizes[key.spec.configured_id] * MIB
        return Estimate(
            {devices[0].id: Parts(size - OVERHEAD_BYTES, 0, 0)}, {devices[0].id: OVERHEAD_BYTES}, "", "", 4096
        )

    def model(self, name: str) -> ModelRecord:
        """The record of a model."""
        return self.state.models[name]

    def arrive(self, *held: type) -> None:
        """All answers that are under way arrive, except those of the types `held`."""
        for _ in range(1000):
            index = next((at for at, event in enumerate(self.later) if not isinstance(event, held)), None)
            if index is None:
                return
            self.deliver(index)
        raise AssertionError("the answers do not end")

    def live(self, seconds: float, *held: type) -> None:
        """Time passes, and answers arrive at once, except those of the types `held`."""
        for _ in range(math.ceil(seconds / TICK_SECONDS)):
            self.arrive(*held)
            self.tick(min(TICK_SECONDS, seconds))
        self.arrive(*held)

    def leased(self, model: str, **more: Any) -> int:
        """The lease of a request that is granted at once, or after a load."""
        ticket = self.want(model, **more)
        self.live(1.0)
        return self.grants[ticket]

    def finish(self, lease: int) -> None:
        """A request is answered."""
        self.release(lease, completed=True)

    def used(self, *models: str) -> None:
        """One request of each model, one after the other."""
        for model in models:
            self.finish(self.leased(model))

    def foreign_mib(self, device: str, mib: int) -> None:
        """Other programs use `mib` of a device, and the devices are read."""
        self.foreign[device] = mib * MIB
        self.send(events.DeviceNoticed())
        self.arrive()

    def check_pressure(self, times: int = 1) -> None:
        """Time passes until `times` regular checks of the pressure are done."""
        for _ in range(times):
            self.live(self.state.settings.pressure_check_interval_seconds)

    def booked(self, device: str) -> int:
        """MiB that models hold of a device."""
        return self.state.ledger.balance(device).ours_bytes // MIB


def begin(
    models: dict[str, dict[str, Any]], sizes: dict[str, int] | None = None, *, gpus: tuple[str, ...] = (),
    kind: str = "cuda", tells_processes: bool = False, context_bytes: int = 0, **settings: Any,
) -> StepWorld:  # fmt: skip
    """Models of 200 MiB, or of `sizes`, that may be evicted at once, after the start."""
    found = {name: {"parallel": 1, "min_residency": 0, **keys} for name, keys in models.items()}
    sizes = {name: (sizes or {}).get(name, 200) for name in models}
    config = configuration(found, **settings)
    world = StepWorld(config, sizes, gpus, kind, tells_processes=tells_processes, context_bytes=context_bytes)
    world.arrive()
    return world
