"""Starts the simulator, reads its devices and notices its end; decides nothing. Its end is the loss of its devices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.bootstrap import missing_backends
from headgate.shared.errors import ConfigError, HeadgateError, Problem
from inference.childenv import child_environment
from inference.devices.base import HIDDEN, Reading
from inference.devices.simgpu.control import SOCKET_NAME
from inference.devices.simgpu.server import package
from inference.protocol import DeviceState

log = logging.getLogger(__name__)

START_SECONDS = 30.0
ANSWER_SECONDS = 5.0
MOST_LINE_BYTES = 2**20
KIND = "sim"


class SimProbe:
    """The simulated devices `gpu-0`, `gpu-1`, ...; `directory` is private and holds the simulator's socket.

    `engine` is the folder of llama-cpp-python, whose RPC they need.
    """

    def __init__(self, sizes: Sequence[int], directory: Path | None = None, *, engine: Path | None = None) -> None:
        self._sizes = tuple(sizes)
        self._engine = engine or package()
        self._own = tempfile.TemporaryDirectory(prefix="hg-sim-") if directory is None else None
        self.socket_path = (Path(self._own.name) if self._own is not None else directory or Path()) / SOCKET_NAME
        self._process: asyncio.subprocess.Process | None = None
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        self._readings: tuple[Reading, ...] = ()

    @property
    def pid(self) -> int | None:
        """The simulator's process."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Returns when every device listens; raises HeadgateError when they cannot be had."""
        if self._engine is None or missing_backends(self._engine, ["rpc"]):
            message = "simulated devices need llama-cpp-python built with RPC: CMAKE_ARGS=-DGGML_RPC=ON make serve"
            raise ConfigError([Problem(message, key="INFERENCE_DEVICES")])
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.devices.simgpu",
            str(self.socket_path),
            *map(str, self._sizes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(HIDDEN),
            limit=MOST_LINE_BYTES,
        )
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                status = json.loads(await self._process.stdout.readline())
                self._streams = await self._connect()
        except (TimeoutError, OSError, ValueError) as error:
            await self.close()
            raise HeadgateError(f"the simulated devices did not start ({str(error) or 'no answer in time'})") from error
        except BaseException:
            await self.close()
            raise
        self._readings = tuple(map(_reading, status["devices"]))
        self._watch = asyncio.create_task(self._notice_end(self._process))

    def readings(self) -> tuple[Reading, ...]:
        """The newest figures."""
        return self._readings

    async def refresh(self) -> None:
        """Asks the simulator; one that does not answer in time has lost its devices."""
        try:
            status = await self.tell("status")
        except HeadgateError as error:
            self._lose(str(error))
        else:
            self._readings = tuple(map(_reading, status["devices"]))

    async def tell(self, do: str, device: str | None = None, **amount: float) -> dict[str, Any]:
        """Carries out one command of `faults.COMMANDS`; the status of all devices. Raises HeadgateError."""
        async with self._turn:
            if self._process is None or self._process.returncode is not None:
                raise HeadgateError("the simulator has ended")
            writer: asyncio.StreamWriter | None = None
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    reader, writer = self._streams = self._streams or await self._connect()
                    writer.write(json.dumps({"do": do, "device": device, **amount}).encode() + b"\n")
                    await writer.drain()
                    answer = json.loads(await reader.readline())
            except BaseException as error:
                if writer is not None:
                    writer.transport.abort()  # an answer that comes later would be taken for the next one's
                self._streams = None
                if isinstance(error, ConnectionRefusedError | FileNotFoundError):
                    raise HeadgateError("the simulator has ended") from error
                if isinstance(error, TimeoutError | OSError | ValueError):
                    raise HeadgateError(
                        f"the simulator does not answer ({str(error) or 'no answer in time'})"
                    ) from error
                raise
        if "error" in answer:
            raise HeadgateError(f"the simulator refuses: {answer['error']}")
        return dict(answer)

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_unix_connection(str(self.socket_path), limit=MOST_LINE_BYTES)

    async def close(self) -> None:
        """Ends the simulator and whatever it started."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
        streams, self._streams = self._streams, None
        if streams is not None:
            streams[1].transport.abort()
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):  # it ended meanwhile; its servers end with it
                process.kill()
            await asyncio.shield(process.wait())
            if process.stdin is not None:
                process.stdin.close()
        self.socket_path.unlink(missing_ok=True)
        if self._own is not None:
            self._own.cleanup()

    async def _notice_end(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        self._lose(f"the simulator has ended with status {process.returncode}")

    def _lose(self, why: str) -> None:
        if self._process is None:  # closed: what was asked at that moment has no answer, and no device is lost by it
            return
        if any(reading.state is not DeviceState.LOST for reading in self._readings):
            log.error("all simulated devices are lost: %s", why)
        self._readings = tuple(replace(reading, state=DeviceState.LOST, note=why) for reading in self._readings)


def _reading(device: Mapping[str, Any]) -> Reading:
    lost = device["lost"]
    return Reading(
        id=device["id"],
        kind=KIND,
        name=device["name"],
        total_bytes=device["total_bytes"],
        free_bytes=device["free_bytes"],
        used_bytes=device["used_bytes"],
        uuid=device["uuid"],
        rpc_endpoint=device["endpoint"],
        environment=HIDDEN,
        state=DeviceState.LOST if lost else DeviceState.HEALTHY,
        note="it was cut" if lost else "",
    )
