"""Makes a start fail if accelerators that earlier starts found are missing: otherwise models would run on the CPU.

A start that finds accelerators stores their number and its circumstances in the state directory. A service whose
processes cannot reach them marks the record and ends. Under the same circumstances the next start fails if it finds no
accelerator (after a mark: fewer than before), unless the CPU is configured.
"""

from __future__ import annotations

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
_VERSION = 2
_LOST = "the start does not check whether accelerators are missing"
_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HIDING_VARIABLES = (*HIDDEN, "NVIDIA_VISIBLE_DEVICES")
"""Variables that hide accelerators from a process or a container. A change of one is intentional."""
_LIBRARY = re.compile(r"(?:lib)?ggml-([\w-]+)\.(?:so|dylib|dll)\b")


class OutOfReachError(HeadgateError):
    """Fewer accelerators than before the restart; a restart of the container or machine may help."""

    exit_code = Exit.RESTART_OUTSIDE


@dataclass(frozen=True, slots=True)
class Circumstances:
    """The circumstances that determine the accelerators; after a change of one, no number of accelerators is expected.

    `choice`: INFERENCE_DEVICES and the variables that hide devices. `boot`: the kernel's boot id, "" without one.
    `backends`: those of llama.cpp; two builds may share a state directory (containers with and without CUDA).
    """

    choice: Mapping[str, str]
    boot: str
    backends: tuple[str, ...]

    @classmethod
    def now(
        cls, devices: str, environ: Mapping[str, str] = os.environ, *, boot: Path = _BOOT, engine: Path | None = None
    ) -> Circumstances:
        """The circumstances of this process; `engine` is the folder of llama-cpp-python, which is not imported."""
        folder = engine or package()
        libraries = () if folder is None else (_LIBRARY.match(path.name) for path in folder.rglob("*ggml-*"))
        try:
            booted = boot.read_text(encoding="ascii").strip()
        except (OSError, ValueError):
            booted = ""
        return cls(
            choice={
                "INFERENCE_DEVICES": devices,
                **{name: environ[name] for name in _HIDING_VARIABLES if name in environ},
            },
            boot=booted,
            backends=tuple(sorted({found[1] for found in libraries if found})),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The number of accelerators at the last successful start, and whether its processes could not reach them later."""

    count: int
    were_unreachable: bool
    under: Circumstances


class AcceleratorRecord:
    """The record in the state directory; an invalid one is ignored."""

    def __init__(self, state: StateDir, now: Circumstances) -> None:
        self._path: Path = state.root / NAME
        self._files = StateFileWriter("how many accelerators there are")
        self._now = now

    def note(self, accelerators: int) -> None:
        """Marks that the service ends because its processes cannot reach the accelerators."""
        self._keep(Record(accelerators, True, self._now))

    def check(self, found: int, *, cpu_configured: bool) -> None:
        """Compares `found` accelerators with the record and stores them; raises OutOfReachError if they are too few."""
        before = None if cpu_configured else load_state_file(self._path, _record, _LOST)
        if before is not None and before.under == self._now:
            if found < (before.count if before.were_unreachable else 1):
                raise OutOfReachError(self._refusal(before.count, found))
        elif before is not None and not found and before.under.choice == self._now.choice:
            changed = "the machine was restarted" if before.under.boot != self._now.boot else "llama.cpp was changed"
            log.warning("no accelerators found; there were %d before %s; check the driver", before.count, changed)
        if found:
            self._keep(Record(found, False, self._now))

    def _refusal(self, before: int, found: int) -> str:
        return (
            f"{before} accelerators were in use and {found} are reachable now. Headgate does not move models to "
            "the CPU by itself: restart the container or the machine. To use the CPU, set "
            "INFERENCE_FORCE_CPU_MODE=true; if accelerators were removed, restart the machine or delete "
            f"{self._path}"
        )

    def _keep(self, record: Record) -> None:
        self._files.write(self._path, {"version": _VERSION, **asdict(record)})


def _record(data: Any) -> Record | None:
    """The record in the content of the file, or None if another version of Headgate wrote it."""
    under = data["under"]
    if data["version"] != _VERSION or data["count"] < 1:
        return None
    circumstances = Circumstances(dict(under["choice"]), str(under["boot"]), tuple(under["backends"]))
    return Record(int(data["count"]), bool(data["were_unreachable"]), circumstances)
