"""Client of the simulator's control socket."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SOCKET_NAME = "simgpu.sock"
"""File name in the directory of the service's sockets."""
ANSWER_SECONDS = 10.0
MOST_ANSWER_BYTES = 2**20


class SimulatorError(Exception):
    """The simulator does not answer, or refuses a command.

    `of_state`: the reason is the state of the device, such as too little memory, or the simulator has ended.
    """

    def __init__(self, message: str, *, of_state: bool = False) -> None:
        super().__init__(message)
        self.of_state = of_state


async def send_command(path: Path, do: str, device: str, *, seconds: float, **amount: float) -> None:
    """Runs one command over a new connection, with a deadline. Raises SimulatorError."""
    command = {"do": do, "device": device, **amount}
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_unix_connection(str(path), limit=MOST_ANSWER_BYTES)
            writer.write(json.dumps(command).encode() + b"\n")
            await writer.drain()
            line = await reader.readline()
        answer = json.loads(line) if line.endswith(b"\n") else {}
    except TimeoutError:
        raise SimulatorError(f"the simulator did not answer within {seconds:g} s") from None
    except (OSError, ValueError) as error:
        is_gone = isinstance(error, OSError)
        raise SimulatorError(f"the simulator gave no answer ({error})", of_state=is_gone) from None
    finally:
        if writer is not None:
            writer.transport.abort()
    if "devices" not in answer:
        raise _refused(answer)


def _refused(answer: Mapping[str, Any]) -> SimulatorError:
    if "error" not in answer:
        return SimulatorError("the simulator has ended", of_state=True)
    return SimulatorError(answer["error"], of_state=answer.get("of_state", False))


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
        """Runs one command of `faults.COMMANDS`. Returns the status of all devices by id."""
        command = {"do": do, "device": device, **amount}
        try:
            self._sock.sendall(json.dumps(command).encode() + b"\n")
            answer = json.loads(self._answers.readline() or b"{}")
        except (OSError, ValueError) as error:
            raise SimulatorError(f"the simulator gave no answer ({error})") from None
        if "devices" not in answer:
            raise _refused(answer)
        return {device["id"]: device for device in answer["devices"]}

    def close(self) -> None:
        """Ends the connection."""
        self._answers.close()
        self._sock.close()

    def __enter__(self) -> Control:
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
