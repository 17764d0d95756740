"""Clients of the simulator's control socket: a function for event loops, and a blocking connection."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headgate.shared.errors import HeadgateError

SOCKET_NAME = "simgpu.sock"
"""File name in the directory of the service's sockets."""
ANSWER_SECONDS = 10.0
MAX_ANSWER_BYTES = 2**20


class SimulatorError(HeadgateError):
    """The simulator does not answer, or refuses a command.

    `by_device_state`: the reason is the state of the device, such as too little memory, or the simulator has ended.
    """

    def __init__(self, message: str, *, by_device_state: bool = False) -> None:
        super().__init__(message)
        self.by_device_state = by_device_state


async def send_command(
    path: Path, do: str, device: str | None = None, *, seconds: float, **amount: float
) -> dict[str, dict[str, Any]]:
    """Runs one command of `faults.COMMANDS` over a new connection, with a deadline. Returns the status of all devices
    by id. Raises SimulatorError.
    """
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MAX_ANSWER_BYTES)
            writer.write(_line(do, device, amount))
            await writer.drain()
            line = await reader.readline()
    except TimeoutError:
        raise SimulatorError(f"the simulator did not answer within {seconds:g} s") from None
    except (ConnectionRefusedError, FileNotFoundError):
        raise SimulatorError("the simulator has ended", by_device_state=True) from None
    except (OSError, ValueError) as error:
        raise SimulatorError(
            f"the simulator did not answer ({error})", by_device_state=isinstance(error, OSError)
        ) from None
    finally:
        if writer is not None:
            writer.transport.abort()
    return _statuses(line)


def _line(do: str, device: str | None, amount: Mapping[str, float]) -> bytes:
    return json.dumps({"do": do, "device": device, **amount}).encode() + b"\n"


def _statuses(line: bytes) -> dict[str, dict[str, Any]]:
    """The status of the devices by id in an answer. Raises SimulatorError for a refusal and for an incomplete line."""
    if not line.endswith(b"\n"):
        raise SimulatorError("the simulator has ended", by_device_state=True)
    try:
        answer = json.loads(line)
    except ValueError as error:
        raise SimulatorError(f"the answer of the simulator is not JSON ({error})") from None
    if "error" in answer:
        raise SimulatorError(answer["error"], by_device_state=answer.get("by_device_state", False))
    return {device["id"]: device for device in answer["devices"]}


class Control:
    """A connection to the simulator; a context manager."""

    def __init__(self, path: Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX)
        self._sock.settimeout(ANSWER_SECONDS)
        try:
            self._sock.connect(str(path))
        except OSError as error:
            self._sock.close()
            raise SimulatorError(f"no simulated device answers at {path} ({error.strerror or error})") from None
        self._answers = self._sock.makefile("rb")

    def send(self, do: str, device: str | None = None, **amount: float) -> dict[str, dict[str, Any]]:
        """Runs one command of `faults.COMMANDS`. Returns the status of all devices by id."""
        try:
            self._sock.sendall(_line(do, device, amount))
            line = self._answers.readline()
        except OSError as error:
            raise SimulatorError(f"the simulator did not answer ({error})") from None
        return _statuses(line)

    def close(self) -> None:
        """Ends the connection."""
        self._answers.close()
        self._sock.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
