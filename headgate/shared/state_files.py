"""Reads and writes files of the state directory. A damaged file is logged and renamed; it does not stop a service."""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

log = logging.getLogger(__name__)

MAX_BYTES = 64 * 2**20
"""The size limit of a file. The largest one, with 2,000 estimates, has about a tenth of it."""
DAMAGED_SUFFIX = ".damaged"
"""Added to the name of a damaged file. Only the latest copy is kept."""
T = TypeVar("T")


def load_state_file(path: Path, parse: Callable[[Any], T], consequence: str, *, max_bytes: int = MAX_BYTES) -> T | None:
    """`parse` of the JSON in `path`, or None when the file is missing or cannot be used.

    `parse` raises ValueError, KeyError, TypeError, AttributeError, IndexError or OverflowError for damaged content.
    `consequence` is the part of the log line that says what follows, such as `estimates are measured again`.
    """
    try:
        data = read_regular(path, max_bytes)
    except NotRegularError as error:
        log.warning("%s is %s and is ignored: %s. Move it away", path, error, consequence)
        return None
    except OSError as error:
        log.warning("%s cannot be read (%s): %s", path, error.strerror, consequence)
        return None
    if data is None:
        return None
    try:
        if len(data) > max_bytes:
            raise ValueError(f"larger than {max_bytes} bytes")
        return parse(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        log.warning("%s is damaged (%s): %s; %s", path, _describe(error), consequence, _set_aside(path))
        return None


def _set_aside(path: Path) -> str:
    """Renames the damaged file, so that the next write does not replace it. Returns the end of the log line."""
    kept = path.with_name(path.name + DAMAGED_SUFFIX)
    try:
        path.replace(kept)
    except OSError as error:
        return f"renaming it to {kept} failed ({error.strerror}); the next write replaces it"
    return f"the damaged file is kept as {kept}"


def _describe(error: Exception) -> str:
    """A short text on one line, with the type of the error unless it is a ValueError, whose text is a sentence."""
    text = ascii(str(error))[1:-1][:200]
    return text if isinstance(error, ValueError) and text else f"{type(error).__name__}: {text}"


class NotRegularError(OSError):
    """The path is a directory, a pipe, a socket or a device; the text names it."""


_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def open_regular(path: Path, flags: int, mode: int = 0o600) -> int:
    """A descriptor of the regular file at `path`. Does not block. Raises NotRegularError and other OSErrors."""
    try:
        handle = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY, mode)
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise NotRegularError("a socket or a device instead of a file") from error
        raise
    kind = os.fstat(handle).st_mode
    if not stat.S_ISREG(kind):
        os.close(handle)
        raise NotRegularError(f"{_KINDS.get(stat.S_IFMT(kind), 'a device')} instead of a file")
    return handle


def read_regular(path: Path, max_bytes: int) -> bytes | None:
    """The content of `path`, at most its first `max_bytes` + 1 bytes; None when there is no such file.

    Does not block: a pipe is not read. Raises NotRegularError and other OSErrors.
    """
    try:
        handle = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        return file.read(max_bytes + 1)


def write_temporary(path: Path, data: bytes) -> Path:
    """A temporary file with `data` beside `path`, with mode 0600, flushed to disk. Raises OSError that names `path`."""
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return temporary


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` with `data` in one step: readers see the old or the new content, also after a crash.

    Raises OSError that names `path`.
    """
    temporary = write_temporary(path, data)
    try:
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class StateFileWriter:
    """Writes JSON files. `what` names their content in log lines. Logs the first failed write, and the next success."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._fails = False

    def write(self, path: Path, content: Any) -> bool:
        """Replaces the file at `path` with `content` as JSON; creates its directory. Returns whether it succeeded."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomic(path, json.dumps(content).encode())
        except OSError as error:
            if not self._fails:
                reason = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
                log.warning(
                    "cannot save %s (%s); the service continues, but the next start may have old data",
                    self._what,
                    reason,
                )
            self._fails = True
            return False
        if self._fails:
            log.info("saving %s works again", self._what)
        self._fails = False
        return True
