"""Starts a real worker process as the authority does: socketpair, passed Unix socket, grant; for tests."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from inference import worker_link
from tests.rigs.processes import private_env

M = TypeVar("M", bound=worker_link.Message)
CPU = worker_link.DeviceGrant("cpu", "cpu")


def grant_for(model: Path, **changes: Any) -> worker_link.Grant:
    """A grant for a tiny model on the CPU."""
    fields: dict[str, Any] = {
        "model_id": "tiny",
        "path": str(model),
        "devices": (CPU,),
        "gpu_layers": 0,
        "context_length": 1024,
        "parallel": 4,
        "batch": 512,
        "ubatch": 256,
        "threads": 1,
    }
    return worker_link.Grant(**{**fields, **changes})


@dataclass
class WorkerRig:
    """One worker process and the parent's ends of its link and socket."""

    root: Path
    grant: worker_link.Grant | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    keep: int | None = None
    """A descriptor of memory for sequences that outlive the process; stays open."""
    beats: list[worker_link.Heartbeat] = field(default_factory=list)

    def start(self) -> WorkerRig:
        """Spawns the process; sends the grant when there is one. Does not wait for it to be ready."""
        self.directory = tempfile.mkdtemp(prefix="hgw")  # a Unix socket path holds 108 bytes
        self.socket_path = str(Path(self.directory) / "s")
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.socket_path)
        listener.listen(128)
        self.ours, theirs = socket.socketpair()
        env = {
            **private_env(self.root, self.env),
            worker_link.LINK_FD_ENV: str(theirs.fileno()),
            worker_link.SOCKET_FD_ENV: str(listener.fileno()),
            worker_link.PARENT_ENV: str(os.getpid()),
            "GGML_NO_BACKTRACE": "1",
        }
        kept = () if self.keep is None else (self.keep,)
        if self.keep is not None:
            env[worker_link.ARENA_FD_ENV] = str(self.keep)
        self.log_path = self.root / "worker.log"
        with self.log_path.open("ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "inference.worker"],
                env=env,
                pass_fds=(theirs.fileno(), listener.fileno(), *kept),
                process_group=0,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        theirs.close()
        listener.close()
        self._messages: queue.Queue[worker_link.Message | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        if self.grant is not None:
            self.send(self.grant)
        return self

    def _read(self) -> None:
        pending = b""
        with contextlib.suppress(OSError):
            while data := self.ours.recv(65536):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    message = worker_link.decode(line)
                    if isinstance(message, worker_link.Heartbeat):
                        self.beats.append(message)
                    self._messages.put(message)
        self._messages.put(None)

    @property
    def log(self) -> str:
        """Everything the worker printed."""
        return self.log_path.read_text(errors="replace")

    def send(self, message: worker_link.Message) -> None:
        """Sends a message to the worker."""
        self.ours.sendall(worker_link.encode(message))

    def expect(self, kind: type[M], seconds: float = 20.0) -> M:
        """The next message of that kind; others before it are passed over."""
        while True:
            try:
                message = self._messages.get(timeout=seconds)
            except queue.Empty:
                raise AssertionError(f"no {kind.__name__} within {seconds:g} s:\n{self.log}") from None
            if message is None:
                raise AssertionError(f"the worker ended without {kind.__name__}:\n{self.log}")
            if isinstance(message, kind):
                return message

    def ready(self) -> worker_link.Ready:
        """Waits until the model is loaded."""
        return self.expect(worker_link.Ready)

    def post(self, path: str, body: Any, headers: Mapping[str, str] | None = None) -> tuple[int, dict[str, Any]]:
        """Status and JSON of one request; `body` may be raw bytes."""
        with self.connection() as connection:
            raw = body if isinstance(body, bytes) else json.dumps(body).encode()
            connection.request("POST", path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def stream(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None) -> Iterator[bytes]:
        """The SSE frames of a streamed request, without their blank lines; asserts status 200."""
        with self.connection() as connection:
            raw = json.dumps({**body, "stream": True}).encode()
            connection.request("POST", path, raw, {"content-type": "application/json", **(headers or {})})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            lines: list[bytes] = []
            for line in answer:
                if line == b"\n":
                    yield b"".join(lines).rstrip(b"\n")
                    lines = []
                else:
                    lines.append(line)

    def chunks(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> list[dict[str, Any]]:
        """The JSON chunks of a streamed request that must end in [DONE]."""
        frames = [frame for frame in self.stream(path, body, headers) if not frame.startswith(b":")]
        assert frames[-1] == b"data: [DONE]", frames[-1]
        return [json.loads(frame.removeprefix(b"data: ")) for frame in frames[:-1]]

    @contextlib.contextmanager
    def connection(self, seconds: float = 60.0) -> Iterator[http.client.HTTPConnection]:
        """An HTTP connection to the worker's socket; closed at once at the end."""
        connection = _UnixConnection(self.socket_path, seconds)
        try:
            yield connection
        finally:
            connection.close()

    def next_beat(self, seconds: float = 5.0) -> worker_link.Heartbeat:
        """The next heartbeat that was not read yet; it may have arrived before this call."""
        return self.expect(worker_link.Heartbeat, seconds)

    def fresh_beat(self) -> worker_link.Heartbeat:
        """The next heartbeat that arrives after this call."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._messages.get_nowait()
        return self.next_beat()

    def wait(self, seconds: float = 20.0) -> int:
        """Exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the worker still runs after {seconds:g} s:\n{self.log}") from None

    def close(self) -> None:
        """Ends the process, however it is, and removes its socket."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        self.ours.close()
        with contextlib.suppress(FileNotFoundError):
            Path(self.socket_path).unlink()
        Path(self.directory).rmdir()

    def __enter__(self) -> WorkerRig:
        return self.start()

    def __exit__(self, *_error: object) -> None:
        self.close()


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("worker", timeout=seconds)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)
