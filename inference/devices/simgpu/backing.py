"""Keeps ggml servers at hand, one per connection and one to spare; decides nothing about memory."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from dataclasses import dataclass

from inference.childenv import child_environment
from inference.devices.base import HIDDEN

START_SECONDS = 30.0


class NoServerError(Exception):
    """A ggml server did not start; the message says why."""


@dataclass(frozen=True, slots=True)
class Server:
    """A ggml server that waits for its one client."""

    process: asyncio.subprocess.Process
    port: int

    async def end(self) -> None:
        """Kills and reaps it; its memory is the machine's again when this returns."""
        await _kill(self.process)


class Servers:
    """Starts servers ahead of their use, because a process takes longer to start than a client likes to wait."""

    def __init__(self) -> None:
        self._spare: asyncio.Task[Server] | None = None

    def prepare(self) -> None:
        """Begins to start a server that nobody asked for yet."""
        if self._spare is None:
            self._spare = asyncio.create_task(self._start())
            self._spare.add_done_callback(lambda task: None if task.cancelled() else task.exception())

    async def take(self) -> Server:
        """A server for one connection; the caller ends it. Raises NoServerError."""
        self.prepare()
        spare, self._spare = self._spare, None
        assert spare is not None
        try:
            server = await spare
        except asyncio.CancelledError:
            spare.cancel()
            raise
        self.prepare()
        if server.process.returncode is not None:  # it died while it waited
            return await self._start()
        return server

    async def close(self) -> None:
        """Ends the spare server."""
        spare, self._spare = self._spare, None
        if spare is not None:
            with contextlib.suppress(NoServerError, asyncio.CancelledError):
                if spare.done():
                    await spare.result().end()
                else:
                    spare.cancel()
                    await spare

    async def _start(self) -> Server:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "inference.devices.simgpu.server",
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=child_environment(HIDDEN),
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(START_SECONDS):
                said = await process.stdout.readline()
            return Server(process, int(said))
        except (TimeoutError, ValueError):
            await _kill(process)
            raise NoServerError("ggml's RPC server did not start") from None
        except BaseException:
            await _kill(process)
            raise


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
            process.kill()
    await asyncio.shield(process.wait())
