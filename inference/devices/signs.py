"""Decides what a piece of evidence about a device means, by tables; never what is done about it.

NVML's codes are those of its manual (nvmlReturn_t). Xid numbers go by the immediate action of NVIDIA's Xid catalog
(Ampere and newer), which is a "resolution bucket"; where that bucket is a workflow of its own, the sign is what the
catalog's text says of the device. The recovery action is NVML's field 230 (drivers from R570 on).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType


class Sign(StrEnum):
    """What a piece of evidence says of a device, from good to bad."""

    FINE = "fine"
    UNSURE = "unsure"
    """Something happened, or it cannot be read now: it may work, and another look or a trial will tell."""
    ILL = "ill"
    """It still computes, and needs to be emptied and then reset."""
    DEAD = "dead"
    """Nothing computes on it any more, and whatever was in its memory is gone."""
    GONE = "gone"
    """The machine does not have it now."""
    BEYOND = "beyond"
    """No new process of this service reaches it, however fresh: only a restart of the service or its container helps.

    Processes that reached it before may still work, and a trial tells whether a new one really does not.
    """


_ORDER = tuple(Sign)


def worst(signs: Iterable[Sign]) -> Sign:
    """The worst of several; FINE of none."""
    return max(signs, key=_ORDER.index, default=Sign.FINE)


# --- NVML ------------------------------------------------------------------------------------------------------------
DRIVER_NOT_LOADED, OPERATING_SYSTEM, LIB_RM_VERSION_MISMATCH, UNKNOWN = 9, 17, 18, 999

_BY_CODE: Mapping[int, Sign] = MappingProxyType(
    {
        0: Sign.FINE,
        6: Sign.GONE,  # NOT_FOUND
        8: Sign.DEAD,  # INSUFFICIENT_POWER: its cables are not attached
        DRIVER_NOT_LOADED: Sign.DEAD,
        11: Sign.ILL,  # IRQ_ISSUE: the kernel sees trouble with its interrupts
        15: Sign.DEAD,  # GPU_IS_LOST
        16: Sign.DEAD,  # RESET_REQUIRED
        LIB_RM_VERSION_MISMATCH: Sign.ILL,  # the driver was replaced: old processes go on, new ones cannot start
        28: Sign.GONE,  # GPU_NOT_FOUND
    }
)

OUT_OF_REACH = frozenset({OPERATING_SYSTEM, LIB_RM_VERSION_MISMATCH, UNKNOWN})
"""What NVML answers for ever in a container that lost its devices or kept the library of a replaced driver."""


def sign_of_nvml(code: int) -> Sign:
    """What a code of NVML says of the device that was asked for, or of all when the library was; UNSURE when unlisted.

    A single code never means BEYOND: that needs fresh processes that are told so again and again.
    """
    return _BY_CODE.get(code, Sign.UNSURE)


_BY_ACTION: Mapping[int, Sign] = MappingProxyType(
    {
        0: Sign.FINE,  # none
        1: Sign.DEAD,  # reset
        2: Sign.DEAD,  # reboot of the node
        3: Sign.ILL,  # drain traffic between devices
        4: Sign.ILL,  # drain, then reset: it goes on at reduced capacity until then
        6: Sign.DEAD,  # reset of the bus
        7: Sign.DEAD,  # reboot of the system
    }
)


def sign_of_action(action: int) -> Sign:
    """What the recovery action that the driver asks for says of the device; UNSURE when unlisted."""
    return _BY_ACTION.get(action, Sign.UNSURE)


# --- Xid -------------------------------------------------------------------------------------------------------------
_IGNORE = frozenset({14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161})
"""Ignore. With 45, which every killed process of the device leaves: only another Xid beside it means something."""

_RESTART_APP = frozenset(
    {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94, 139}
    | {*range(96, 106), *range(126, 136)}
)
"""Restart the application: the process that met it ends by itself, the device goes on."""

_DRAIN = frozenset({48, 54, 64, 78, 136, 155, 156})
"""The device must be reset or looked after, and others compute on it until then: an uncorrectable error of memory and
a remapping that failed (48, 64, 156), links (136, 155), power and virtual devices (54, 78)."""

_RESET = frozenset({46, 62, 79, 95, 109, 110, 119, 120, 140, 143, 151, 158})
"""Reset the device, or restart the host (79: it fell off the bus; 151). A host is nothing that a service can restart,
and devices beside this one go on."""

_WORDS: Mapping[int, str] = MappingProxyType(
    {
        13: "graphics engine exception",
        31: "page fault",
        43: "stopped processing",
        45: "preemptive cleanup",
        46: "stopped processing",
        48: "double bit ECC error",
        62: "micro-controller halt",
        63: "memory is remapped",
        64: "memory cannot be remapped",
        74: "NVLink error",
        79: "fallen off the bus",
        94: "contained memory error",
        95: "uncontained memory error",
        109: "context switch timeout",
        119: "firmware does not answer",
        120: "firmware error",
        140: "unrecoverable ECC error",
        143: "initialization error",
        154: "another recovery action is needed",
        158: "fatal timeout",
    }
)


def sign_of_xid(number: int) -> Sign:
    """What an Xid event says of the device; UNSURE when unlisted, so that the device is looked at."""
    if number in _IGNORE or number in _RESTART_APP:
        return Sign.FINE
    if number in _RESET:
        return Sign.DEAD
    if number in _DRAIN:
        return Sign.ILL
    return Sign.UNSURE


def xid_words(number: int) -> str:
    """Such as `Xid 79 (fallen off the bus)`."""
    words = _WORDS.get(number)
    return f"Xid {number} ({words})" if words else f"Xid {number}"
