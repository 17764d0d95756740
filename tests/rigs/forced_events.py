"""Events by which tests force what the authority otherwise decides itself. Importing this module registers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import inference.authority.step as authority_step
from inference.authority.draft import Draft
from inference.authority.handlers.running import departure
from inference.authority.handlers.watching import advisor, governor
from inference.authority.lifecycle import Action, Reason
from inference.devices.device import Reading


@dataclass(frozen=True, slots=True)
class PressureChecked:
    """The pressure is checked with these readings."""

    readings: tuple[Reading, ...]
    regular: bool
    arenas: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class DepartureWanted:
    """A model leaves."""

    model: str
    reason: str
    action: Action = Action.UNLOAD


def _checked(draft: Draft, event: Any) -> None:
    governor.check(draft, regular=event.regular)
    if event.regular:
        advisor.report(draft)


def _departure_wanted(draft: Draft, event: Any) -> None:
    departure.leave(draft, event.model, Reason(event.reason), event.action)


authority_step._HANDLERS |= {PressureChecked: _checked, DepartureWanted: _departure_wanted}
authority_step._WITH_READINGS = (*authority_step._WITH_READINGS, PressureChecked)  # type: ignore[assignment]
authority_step._WITH_ARENAS = (*authority_step._WITH_ARENAS, PressureChecked)  # type: ignore[assignment]
