"""A disk that can be made full: a preloaded shim that refuses writes below one directory with ENOSPC. Linux."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.compiled import library_directory

SOURCE = Path(__file__).with_name("fulldisk.c")


class FullDisk:
    """Applies to files below `directory`, for processes with `env`; `control` is outside of it."""

    def __init__(self, directory: Path, control: Path) -> None:
        control.mkdir(parents=True, exist_ok=True)
        self._flag, self._count = control / "full", control / "refused"
        library = library_directory(SOURCE, "libfulldisk.so") / "libfulldisk.so"
        self.env = {
            "LD_PRELOAD": str(library),
            "FULLDISK_DIR": str(directory),
            "FULLDISK_FLAG": str(self._flag),
            "FULLDISK_COUNT": str(self._count),
        }

    def fill(self) -> None:
        """All writes fail from now on."""
        self._flag.touch()

    def clear(self) -> None:
        """Writes succeed again."""
        self._flag.unlink(missing_ok=True)

    @property
    def refused(self) -> int:
        """The number of failed writes."""
        return self._count.stat().st_size if self._count.exists() else 0
