"""The timeline of the dashboard: events of the inference service and of breakers as short sentences."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from headgate.shared.units import format_bytes
from inference.protocol import DeviceState, ModelState

_S = ModelState
_LOADING = (_S.LOADING, _S.RESTORING)
_SERVING = (_S.READY, _S.BUSY)
_PASSING = (_S.UNLOADING, _S.OFFLOADING)
_UNUSABLE = (DeviceState.QUARANTINED, DeviceState.LOST)
_BREAKERS = {"open": "error", "half-open": "warning", "closed": "info"}
_PRESSURE = {"critical": "error", "emergency": "error", "high": "warning"}
SERVICE = "inference"
"""The subject of entries about the inference service itself."""

Entry = dict[str, Any]


class Timeline:
    """Makes the entries of one gateway. Times are Unix seconds."""

    def __init__(self) -> None:
        self._states: dict[tuple[str, str], tuple[ModelState, float]] = {}
        """By node and model: its state, and since when."""
        self._breakers: dict[str, str] = {}
        self._unreachable: set[str] = set()
        """Nodes that do not answer."""

    def keep(self, nodes: Container[str]) -> None:
        """Forgets all nodes but these."""
        self._states = {key: known for key, known in self._states.items() if key[0] in nodes}
        self._unreachable = {node for node in self._unreachable if node in nodes}

    def note_event(self, node: str, kind: str, data: Mapping[str, Any], now: float) -> Entry | None:
        """The entry for an event of a node; None when it has none. Its text begins with the name of the node, if any.

        Raises KeyError, TypeError or ValueError for a malformed event.
        """
        entry = self._entry(node, kind, data, now)
        return {**entry, "text": f"{node}: {entry['text']}", "node": node} if node and entry is not None else entry

    def _entry(self, node: str, kind: str, data: Mapping[str, Any], now: float) -> Entry | None:
        if kind == "snapshot":
            for item in data["models"]:
                self._states[node, item["id"]] = (_S(item["headgate"]["state"]), now)
        elif kind == "model":
            return self._model((node, data["model"]["id"]), data["model"]["headgate"], now)
        elif kind == "removed" and "id" in data:
            self._states.pop((node, data["id"]), None)
        elif kind == "removed":
            return _entry(now, "device", data["device"], f"{data['device']} is no longer listed", "error")
        elif kind == "device":
            return _device(data["device"], now)
        elif kind == "eviction":
            return _eviction(data["eviction"], now)
        elif kind == "crash":
            crash = data["crash"]
            text = f"The worker of {crash['id']} ended ({crash['cause']}): {crash['message']}"
            return _entry(now, "crash", crash["id"], text, "error")
        elif kind == "pressure":
            level = data["level"]
            text = f"Memory pressure of {data['device']} is {level}"
            return _entry(now, "pressure", data["device"], text, _PRESSURE.get(level, "info"))
        return None

    def note_reachable(self, node: str, is_reachable: bool, now: float) -> Entry | None:
        """The entry for a change of the connection to a node; None without a change."""
        if is_reachable is (node not in self._unreachable):
            return None
        name = f"The node {node}" if node else "The inference service"
        if is_reachable:
            self._unreachable.discard(node)
            return _entry(now, "state", node or SERVICE, f"{name} answers again", "info")
        self._unreachable.add(node)
        return _entry(now, "state", node or SERVICE, f"{name} does not answer", "error")

    def note_breaker(self, name: str, state: str | None, reason: str | None, now: float) -> Entry | None:
        """The entry for a new state of a breaker, None without a change. `state` None: the breaker was removed."""
        if state is None:
            self._breakers.pop(name, None)
            return None
        before = self._breakers.get(name, "closed")
        self._breakers[name] = state
        if before == state:
            return None
        because = f": {reason}" if reason and state == "open" else ""
        return _entry(now, "breaker", name, f"The breaker of {name} is {state}{because}", _BREAKERS[state])

    def _model(self, key: tuple[str, str], status: Mapping[str, Any], now: float) -> Entry | None:
        state, name = _S(status["state"]), key[1]
        before, since = self._states.get(key, (_S.COLD, now))
        if state is before:
            return None
        self._states[key] = (state, now)
        if state in _PASSING or (state in _SERVING and before in _SERVING):
            return None  # requests change the state between READY and BUSY
        if state is _S.COLD and before is _S.UNLOADING:
            return None  # the eviction has an entry
        places = " and ".join(status.get("devices") or ())
        if state in _LOADING:
            doing = "is being loaded" if state is _S.LOADING else "is being restored"
            return _entry(now, "load", name, f"{name} {doing}{f' on {places}' if places else ''}", "info")
        if state in _SERVING and before in _LOADING:
            text = f"{name} is ready{f' on {places}' if places else ''} after {now - since:.1f} s"
            return _entry(now, "load", name, text, "info")
        if state is _S.FAILED:
            return _entry(now, "state", name, f"{name} failed: {status.get('reason') or 'no reason given'}", "error")
        return _entry(now, "state", name, f"{name} is {state} ({before} before)", "info")


def _device(device: Mapping[str, Any], now: float) -> Entry:
    state, note = DeviceState(device["state"]), device.get("note")
    severity = "error" if state in _UNUSABLE else "info" if state is DeviceState.HEALTHY else "warning"
    text = f"{device['id']} is {state}{f': {note}' if note else ''}"
    return _entry(now, "device", device["id"], text, severity)


def _eviction(eviction: Mapping[str, Any], now: float) -> Entry:
    name, how = eviction["model_name"], "offloaded" if eviction["action"] == "offload" else "unloaded"
    freed = format_bytes(int(eviction["memory_freed_mb"] * 2**20))
    return _entry(now, "eviction", name, f"{name} was {how} ({eviction['reason']}), {freed} freed", "info")


def _entry(now: float, kind: str, subject: str, text: str, severity: str) -> Entry:
    return {"at": round(now, 3), "kind": kind, "subject": subject, "text": text[:500], "severity": severity}
