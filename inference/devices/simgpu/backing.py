"""Starts ggml RPC servers for simulated devices: one per connection, and a spare one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from inference.devices.device import HIDDEN
from inference.workers.child_environment import child_environment

START_SECONDS = 30.0
MAX_SPARES = 2
"""Maximum number of spare servers: one that replaces a used server, and one that was returned."""


MIN_MOVE_SECONDS = 10.0
SLOWEST_MOVE_BYTES_PER_SECOND = 100e6
"""The speed of a copy within memory on busy cores."""


_ENDED = "the RPC server of the simulated GPU has ended"


class NoServerError(Exception):
    """A ggml server did not start."""


class NotMovedError(Exception):
    """A server did not move its buffers. Its state is unknown."""


class ServerEndedError(NotMovedError):
    """The server ended before it had moved the buffers."""


@dataclass(frozen=True, slots=True)
class Server:
    """A ggml server that waits for its one client."""

    process: asyncio.subprocess.Process
    port: int

    async def suspend(self, buffers: Mapping[int, int]) -> None:
        """Moves these buffers (bytes by pointer), which nothing uses now, to host memory. Raises NotMovedError."""
        await self._move({"do": "suspend", "buffers": list(buffers.items())}, sum(buffers.values()))

    async def resume(self, count_bytes: int) -> None:
        """Moves the `count_bytes` of suspended buffers back. Raises NotMovedError."""
        await self._move({"do": "resume"}, count_bytes)

    async def _move(self, command: Mapping[str, object], count_bytes: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        if self.process.stdin.is_closing():
            raise ServerEndedError(_ENDED)
        try:
            async with asyncio.timeout(MIN_MOVE_SECONDS + count_bytes / SLOWEST_MOVE_BYTES_PER_SECOND):
                self.process.stdin.write(json.dumps(command).encode() + b"\n")
                await self.process.stdin.drain()
                line = await self.process.stdout.readline()
            if not line.endswith(b"\n"):
                raise ServerEndedError(_ENDED)
            answer = json.loads(line)
        except (BrokenPipeError, ConnectionResetError):
            raise ServerEndedError(_ENDED) from None
        except (TimeoutError, OSError, ValueError) as error:
            raise NotMovedError(f"the simulated GPU did not answer ({type(error).__name__})") from None
        if "error" in answer:
            raise NotMovedError(str(answer["error"]))

    async def end(self) -> None:
        """Kills and reaps the server; its memory is free when this returns."""
        await kill_and_reap(self.process)


class Servers:
    """Starts servers in advance, because a process takes long to start."""

    def __init__(self) -> None:
        self._spares: list[asyncio.Future[Server]] = []

    def prepare(self) -> None:
        """Starts a spare server in the background."""
        if not self._spares:
            self._keep(asyncio.create_task(self._start()))

    async def take(self) -> Server:
        """A server for one connection; the caller ends it. Raises NoServerError."""
        self.prepare()
        spare = self._spares.pop(0)
        server: Server | None = None
        try:
            with contextlib.suppress(NoServerError):  # then one is started now
                server = await asyncio.shield(spare)
        except asyncio.CancelledError:  # the caller is cancelled; the next one takes the server
            self._keep(spare)
            raise
        self.prepare()
        if server is None or server.process.returncode is not None:  # it ended while it waited
            return await self._start()
        return server

    async def give_back(self, server: Server) -> None:
        """Keeps a server whose client disconnected before it allocated anything, or ends it if there are enough.

        Before a load, llama.cpp opens and closes several connections to read the memory of a device.
        """
        if len(self._spares) >= MAX_SPARES or server.process.returncode is not None:
            await server.end()
            return
        spare = asyncio.get_running_loop().create_future()
        spare.set_result(server)
        self._spares.insert(0, spare)

    async def close(self) -> None:
        """Ends the spare servers."""
        spares, self._spares = self._spares, []
        for spare in spares:
            if not spare.done():
                spare.cancel()
            with contextlib.suppress(NoServerError, asyncio.CancelledError):
                await (await spare).end()

    def _keep(self, spare: asyncio.Future[Server]) -> None:
        self._spares.append(spare)
        spare.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def _start(self) -> Server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.devices.simgpu.rpc_server",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(HIDDEN),
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                line = await process.stdout.readline()
            return Server(process, int(line))
        except (TimeoutError, ValueError):
            await kill_and_reap(process)
            raise NoServerError("ggml's RPC server did not start") from None
        except BaseException:
            await kill_and_reap(process)
            raise


async def kill_and_reap(process: asyncio.subprocess.Process) -> None:
    """Kills a process, whose children end with it, and returns when it has ended."""
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            process.kill()
    await asyncio.shield(process.wait())
    if process.stdin is not None:
        process.stdin.close()
