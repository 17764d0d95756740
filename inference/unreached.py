"""Remembers over a restart of the service that accelerators were there; places no model.

A service that ends because no process of it reaches its accelerators any more notes how many there were. The next one
serves only if it finds as many again, or was told to use the CPU: models of a GPU never end there by a restart.
"""

from __future__ import annotations

import logging
from pathlib import Path

from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state import StateDir

log = logging.getLogger(__name__)

NAME = "accelerators-out-of-reach"


class OutOfReachError(HeadgateError):
    """Fewer accelerators than before the restart; another one, from outside, may help."""

    exit_code = Exit.RESTART_OUTSIDE


class Unreached:
    """The note in the state directory."""

    def __init__(self, state: StateDir) -> None:
        self._path: Path = state.root / NAME

    def note(self, accelerators: int) -> None:
        """The service ends because of them."""
        try:
            self._path.write_text(f"{accelerators}\n", encoding="ascii")
        except OSError as error:
            log.warning("it cannot be noted that accelerators are out of reach: %s", error)

    def check(self, accelerators: int, *, cpu_asked: bool) -> None:
        """The service found so many; raises OutOfReachError where that is too few."""
        try:
            before = int(self._path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            return
        if accelerators < before and not cpu_asked:
            raise OutOfReachError(
                f"{before} accelerators were in use and {accelerators} can be reached: what heals this is a restart of "
                "the container or the machine. Models do not go to the CPU for it; to let them, set "
                f"INFERENCE_FORCE_CPU_MODE=true, and after devices were taken out for good, remove {self._path}"
            )
        self._path.unlink(missing_ok=True)
