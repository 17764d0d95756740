"""Reads JSON files of the state directory; a file that cannot be used is reported and set aside, and never fatal."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from headgate.shared.state import NotRegularError, read_regular

log = logging.getLogger(__name__)

MOST_BYTES = 64 * 2**20
"""A larger file was not written by Headgate; the largest, with 2,000 estimates, has about a tenth of it."""
DAMAGED = ".damaged"
"""Added to the name of a damaged file, whose last copy is kept."""
T = TypeVar("T")


def recovered(path: Path, parse: Callable[[Any], T], lost: str, *, most_bytes: int = MOST_BYTES) -> T | None:
    """What `parse` makes of the JSON in `path`; None where there is no file, or none that can be used.

    `parse` raises ValueError, KeyError, TypeError, AttributeError, IndexError or OverflowError for content that is
    damaged. `lost` says in the log what the program does without the content.
    """
    try:
        data = read_regular(path, most_bytes)
    except NotRegularError as error:
        log.warning("%s is %s and is ignored: %s. Move it away", path, error, lost)
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): %s", path, error.strerror, lost)
        return None
    if data is None:
        return None
    try:
        if len(data) > most_bytes:
            raise ValueError(f"larger than {most_bytes} bytes")
        return parse(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        log.warning("%s is damaged (%s): %s; %s", path, _shown(error), lost, _set_aside(path))
        return None


def _set_aside(path: Path) -> str:
    """Renames the damaged file, so that the next write does not destroy it; says in words where it is."""
    kept = path.with_name(path.name + DAMAGED)
    try:
        path.replace(kept)
    except OSError as error:
        return f"it cannot be kept as {kept} ({error.strerror}), and the next write replaces it"
    return f"the damaged file is kept as {kept}"


def _shown(error: Exception) -> str:
    """Short, on one line, and with the name of the error where its text is only a value."""
    text = ascii(str(error))[1:-1][:200]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"
