"""A really slow disk: a preloaded shim that delays every read of a *.gguf file. Linux; built with the C compiler."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

SOURCE = Path(__file__).with_name("slowdisk.c")


def build(directory: Path) -> Path:
    """The shared library, compiled into `directory`; AssertionError with the compiler's words when it does not."""
    library = directory / "libslowdisk.so"
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    assert compiler, "a C compiler is needed for the slow disk"
    done = subprocess.run(
        [compiler, "-O1", "-Wall", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return library


def slow_disk_env(directory: Path, bytes_per_second: int) -> dict[str, str]:
    """Environment for a process (and its children) whose GGUF files come from a disk of that speed."""
    return {"LD_PRELOAD": str(build(directory)), "SLOWDISK_BYTES_PER_SECOND": str(bytes_per_second)}
