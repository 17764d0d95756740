"""The key of stored sequences: what must be equal for a state to be valid."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from xxhash import xxh3_64

from inference.file_stamp import Fingerprint, fingerprint
from inference.worker.llama.binding import lib
from inference.worker_link import Grant

WHOLE_BYTES = 2**26
"""Files up to this size are read whole, such as adapters: those of one rank have the same size."""
PIECE_BYTES, PIECES = 2**16, 16

FileKeys = list[list[Any]]
"""Name, size, modification time and `contents_sum` of files."""


def file_keys(files: Fingerprint, copies: Mapping[str, str] | None = None) -> FileKeys:
    """What identifies the files of a model. `copies`: for some paths, another path from which the content is read.

    Files have names and no inodes, so that a new container of the same image finds its sequences. Modification times
    are not enough, because images and archives may give the same one to all files.
    """
    sources = copies or {}
    return [
        [Path(path).name, size, modified, contents_sum(sources.get(path, path))]
        for path, (size, modified, _inode) in files
    ]


def contents_sum(path: str) -> str:
    """A checksum of the content of a file, of pieces of it if it is large; empty if it cannot be read."""
    summed = xxh3_64()
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(handle).st_size
            places: Iterable[int] = range(0, size, PIECE_BYTES)
            if size > WHOLE_BYTES:
                places = [(size - PIECE_BYTES) * piece // (PIECES - 1) for piece in range(PIECES)]
            for at in places:
                summed.update(os.pread(handle, PIECE_BYTES, at))
        finally:
            os.close(handle)
    except OSError:
        return ""
    return summed.hexdigest()


def sequence_key(grant: Grant, files: FileKeys) -> dict[str, Any]:
    """The properties that must be equal for a state to be valid, as JSON returns them.

    The number of sequences, the devices and how these share the model (`split_mode`) are left out, because a state does
    not depend on them: llama.cpp writes whole rows of the caches.
    """
    return {
        "files": files,
        "kv_type": grant.kv_type,
        "flash_attention": grant.flash_attention,
        "swa_full": grant.swa_full,
        "context_length": grant.context_length,
        "library": file_keys(fingerprint(Path(lib._lib._name))),
    }
