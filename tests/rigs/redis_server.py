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
    """The server; its data is in memory only. `port` stays the same over restarts.

    With `certificate` (authority, certificate, key) the port has TLS.
    """

    def __init__(self, directory: Path, certificate: tuple[Path, Path, Path] | None = None) -> None:
        if SERVER is None:
            pytest.skip("needs redis-server or valkey-server, which this machine does not have")
        self._directory = directory
        self._certificate = certificate
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        """Its address."""
        if self._certificate is not None:
            return f"rediss://127.0.0.1:{self.port}/0?ssl_ca_certs={self._certificate[0]}"
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def unix_url(self) -> str:
        """The address of its Unix socket."""
        return f"unix://{self._directory}/redis.sock?db=0"

    def start(self) -> None:
        """Starts it and waits until it accepts connections."""
        assert SERVER is not None
        command = [SERVER, "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--unixsocket", "redis.sock"]
        if self._certificate is None:
            command += ["--port", str(self.port)]
        else:
            command += ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            names = ("--tls-ca-cert-file", "--tls-cert-file", "--tls-key-file")
            command += [word for pair in zip(names, map(str, self._certificate), strict=True) for word in pair]
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
