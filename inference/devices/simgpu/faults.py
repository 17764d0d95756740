"""Reads a command for the simulator, such as `{"do": "shrink", "bytes": 1048576}`; carries none of them out."""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

COMMANDS: Mapping[str, tuple[str, str]] = {
    "status": ("", "figures and counters; changes nothing"),
    "refuse": ("count", "the next `count` allocations fail (without it: all, until `heal`)"),
    "refuse_after": ("count", "the next `count` allocations succeed and the one after them fails"),
    "cut": ("", "every connection is cut and the device is lost until `return`"),
    "return": ("", "a lost device is back, empty, with its capacity"),
    "stall": ("", "nothing passes in either direction until `heal`"),
    "unstall": ("", "ends stall alone"),
    "slow": ("seconds", "every request is delayed by so many seconds"),
    "shrink": ("bytes", "the device shows another capacity; what is allocated stays"),
    "late": ("seconds", "freed bytes are back so much later (without it: with `settle`)"),
    "settle": ("", "all late bytes are back now"),
    "foreign": ("bytes", "other processes use so many bytes of the device in all"),
    "suspend": ("pid", "what the process has on `device` goes to host memory, and what it asks for waits"),
    "resume": ("pid", "a suspended process has all of that back, if there is room for it"),
    "heal": ("", "ends refuse, refuse_after, stall, slow, shrink, late and foreign, and a lost device returns"),
}
"""What the simulator can be told: the name, its one parameter (or none), and what happens."""
_NEEDED = frozenset({"refuse_after", "slow", "shrink", "foreign", "suspend", "resume"})
_WHOLE = frozenset({"count", "bytes", "pid"})
_OF_ONE_DEVICE = frozenset({"suspend", "resume"})


@dataclass(frozen=True, slots=True)
class Order:
    """A command that makes sense. `device` None means all; `amount` is in the unit of the command's parameter."""

    do: str
    device: str | None = None
    amount: float = math.inf


def parse(said: object, devices: list[str]) -> Order:
    """The command that `said` is; raises ValueError saying what is wrong with it."""
    if not isinstance(said, dict):
        raise ValueError('a command is an object such as {"do": "status"}')
    name = said.get("do")
    if not isinstance(name, str) or name not in COMMANDS:
        near = difflib.get_close_matches(str(name), COMMANDS, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"{name!r} is no command{meant} (there are {', '.join(COMMANDS)})")
    parameter, _what = COMMANDS[name]
    unknown = set(said) - {"do", "device", parameter}
    if unknown:
        raise ValueError(f"{name} takes no {', '.join(sorted(map(str, unknown)))}")
    device = said.get("device")
    if device is not None and device not in devices:
        raise ValueError(f"there is no simulated device {device!r} (there are {', '.join(devices)})")
    if device is None and name in _OF_ONE_DEVICE:
        raise ValueError(f"{name} needs device")
    if not parameter or said.get(parameter) is None:
        if name in _NEEDED:
            raise ValueError(f"{name} needs {parameter}")
        return Order(name, device)
    return Order(name, device, _amount(parameter, said[parameter]))


def _amount(parameter: str, value: Any) -> float:
    allowed = int if parameter in _WHOLE else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or value < 0 or not math.isfinite(value):
        raise ValueError(f"{parameter} must be a number from 0 on, not {value!r}")
    return value
