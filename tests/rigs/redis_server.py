"""A real Redis or Valkey server on a free port, which a test may kill and start again."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
START_SECONDS = 10.0


class RedisServer:
    """The server; its data is in memory only. `port` stays the same over restarts."""

    def __init__(self, directory: Path) -> None:
        if SERVER is None:
            pytest.skip("needs redis-server or valkey-server, which this machine does not have")
        self._directory = directory
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Starts it and waits until it accepts connections."""
        assert SERVER is not None
        command = [SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._process = subprocess.Popen(command, cwd=self._directory, stdout=subprocess.DEVNULL)
        until = time.monotonic() + START_SECONDS
        while True:
            try:
                with socket.create_connection(("127.0.0.1", self.port), 0.2):
                    return
            except OSError:
                assert time.monotonic() < until, f"{SERVER} does not answer"
                time.sleep(0.01)

    def kill(self) -> None:
        """Ends it at once; its data is lost."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)
            self._process = None

    def pause(self, seconds: float) -> None:
        """Lets commands wait, as a network that loses packets does."""
        self.command("CLIENT", "PAUSE", str(round(seconds * 1000)), "ALL")

    def command(self, *words: str) -> bytes:
        """The raw reply to one command."""
        with socket.create_connection(("127.0.0.1", self.port), 5) as connection:
            parts = [f"*{len(words)}\r\n".encode()]
            parts += [b"$%d\r\n%s\r\n" % (len(word.encode()), word.encode()) for word in words]
            connection.sendall(b"".join(parts))
            return connection.recv(65536)
