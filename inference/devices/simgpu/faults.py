"""Parses commands for the simulator, such as `{"do": "shrink", "bytes": 1048576}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headgate.shared.errors import did_you_mean

COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("", "figures and counters; changes nothing"),
    "refuse": ("count", "the next `count` allocations fail (without it: all, until `heal`)"),
    "refuse_after": ("count", "the next `count` allocations succeed and the one after them fails"),
    "cut": ("", "every connection is cut and the device is lost until `return`"),
    "return": ("", "a lost device is back, empty, with its capacity"),
    "stall": ("", "nothing passes in either direction until `heal`"),
    "unstall": ("", "ends only stall"),
    "slow": ("seconds", "each request is delayed by `seconds`"),
    "pace": ("seconds", "each computation takes at least `seconds`, one after the other, without use of the CPU"),
    "shrink": ("bytes", "the device reports another capacity; allocations stay"),
    "late": ("seconds", "freed bytes become available after `seconds` (without it: with `settle`)"),
    "settle": ("", "all late bytes become available now"),
    "foreign": ("bytes", "other processes use `bytes` of the device in total"),
    "contexts": ("bytes", "each process that connects from now on takes `bytes` beside its buffers"),
    "pools": ("bytes", "each process takes up to `bytes` more while it computes, and keeps them"),
    "tell": ("", "the device tells the bytes of each process"),
    "hide": ("", "ends tell"),
    "suspend": ("pid", "moves the data of the process on `device` to host memory; its requests wait"),
    "resume": ("pid", "moves the data of a suspended process back if it fits"),
    "heal": ("", "ends refuse, refuse_after, stall, slow, pace, shrink, late, foreign, pools; a lost device returns"),
}
"""The commands of the simulator: name, parameter (or none), and effect."""
_NEEDED = frozenset({"refuse_after", "slow", "pace", "shrink", "foreign", "contexts", "pools", "suspend", "resume"})
_WHOLE = frozenset({"count", "bytes", "pid"})
_OF_ONE_DEVICE = frozenset({"suspend", "resume"})


@dataclass(frozen=True, slots=True)
class ParsedCommand:
    """A valid command. `device` None stands for all devices; `amount` is in the unit of the parameter."""

    do: str
    device: str | None = None
    amount: float = math.inf


def parse(data: object, devices: list[str]) -> ParsedCommand:
    """The command in `data`. Raises ValueError with the mistake."""
    if not isinstance(data, dict):
        raise ValueError('a command is an object such as {"do": "status"}')
    name = data.get("do")
    if not isinstance(name, str) or name not in COMMANDS:
        advice = did_you_mean(name, COMMANDS, shown=str)
        raise ValueError(f"{name!r} is not a command{advice} (commands: {', '.join(COMMANDS)})")
    parameter, _what = COMMANDS[name]
    unknown = set(data) - {"do", "device", parameter}
    if unknown:
        raise ValueError(f"{name} does not accept {', '.join(sorted(map(str, unknown)))}")
    device = data.get("device")
    if device is not None and device not in devices:
        raise ValueError(f"there is no simulated device {device!r} (there are {', '.join(devices)})")
    if device is None and name in _OF_ONE_DEVICE:
        raise ValueError(f"{name} needs the parameter device")
    if not parameter or data.get(parameter) is None:
        if name in _NEEDED:
            raise ValueError(f"{name} needs the parameter {parameter}")
        return ParsedCommand(name, device)
    return ParsedCommand(name, device, _amount(parameter, data[parameter]))


def _amount(parameter: str, value: Any) -> float:
    allowed = int if parameter in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or value < 0 or not math.isfinite(value):
        kind = "whole number" if parameter in _WHOLE else "number"
        raise ValueError(f"{parameter} must be a {kind} of 0 or more, not {value!r}")
    return value
