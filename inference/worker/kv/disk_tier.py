"""Files of stored sequences.

    DIRECTORY/lock                              held while files are removed for room
    DIRECTORY/<hash of key>/<hash of tokens and tenant>.kv
    DIRECTORY/<hash of key>/*.tmp               being written; its writer holds a lock on it

Several workers, also of several services, may use one directory. The modification time of a file is the time of its
last use, or the end of its pin. When the directory would exceed its size limit, the oldest files are removed first.
Files are written to a temporary name, synced and renamed, so a file with its final name is complete. It is verified
nevertheless when it is read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from inference.worker.kv.arena import Arena, Region
from inference.worker.kv.entry_format import (
    HEADER_BYTES,
    MAX_TOKENS,
    Head,
    InvalidEntryError,
    Progress,
    StatesSum,
    decode_head,
    decode_header,
    max_head_bytes,
    set_progress,
    set_states_sum,
)
from inference.worker.steps import StoredSequence

log = logging.getLogger("headgate.worker.kv")

PIECE_BYTES = 2**20
"""Bytes that are read or written at a time; their checksum is computed while they are in the cache of the CPU."""
FIRST_READ_BYTES = 2**16
"""Bytes that are read first to find out the size of a head."""
PAUSE_SECONDS = 60.0
"""How long nothing is written after an error or a slow write."""
SLOW_SECONDS = 10.0
SLOW_BYTES_PER_SECOND = 4 * 2**20
"""A write is slow if it takes longer than SLOW_SECONDS and is slower than this."""
LOCK_SECONDS = 10.0
"""Longest wait for the lock of the directory."""
MAX_REMOVALS = 3
"""How often files are removed from a full disk until a write succeeds. After that, writing pauses."""
LONGEST_PIN_SECONDS = 31 * 86400.0
"""A modification time further in the future comes from a wrong clock. Such a file counts as the oldest."""

ENTRY, TEMPORARY = ".kv", ".tmp"
_READING = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
"""O_NONBLOCK: if the path is a pipe, opening it must not wait for a writer."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_UNREADABLE = (errno.EIO, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP)


class FoundEntry(NamedTuple):
    """A file of this model."""

    name: str
    head: Head
    modified_at: float


class AbandonedError(Exception):
    """The write was abandoned because the worker ends."""


class _File(NamedTuple):
    """A file in the directory. A tuple with a string instead of a Path saves time when there are thousands of files."""

    modified_at: float
    count_bytes: int
    path: str


class DiskTier:
    """The files of one model in a directory. Its methods block; they are called on background threads."""

    def __init__(
        self,
        directory: Path,
        key: Mapping[str, Any],
        max_bytes: int,
        clock: Callable[[], float] = time.time,
        ticks: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_bytes`: the limit of the whole directory. `clock` gives Unix seconds, `ticks` monotonic seconds."""
        self._root = directory
        self._key = dict(key)
        self._own = directory / _digest(json.dumps(self._key, sort_keys=True).encode())
        self._max_bytes = max_bytes
        self._max_head_bytes = max_head_bytes(int(key.get("context_length", MAX_TOKENS)))
        self._clock = clock
        self._ticks = ticks
        self._paused_until = -1.0
        self._removals = 0
        self._next_full_log_at = 0.0

    def fits(self, count_bytes: int) -> bool:
        """Whether an entry of this size is within the limit."""
        return count_bytes <= self._max_bytes

    @property
    def is_paused(self) -> bool:
        """Whether nothing is written for a while because of an error or a slow write."""
        return self._ticks() < self._paused_until

    def name_of(self, sequence: StoredSequence) -> str:
        """The name of the file of a sequence."""
        return sequence.id + ENTRY

    def write(
        self,
        sequence: StoredSequence,
        head: bytearray,
        states: memoryview,
        is_abandoned: Callable[[], bool],
        removed: list[str],
    ) -> None:
        """Writes an entry. The names of files of this model that are removed for room are appended to `removed`.

        `head` is changed. If the disk is full before the limit is reached, the oldest files that are not pinned are
        removed. If the write fails, logs the reason, pauses writing and raises OSError. Raises AbandonedError if
        `is_abandoned` becomes true.
        """
        began, count_bytes, is_written = self._ticks(), len(head) + len(states), False
        while not is_written:
            try:
                self._write_file(sequence, head, states, is_abandoned, removed)
                is_written = True
            except OSError as error:
                if error.errno in _FULL and self._free(count_bytes, removed):
                    continue
                self._pause(f"cannot write stored sequences to {self._root} ({error.strerror or error})")
                raise
        if self._removals and self._ticks() >= self._next_full_log_at:
            log.warning("the disk is full: removing the oldest stored sequences in %s for new ones", self._root)
            self._next_full_log_at = self._ticks() + PAUSE_SECONDS
        self._removals = 0
        if (seconds := self._ticks() - began) > max(SLOW_SECONDS, count_bytes / SLOW_BYTES_PER_SECOND):
            self._pause(f"{self._root} is slow ({count_bytes} bytes in {seconds:.0f} s)")

    def read(self, sequence: StoredSequence, arena: Arena, max_bytes: int) -> tuple[Region, Head]:
        """Reads the entry of a sequence into a region of `arena` and verifies it; the region is not committed.

        `max_bytes`: see `Arena.allocate`. Raises FileNotFoundError, OSError, InvalidEntryError and MemoryError.
        """
        handle = os.open(self._own / self.name_of(sequence), _READING)
        try:
            encoded, head = self._head(handle)
            if head.sequence.tokens != sequence.tokens or head.sequence.tenant != sequence.tenant:
                raise InvalidEntryError("belongs to another sequence")
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(handle, 0, head.sizes.all_bytes, os.POSIX_FADV_SEQUENTIAL)
            region = arena.allocate(head.sizes.all_bytes, max_bytes, maps=False)
            try:
                self._read_states(handle, head, arena, region)
            except BaseException:
                arena.release(region, spare=True)
                raise
            set_progress(encoded, Progress.WRITING)
            region.view[: len(encoded)] = encoded
            return region, head
        finally:
            os.close(handle)

    def find(self) -> Iterator[FoundEntry | None]:
        """The files of this model, the last used first. Yields None for an unusable file, after `discard`."""
        for file in sorted(self._files(self._own), reverse=True):
            if not file.path.endswith(ENTRY):
                continue
            name = Path(file.path).name
            try:
                handle = os.open(file.path, _READING)
                try:
                    _, head = self._head(handle)
                finally:
                    os.close(handle)
                if self.name_of(head.sequence) != name:
                    raise InvalidEntryError("belongs to another sequence")
            except FileNotFoundError:
                continue
            except (InvalidEntryError, OSError) as error:
                self.discard(name, error)
                yield None
                continue
            yield FoundEntry(name, head, self._plausible(file.modified_at))

    def discard(self, name: str, reason: Exception) -> None:
        """Removes an unusable file, with a log line. A file stays if the error may be temporary."""
        removes = not isinstance(reason, OSError) or reason.errno in _UNREADABLE
        text = reason.strerror if isinstance(reason, OSError) else f"it {reason}"
        log.warning("stored sequence %s %s: %s", self._own / name, "removed" if removes else "skipped", text)
        if removes:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Removes a file, or a directory in its place, if possible."""
        path = self._own / name
        try:
            path.unlink()
        except IsADirectoryError:
            shutil.rmtree(path, ignore_errors=True)
        except FileNotFoundError:
            pass  # another worker removed it
        except OSError as error:
            log.warning("cannot remove the stored sequence %s (%s): remove the file", path, error.strerror)

    def touch(self, name: str, at: float) -> None:
        """Records the Unix time of the last use of a file, or of the end of its pin."""
        with contextlib.suppress(OSError):
            os.utime(self._own / name, (at, at))

    # --- reading and writing ------------------------------------------------------------------------------------------
    def _head(self, handle: int) -> tuple[bytearray, Head]:
        """The verified head of a file of this model. Raises InvalidEntryError."""
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidEntryError("is not a regular file")
        encoded = bytearray(FIRST_READ_BYTES)
        count = os.preadv(handle, [encoded], 0)
        header = decode_header(encoded[: min(count, HEADER_BYTES)])
        if header.all_bytes != status.st_size:
            raise InvalidEntryError("is not as long as its header says")
        if header.state_at > self._max_head_bytes:
            raise InvalidEntryError("is longer than the context of the model")
        if header.state_at > count:
            encoded = bytearray(header.state_at)
            _read_exactly(handle, memoryview(encoded), 0)
        del encoded[header.state_at :]
        head = decode_head(encoded)
        if head.key != self._key:
            raise InvalidEntryError("was made with another file or other settings of the model")
        return encoded, head

    def _read_states(self, handle: int, head: Head, arena: Arena, region: Region) -> None:
        """Reads the states into `region`. Raises InvalidEntryError if their checksum is wrong."""
        size, states = head.sizes.all_bytes, StatesSum()
        for at in range(head.sizes.state_at, size, PIECE_BYTES):
            end = min(at + PIECE_BYTES, size)
            arena.fill(region, at, handle, end - at)
            states.update(region.view[at:end])
        if states.intdigest() != head.states_sum:
            raise InvalidEntryError("is damaged: the checksum of its states is wrong")
        region.is_ready = True

    def _create(self, path: Path, count_bytes: int) -> int:
        """A new file of this size, with a lock that shows that its writer runs."""
        path.unlink(missing_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, count_bytes)  # so that other workers count it at once
        except OSError:
            os.close(handle)
            path.unlink()
            raise
        return handle

    def _write_file(
        self,
        sequence: StoredSequence,
        head: bytearray,
        states: memoryview,
        is_abandoned: Callable[[], bool],
        removed: list[str],
    ) -> None:
        """Writes an entry to a temporary file and renames it. Raises OSError and AbandonedError."""
        temporary: Path | None = None
        try:
            with self._locked():
                count_bytes = len(head) + len(states)
                self._make_room(count_bytes, removed)
                temporary = self._own / f"{self.name_of(sequence)}.{os.getpid()}{TEMPORARY}"
                handle = self._create(temporary, count_bytes)
            try:
                self._write(handle, head, states, is_abandoned)
                modified_at = max(self._clock(), sequence.pinned_until)
                os.utime(handle, (modified_at, modified_at))
                os.fsync(handle)
                try:
                    temporary.rename(self._own / self.name_of(sequence))
                except IsADirectoryError:
                    self.discard(self.name_of(sequence), InvalidEntryError("is a directory"))
                    temporary.rename(self._own / self.name_of(sequence))
            finally:
                os.close(handle)
            temporary = None
            _sync(self._own)
        finally:
            if temporary is not None:
                with contextlib.suppress(OSError):
                    temporary.unlink()

    def _write(self, handle: int, head: bytearray, states: memoryview, is_abandoned: Callable[[], bool]) -> None:
        summed = StatesSum()
        for start in range(0, len(states), PIECE_BYTES):
            if is_abandoned():
                raise AbandonedError
            piece = states[start : start + PIECE_BYTES]
            summed.update(piece)
            _write_exactly(handle, piece, len(head) + start)
        set_states_sum(head, summed.intdigest())
        set_progress(head, Progress.COMPLETE)
        _write_exactly(handle, memoryview(head), 0)

    # --- the directory ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the directory, which is created if it is missing. Raises OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            until = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > until:
                        raise
                    time.sleep(0.02)
            yield
        finally:
            os.close(handle)

    def _make_room(self, count_bytes: int, removed: list[str]) -> None:
        """Removes the oldest files until `count_bytes` more are within the limit.

        Raises OSError if they are not, because of the files that are being written.
        """
        created = not self._own.is_dir()
        self._own.mkdir(mode=0o700, exist_ok=True)
        if created:
            _sync(self._root)
        files = self._all_files()
        excess = sum([file.count_bytes for file in files]) + count_bytes - self._max_bytes
        if self._remove_oldest(files, excess, removed) < excess:
            raise OSError(errno.EBUSY, "other sequences are being written, and the limit is reached")

    def _free(self, count_bytes: int, removed: list[str]) -> bool:
        """Removes the oldest files without a pin until `count_bytes` are free. Returns whether a write may succeed now.

        Other programs may use the space that becomes free, so files are removed at most MAX_REMOVALS times until
        a write succeeds.
        """
        if self._removals == MAX_REMOVALS:
            return False
        self._removals += 1
        before = len(removed)
        try:
            with self._locked():
                now = self._clock()
                files = [file for file in self._all_files() if self._plausible(file.modified_at) <= now]
                freed = self._remove_oldest(files, count_bytes, removed)
        except OSError:
            return len(removed) > before
        return freed > 0

    def _remove_oldest(self, files: Sequence[_File], count_bytes: int, removed: list[str]) -> int:
        """Removes the oldest entries, at least `count_bytes` of them if possible. Returns the bytes removed."""
        freed = 0
        for file in sorted(files, key=lambda item: self._plausible(item.modified_at)):
            if freed >= count_bytes:
                break
            path = Path(file.path)
            if path.suffix != ENTRY:
                continue
            path.unlink(missing_ok=True)
            freed += file.count_bytes
            if path.parent == self._own:
                removed.append(path.name)
            else:
                with contextlib.suppress(OSError):
                    path.parent.rmdir()  # fails while it has other files
        return freed

    def _all_files(self) -> list[_File]:
        """The files of all models. Unfinished files of ended processes are removed."""
        files = []
        for directory in [entry.path for entry in os.scandir(self._root) if entry.is_dir(follow_symlinks=False)]:
            for file in self._files(directory):
                if file.path.endswith(TEMPORARY) and _writer_has_ended(file.path):
                    Path(file.path).unlink(missing_ok=True)
                else:
                    files.append(file)
        return files

    def _files(self, directory: str | Path) -> list[_File]:
        found = []
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    if entry.name.endswith((ENTRY, TEMPORARY)) and entry.is_file(follow_symlinks=False):
                        with contextlib.suppress(FileNotFoundError):  # removed by another worker
                            status = entry.stat(follow_symlinks=False)
                            found.append(_File(status.st_mtime, status.st_size, entry.path))
        except FileNotFoundError:
            pass
        except OSError as error:
            self._pause(f"cannot list stored sequences in {directory} ({error.strerror})")
        return found

    def _plausible(self, modified_at: float) -> float:
        return modified_at if modified_at <= self._clock() + LONGEST_PIN_SECONDS else 0.0

    def _pause(self, reason: str) -> None:
        if not self.is_paused:
            log.warning("%s; no sequences are written to disk for the next %.0f s", reason, PAUSE_SECONDS)
        self._paused_until = self._ticks() + PAUSE_SECONDS


def _digest(*parts: bytes) -> str:
    hashed = hashlib.blake2b(digest_size=16)
    for part in parts:
        hashed.update(part)
    return hashed.hexdigest()


def _read_exactly(handle: int, target: memoryview, offset: int) -> None:
    """Raises InvalidEntryError if the file is too short."""
    done = 0
    while done < len(target):
        count = os.preadv(handle, [target[done:]], offset + done)
        if count == 0:
            raise InvalidEntryError("is shorter than its header says")
        done += count


def _write_exactly(handle: int, source: memoryview, offset: int) -> None:
    done = 0
    while done < len(source):
        done += os.pwrite(handle, source[done:], offset + done)


def _writer_has_ended(path: str) -> bool:
    """Whether the writer of a temporary file has ended."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _sync(directory: Path) -> None:
    handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
