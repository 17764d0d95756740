"""Classifies evidence about a device by tables.

NVML's codes are from its manual (nvmlReturn_t). Xid numbers are classified by the immediate action (the "resolution
bucket") in NVIDIA's Xid catalog for Ampere and newer, or by the catalog's text if that bucket is a separate workflow.
The recovery action is NVML's field 230 (drivers since R570).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from types import MappingProxyType


class Sign(StrEnum):
    """The meaning of evidence about a device, from good to bad."""

    HEALTHY = "healthy"
    UNCERTAIN = "uncertain"
    """Something happened, or the device is unreadable: another reading or a trial decides."""
    DEGRADED = "degraded"
    """It still computes, but must be emptied and then reset."""
    FAILED = "failed"
    """It no longer computes, and its memory is lost."""
    MISSING = "missing"
    """The machine does not have it at the moment."""
    UNREACHABLE = "unreachable"
    """New processes of this service cannot reach it: only a restart of the service or its container helps.

    Older processes may still work; a trial shows whether a new one does.
    """


_ORDER = tuple(Sign)


def worst(signs: Iterable[Sign]) -> Sign:
    """The worst of several; HEALTHY of none."""
    return max(signs, key=_ORDER.index, default=Sign.HEALTHY)


# --- NVML ------------------------------------------------------------------------------------------------------------
DRIVER_NOT_LOADED, OPERATING_SYSTEM, LIB_RM_VERSION_MISMATCH, UNKNOWN = 9, 17, 18, 999

_BY_CODE: Mapping[int, Sign] = MappingProxyType(
    {
        0: Sign.HEALTHY,
        6: Sign.MISSING,  # NOT_FOUND
        8: Sign.FAILED,  # INSUFFICIENT_POWER: power cables are not attached
        DRIVER_NOT_LOADED: Sign.FAILED,
        11: Sign.DEGRADED,  # IRQ_ISSUE: the kernel reports a problem with its interrupts
        15: Sign.FAILED,  # GPU_IS_LOST
        16: Sign.FAILED,  # RESET_REQUIRED
        LIB_RM_VERSION_MISMATCH: Sign.DEGRADED,  # the driver was replaced: old processes continue, new ones fail
        28: Sign.MISSING,  # GPU_NOT_FOUND
    }
)

OUT_OF_REACH = frozenset({OPERATING_SYSTEM, LIB_RM_VERSION_MISMATCH, UNKNOWN})
"""Permanent answers of NVML in a container that lost its devices or has the library of a replaced driver."""


def sign_of_nvml(code: int) -> Sign:
    """The sign of an NVML code for a device, or for all devices in an answer of the library; UNCERTAIN if unlisted.

    A single code does not mean UNREACHABLE, which needs codes of OUT_OF_REACH in several new processes.
    """
    return _BY_CODE.get(code, Sign.UNCERTAIN)


_BY_ACTION: Mapping[int, Sign] = MappingProxyType(
    {
        0: Sign.HEALTHY,  # none
        1: Sign.FAILED,  # reset
        2: Sign.FAILED,  # reboot of the node
        3: Sign.DEGRADED,  # drain traffic between devices
        4: Sign.DEGRADED,  # drain, then reset: it works at reduced capacity until then
        6: Sign.FAILED,  # reset of the bus
        7: Sign.FAILED,  # reboot of the system
    }
)


def sign_of_action(action: int) -> Sign:
    """The sign of the recovery action that the driver requests; UNCERTAIN if unlisted."""
    return _BY_ACTION.get(action, Sign.UNCERTAIN)


# --- Xid -------------------------------------------------------------------------------------------------------------
_IGNORE = frozenset({14, 37, 38, 43, 44, 45, 63, 66, 67, 92, 93, 106, 107, 108, 121, 137, 141, 152, 153, 157, 160, 161})
"""Ignore. Includes 45, which follows every killed process of the device."""

_RESTART_APP = frozenset(
    {8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 94, 139}
    | {*range(96, 106), *range(126, 136)}
)
"""Restart the application: the affected process ends by itself, the device works."""

_DRAIN = frozenset({48, 54, 64, 78, 136, 155, 156})
"""The device must be reset or checked, but computes until then: uncorrectable memory errors and failed remapping
(48, 64, 156), links (136, 155), power and virtual devices (54, 78)."""

_RESET = frozenset({46, 62, 79, 95, 109, 110, 119, 120, 140, 143, 151, 158})
"""Reset the device, or restart the host (79: it fell off the bus; 151). The service cannot restart the host, and other
devices still work."""

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
    """The sign of an Xid event; UNCERTAIN if unlisted, so that the device is read again."""
    if number in _IGNORE or number in _RESTART_APP:
        return Sign.HEALTHY
    if number in _RESET:
        return Sign.FAILED
    if number in _DRAIN:
        return Sign.DEGRADED
    return Sign.UNCERTAIN


def xid_words(number: int) -> str:
    """The number with its meaning, such as `Xid 79 (fallen off the bus)`."""
    words = _WORDS.get(number)
    return f"Xid {number} ({words})" if words else f"Xid {number}"
