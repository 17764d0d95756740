"""What an attempt listens to, as far as its breakers ask."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Heard:
    """Silent for `seconds` now, and before that for `longest_silence` at most."""

    seconds: float = 0.0
    longest_silence: float = 0.0

    def silent_seconds(self) -> float:
        """For how long there has been no sign of life."""
        return self.seconds
