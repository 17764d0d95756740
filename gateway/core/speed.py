"""How quick the inference service says that a model is; measured there, concluded from elsewhere."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speed:
    """What was measured of a model; None where nothing was. `load_seconds` is 0 for one that is loaded,
    `queue_seconds` what somebody who comes now waits behind others once it is.
    """

    load_seconds: float | None = None
    queue_seconds: float | None = None
    prefill_tokens_per_second: float | None = None

    @property
    def ready_in(self) -> float:
        """Seconds until it takes a request of somebody who comes now, as far as known."""
        return (self.load_seconds or 0.0) + (self.queue_seconds or 0.0)


UNKNOWN = Speed()
"""Nothing was measured."""
