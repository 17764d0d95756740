"""The directories of configuration and state, generated secrets, `.env`, and the lock for one inference service."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.shared.errors import AlreadyRunningError, ConfigError, HeadgateError, Problem
from headgate.shared.state_files import NotRegularError, open_regular, read_regular, write_temporary

GATEWAY_KEY = "gateway.key"
INFERENCE_TOKEN = "inference.token"

SECRET_NAMES = frozenset({"api_key", "admin_key", "token", "hash"})
"""Settings whose values are not printed."""

INVALID_KEY = "a key must be printable ASCII without spaces at its ends, because clients send it in a header"

_MAX_SECRET_BYTES = 2**16
_ATTEMPTS = 10
"""Attempts to read or create a secret while another process writes or empties the file."""


def fits_a_header(secret: str) -> bool:
    """Whether an HTTP header can carry `secret` unchanged."""
    return secret.isascii() and secret.isprintable() and secret == secret.strip()


def config_dir(environ: Mapping[str, str], given: str | None = None) -> Path:
    """The configuration directory: `given`, HEADGATE_CONFIG_DIR, ./config if it has models.yaml or gateway.yaml, or the
    packaged defaults, in this order.
    """
    if chosen := given or environ.get("HEADGATE_CONFIG_DIR"):
        return Path(chosen).expanduser()
    here = Path("config")
    if (here / "models.yaml").is_file() or (here / "gateway.yaml").is_file():
        return here
    return packaged_defaults()


def packaged_defaults() -> Path:
    """The directory of the configuration that is shipped with Headgate."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "defaults"
    return installed if installed.is_dir() else package.parent / "config"


@dataclass(frozen=True, slots=True)
class StateDir:
    """The private state of a user (mode 0700): keys, measured memory figures, crash records, sockets and locks."""

    root: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> StateDir:
        """HEADGATE_STATE_DIR, by default `$XDG_STATE_HOME/headgate` (`~/.local/state/headgate`). Creates it.

        Raises HeadgateError when it cannot be created.
        """
        base = environ.get("HEADGATE_STATE_DIR")
        if not base:
            base = str(Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headgate")
        state = cls(Path(base).expanduser().absolute())
        state.directory()
        return state

    def directory(self, *parts: str) -> Path:
        """A directory below the root, created with mode 0700. Raises HeadgateError when it cannot be created."""
        path = self.root.joinpath(*parts)
        try:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not parts:
                path.chmod(0o700)
        except OSError as error:
            raise HeadgateError(
                f"cannot use {path} for state ({error.strerror}); set HEADGATE_STATE_DIR to a directory you own"
            ) from error
        return path

    def file(self, *parts: str) -> Path:
        """A path below the root. Creates the directory of the file. Raises HeadgateError when it cannot be created."""
        return self.directory(*parts[:-1]) / parts[-1]

    def read_secret(self, name: str) -> str | None:
        """The secret in file `name`, or None when the file is missing or empty.

        Raises HeadgateError for a file to which other users have access, that cannot be read, or that is not printable.
        """
        path = self.file(name)
        advice = "move it away; the next start creates a new one"
        try:
            data = read_regular(path, _MAX_SECRET_BYTES)
            if data is None:
                return None
            if path.stat().st_mode & 0o077:
                raise HeadgateError(f"other users have access to {path}; run: chmod 600 {path}")
            found = data.decode("ascii").strip()
        except NotRegularError as error:
            raise HeadgateError(f"{path} is {error}; {advice}") from error
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise HeadgateError(f"{path} does not contain a valid key; {advice}") from None
        except OSError as error:
            raise HeadgateError(f"{path} cannot be read ({error.strerror}); {advice}") from error
        if not found.isprintable():
            raise HeadgateError(f"{path} does not contain a valid key; {advice}")
        return found or None

    def secret(self, name: str, prefix: str = "") -> str:
        """The secret in file `name`: `prefix` and 256 random bits, generated on first use. The file has mode 0600.

        Processes that call this at the same time get the same secret. An empty file, which a crash of the machine can
        leave, is replaced. Raises HeadgateError like `read_secret`, and when the file cannot be written.
        """
        path = self.file(name)
        for _ in range(_ATTEMPTS):
            if found := self.read_secret(name):
                return found
            fresh = prefix + secrets.token_urlsafe(32)
            try:
                if _put_first(path, fresh.encode() + b"\n"):
                    return fresh
            except OSError as error:
                raise HeadgateError(
                    f"cannot write {path} ({error.strerror}); make it writable or set HEADGATE_STATE_DIR to another "
                    f"directory"
                ) from error
        raise HeadgateError(f"another process emptied {path} {_ATTEMPTS} times in a row; stop it and try again")


def _put_first(path: Path, data: bytes) -> bool:
    """Writes `path` unless it has content. Returns False when another process wrote or removed it in the meantime.

    Without a file, only one `link` can succeed. An empty file is replaced under its own lock, and only if it is
    still the file at `path`: another process can have replaced it while this one waited for the lock.
    """
    temporary = write_temporary(path, data)
    try:
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
            return True
        with path.open("r+b") as empty:
            fcntl.flock(empty, fcntl.LOCK_EX)
            if not os.path.samestat(os.fstat(empty.fileno()), path.stat()) or empty.read().strip():
                return False
            temporary.replace(path)
            return True
    except FileNotFoundError:  # removed in the meantime: the caller tries again
        return False
    finally:
        temporary.unlink(missing_ok=True)


class MachineLock:
    """The lock that allows one inference service on a machine.

    It is an advisory `flock` on a file in HEADGATE_LOCK_DIR (by default `/run/lock` where writable, else the temporary
    directory). The kernel releases it when the holder ends. The text in the file describes the holder for messages.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path

    @classmethod
    def acquire(cls, environ: Mapping[str, str], holder: Mapping[str, Any]) -> MachineLock:
        """Takes the lock and writes `holder` (pid, url) into its file.

        Raises AlreadyRunningError that names the holder, and HeadgateError when the file cannot be opened.
        """
        path = lock_path(environ)
        try:
            handle = _open_lock(path)
        except OSError as error:
            raise HeadgateError(
                f"cannot open the lock {path} ({error.strerror or error}); "
                f"remove it, or set HEADGATE_LOCK_DIR to a writable directory"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(handle, 4096, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            raise AlreadyRunningError(
                f"an inference service already manages the GPUs of this machine ({_described(text)}); "
                f"stop that service, or use it"
            ) from None
        with contextlib.suppress(OSError):  # another user's file: locked, but without the holder's description
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(dict(holder)).encode(), 0)
        return cls(handle, path)

    def release(self) -> None:
        """Releases the lock. The file stays: with a new inode two holders would be possible."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):  # opened read-only
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1


def lock_path(environ: Mapping[str, str]) -> Path:
    """The path of the lock file, see MachineLock."""
    if chosen := environ.get("HEADGATE_LOCK_DIR"):
        return Path(chosen) / "headgate-authority.lock"
    shared = Path("/run/lock")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / "headgate-authority.lock"


def _open_lock(path: Path) -> int:
    """The opened lock file, created if missing. A file of another user is opened read-only, which `flock` accepts."""
    try:
        handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except PermissionError:
        handle = open_regular(path, os.O_RDONLY | os.O_NOFOLLOW)
    if os.fstat(handle).st_uid == os.geteuid():
        os.fchmod(handle, 0o666)  # despite the umask: other users must be able to open it to see the holder
    return handle


def _described(text: str) -> str:
    """The holder in the text of a lock file, for messages."""
    try:
        description = json.loads(text)
        return ", ".join(f"{key} {value}" for key, value in description.items())
    except (ValueError, AttributeError):
        return "unknown process"


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
