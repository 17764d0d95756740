"""Writes bounds of numbers so that llguidance enforces them exactly, or slightly narrower where it cannot.

llguidance reads a decimal exactly if its digits are at most 2^53 and it has at most 22 decimal places; it may read any
other decimal as an adjacent number. If an exclusive bound is a whole number and the other bound has the same whole
part, llguidance accepts the bound that is nearer to 0."""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal

from inference.worker.constraints.schema_limits import EXACT

_DIGITS = 15
"""Numbers with this many digits are below 2^53."""
_PLACES = 22


def is_exact(value: float) -> bool:
    """Whether llguidance reads a number exactly (whole numbers up to 2^53)."""
    return _is_read(Decimal(repr(value)))


def inside(key: str, value: float) -> tuple[str, float]:
    """A keyword and a value that allow only numbers which `key` with `value` allows.

    They also forbid numbers that differ from the bound only in the 15th digit or the 22nd decimal place.
    """
    is_lower = key in ("minimum", "exclusiveMinimum")
    plain = "minimum" if is_lower else "maximum"
    found = Decimal(repr(value))
    if found == found.to_integral_value():
        whole = int(found)
        if key == plain or (whole < 0 if is_lower else whole > 0):
            return key, whole
        step = min(Decimal(1), Decimal(1).scaleb(found.adjusted() + 1 - _DIGITS if whole else -_PLACES))
        step = Decimal(2) if abs(whole) == EXACT else step
        near = found + (step if is_lower else -step)
        return plain, int(near) if step >= 1 else float(near)
    if _is_read(found):
        return key, value
    unit = Decimal(1).scaleb(max(found.adjusted() + 1 - _DIGITS, -_PLACES))
    return plain, float(found.quantize(unit, ROUND_CEILING if is_lower else ROUND_FLOOR))


def _is_read(found: Decimal) -> bool:
    if found == found.to_integral_value():
        return True
    places = -int(found.as_tuple().exponent)
    return places <= _PLACES and abs(int(found.scaleb(places))) <= EXACT
