"""Writes what is worth remembering into the state directory; a full disk costs the memory of it, and nothing else.

Nobody may fail because something cannot be written: it is said once, and once more when it works again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from headgate.shared.errors import HeadgateError
from headgate.shared.state import write_atomic

log = logging.getLogger(__name__)


class StateFiles:
    """The files of one kind; `what` names them in the log (`estimates`)."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._fails = False

    def write(self, path: Callable[[], Path], data: bytes) -> bool:
        """Replaces the file at `path`, whose directory may have to be made first; False when that was impossible."""
        try:
            write_atomic(path(), data)
        except (OSError, HeadgateError) as error:
            if not self._fails:
                why = error.strerror if isinstance(error, OSError) else error
                if isinstance(error, OSError) and error.filename:
                    why = f"{error.filename}: {why}"
                log.warning("%s cannot be kept (%s); the service goes on without", self._what, why)
            self._fails = True
            return False
        if self._fails:
            log.info("%s can be kept again", self._what)
        self._fails = False
        return True
