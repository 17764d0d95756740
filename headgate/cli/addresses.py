"""Addresses and keys of the two services for the command line.

The sources of an address, in this order: variables of the shell or `.env`, the record of a running `headgate up` in
the state directory, the configuration file, the default.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headgate.cli.client import Api
from headgate.cli.command import Session
from headgate.shared.errors import AlreadyRunningError, HeadgateError, NotRunningError
from headgate.shared.state_directory import GATEWAY_KEY, INFERENCE_TOKEN, StateDir
from headgate.shared.state_files import open_regular, read_regular, write_atomic

if TYPE_CHECKING:
    from gateway.settings import GatewayConfig

INFERENCE_PORT = 8085
_INFERENCE = ("INFERENCE_HOST", "INFERENCE_PORT")
RECORD = "up.json"
_MAX_BYTES = 2**16
_ADVICE = "move it away, or set HEADGATE_STATE_DIR to another directory"
LOCK = "up.lock"
"""The lock that only one `headgate up` per state directory holds. Other verbs do not touch it."""


@dataclass(frozen=True)
class Record:
    """The file in which `headgate up` publishes its addresses and directories.

    It is valid while `up` holds a lock on this file, which is not LOCK.
    """

    pid: int
    gateway_url: str
    inference_url: str
    config_dir: str = ""
    models_dir: str = ""
    nodes: tuple[str, ...] = ()
    """`inference.nodes` of the gateway."""

    @contextlib.contextmanager
    def published(self, state: StateDir) -> Iterator[None]:
        """Keeps the record in the state directory until the block or this process ends.

        Raises AlreadyRunningError when another `up` uses the state directory, HeadgateError when it cannot be written.
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
                raise HeadgateError(f"cannot write {path} ({error.strerror}); {_ADVICE}") from error
            with path.open("rb") as held:
                fcntl.flock(held, fcntl.LOCK_EX)  # `read` holds it only for a moment
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)

    @classmethod
    def read(cls, state: StateDir) -> Record | None:
        """The record of a running `up`, or None."""
        path = state.file(RECORD)
        try:
            found = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
            finally:
                os.close(found)
        except BlockingIOError:
            with contextlib.suppress(OSError, ValueError, TypeError, KeyError):  # just removed, or an older record
                found = json.loads(read_regular(path, _MAX_BYTES) or b"")
                return cls(**{**found, "nodes": tuple(found["nodes"])})
        except OSError:  # missing, or not a file
            return None
        return None


def _opened_lock(path: Path) -> BinaryIO:
    """The lock file, created if missing. Raises HeadgateError when it cannot be opened or is not a file."""
    try:
        return os.fdopen(open_regular(path, os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    except OSError as error:
        raise HeadgateError(f"cannot open {path} ({error.strerror or error}); {_ADVICE}") from error


def _already_runs(state: StateDir, other: Record | None) -> AlreadyRunningError:
    """The error for a second `up`. `other` is None when the first one has not written its record yet."""
    process = "" if other is None else f" (pid {other.pid}, {other.gateway_url})"
    return AlreadyRunningError(
        f"`headgate up` already runs with the state directory {state.root}{process}; stop it first, or set "
        f"HEADGATE_STATE_DIR to another directory"
    )


def reachable(host: str) -> str:
    """The host for a URL to a service that listens on `host`: loopback for wildcards, brackets around IPv6."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)  # noqa: S104  # a lookup, not a bind
    return f"[{host}]" if ":" in host else host


def url_of(host: str, port: int | str) -> str:
    """The base URL of a service that listens on `host` and `port`."""
    return f"http://{reachable(host)}:{port}"


def gateway_url(session: Session) -> str:
    """The URL of the gateway."""
    if not _any_set(session, "GATEWAY_HOST", "GATEWAY_PORT") and (record := Record.read(session.state)):
        return record.gateway_url
    configured = _settings(session)
    return url_of(configured.host, configured.port)


def inference_url(session: Session) -> str:
    """The URL of the inference service."""
    if _any_set(session, *_INFERENCE):
        port = check_port(session.environ.get("INFERENCE_PORT") or str(INFERENCE_PORT))
        url = url_of(session.environ.get("INFERENCE_HOST", ""), port)
        return url.replace("http:", "https:", 1) if session.environ.get("INFERENCE_TLS_CERTIFICATE") else url
    if not _any_set(session, "GATEWAY_INFERENCE__URL") and (record := Record.read(session.state)):
        return record.inference_url
    return _settings(session).inference.url


def _any_set(session: Session, *names: str) -> bool:
    return any(session.environ.get(name) for name in names)


def _settings(session: Session) -> GatewayConfig:
    from gateway import settings_loading  # takes 0.1 s, which is saved when `up` runs

    return settings_loading.load(session.config_dir, session.environ)


@dataclass(frozen=True)
class Key:
    """The gateway's key and its source: the name of a variable or a file."""

    value: str
    variable: str | None = None
    file: Path | None = None


def gateway_key(environ: Mapping[str, str], state: StateDir, *, admin: bool = False) -> Key | None:
    """The key for the gateway; None when no variable is set and no key has been generated.

    A variable comes before the generated key; with `admin`, GATEWAY_ADMIN_KEY comes before GATEWAY_API_KEY.
    """
    for name in ("GATEWAY_ADMIN_KEY", "GATEWAY_API_KEY") if admin else ("GATEWAY_API_KEY", "GATEWAY_ADMIN_KEY"):
        if value := environ.get(name):
            return Key(value, variable=name)
    found = state.read_secret(GATEWAY_KEY)
    return None if found is None else Key(found, file=state.file(GATEWAY_KEY))


def has_keys(session: Session) -> bool:
    """Whether gateway.yaml configures keys, so that none is generated. Raises ConfigError."""
    return bool(_settings(session).keys)


def gateway(session: Session, *, admin: bool = False, needs_key: bool = False) -> Api:
    """The API of the gateway, with the key of this user. Raises HeadgateError if `needs_key` and there is no key."""
    key = gateway_key(session.environ, session.state, admin=admin)
    if needs_key and key is None:
        raise HeadgateError(
            "no key for the gateway was found; set GATEWAY_API_KEY, or start the gateway once with `headgate up`, "
            "which generates a key unless gateway.yaml has `keys:`"
        )
    return Api("gateway", gateway_url(session), key.value if key else None, "headgate up")


def node_urls(session: Session) -> Mapping[str, str]:
    """The URL of each node of `inference.nodes` by name; empty without nodes, or if INFERENCE_HOST or INFERENCE_PORT
    is set.

    If `inference.nodes` has a source that changes (`dns:`, `ray:`), the running gateway lists its current nodes. Raises
    NotRunningError when it has none.
    """
    if _any_set(session, *_INFERENCE):
        return {}
    is_chosen = _any_set(session, "GATEWAY_INFERENCE__URL", "GATEWAY_INFERENCE__NODES")
    if not is_chosen and (record := Record.read(session.state)):
        entries = record.nodes
    else:
        entries = _settings(session).inference.nodes
    if not entries:
        return {}
    from gateway.settings import node_source

    sources = [node_source(entry) for entry in entries]
    if all(source.kind == "url" for source in sources):
        return {source.name: source.address for source in sources}
    listed = gateway(session, admin=True).get("/admin/nodes")["nodes"]
    if not listed:
        raise NotRunningError(f"the gateway knows no node yet; `inference.nodes` is {', '.join(entries)}")
    return {node["name"]: node["url"] for node in listed}


def inference(session: Session, url: str | None = None, node: str = "") -> Api:
    """The API of the inference service of this machine, or of the node `node` at `url`.

    Its token is INFERENCE_ADMIN_KEY, INFERENCE_TOKEN, or the token file of the state directory.
    """
    token = (
        session.environ.get("INFERENCE_ADMIN_KEY")
        or session.environ.get("INFERENCE_TOKEN")
        or session.state.read_secret(INFERENCE_TOKEN)
    )
    name, hint = (
        (f"inference service of {node}", "headgate inference") if node else ("inference service", "headgate up")
    )
    found = inference_url(session) if url is None else url
    return Api(name, found, token, hint, inference_tls(session) if found.startswith("https:") else None)


def inference_tls(session: Session) -> ssl.SSLContext:
    """The context for `inference.tls`. Raises HeadgateError for files that cannot be used."""
    files = _settings(session).inference.tls
    try:
        context = ssl.create_default_context(cafile=files.ca)
        if files.certificate is not None:
            context.load_cert_chain(files.certificate, files.key)
    except OSError as error:
        names = ", ".join(name for name in (files.ca, files.certificate, files.key) if name is not None)
        raise HeadgateError(
            f"inference.tls in gateway.yaml cannot be used ({names}): {error.strerror or error}"
        ) from error
    return context


def check_port(text: str) -> int:
    """The TCP port in `text`. Raises HeadgateError for anything else."""
    if text.isascii() and text.isdigit() and 0 < int(text) < 65536:
        return int(text)
    raise HeadgateError(f"{text!r} is not a port; use a number from 1 to 65535")
