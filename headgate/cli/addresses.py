"""Finds the two services and the secrets to talk to them; starts nothing and waits for nothing.

An address comes from, in this order: variables set in this shell or `.env`, the record that a running `headgate up`
keeps in the state directory, the configuration file, the default.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headgate.cli.client import Api
from headgate.cli.command import Session
from headgate.shared.errors import AlreadyRunningError, HeadgateError
from headgate.shared.state import GATEWAY_KEY, INFERENCE_TOKEN, StateDir
from headgate.shared.state_files import NotRegularError, check_regular, read_regular, write_atomic

if TYPE_CHECKING:
    from gateway.settings import GatewayConfig

INFERENCE_PORT = 8085
RECORD = "up.json"
_MOST_BYTES = 2**16
_MEND = "move what is there away, or set HEADGATE_STATE_DIR to another directory"
LOCK = "up.lock"
"""Held by the one `headgate up` of a state directory; never replaced, and nobody who only looks touches it."""


@dataclass(frozen=True)
class Record:
    """What a running `headgate up` says of itself. It is alive as long as its writer holds the file's lock."""

    pid: int
    gateway_url: str
    inference_url: str

    @contextlib.contextmanager
    def published(self, state: StateDir) -> Iterator[None]:
        """Leaves the record in the state directory until the block, or this process, ends.

        Raises AlreadyRunningError while another one's is there: verbs find one system in a state directory.
        """
        with _opened_lock(state.file(LOCK)) as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise _already_runs(state, self.read(state)) from None
            path = state.file(RECORD)
            try:
                write_atomic(path, json.dumps(asdict(self)).encode())
            except OSError as error:
                raise HeadgateError(f"cannot write {path} ({error.strerror}); {_MEND}") from error
            with path.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX)  # waits for no more than a look of `read`
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)

    @classmethod
    def read(cls, state: StateDir) -> Record | None:
        """The record of an `up` that runs, or None."""
        path = state.file(RECORD)
        try:
            found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
            finally:
                os.close(found)
        except BlockingIOError:
            with contextlib.suppress(OSError, ValueError, TypeError):  # gone this moment, or of another version
                return cls(**json.loads(read_regular(path, _MOST_BYTES) or b""))
        except OSError:  # there is none, or something else is in its place
            return None
        return None


def _opened_lock(path: Path) -> BinaryIO:
    """The lock file, made where it is missing; raises HeadgateError for what is no file."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
        try:
            check_regular(os.fstat(handle).st_mode)
        except NotRegularError:
            os.close(handle)
            raise
    except OSError as error:
        raise HeadgateError(f"cannot open {path} ({error.strerror or error}); {_MEND}") from error
    return os.fdopen(handle, "r+b", buffering=0)


def _already_runs(state: StateDir, other: Record | None) -> AlreadyRunningError:
    """`other` is None while the one that runs has not written its record yet."""
    who = "" if other is None else f" (pid {other.pid}, {other.gateway_url})"
    return AlreadyRunningError(
        f"`headgate up` runs already with the state directory {state.root}{who}; stop it first, or set "
        f"HEADGATE_STATE_DIR to another directory"
    )


def reachable(host: str) -> str:
    """A host to connect to for one that is listened on: loopback for the wildcards, brackets around IPv6."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # a lookup, not a bind
    return f"[{host}]" if ":" in host else host


def url_of(host: str, port: int | str) -> str:
    """The base URL of a service that listens on `host`:`port`."""
    return f"http://{reachable(host)}:{port}"


def gateway_url(session: Session) -> str:
    """Where the gateway answers."""
    if not _any_set(session, "GATEWAY_HOST", "GATEWAY_PORT") and (record := Record.read(session.state)):
        return record.gateway_url
    configured = _settings(session)
    return url_of(configured.host, configured.port)


def inference_url(session: Session) -> str:
    """Where the inference service answers."""
    if _any_set(session, "INFERENCE_HOST", "INFERENCE_PORT"):
        port = check_port(session.environ.get("INFERENCE_PORT") or str(INFERENCE_PORT))
        return url_of(session.environ.get("INFERENCE_HOST", ""), port)
    if not _any_set(session, "GATEWAY_INFERENCE__URL") and (record := Record.read(session.state)):
        return record.inference_url
    return _settings(session).inference.url


def _any_set(session: Session, *names: str) -> bool:
    return any(session.environ.get(name) for name in names)


def _settings(session: Session) -> GatewayConfig:
    from gateway import settings  # a tenth of a second that a live record saves

    return settings.load(session.config_dir, session.environ)


@dataclass(frozen=True)
class Key:
    """The gateway's key and where it comes from: a variable's name, or the file that holds it."""

    value: str
    variable: str | None = None
    file: Path | None = None


def gateway_key(environ: Mapping[str, str], state: StateDir, *, admin: bool = False) -> Key | None:
    """The key to talk to the gateway with; None when none was set and none has been generated yet."""
    for name in ("GATEWAY_ADMIN_KEY", "GATEWAY_API_KEY") if admin else ("GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY"):
        if value := environ.get(name):
            return Key(value, variable=name)
    found = state.read_secret(GATEWAY_KEY)
    return None if found is None else Key(found, file=state.file(GATEWAY_KEY))


def has_keys(session: Session) -> bool:
    """Whether gateway.yaml names keys of its own, so that none is generated; raises ConfigError."""
    return bool(_settings(session).keys)


def gateway(session: Session, *, admin: bool = False) -> Api:
    """The gateway, with the key that this user has."""
    key = gateway_key(session.environ, session.state, admin=admin)
    return Api("gateway", gateway_url(session), key.value if key else None, "headgate up")


def inference(session: Session) -> Api:
    """The inference service, with its admin key where there is one, else with the token that both services share."""
    token = (
        session.environ.get("INFERENCE_ADMIN_KEY")
        or session.environ.get("INFERENCE_TOKEN")
        or session.state.read_secret(INFERENCE_TOKEN)
    )
    return Api("inference service", inference_url(session), token, "headgate up")


def check_port(text: str) -> int:
    """A TCP port number from a variable or an option; raises HeadgateError for anything else."""
    if text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise HeadgateError(f"{text!r} is not a port; a number from 1 to 65535 is needed")
