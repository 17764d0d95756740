"""Where private state lives and who may read it: directories, generated keys, the machine lock; decides no policy."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headgate.shared.errors import AlreadyRunningError, HeadgateError

GATEWAY_KEY = "gateway.key"
INFERENCE_TOKEN = "inference.token"

SECRET_NAMES = frozenset({"api_key", "admin_key", "token", "hash"})
"""Settings whose values nobody repeats."""

UNSHOWABLE = "a key is printable ASCII without spaces around it; as it is, no request could ever show it"
"""The problem of a secret that does not fit a header."""

_MOST_SECRET_BYTES = 2**16
_TRIES = 10
"""How often a secret is looked for again after somebody else was quicker to write or to empty it."""


def fits_a_header(secret: str) -> bool:
    """Whether a request can show `secret` as it is."""
    return secret.isascii() and secret.isprintable() and secret == secret.strip()


def config_dir(environ: Mapping[str, str], given: str | None = None) -> Path:
    """The configuration directory: `given`, else HEADGATE_CONFIG_DIR, else ./config, else the packaged defaults."""
    if chosen := given or environ.get("HEADGATE_CONFIG_DIR"):
        return Path(chosen).expanduser()
    here = Path("config")
    if (here / "models.yaml").is_file() or (here / "gateway.yaml").is_file():
        return here
    return packaged_defaults()


def packaged_defaults() -> Path:
    """The configuration shipped with the package: beside the package in a checkout, inside it once installed."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "defaults"
    return installed if installed.is_dir() else package.parent / "config"


@dataclass(frozen=True, slots=True)
class StateDir:
    """Private per-user state (mode 0700): keys, learned figures, crash records, sockets and locks."""

    root: Path

    @classmethod
    def from_env(cls, environ: Mapping[str, str]) -> StateDir:
        """HEADGATE_STATE_DIR, default `$XDG_STATE_HOME/headgate` (`~/.local/state/headgate`); created when absent."""
        base = environ.get("HEADGATE_STATE_DIR")
        if not base:
            base = str(Path(environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "headgate")
        state = cls(Path(base).expanduser().absolute())
        state.directory()
        return state

    def directory(self, *parts: str) -> Path:
        """A directory below the root, created with mode 0700; raises HeadgateError when that is impossible."""
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
        """A path below the root whose directory exists."""
        return self.directory(*parts[:-1]) / parts[-1]

    def read_secret(self, name: str) -> str | None:
        """The secret kept in file `name`, or None where there is no such file or nothing in it.

        A file that others can read, or that holds no secret, is refused with HeadgateError.
        """
        path = self.file(name)
        mend = "move it away, and a new one is made at the next start"
        try:
            data = read_regular(path, _MOST_SECRET_BYTES)
            if data is None:
                return None
            if path.stat().st_mode & 0o077:
                raise HeadgateError(f"{path} can be read by others; run: chmod 600 {path}")
            found = data.decode("ascii").strip()
        except NotRegularError as error:
            raise HeadgateError(f"{path} is {error}; {mend}") from error
        except FileNotFoundError:
            return None
        except UnicodeDecodeError:
            raise HeadgateError(f"{path} holds something that is not a key; {mend}") from None
        except OSError as error:
            raise HeadgateError(f"{path} cannot be read ({error.strerror}); {mend}") from error
        if not found.isprintable():
            raise HeadgateError(f"{path} holds something that is not a key; {mend}")
        return found or None

    def secret(self, name: str, prefix: str = "") -> str:
        """The secret kept in file `name`, generated (256 bits, mode 0600) on first use; safe against races.

        An empty file is what a crash of the machine may leave; it is replaced.
        """
        path = self.file(name)
        for _ in range(_TRIES):
            if found := self.read_secret(name):
                return found
            fresh = prefix + secrets.token_urlsafe(32)
            try:
                if _put_first(path, fresh.encode() + b"\n"):
                    return fresh
            except OSError as error:
                raise HeadgateError(
                    f"cannot write {path} ({error.strerror}); make that possible, or set HEADGATE_STATE_DIR to another "
                    f"directory"
                ) from error
        raise HeadgateError(f"{path} was emptied by somebody else {_TRIES} times in a row")


class NotRegularError(OSError):
    """A directory, a pipe, a socket or a device is in the place of a file; the text says which."""


_KINDS = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}


def check_regular(mode: int) -> None:
    """Raises NotRegularError unless `mode` (`st_mode`) is that of a regular file."""
    if not stat.S_ISREG(mode):
        raise NotRegularError(f"{_KINDS.get(stat.S_IFMT(mode), 'a device')} instead of a file")


def read_regular(path: Path, most_bytes: int) -> bytes | None:
    """The content of a file of the state directory, or its first `most_bytes` + 1 bytes; None where there is none.

    Never waits: a pipe in the place of the file is not read. Raises NotRegularError, and OSError.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno == errno.ENXIO:  # a socket, or a device without a driver
            raise NotRegularError("a socket or a device instead of a file") from error
        raise
    try:
        check_regular(os.fstat(handle).st_mode)
        with os.fdopen(handle, "rb", closefd=False) as file:
            return file.read(most_bytes + 1)
    finally:
        os.close(handle)


def _put_first(path: Path, data: bytes) -> bool:
    """Gives `path` its first content; False when somebody else was quicker.

    Where no file is, only one link can succeed. An empty file is replaced under its own lock, and only while it still
    is the one at `path`, so whoever waited for the lock finds that it is not.
    """
    temporary = _written_beside(path, data)
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
    except FileNotFoundError:  # removed between two looks: the next look starts over
        return False
    finally:
        temporary.unlink(missing_ok=True)


def _written_beside(path: Path, data: bytes) -> Path:
    """A private temporary file beside `path` that holds `data`, on the disk; raises OSError that names `path`."""
    temporary: Path | None = None
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        temporary = Path(name)
        with os.fdopen(handle, "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
    except BaseException as error:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise
    return temporary


def write_atomic(path: Path, data: bytes) -> None:
    """Replaces `path` with `data` so that a reader or a crash sees the old or the new content, never a mixture.

    Raises OSError that names `path`.
    """
    temporary = _written_beside(path, data)
    try:
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


class MachineLock:
    """The lock that makes one inference service the sole GPU authority of a machine.

    It is an advisory `flock` on one file in HEADGATE_LOCK_DIR (default `/run/lock` where writable, else the temporary
    directory), so the kernel drops it however the holder dies. The file's text names the holder for messages only.
    """

    def __init__(self, handle: int, path: Path) -> None:
        self._handle = handle
        self.path = path

    @classmethod
    def acquire(cls, environ: Mapping[str, str], describe: Mapping[str, Any]) -> MachineLock:
        """Takes the lock or raises AlreadyRunningError naming the holder; `describe` (pid, url) is left for others."""
        path = lock_path(environ)
        try:
            handle = _open_lock(path)
        except OSError as error:
            raise HeadgateError(
                f"cannot open the authority lock {path} ({error.strerror or error}); "
                f"remove what is there, or set HEADGATE_LOCK_DIR to a writable directory"
            ) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 4096, 0).decode("utf-8", "replace").strip()
            os.close(handle)
            raise AlreadyRunningError(
                f"an inference service already is the GPU authority of this machine ({_holder(holder)}); "
                f"stop it first, or use it as it is"
            ) from None
        with contextlib.suppress(OSError):  # another user's file: held all the same, only the holder's name is missing
            os.ftruncate(handle, 0)
            os.pwrite(handle, json.dumps(dict(describe)).encode(), 0)
        return cls(handle, path)

    def release(self) -> None:
        """Gives the lock back; the file stays, so that no second holder can race on a fresh inode."""
        if self._handle >= 0:
            with contextlib.suppress(OSError):  # opened for reading only
                os.ftruncate(self._handle, 0)
            os.close(self._handle)
            self._handle = -1


def lock_path(environ: Mapping[str, str]) -> Path:
    """The lock file's path; one per machine unless HEADGATE_LOCK_DIR says otherwise."""
    if chosen := environ.get("HEADGATE_LOCK_DIR"):
        return Path(chosen) / "headgate-authority.lock"
    shared = Path("/run/lock")
    base = shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())
    return base / "headgate-authority.lock"


def _open_lock(path: Path) -> int:
    """A descriptor to lock; a file that another user left behind is opened for reading, which `flock` accepts."""
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except PermissionError:
        handle = os.open(path, os.O_RDONLY | flags)
    try:
        check_regular(os.fstat(handle).st_mode)
    except NotRegularError:
        os.close(handle)
        raise
    if os.fstat(handle).st_uid == os.geteuid():
        os.fchmod(handle, 0o666)  # the umask took the others' bits away; they need to open it to be refused properly
    return handle


def _holder(text: str) -> str:
    try:
        said = json.loads(text)
        return ", ".join(f"{key} {value}" for key, value in said.items())
    except (ValueError, AttributeError):
        return "it left no name"
