"""Defects that the suite must find. Each replaces one function of the gateway."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tests.fleet.plan import Kind

PLANTS: Mapping[str, Callable[[], None]] = {}
"""By name."""

PROMISES: Mapping[str, str] = {}
"""The promise whose violation the suite must report for each defect."""

REVEALED_BY: Mapping[str, Kind] = {}
"""The faults that reveal each defect."""
