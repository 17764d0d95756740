"""Reads the environment a process goes by: its variables over `.env` in the working directory; interprets no value."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from headgate.shared.errors import ConfigError, Problem


def load_environ(environ: Mapping[str, str] | None = None, directory: Path | None = None) -> dict[str, str]:
    """`environ` (default: this process's) over the variables in `directory`/.env (default: the working directory).

    A variable that is set, even to nothing, wins over the file. Kubernetes' service links (`INFERENCE_PORT=tcp://...`
    for any service that is called `inference`) are no settings and left out. Raises ConfigError when `.env` cannot be
    read.
    """
    given = os.environ if environ is None else environ
    own = {name: value for name, value in given.items() if not _is_link(value)}
    path = (directory or Path()) / ".env"
    if not path.is_file():
        return own
    from dotenv import dotenv_values  # only where there is a file to read: keeps `--help` quick

    try:
        said = dotenv_values(path, encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([Problem(f"cannot be read: {error}", file=path)]) from error
    return {name: value for name, value in said.items() if value is not None} | own


def _is_link(value: str) -> bool:
    return value.startswith(("tcp://", "udp://", "sctp://"))
