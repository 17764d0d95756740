"""The environment of worker and helper processes, without secrets.

They run llama.cpp, compute drivers and NVML, and read model files from untrusted sources. They need no keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from headgate.shared import child_process

NOTICE = b"!\n"
"""A line that a serving helper sends between two answers, when its next answer will contain an event."""
_SECRET_NAME = re.compile(
    r"(KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|_PASS|_PWD|_AUTH|_DSN|_HEADERS)$|SECRET", re.IGNORECASE
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SPILLS = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
"""A variable that lets llama.cpp use host memory silently for a model that does not fit. It is removed."""
_TUNABLES = "GLIBC_TUNABLES"
_COPIES = "glibc.cpu.x86_non_temporal_threshold=0x100000"
"""Copies of 1 MiB and more bypass the CPU caches (x86 with glibc; others ignore it).

The default is three quarters of the last cache, 100 MB on some servers. The state of a sequence is copied in pieces of
a few MiB, one per layer, which are not read again soon; through the caches that takes about 1.5 times as long.
"""

_DEFAULTS = {"OPENBLAS_NUM_THREADS": "1"}
"""By default the import of numpy starts a thread per core for linear algebra, which doubles its CPU time. Workers and
helpers use numpy for small arrays only.
"""


def child_environment(extra: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker or helper: `environ` (default: of this process) without secrets, then `extra`.

    The child ends with this process (`headgate.shared.child_process`). llama.cpp prints no backtrace when it aborts.
    Tunables of glibc and threads of OpenBLAS in `environ` take precedence over ours.
    """
    kept = {
        name: value
        for name, value in (os.environ if environ is None else environ).items()
        if name != _SPILLS and not is_secret(name, value)
    }
    tunables = ":".join(filter(None, (_COPIES, kept.get(_TUNABLES))))  # the last value of a name counts
    own = {child_process.PARENT_ENV: str(os.getpid()), "GGML_NO_BACKTRACE": "1", _TUNABLES: tunables}
    return _DEFAULTS | kept | own | dict(extra)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a key, a token, a password, or a URL with a password."""
    return _SECRET_NAME.search(name) is not None or _PASSWORD_IN_ADDRESS.search(value) is not None
