"""The seam through which several gateways agree on the one probe of an open breaker."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol


class Claim(Protocol):
    """The right to probe some breakers. It ends by itself a few seconds after its gateway has ended."""

    def release(self, provider: str, model: str) -> None:
        """Gives the right for one breaker back, after the result of its probe was recorded. Does not block."""
        ...


class ClaimRefused(NamedTuple):
    """No probe now. `changed`: another gateway changed the state, which was taken over; else its probe is running."""

    provider: str
    model: str
    changed: bool


class ProbeClaims(Protocol):
    """All claims of one gateway."""

    async def claim(self, keys: Sequence[tuple[str, str]]) -> Claim | ClaimRefused:
        """A claim for all breakers of `keys` (provider, model), or for none. Without the shared store it is granted."""
        ...
