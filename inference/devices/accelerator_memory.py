"""Remembers over a restart of the service that accelerators were there; places no model.

Every start that finds accelerators keeps how many, and under which circumstances, in the state directory; a service
that ends because no process of it reaches them any more marks that. The next one under the same circumstances serves
only if it finds some, after a mark as many again, or if it was told to use the CPU: models of a GPU never end there by
a restart, whatever ended the service.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.state_directory import StateDir
from headgate.shared.state_files import StateFileWriter, load_state_file
from inference.devices.device import HIDDEN
from inference.devices.simgpu.rpc_server import package

log = logging.getLogger(__name__)

NAME = "accelerators.json"
_VERSION = 1
_LOST = "accelerators that were there before this start are not expected"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_SHOWN_BY = (*HIDDEN, "NVIDIA_VISIBLE_DEVICES")
"""Variables that hide accelerators from a process, or from a container: who changes one means what it does."""
_LIBRARY = re.compile(r"(?:lib)?ggml-([\w-]+)\.(?:so|dylib|dll)\b")


class OutOfReachError(HeadgateError):
    """Fewer accelerators than before the restart; another one, from outside, may help."""

    exit_code = Exit.RESTART_OUTSIDE


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What says which accelerators a start may expect; where any of it changed, nothing is expected.

    `choice` is what was asked for: INFERENCE_DEVICES and the variables that hide devices. `boot` is the kernel's name
    for the time since the machine was started, "" where it has none. `backends` are those llama.cpp was built with;
    two builds may share a state directory (containers with and without CUDA).
    """

    choice: Mapping[str, str]
    boot: str
    backends: tuple[str, ...]

    @classmethod
    def now(
        cls, devices: str, environ: Mapping[str, str] = os.environ, *, boot: Path = _BOOT, engine: Path | None = None
    ) -> Circumstances:
        """Those of this process; `engine` is the folder of llama-cpp-python, which is not imported."""
        folder = engine or package()
        libraries = () if folder is None else (_LIBRARY.match(path.name) for path in folder.rglob("*ggml-*"))
        try:
            booted = boot.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            booted = ""
        return cls(
            choice={"INFERENCE_DEVICES": devices, **{name: environ[name] for name in _SHOWN_BY if name in environ}},
            boot=booted,
            backends=tuple(sorted({found[1] for found in libraries if found})),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """How many accelerators the last good start found, and whether the service ended because of them."""

    count: int
    unreached: bool
    under: Circumstances


class Unreached:
    """The record in the state directory; a damaged or foreign one counts as none."""

    def __init__(self, state: StateDir, now: Circumstances) -> None:
        self._path: Path = state.root / NAME
        self._files = StateFileWriter("how many accelerators there are")
        self._now = now

    def note(self, accelerators: int) -> None:
        """The service ends because no process of it reaches them."""
        self._keep(Record(accelerators, True, self._now))

    def check(self, found: int, *, cpu_asked: bool) -> None:
        """The service found so many; raises OutOfReachError where that is too few. Keeps them where there are any."""
        before = None if cpu_asked else load_state_file(self._path, _record, _LOST)
        if before is not None and before.under == self._now:
            if found < (before.count if before.unreached else 1):
                raise OutOfReachError(self._refusal(before.count, found))
        elif before is not None and not found and before.under.choice == self._now.choice:
            changed = "the machine was restarted" if before.under.boot != self._now.boot else "llama.cpp was changed"
            log.warning("%d accelerators were in use before %s, and none is found now", before.count, changed)
        if found:
            self._keep(Record(found, False, self._now))

    def _refusal(self, before: int, found: int) -> str:
        return (
            f"{before} accelerators were in use and {found} can be reached. Models do not go to the CPU for it; what "
            "heals this is mostly a restart of the container or the machine. If the CPU is meant, set "
            "INFERENCE_FORCE_CPU_MODE=true; if accelerators were taken out for good, restart the machine or remove "
            f"{self._path}"
        )

    def _keep(self, record: Record) -> None:
        data = json.dumps({"version": _VERSION, **asdict(record)}).encode()
        self._files.write(lambda: self._path, data)


def _record(data: Any) -> Record | None:
    """The record in the file's content; none of another version."""
    under = data["under"]
    if data["version"] != _VERSION or data["count"] < 1:
        return None
    circumstances = Circumstances(dict(under["choice"]), str(under["boot"]), tuple(under["backends"]))
    return Record(int(data["count"]), bool(data["unreached"]), circumstances)
