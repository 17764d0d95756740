"""Compiles the C libraries that replace drivers in tests, once per source."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path


def library_directory(source: Path, library: str) -> Path:
    """The folder with `library`, compiled from `source`; AssertionError with the output of the compiler."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    directory = Path(tempfile.gettempdir()) / f"headgate-{source.stem}-{os.getuid()}-{digest}"
    directory.mkdir(mode=0o700, exist_ok=True)
    path = directory / library
    if not path.exists():
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        assert compiler, f"a C compiler is needed for {source.name}"
        mine = directory / f"{library}.{os.getpid()}"
        done = subprocess.run(
            [compiler, "-std=gnu11", "-O1", "-Wall", "-Werror", "-shared", "-fPIC", str(source), "-o", str(mine)],
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        mine.replace(path)  # parallel tests never see a partial file
    return directory
