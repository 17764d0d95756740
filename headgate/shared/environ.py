"""Reads environment variables and `.env`. Separate from `configfile`, whose imports would slow down `--help`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headgate.shared.errors import ConfigError, Problem


def load_environ(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> dict[str, str]:
    """`environ` (default: of this process) merged over `.env` in `directory` (default: the working directory).

    A variable that is set, even to an empty value, overrides the file. Kubernetes' service links
    (`INFERENCE_PORT=tcp://...` for a service called `inference`) are omitted. Raises ConfigError when `.env` cannot
    be read.
    """
    given = os.environ if environ is None else environ
    own = {name: value for name, value in given.items() if not _is_service_link(value)}
    path = (directory or Path()) / ".env"
    if not path.is_file():
        return own
    from dotenv import dotenv_values  # imported only when needed: `--help` stays fast

    try:
        values = dotenv_values(path, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", file=path)]) from error
    return {name: value for name, value in values.items() if value is not None} | own


def _is_service_link(value: str) -> bool:
    return value.startswith(("tcp://", "udp://", "sctp://"))
