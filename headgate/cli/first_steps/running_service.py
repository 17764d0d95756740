"""The running services: their configuration directory, a reload, and the first plan of a new model."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.cli import addresses
from headgate.cli.client import Api, ApiError, segment
from headgate.cli.command import Session
from headgate.cli.models import plan_lines
from headgate.shared import ports
from headgate.shared.errors import HeadgateError, NotRunningError
from headgate.shared.state_directory import lock_path
from headgate.shared.state_files import read_regular

RELOAD_SECONDS = 15.0
"""Longest wait until a reload has taken effect."""
PLAN_SECONDS = 90.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Target:
    """Where models are added: the configuration directory, and the environment with the models directory.

    They are those of a running `headgate up`, else of this command. A directory that is chosen by an option or a
    variable comes first.
    """

    config_dir: Path
    environ: Mapping[str, str]
    pid: int | None
    """The process that reloads the configuration on SIGHUP. None if none runs, or if `headgate up` uses another
    directory."""

    @classmethod
    def of(cls, session: Session) -> Target:
        """The target of this command."""
        record = addresses.Record.read(session.state)
        environ = dict(session.environ)
        if record is None:
            return cls(session.config_dir, environ, _lock_holder(environ))
        if record.models_dir and not environ.get("INFERENCE_MODELS_DIR"):
            environ["INFERENCE_MODELS_DIR"] = record.models_dir
        chosen = session.args.config_dir or environ.get("HEADGATE_CONFIG_DIR")
        directory = Path(record.config_dir) if record.config_dir and not chosen else session.config_dir
        is_its = not record.config_dir or directory.absolute() == Path(record.config_dir)
        return cls(directory, environ, record.pid if is_its else None)


def _lock_holder(environ: Mapping[str, str]) -> int | None:
    """The process id of an inference service without `headgate up`, from the lock of the machine."""
    path = lock_path(environ)
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _pid_in(path)
    except OSError:  # no service has run yet
        pass
    return None


def _pid_in(path: Path) -> int | None:
    try:
        pid = int(json.loads(read_regular(path, 4096) or b"")["pid"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return pid if "inference" in ports.command(pid) else None


def reload(session: Session, target: Target, model: str) -> Api | None:
    """Lets the running service read its files again and waits until it has `model`. None if no service runs.

    Raises HeadgateError if it does not have the model within RELOAD_SECONDS.
    """
    if target.pid is None:
        return None
    try:
        os.kill(target.pid, signal.SIGHUP)
    except ProcessLookupError:
        return None
    except PermissionError:
        raise HeadgateError(
            f"the running service (pid {target.pid}) belongs to another user; let it reload: sudo kill -HUP "
            f"{target.pid}"
        ) from None
    api = addresses.inference(session)
    ends = time.monotonic() + RELOAD_SECONDS
    while True:
        try:
            api.get(f"/v1/models/{segment(model)}")
        except (ApiError, NotRunningError) as error:
            if time.monotonic() > ends:
                raise HeadgateError(
                    f"the running service (pid {target.pid}) did not add {model} within {RELOAD_SECONDS:g} s "
                    f"({error}); its log says why"
                ) from error
        else:
            return api
        time.sleep(_POLL_SECONDS)


def first_plan(session: Session, api: Api, model: str) -> dict[str, Any] | None:
    """The plan of the service at `api` for `model`; prints its main lines. None, with a printed reason, if it fails."""
    session.terminal.status(f"estimating {model} ...")
    try:
        answer: dict[str, Any] = api.post("/memory/plan", {"model": model}, seconds=PLAN_SECONDS)
    except HeadgateError as error:
        session.terminal.say(f"{model}: {error}")
        return None
    if not session.json:
        for line in plan_lines(model, answer):
            if not line.startswith("  ") or line.startswith("  would "):
                session.terminal.say(line)
    return answer


def say_how_to_ask(session: Session, model: str) -> None:
    """Prints the next step after a model was added."""
    session.terminal.say(
        f'to use it: headgate run {model} "Hello", or in a browser: {addresses.gateway_url(session)}/ui/'
    )
