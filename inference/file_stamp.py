"""Detects changes of model files from size, modification time and inode."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[int, int, int]
Fingerprint = tuple[tuple[str, Stamp], ...]
"""The files of a model with their stamps: weights (all parts of a split file), projector, draft model,
LoRA adapters."""

NO_FILE: Stamp = (0, 0, 0)
_PART = re.compile(r"(?P<prefix>.+)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf")
_MAX_PARTS = 1024


def stamp(path: str | Path) -> Stamp:
    """Size in bytes, modification time in ns, and inode of a file; NO_FILE when it is missing."""
    try:
        status = Path(path).stat()
    except OSError:
        return NO_FILE
    return status.st_size, status.st_mtime_ns, status.st_ino


def parts_of(path: Path) -> tuple[Path, ...]:
    """The files of a GGUF that is split into parts (`NAME-00001-of-00003.gguf`), in order; else `path` alone."""
    match = _PART.fullmatch(path.name)
    count = int(match["count"]) if match else 1
    if match is None or not 1 < count <= _MAX_PARTS:
        return (path,)
    prefix, end = match["prefix"], f"-of-{count:05d}.gguf"
    return tuple(path.with_name(f"{prefix}-{part:05d}{end}") for part in range(1, count + 1))


def fingerprint(path: Path, others: Iterable[str] = ()) -> Fingerprint:
    """The stamps of the model file `path`, with all its parts, and of `others`."""
    files = [*map(str, parts_of(path)), *others]
    return tuple((file, stamp(file)) for file in files)


def changed(before: Fingerprint, now: Fingerprint) -> str:
    """The paths in `now` whose stamps are new or differ, for a message; empty without any."""
    known = dict(before)
    return ", ".join(path for path, seen in now if known.get(path) != seen)
