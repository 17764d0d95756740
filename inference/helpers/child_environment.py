"""Decides what of our environment a child process sees: never a secret, because foreign code runs there.

Workers and helpers map llama.cpp, compute drivers and NVML and read files that strangers made. None of it needs a key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from headgate.shared import child_process

_SECRET_NAME = re.compile(
    r"(KEY|TOKEN|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|COOKIE|_PASS|_PWD|_AUTH|_DSN)$|SECRET", re.IGNORECASE
)
_PASSWORD_IN_ADDRESS = re.compile(r"://[^/@\s]*:[^/@\s]+@")
_SPILLS = "GGML_CUDA_ENABLE_UNIFIED_MEMORY"
"""Would let a model that does not fit spill to host memory without a word."""


def child_environment(extra: Mapping[str, str], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a worker or helper: `environ` (default: ours) without secrets, then `extra`.

    The child ends with this process (`headgate.shared.child_process`). llama.cpp prints no backtrace when it aborts.
    """
    kept = {
        name: value
        for name, value in (os.environ if environ is None else environ).items()
        if name != _SPILLS and not is_secret(name, value)
    }
    return kept | {child_process.PARENT_ENV: str(os.getpid()), "GGML_NO_BACKTRACE": "1"} | dict(extra)


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks like a key, a token, a password, or an address that holds one."""
    return _SECRET_NAME.search(name) is not None or _PASSWORD_IN_ADDRESS.search(value) is not None
