"""The process of the GPU simulator: `python -m inference.devices.simgpu SOCKET SIZE...`.

SIZE is bytes. The first line on stdout is the status, after all devices listen. Commands are JSON lines over the
private Unix socket; each is answered with the status of all devices, or `{"error": message, "by_device_state": bool}`.
The process ends with its parent, or when stdin ends; SIGINT and SIGTERM are ignored, because the parent handles them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from headgate.shared import child_process
from headgate.shared import log as logs
from inference.devices.simgpu.backing import Servers
from inference.devices.simgpu.faults import parse
from inference.devices.simgpu.simulated_device import Device, StateError

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 2**16
_NAMESPACE = uuid.UUID("6f1d5a52-0c1b-4e0e-9f52-9c7f6a1b9d10")


class Machine:
    """All simulated devices of one machine."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self.servers = Servers()
        self.devices = [
            Device(f"gpu-{index}", f"SIM-{uuid.uuid5(_NAMESPACE, f'{index}')}", size, self.servers)
            for index, size in enumerate(sizes)
        ]

    async def open(self) -> None:
        """Opens all devices; they listen when this returns."""
        self.servers.prepare()
        for device in self.devices:
            await device.open()

    async def close(self) -> None:
        """Closes all devices and their connections."""
        for device in self.devices:
            await device.close()
        await self.servers.close()

    def status(self) -> dict[str, Any]:
        """The status of all devices."""
        return {"devices": [device.status() for device in self.devices]}

    async def answer(self, line: bytes) -> dict[str, Any]:
        """Runs one command; returns the status or an error."""
        try:
            command = parse(json.loads(line), [device.id for device in self.devices])
            for device in self.devices:
                if command.device in (None, device.id):
                    await device.run_command(command)
        except ValueError as error:  # includes JSONDecodeError
            return {"error": str(error), "by_device_state": isinstance(error, StateError)}
        if command.do != "status":
            log.info("command for %s: %s", command.device or "all devices", line.decode("utf-8", "replace").strip())
        return self.status()


async def run(path: Path, sizes: Sequence[int]) -> None:
    """Serves until stdin ends."""
    machine = Machine(sizes)
    await machine.open()
    before = os.umask(0o177)
    try:
        control = await asyncio.start_unix_server(
            lambda reader, writer: _control(machine, reader, writer), str(path), limit=MAX_LINE_BYTES
        )
    finally:
        os.umask(before)
    try:
        sys.stdout.write(json.dumps(machine.status()) + "\n")
        sys.stdout.flush()
        await _stdin_ended()
    finally:
        control.close()
        await machine.close()


async def _control(machine: Machine, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while line := await reader.readline():
            writer.write(json.dumps(await machine.answer(line)).encode() + b"\n")
            await writer.drain()
    except (OSError, ValueError) as error:  # disconnected, or a line that is too long
        log.warning("a control connection ended: %s", error)
    finally:
        writer.close()


async def _stdin_ended() -> None:
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    while await reader.read(4096):
        continue


def main(argv: list[str] | None = None) -> int:
    """Runs the simulator; returns 0 after stdin ended."""
    arguments = sys.argv[1:] if argv is None else argv
    child_process.die_with_parent(os.environ)
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    logs.set_up(os.environ)
    path = Path(arguments[0])
    path.unlink(missing_ok=True)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(run(path, [int(size) for size in arguments[1:]]))
    except OSError as error:
        log.error("the simulator failed: %s", error)  # noqa: TRY400 - the message is enough
        return 1
    finally:
        path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
