"""Starts and ends real Headgate processes for tests: private state, free ports, collected output."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import pytest

T = TypeVar("T")

OWN = ("GATEWAY_", "INFERENCE_", "HEADGATE_")
"""Prefixes of Headgate's own variables."""

START_DEADLINE_SECONDS = 60.0


PORTS = range(20_000, 32_000)
"""Below the range from which the kernel selects ports, so that no other program gets one before its use."""


def free_port() -> int:
    """A TCP port on loopback that was free a moment ago."""
    while True:
        with socket.socket() as sock, contextlib.suppress(OSError):  # in use
            sock.bind(("127.0.0.1", random.SystemRandom().choice(PORTS)))
            return int(sock.getsockname()[1])


def wait_until(what: str, probe: Callable[[], T], *, seconds: float = 20.0, every: float = 0.02) -> T:
    """Polls `probe` until its result is true and returns it; AssertionError naming `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        if value := probe():
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(every)


def http_status(url: str, seconds: float = 2.0) -> int | None:
    """Status of a GET on `url`, or None without an answer."""
    try:
        with urllib.request.urlopen(url, timeout=seconds) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def private_env(root: Path, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment without the developer's configuration, keys, state and lock."""
    keep = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith((*OWN, "OPENAI_", "ANTHROPIC_", "GEMINI_", "OTEL_", "XDG_"))
    }
    state = root / "state"
    locks = root / "locks"
    state.mkdir(mode=0o700, parents=True, exist_ok=True)
    locks.mkdir(parents=True, exist_ok=True)
    return keep | {
        "HEADGATE_STATE_DIR": str(state),
        "HEADGATE_LOCK_DIR": str(locks),
        "PYTHONUNBUFFERED": "1",
        **(extra or {}),
    }


def forget_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes all variables of Headgate for the duration of a test."""
    for name in list(os.environ):
        if name.startswith(OWN):
            monkeypatch.delenv(name)


def command_of(pid: int) -> str:
    """The command line of a process with spaces between its words; empty if it has ended (Linux)."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except OSError:
        return ""


def descendants_of(pid: int) -> list[int]:
    """Process ids of all living descendants of `pid` (Linux)."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            fields = stat.rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    frontier = [pid]
    while frontier:
        here = frontier.pop()
        kids = [child for child, parent in parents.items() if parent == here]
        found += kids
        frontier += kids
    return found


def of_models(pid: int) -> list[str]:
    """Command lines of the workers and helpers below `pid` that work on models, without the helper for NVML (Linux)."""
    commands = [command_of(child) for child in descendants_of(pid)]
    return [
        command
        for command in commands
        if "inference.worker" in command or ("inference.helper" in command and "helper nvml" not in command)
    ]


def is_alive(pid: int) -> bool:
    """Whether `pid` is a process that is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@dataclass
class Service:
    """One program. `url` is where it answers; `log` is everything it wrote to stdout and stderr so far."""

    argv: Sequence[str]
    env: Mapping[str, str]
    root: Path
    port: int
    name: str = "service"
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Base address without a trailing slash."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id; AssertionError when not started."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def log_path(self) -> Path:
        """The file that collects stdout and stderr."""
        return self.root / f"{self.name}.log"

    @property
    def log(self) -> str:
        """Everything printed so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def spawn(self) -> Service:
        """Starts the program."""
        with self.log_path.open("ab") as out:
            self._process = subprocess.Popen(
                list(self.argv), env=dict(self.env), cwd=self.root, stdin=subprocess.DEVNULL, stdout=out, stderr=out
            )
        return self

    def exit_status(self) -> int | None:
        """Its exit status; None while it runs."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.poll()

    def start(self, *, wait_for: str = "/livez", seconds: float = START_DEADLINE_SECONDS) -> Service:
        """Starts the program and returns once GET `wait_for` answers 200; AssertionError with its log otherwise."""
        self.spawn()

        def answered() -> bool:
            if (status := self.exit_status()) is not None:
                raise AssertionError(f"{self.name} ended with status {status} at start:\n{self.log}")
            return http_status(self.url + wait_for) == 200

        try:
            wait_until(f"{self.name} answers {wait_for}", answered, seconds=seconds)
        except AssertionError as error:
            self.kill()
            raise AssertionError(f"{error}\n{self.log}") from None
        return self

    def signal(self, number: int) -> None:
        """Sends a signal to the program itself (not its children)."""
        os.kill(self.pid, number)

    def wait(self, seconds: float = 30.0) -> int:
        """Exit status; AssertionError with the log when it is still running after `seconds`."""
        assert self._process is not None
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs after {seconds:g} s:\n{self.log}") from None

    def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM, then the exit status."""
        if self._process is None:
            return 0
        if self._process.poll() is None:
            self.signal(signal.SIGTERM)
        return self.wait(seconds)

    def kill(self) -> None:
        """SIGKILL to the program and to all its descendants."""
        if self._process is None:
            return
        tree = descendants_of(self._process.pid)
        for pid in (self._process.pid, *tree):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait(10)


def inference_service(
    root: Path, config_dir: Path, env: Mapping[str, str] | None = None, port: int | None = None
) -> Service:
    """An inference service on a free port with private state below `root`; not started yet."""
    port = port or free_port()
    argv = [sys.executable, "-m", "inference", "--config-dir", str(config_dir), "--port", str(port)]
    return Service(argv, private_env(root, env), root, port, "inference")


def gateway_service(
    root: Path, config_dir: Path, inference_url: str | None = None, env: Mapping[str, str] | None = None
) -> Service:
    """A gateway on a free port with private state below `root`; not started yet."""
    port = free_port()
    argv = [sys.executable, "-m", "gateway", "--config-dir", str(config_dir), "--port", str(port)]
    where = {"GATEWAY_INFERENCE__URL": inference_url} if inference_url else {}
    return Service(argv, private_env(root, {**where, **(env or {})}), root, port, "gateway")
