"""Starts the simulator and reads its devices. When the simulator ends, its devices are lost. It is restarted after the
loss was reported, with the delays of `inference.devices.reopen_policy`. Its devices are then empty, with the same
identity and another endpoint, like GPUs after a reset of the driver.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headgate.engine_build import missing_backends
from headgate.shared.errors import ConfigError, HeadgateError, Problem
from inference.devices.device import HIDDEN, Reading
from inference.devices.device_probe import Probe
from inference.devices.reopen_policy import Reopening
from inference.devices.signs import Sign
from inference.devices.simgpu.backing import kill_and_reap
from inference.devices.simgpu.control import SOCKET_NAME, SimulatorError, send_command
from inference.devices.simgpu.rpc_server import package
from inference.workers.child_environment import child_environment

log = logging.getLogger(__name__)

START_SECONDS = 30.0
ANSWER_SECONDS = 5.0
STEADY_SECONDS = 30.0
"""A simulator that ran this long counts as healthy: its end starts a new series of failures."""
MAX_LINE_BYTES = 2**20
KIND = "sim"


class SimProbe(Probe):
    """The simulated devices `gpu-0`, `gpu-1`, ... `directory` is private and contains the simulator's socket.

    `engine` is the folder of llama-cpp-python, whose RPC backend they need.
    """

    def __init__(self, sizes: Sequence[int], directory: Path | None = None, *, engine: Path | None = None) -> None:
        self._sizes = tuple(sizes)
        self._engine = engine or package()
        self._own = tempfile.TemporaryDirectory(prefix="hg-sim-") if directory is None else None
        self.socket_path = (Path(self._own.name) if self._own is not None else directory or Path()) / SOCKET_NAME
        self._process: asyncio.subprocess.Process | None = None
        self._watch: asyncio.Task[None] | None = None
        self._reopening = Reopening()
        self._opened_at = 0.0
        self._is_loss_reported = False
        self._is_opening = False
        self._on_event: Callable[[], None] | None = None
        self._readings: tuple[Reading, ...] = ()

    @property
    def pid(self) -> int | None:
        """The process id of the simulator."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        """Starts the simulator; returns when every device listens. Raises HeadgateError."""
        if self._engine is None or missing_backends(self._engine, ["rpc"]):
            message = "simulated devices need llama-cpp-python built with RPC: CMAKE_ARGS=-DGGML_RPC=ON make serve"
            raise ConfigError([Problem(message, key="INFERENCE_DEVICES")])
        try:
            await self._open()
        except BaseException:
            await self.close()
            raise

    def readings(self) -> tuple[Reading, ...]:
        """The newest figures."""
        return self._readings

    async def refresh(self) -> None:
        """Reads the simulator. Without an answer its devices are uncertain; a simulator that ended is started again."""
        process = self._process
        if self._is_opening:
            return
        if process is not None and process.returncode is not None:
            await self._reopen(process.returncode)
            return
        try:
            status = await self.send("status")
        except SimulatorError as error:
            self._mark_all(
                str(error), Sign.UNCERTAIN if process is None or process.returncode is None else Sign.MISSING
            )
        else:
            self._readings = tuple(map(_reading, status.values()))

    def listen(self, on_event: Callable[[], None]) -> None:
        """Calls `on_event` when the simulator ends."""
        self._on_event = on_event

    async def renew(self) -> None:
        """The next refresh starts an ended simulator without a delay."""
        self._reopening, self._is_loss_reported = Reopening(), True

    async def send(self, do: str, device: str | None = None, **amount: float) -> dict[str, dict[str, Any]]:
        """Runs one command of `faults.COMMANDS`; returns the status of all devices by id. Raises SimulatorError."""
        if self._process is None or self._process.returncode is not None:
            raise SimulatorError("the simulator has ended")
        return await send_command(self.socket_path, do, device, seconds=ANSWER_SECONDS, **amount)

    async def close(self) -> None:
        """Ends the simulator and its servers."""
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
        process, self._process = self._process, None
        if process is not None:
            await kill_and_reap(process)
        self.socket_path.unlink(missing_ok=True)
        if self._own is not None:
            self._own.cleanup()

    # --- its process -----------------------------------------------------------------------------------------------
    async def _open(self) -> None:
        """Starts a simulator and waits until its devices listen. Raises HeadgateError; a failed simulator is ended."""
        process = self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.devices.simgpu",
            str(self.socket_path),
            *map(str, self._sizes),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(HIDDEN),
            limit=MAX_LINE_BYTES,
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                status = json.loads(await process.stdout.readline())
            if self._process is not process:
                raise OSError("the probe was closed meanwhile")
        except BaseException as error:
            await kill_and_reap(process)
            if isinstance(error, TimeoutError | OSError | ValueError):
                raise HeadgateError(
                    f"the simulated devices did not start ({str(error) or 'no answer in time'})"
                ) from error
            raise
        self._readings = tuple(map(_reading, status["devices"]))
        self._opened_at, self._is_loss_reported = time.monotonic(), False
        self._watch = asyncio.create_task(self._notice_end(process))

    async def _reopen(self, status: int) -> None:
        """Starts the next simulator when it is due and the end of the last one was reported."""
        if not self._is_loss_reported or not self._reopening.is_due(time.monotonic()):
            self._mark_all(f"the simulator has ended with status {status}", Sign.MISSING)
            self._is_loss_reported = True
            return
        self._is_opening = True
        try:
            await self._open()
        except HeadgateError as error:
            self._reopening = self._reopening.failed(time.monotonic())
            self._mark_all(str(error), Sign.MISSING)
        else:
            log.info("the simulator answers again; its devices are empty")
        finally:
            self._is_opening = False

    async def _notice_end(self, process: asyncio.subprocess.Process) -> None:
        await process.wait()
        now = time.monotonic()
        if now - self._opened_at > STEADY_SECONDS:
            self._reopening = Reopening()
        self._reopening = self._reopening.failed(now)
        self._mark_all(f"the simulator has ended with status {process.returncode}", Sign.MISSING)
        if self._on_event is not None:
            self._on_event()

    def _mark_all(self, why: str, sign: Sign) -> None:
        if self._process is None:  # closed: a pending command has no answer, but no device is lost
            return
        if any(reading.sign is not sign for reading in self._readings):
            log.error("all simulated devices are %s: %s", sign, why)
        self._readings = tuple(replace(reading, sign=sign, note=why) for reading in self._readings)


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
        sign=Sign.FAILED if lost else Sign.HEALTHY,
        note="its connections were cut" if lost else "",
        context_bytes=device["context_bytes"],
        process_bytes={int(pid): count for pid, count in device["processes"].items()},
    )
