"""Remembers how much more than estimated models need where memory ran out; never measures and never reserves.

Kept per (model file, parameters, device) in the state directory. What grows, bounds and forgets it is the core's.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headgate.shared.state import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from headgate.shared.units import format_bytes
from inference.authority.placement.headroom import Headroom, asked, eased, grown, proven
from inference.devices.device import Reading
from inference.devices.host import CPU
from inference.estimate.file_stamp import stamp
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.estimate.overheads import key_of
from inference.settings import ModelSpec

log = logging.getLogger(__name__)

_MOST_KEYS = 256
_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """What was learned, and of whom, for people who read the file."""

    room: Headroom
    model: str
    device: str


class Headrooms:
    """What was learned; a damaged or foreign file counts as nothing. `clock` gives seconds that outlive the process."""

    def __init__(self, state: StateDir, clock: Callable[[], float] = time.time) -> None:
        self._path = state.root / "headroom.json"
        self._files = StateFileWriter("learned head-room")
        self.clock = clock
        self._entries = (
            load_state_file(self._path, _learned, "what models need beyond their estimates is learned again") or {}
        )

    def added(
        self, spec: ModelSpec, devices: Sequence[Reading], estimate: Estimate, capacities: Mapping[str, int]
    ) -> Estimate:
        """`estimate` with what was learned for these devices; `capacities` is what models may have of each, bytes.

        A configured `memory_overhead` replaces what was learned.
        """
        more = {}
        for device in devices if spec.memory_overhead is None else ():
            room = self.of(spec, device)
            if count := asked(room, estimate.need.get(device.id, 0), capacities.get(device.id, 0)):
                more[device.id] = count
        if not more:
            return estimate
        overhead = dict(estimate.overhead_bytes)
        for name, count in more.items():
            overhead[name] = overhead.get(name, 0) + count
        return replace(estimate, overhead_bytes=overhead, headroom_bytes=more)

    def of(self, spec: ModelSpec, device: Reading) -> Headroom:
        """What was learned of this model there, as far as it still counts."""
        entry = self._entries.get(_key(spec, device))
        return eased(entry.room, self.clock()) if entry is not None else Headroom()

    def short(self, spec: ModelSpec, device: Reading, need_bytes: int, *, computing: bool) -> int:
        """Memory ran out on `device` for a model whose estimate there is `need_bytes`; what it is given more now."""
        when = "while it computed" if computing else "while it was loaded, although the estimate allowed it"
        if spec.memory_overhead is not None:
            log.warning(
                "%s ran out of memory on %s %s; its memory_overhead of %s may be too little",
                spec.id, device.id, when, format_bytes(spec.memory_overhead),
            )  # fmt: skip
            return 0
        room = grown(self.of(spec, device), need_bytes, self.clock(), computing=computing)
        self._keep(_key(spec, device), _Entry(room, spec.id, device.id))
        more = room.total_bytes
        log.warning(
            "%s ran out of memory on %s %s; it is planned with %s more there",
            spec.id, device.id, when, format_bytes(more),
        )  # fmt: skip
        return more

    def ended_well(self, spec: ModelSpec, devices: Iterable[Reading]) -> bool:
        """A worker on these ended in good order; whether anything that was learned changed."""
        changed = False
        for device in devices:
            key = _key(spec, device)
            if key in self._entries:
                was, room = self._entries[key].room, proven(self._entries[key].room, self.clock())
                changed = changed or (room.load_bytes, room.compute_bytes) != (was.load_bytes, was.compute_bytes)
                self._keep(key, replace(self._entries[key], room=room))
        return changed

    def _keep(self, key: str, entry: _Entry) -> None:
        self._entries.pop(key, None)
        if not entry.room.is_empty:
            self._entries[key] = entry
        while len(self._entries) > _MOST_KEYS:
            self._entries.pop(next(iter(self._entries)))
        said = {
            name: {**asdict(kept.room), "model": kept.model, "device": kept.device}
            for name, kept in self._entries.items()
        }
        self._files.write(lambda: self._path, json.dumps({"version": _VERSION, "learned": said}).encode())


def _key(spec: ModelSpec, device: Reading) -> str:
    said = {
        "file": [str(spec.path), *stamp(spec.path)],
        "parameters": asdict(parameters_of(spec, device)),
        "device": [device.id, *([] if device.id == CPU else [key_of(device)])],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _learned(data: Any) -> dict[str, _Entry]:
    """The entries in the file's content; none of another version."""
    if data["version"] != _VERSION:
        return {}
    return {str(key): _entry(said) for key, said in list(data["learned"].items())[-_MOST_KEYS:]}


def _entry(said: Mapping[str, Any]) -> _Entry:
    room = Headroom(_count(said["load_bytes"]), _count(said["compute_bytes"]), int(said["good"]), float(said["at"]))
    return _Entry(room, str(said["model"]), str(said["device"]))


def _count(said: object) -> int:
    if type(said) is not int or not 0 <= said < 2**50:
        raise ValueError("no amount of bytes")
    return said
