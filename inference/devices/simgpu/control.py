"""Tells a running simulator what to do, over its private socket; waits for nothing but the answer."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

SOCKET_NAME = "simgpu.sock"
"""In the directory of the service's sockets."""
ANSWER_SECONDS = 10.0


class SimulatorError(Exception):
    """The simulator does not answer, or refuses; the message says which."""


class Control:
    """A connection to the simulator; a context manager."""

    def __init__(self, path: Path, seconds: float = ANSWER_SECONDS) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(seconds)
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise SimulatorError(f"no simulated device answers at {path} ({error.strerror or error})") from None
        self._answers = self._sock.makefile("rb")

    def tell(self, do: str, device: str | None = None, **amount: float) -> dict[str, dict[str, Any]]:
        """Carries out one command of `faults.COMMANDS`; the status of every device by its id, after it."""
        said = {"do": do, "device": device, **amount}
        try:
            self._sock.sendall(json.dumps(said).encode() + b"\n")
            answer = json.loads(self._answers.readline() or b"{}")
        except (OSError, ValueError) as error:
            raise SimulatorError(f"the simulator gave no answer ({error})") from None
        if "devices" not in answer:
            raise SimulatorError(answer.get("error", "the simulator has ended"))
        return {device["id"]: device for device in answer["devices"]}

    def close(self) -> None:
        """Ends the connection."""
        self._answers.close()
        self._sock.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
