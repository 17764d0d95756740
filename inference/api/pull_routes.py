"""HTTP route of downloads: a model from a hub into INFERENCE_MODELS_DIR, in a process of its own."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import APIRouter
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field

from headgate.shared import child_process
from inference.authority.shell import Authority
from inference.errors import InferenceError, InvalidRequestError, ShuttingDown
from inference.models_dir import HubSource

COMMAND = (sys.executable, "-m", "headgate.cli.first_steps.pull_job")
BEAT_SECONDS = 5.0
"""A comment is sent after this time without a line of the process."""
SILENCE_SECONDS = 600.0
"""A process without a line for this time is ended. Reading a large partial file again takes minutes."""
END_SECONDS = 5.0

log = logging.getLogger(__name__)


class PullRequest(BaseModel):
    """A source on a hub, as `headgate pull` takes it."""

    model_config = ConfigDict(extra="forbid")

    source: str = Field(min_length=1, max_length=500)


class Pulls:
    """The downloads that run, one per source. `reload` makes the service find new files."""

    def __init__(self, authority: Authority, command: tuple[str, ...] = COMMAND) -> None:
        self.reload: Callable[[], None] = lambda: None
        self._authority = authority
        self._command = command
        self._running: dict[str, asyncio.subprocess.Process | None] = {}
        """By source; None while the process starts."""
        self._ending: set[asyncio.Task[None]] = set()
        self._closed = False

    def close(self) -> None:
        """Ends all downloads; their partial files stay. New ones are refused."""
        self._closed = True
        for process in self._running.values():
            if process is not None:
                _kill(process)

    def stream(self, source: str) -> AsyncIterator[bytes]:
        """The SSE frames of a download; a disconnect ends it. Raises InferenceError if it cannot begin."""
        try:
            found = str(HubSource.parse(source))
        except ValueError as error:
            raise InvalidRequestError(str(error), param="source") from None
        self._check(found)
        return self._frames(found)

    def _check(self, source: str) -> None:
        if self._closed:
            raise ShuttingDown
        if source in self._running:
            raise InvalidRequestError(f"{source} is being downloaded already; wait for its end", param="source")

    async def _frames(self, source: str) -> AsyncIterator[bytes]:
        try:
            self._check(source)  # another request may have begun since `stream`
        except InferenceError as error:
            yield _frame("error", {"message": error.message})
            return
        self._running[source] = process = None
        try:
            process = self._running[source] = await self._start(source)
            async for frame in self._relayed(source, process):
                yield frame
        except OSError as error:
            yield _frame("error", {"message": f"the process that downloads {source} failed: {error}"})
        finally:
            if process is None:
                del self._running[source]
            else:
                ending = asyncio.create_task(self._end(source, process))
                self._ending.add(ending)
                ending.add_done_callback(self._ending.discard)
                await asyncio.shield(ending)

    async def _start(self, source: str) -> asyncio.subprocess.Process:
        directory = self._authority.state.settings.models_dir.absolute()
        process = await asyncio.create_subprocess_exec(
            *self._command,
            source,
            str(directory),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {child_process.PARENT_ENV: str(os.getpid())},
        )
        log.info("downloading %s into %s (pid %d)", source, directory, process.pid)
        if self._closed:
            _kill(process)
        return process

    async def _relayed(self, source: str, process: asyncio.subprocess.Process) -> AsyncIterator[bytes]:
        """The events of the process, until `done` or `error`."""
        assert process.stdout is not None
        now = asyncio.get_running_loop().time
        silent_at = now() + SILENCE_SECONDS
        while True:
            try:
                async with asyncio.timeout(BEAT_SECONDS):
                    line = await process.stdout.readline()
            except TimeoutError:
                if now() < silent_at:
                    yield b": headgate downloading\n\n"
                    continue
                problem = f"no progress for {SILENCE_SECONDS:g} s; send the request again to continue the download"
                break
            if not line:
                status = child_process.exit_text(await process.wait())
                problem = ShuttingDown().message if self._closed else f"the process ended with {status}; see the log"
                break
            silent_at = now() + SILENCE_SECONDS
            data = json.loads(line)
            kind = data.pop("event")
            if kind == "done":
                self.reload()
                data["model"] = self._model_of(data["path"])
                log.info("downloaded %s into %s", source, data["path"])
            yield _frame(kind, data)
            if kind == "done":
                return
            if kind == "error":
                log.warning("the download of %s failed: %s", source, data["message"])
                return
        log.warning("the download of %s failed: %s", source, problem)
        yield _frame("error", {"message": f"{source}: {problem}"})

    def _model_of(self, path: str) -> str | None:
        """The id of the model with the file `path`."""
        real, models = os.path.realpath(path), self._authority.state.models.values()
        return next((model.id for model in models if os.path.realpath(model.spec.path) == real), None)

    async def _end(self, source: str, process: asyncio.subprocess.Process) -> None:
        _kill(process)
        waiting = asyncio.ensure_future(process.wait())
        await asyncio.wait({waiting}, timeout=END_SECONDS)  # it ends sooner, unless it hangs in the kernel
        del self._running[source]


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        try:
            process.kill()
        except ProcessLookupError:
            return


def _frame(kind: str, data: dict[str, Any]) -> bytes:
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


def router(pulls: Pulls) -> APIRouter:
    """The route of downloads."""
    routes = APIRouter()

    @routes.post("/models/pull", response_class=StreamingResponse)
    async def pull(wanted: PullRequest) -> StreamingResponse:
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(pulls.stream(wanted.source), media_type="text/event-stream", headers=headers)

    return routes
