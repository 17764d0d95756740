"""The key of stored sequences: what must be equal for a state to be valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from inference.file_stamp import Fingerprint, fingerprint
from inference.worker.llama.binding import lib
from inference.worker_link import Grant


def sequence_key(grant: Grant, files: Fingerprint) -> dict[str, Any]:
    """The properties that must be equal for a state to be valid, as JSON returns them.

    Files have names and no inodes, so that a new container of the same image finds its sequences. The number of
    sequences and the devices are left out, because a state does not depend on them.
    """
    library = fingerprint(Path(lib._lib._name))
    return {
        "files": [[Path(path).name, size, modified] for path, (size, modified, _inode) in files],
        "kv_type": grant.kv_type,
        "flash_attention": grant.flash_attention,
        "swa_full": grant.swa_full,
        "context_length": grant.context_length,
        "library": [[Path(path).name, size, modified] for path, (size, modified, _inode) in library],
    }
