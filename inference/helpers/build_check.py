"""Checks that llama.cpp computes on this CPU: at a start where something changed, and when a worker dies at once.

The check runs in a helper (`inference/helpers/build_proof_job.py`). Its record in the state directory, or the one
that set-up left
in the virtual environment, says for which CPU, libraries and place it passed; a start under the same ones checks
nothing. A build that stopped computing while the service ran is recorded as well, and is checked at every start.
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

from headgate.machine import Build
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.devices.simgpu.rpc_server import package
from inference.helpers.helper_client import HelperError, run_helper

log = logging.getLogger(__name__)

NAME = "build.json"
START_SECONDS = 120.0
"""How long the check may take at a start; on an idle machine it takes about a second."""
DOUBT_SECONDS = 30.0
"""How long it may take while requests wait for it."""
MEND = (
    "llama.cpp has to be compiled for this CPU. In a clone, run `make clean`, then `make serve`. Build an image again. "
    "Where pip installed it, run: CMAKE_ARGS='-DGGML_RPC=ON -DGGML_NATIVE=OFF' pip install --force-reinstall "
    "--no-cache-dir --no-deps --no-binary llama-cpp-python llama-cpp-python"
)


class BrokenBuildError(HeadgateError):
    """llama.cpp does not compute on this CPU; another build, or another machine, may."""

    exit_code = Exit.RESTART_OUTSIDE


class BuildCheck:
    """The check of one service. `broken` is called once, with a sentence, when a build that passed fails."""

    def __init__(
        self,
        state: StateDir,
        *,
        run: Callable[..., Awaitable[dict[str, Any]]] = run_helper,
        find: Callable[[], Path | None] = package,
        stamp: Path = Path(sys.prefix) / "headgate.json",
    ) -> None:
        """`run` as `run_helper`; `find` gives the folder of `llama_cpp`; `stamp` is what set-up wrote."""
        self.broken: Callable[[str], None] = lambda _why: None
        self.is_trusted = False
        """Whether a check passed after a worker's death had raised doubts: further such deaths are the models' own."""
        self._path = state.root / NAME
        self._stamp = stamp
        self._files = StateFileWriter("the check of llama.cpp")
        self._run = run
        self._find = find
        self._doubt: asyncio.Task[bool] | None = None

    async def at_start(self) -> None:
        """Returns when the build is known to compute; raises BrokenBuildError where it does not."""
        folder = self._find()
        if folder is None:
            return  # a worker says so
        build = Build.at(folder)
        if (changed := self._changed(build)) is None:
            return
        log.info("checking that llama.cpp computes on this CPU: %s", changed)
        if (failure := await self._failure(START_SECONDS)) is not None:
            raise BrokenBuildError(_sentence(build, f"{failure} ({changed})"))
        log.info("llama.cpp computes on this CPU: %s", build.cpu)
        self._keep({"passed": asdict(build)})

    async def holds(self) -> bool:
        """Whether the build still computes, asked when a worker died at its first step; all who ask share one check.

        After the first check that fails `broken` has been called, and the answer stays.
        """
        if self.is_trusted:
            return True
        if self._doubt is None:
            self._doubt = asyncio.create_task(self._check_again())
        return await asyncio.shield(self._doubt)

    async def _check_again(self) -> bool:
        log.warning("a worker died at its first step; checking that llama.cpp still computes on this CPU")
        try:
            failure = await self._failure(DOUBT_SECONDS, decided=True)
        except HelperError as error:
            log.warning("the check of llama.cpp came to no result (%s); the model counts as the cause", error)
            self._doubt = None
            return True
        if failure is None:
            log.info("llama.cpp computes: the worker's end is its model's own")
            self.is_trusted = True
            return True
        folder = self._find()
        build = Build.at(folder) if folder is not None else None
        self._keep({"failed": build and asdict(build)})
        self.broken(_sentence(build, failure))
        return False

    async def _failure(self, seconds: float, *, decided: bool = False) -> str | None:
        """What is wrong with the build, or None. `decided`: HelperError is raised for what says nothing about it."""
        try:
            answer = await self._run("proof", {}, seconds=seconds)
        except HelperError as error:
            if decided and (error.status is None or error.status >= 0):
                raise
            return str(error)
        return answer.get("error")

    def _changed(self, build: Build) -> str | None:
        """Why the build has to be checked, None where it is known to compute."""
        kept = load_state_file(self._path, _object, "llama.cpp is checked again") or {}
        stamp = _read(self._stamp)
        if _build_of(kept.get("failed")) == build:
            return "it failed while the service ran"
        records = [record for record in (_build_of(kept.get("passed")), _build_of(stamp.get("build"))) if record]
        if build in records:
            return None
        return f"{' and '.join(records[0].differences(build))} changed" if records else "it was never checked"

    def _keep(self, record: dict[str, Any]) -> None:
        self._files.write(lambda: self._path, json.dumps(record).encode())


def _sentence(build: Build | None, failure: str) -> str:
    return f"llama.cpp does not compute on this CPU, {build.cpu if build else 'of an unknown kind'}: {failure}. {MEND}"


def _object(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError("it is no record of a check")
    return data


def _read(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty where there is none."""
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
