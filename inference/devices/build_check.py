"""Checks that llama.cpp computes on this CPU: at a start after a change, and after a crash at a worker's first step.

The check runs in a helper (`inference/devices/build_proof_job.py`). A record in the state directory, or that of the
set-up in the virtual environment, contains the CPU, libraries and folder for which it passed; a start with the same
values does not check again. A build that fails while the service runs is recorded and checked at every start.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from headgate.build import Build
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.devices.simgpu.rpc_server import package
from inference.workers.helper_client import HelperError, run_helper

log = logging.getLogger(__name__)

NAME = "build.json"
START_SECONDS = 120.0
"""Timeout of the check at a start, which takes about a second on an idle machine."""
RECHECK_SECONDS = 30.0
"""Timeout of the check while requests wait for it."""
ADVICE = (
    "Compile llama.cpp for this CPU. In a clone: `make clean`, then `make serve`. In a container: rebuild the image. "
    "After an installation with pip: CMAKE_ARGS='-DGGML_RPC=ON -DGGML_NATIVE=OFF' pip install --force-reinstall "
    "--no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python"
)


class BrokenBuildError(HeadgateError):
    """This build of llama.cpp does not compute on this CPU."""

    exit_code = Exit.RESTART_OUTSIDE


class BuildCheck:
    """The check of one service. `broken` is called once, with the reason, when a build fails after the start."""

    def __init__(
        self,
        state: StateDir,
        *,
        run: Callable[..., Awaitable[dict[str, Any]]] = run_helper,
        find: Callable[[], Path | None] = package,
        stamp: Path = Path(sys.prefix) / "headgate.json",
    ) -> None:
        """`run` is `run_helper`, `find` returns the folder of `llama_cpp`, `stamp` is the file of the set-up."""
        self.broken: Callable[[str], None] = lambda _reason: None
        self.is_trusted = False
        """Whether a check passed after a crash at a first step. Later crashes of that kind have other causes."""
        self._path = state.root / NAME
        self._stamp = stamp
        self._files = StateFileWriter("the check of llama.cpp")
        self._run = run
        self._find = find
        self._doubt: asyncio.Task[bool] | None = None

    async def at_start(self) -> None:
        """Checks the build if needed. Raises BrokenBuildError when it does not compute."""
        folder = self._find()
        if folder is None:
            return  # the workers report it
        build = Build.at(folder)
        if (why := self._why_check(build)) is None:
            return
        log.info("checking that llama.cpp computes on this CPU: %s", why)
        if (failure := await self._failure(START_SECONDS)) is not None:
            raise BrokenBuildError(_sentence(build, f"{failure} ({why})"))
        log.info("the check passed: this build of llama.cpp works on %s", build.cpu)
        self._keep({"passed": asdict(build)})

    async def computes(self) -> bool:
        """Checks the build after a crash at a worker's first step. Concurrent calls share one check.

        The first failed check calls `broken`; its result is final.
        """
        if self.is_trusted:
            return True
        if self._doubt is None:
            self._doubt = asyncio.create_task(self._check_again())
        return await asyncio.shield(self._doubt)

    async def _check_again(self) -> bool:
        log.warning("a worker crashed at its first step; checking that llama.cpp computes on this CPU")
        try:
            failure = await self._failure(RECHECK_SECONDS, raises=True)
        except HelperError as error:
            log.warning("the check of llama.cpp has no result (%s); the crash is attributed to the model", error)
            self._doubt = None
            return True
        if failure is None:
            log.info("the check of llama.cpp succeeded; the crash is attributed to the model")
            self.is_trusted = True
            return True
        folder = self._find()
        build = Build.at(folder) if folder is not None else None
        self._keep({"failed": build and asdict(build)})
        self.broken(_sentence(build, failure))
        return False

    async def _failure(self, seconds: float, *, raises: bool = False) -> str | None:
        """Why the build fails, or None. With `raises`, a failed helper that no signal ended raises HelperError."""
        try:
            answer = await self._run("proof", {}, seconds=seconds)
        except HelperError as error:
            if raises and (error.status is None or error.status >= 0):
                raise
            return str(error)
        return answer.get("error")

    def _why_check(self, build: Build) -> str | None:
        """Why the build must be checked, or None when it was checked."""
        kept = load_state_file(self._path, _object, "llama.cpp is checked again") or {}
        stamp = _read(self._stamp)
        if _build_of(kept.get("failed")) == build:
            return "it failed in an earlier run"
        records = [record for record in (_build_of(kept.get("passed")), _build_of(stamp.get("build"))) if record]
        if build in records:
            return None
        return f"{' and '.join(records[0].differences(build))} changed" if records else "it was never checked"

    def _keep(self, record: dict[str, Any]) -> None:
        self._files.write(self._path, record)


def _sentence(build: Build | None, failure: str) -> str:
    return f"llama.cpp does not compute on this CPU, {build.cpu if build else 'unknown'}: {failure}. {ADVICE}"


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("it is not a record of a check")
    return data


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty when there is none."""
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _build_of(found: Any) -> Build | None:
    try:
        return Build(**found)
    except TypeError:
        return None
