"""Which `format`s of JSON schemas are enforced, and the patterns of those that are spelled out here; never matches.

Dates are those of the calendar, leap years included, from year 1 on: RFC 3339 has a year 0000, most readers, Python's
among them, have none. Times have no leap second, which is right on one night in years.
"""

from __future__ import annotations

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_DATE = (
    rf"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    r"|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)-02-29)"
)
_CLOCK = r"(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+-]{_CLOCK})"

PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
"""Formats written as patterns (RFC 3339)."""

BUILT_IN = frozenset(["duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""Formats that llguidance knows as well as the JSON-Schema-Test-Suite does."""
