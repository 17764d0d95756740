"""Learned head-room: the bytes that models need beyond their estimates, after they ran out of memory.

Stored per (model file, parameters, device) in the state directory. `inference.estimate.headroom` contains
the policy.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from headgate.shared.units import format_bytes
from inference.devices.device import CPU, Reading
from inference.estimate.headroom import Headroom, after_normal_end, decayed, extra_bytes, grown
from inference.estimate.model_estimate import Estimate, parameters_of
from inference.estimate.overheads import key_of
from inference.file_stamp import stamp
from inference.settings import ModelSpec

log = logging.getLogger(__name__)

_MAX_KEYS = 256
_VERSION = 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """The head-room, with model and device for readers of the file."""

    room: Headroom
    model: str
    device: str


class Headrooms:
    """The learned head-room of all models. `clock` is wall-clock time, which survives restarts."""

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
        """`estimate` with the head-room of these devices. `capacities` are the bytes for models on each.

        A configured `memory_overhead` replaces learned head-room.
        """
        more = {}
        for device in devices if spec.memory_overhead is None else ():
            room = self.of(spec, device)
            if count := extra_bytes(room, estimate.need.get(device.id, 0), capacities.get(device.id, 0)):
                more[device.id] = count
        if not more:
            return estimate
        overhead = dict(estimate.overhead_bytes)
        for name, count in more.items():
            overhead[name] = overhead.get(name, 0) + count
        return replace(estimate, overhead_bytes=overhead, headroom_bytes=more)

    def of(self, spec: ModelSpec, device: Reading) -> Headroom:
        """The current head-room of a model on a device."""
        entry = self._entries.get(_key(spec, device))
        return decayed(entry.room, self.clock()) if entry is not None else Headroom()

    def short(self, spec: ModelSpec, device: Reading, need_bytes: int, *, computing: bool) -> int:
        """Learns that a model with an estimate of `need_bytes` ran out of memory. Returns its head-room in bytes."""
        when = "while computing" if computing else "while loading, although the estimate allowed it"
        if spec.memory_overhead is not None:
            log.warning(
                "%s ran out of memory on %s %s; its memory_overhead of %s may be too small",
                spec.id, device.id, when, format_bytes(spec.memory_overhead),
            )  # fmt: skip
            return 0
        room = grown(self.of(spec, device), need_bytes, self.clock(), computing=computing)
        self._keep(_key(spec, device), _Entry(room, spec.id, device.id))
        more = room.total_bytes
        log.warning(
            "%s ran out of memory on %s %s; later loads plan %s more",
            spec.id, device.id, when, format_bytes(more),
        )  # fmt: skip
        return more

    def ended_well(self, spec: ModelSpec, devices: Iterable[Reading]) -> bool:
        """Learns that a worker ended normally. Returns whether any head-room changed."""
        changed = False
        for device in devices:
            key = _key(spec, device)
            if key in self._entries:
                was, room = self._entries[key].room, after_normal_end(self._entries[key].room, self.clock())
                changed = changed or (room.load_bytes, room.compute_bytes) != (was.load_bytes, was.compute_bytes)
                self._keep(key, replace(self._entries[key], room=room))
        return changed

    def _keep(self, key: str, entry: _Entry) -> None:
        self._entries.pop(key, None)
        if not entry.room.is_empty:
            self._entries[key] = entry
        while len(self._entries) > _MAX_KEYS:
            self._entries.pop(next(iter(self._entries)))
        learned = {
            name: {**asdict(kept.room), "model": kept.model, "device": kept.device}
            for name, kept in self._entries.items()
        }
        self._files.write(self._path, {"version": _VERSION, "learned": learned})


def _key(spec: ModelSpec, device: Reading) -> str:
    parts = {
        "file": [str(spec.path), *stamp(spec.path)],
        "parameters": asdict(parameters_of(spec, device.id)),
        "device": [device.id, *([] if device.id == CPU else [key_of(device)])],
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _learned(data: Any) -> dict[str, _Entry]:
    """The entries in the file; empty for a file of another version."""
    if data["version"] != _VERSION:
        return {}
    return {str(key): _entry(item) for key, item in list(data["learned"].items())[-_MAX_KEYS:]}


def _entry(item: Mapping[str, Any]) -> _Entry:
    room = Headroom(_count(item["load_bytes"]), _count(item["compute_bytes"]), int(item["good"]), float(item["at"]))
    return _Entry(room, str(item["model"]), str(item["device"]))


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value < 2**50:
        raise ValueError("invalid number of bytes")
    return value
