"""The virtual environment `.venv`: the choice of its interpreter, its creation, and pip with a log and progress.

It needs only the standard library, because it runs before packages are installed.

An interpreter compiled without optimizations (the default of pyenv) takes up to 50 % more time for the same code. If
the running interpreter is such a one and the variable `PYTHON` is not set, `.venv` uses an installed optimized
interpreter, if there is one.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

OLDEST_PYTHON = (3, 11)
PROBE_SECONDS = 20.0
"""Timeout for querying an interpreter. An interpreter that hangs is ignored."""
REPORT_SECONDS = 20.0
"""Interval of progress lines when stderr is not a terminal."""
_TICK_SECONDS = 0.5
_TAIL_BYTES = 2**14
"""The size of the end of a log that is searched for the progress."""

_DESCRIBE = """
import ensurepip, json, sys, sysconfig, venv
standard = sys.version_info.releaselevel == "final" and not hasattr(sys, "gettotalrefcount")
standard = standard and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps({
    "executable": getattr(sys, "_base_executable", None) or sys.executable, "version": sys.version_info[:3],
    "prefix": sys.base_prefix, "configured": sysconfig.get_config_var("CONFIG_ARGS") or "", "is_standard": standard,
}))
"""
"""The script that describes an interpreter. It fails without `ensurepip`, which an environment with pip needs."""

_PYTHON = re.compile(r"python3(\.\d+)?")
_STEP = re.compile(r"\[(\d+)/(\d+)\]|\[ *(\d+)%\]")


class SetupError(Exception):
    """The set-up failed; the message says what to do."""


@dataclass(frozen=True)
class Interpreter:
    """A Python interpreter that can create `.venv`."""

    executable: str
    version: tuple[int, int, int]
    optimized: bool
    is_standard: bool = True
    """Whether it is a final release of CPython with the global interpreter lock, and not a debug build."""

    @classmethod
    def query(cls, path: str, seconds: float = PROBE_SECONDS) -> Interpreter | None:
        """The interpreter at `path`; None when it fails, exceeds `seconds`, is too old, or lacks `ensurepip`."""
        try:
            answer = subprocess.run(
                [path, "-I", "-c", _DESCRIBE], capture_output=True, text=True, check=True, timeout=seconds
            )
            about = json.loads(answer.stdout)
            version = tuple(about["version"])
            optimized = is_optimized(about["configured"], about["prefix"])
            found = cls(about["executable"], version, optimized, about["is_standard"])
        except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
            return None
        return found if version >= OLDEST_PYTHON else None

    def __str__(self) -> str:
        return f"{self.executable} ({'.'.join(map(str, self.version))})"


def is_optimized(configured: str, prefix: str) -> bool:
    """Whether an interpreter is optimized, from its `configure` arguments and its prefix.

    Interpreters of distributions are optimized. Debian's arguments do not show it, so the prefix `/usr` is enough.
    """
    return "--enable-optimizations" in configured or prefix == "/usr"


def installed_interpreters(path: str) -> list[Interpreter]:
    """All usable interpreters in the folders of `path` (a value of `PATH`), each once."""
    found: dict[Path, Interpreter | None] = {}
    for folder in filter(None, path.split(os.pathsep)):
        with contextlib.suppress(OSError):  # missing or not readable
            for file in sorted(file for file in Path(folder).iterdir() if _PYTHON.fullmatch(file.name)):
                real = file.resolve()
                # links to one launcher, such as pyenv's, start different interpreters
                key = real if _PYTHON.fullmatch(real.name) else file
                if key not in found:
                    found[key] = Interpreter.query(str(file))
    return [interpreter for interpreter in found.values() if interpreter is not None]


def best_interpreter(own: Interpreter, others: Sequence[Interpreter]) -> Interpreter:
    """`own` if it is optimized or no usable interpreter is; otherwise the optimized one with the nearest minor version.

    `others` that are not standard or have another major version are left out. Of several with the nearest minor
    version, the newest is returned.
    """
    better = [other for other in others if other.optimized and other.is_standard and other.version[0] == own.version[0]]
    if own.optimized or not better:
        return own
    return max(better, key=lambda other: (-abs(other.version[1] - own.version[1]), other.version))


# --- steps with a log and progress -----------------------------------------------------------------------------------
def progress(text: str) -> float | None:
    """The completed share (0.0 to 1.0) in the output of Ninja or Make, or None."""
    steps = list(_STEP.finditer(text))
    if not steps:
        return None
    done, of, percent = steps[-1].groups()
    return int(percent) / 100 if percent else int(done) / max(int(of), 1)


class Progress:
    """Shows the progress of a long step: one live line on a terminal, else a line every REPORT_SECONDS."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._last = self._start
        self._live = sys.stderr.isatty()

    def show(self, log: Path) -> None:
        """Shows the share at the end of `log` if the interval has passed."""
        now = time.monotonic()
        if now - self._last < (0 if self._live else REPORT_SECONDS):
            return
        self._last = now
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
            share = progress(file.read().decode("utf-8", "replace"))
        percent = "" if share is None else f"{share:.0%}, "
        self._write(f"{percent}{self._elapsed()} so far", end="" if self._live else "\n")

    def end(self, how: str) -> None:
        """Shows the result in place of the progress."""
        self._write(f"{how} ({self._elapsed()})", end="\n")

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def _write(self, text: str, end: str) -> None:
        line = f"  {self._what}: {text}"
        print(f"\r{line:<70}" if self._live else line, end=end, file=sys.stderr, flush=True)


def run_logged(what: str, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
    """Runs a command with its output in `log` and its progress on stderr. Raises SetupError with the end of the log."""
    step = Progress(what)
    with log.open("ab") as out:
        out.write(f"$ {' '.join(argv)}\n".encode())
        out.flush()
        with subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT
        ) as process:
            try:
                while (status := _status_within(process, _TICK_SECONDS)) is None:
                    step.show(log)
            except BaseException:
                process.terminate()
                raise
    if status != 0:
        step.end("failed")
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        raise SetupError("\n".join([*tail, "", f"{what} failed with status {status}; the complete log is {log}"]))
    step.end("done")


def _status_within(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


# --- the environment -------------------------------------------------------------------------------------------------
class VirtualEnvironment:
    """The folder `.venv` below `root`, and commands that run in it with the variables `environ`."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self.folder = root / ".venv"
        self.python = self.folder / "bin" / "python"
        self.log = self.folder / "headgate-setup.log"
        self.environ = {**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}

    def create(self) -> None:
        """Creates the folder unless it has a working pip; one without it is deleted first. Raises SetupError."""
        if self.python.exists() and self._has_pip():
            return
        if self.folder.exists():
            shutil.rmtree(self.folder)
        base = self._base()
        made = subprocess.run([base, "-m", "venv", str(self.folder)], capture_output=True, text=True, check=False)
        if made.returncode != 0 or not self._has_pip():
            shutil.rmtree(self.folder, ignore_errors=True)
            raise SetupError(
                f"{base} cannot create a virtual environment:\n{(made.stdout + made.stderr).strip()}\n"
                f"on Debian and Ubuntu, run: apt install python3-venv"
            )

    def pip(self, what: str, *words: str) -> None:
        """Runs pip with its output in the log. Raises SetupError with the end of the log."""
        run_logged(what, [str(self.python), "-m", "pip", *words], self.log, self.environ)

    def _base(self) -> str:
        """The interpreter for `.venv`. Prints a line when the running one was compiled without optimizations."""
        base: str = getattr(sys, "_base_executable", None) or sys.executable
        own = Interpreter.query(base)
        if own is None or own.optimized or self.environ.get("PYTHON"):
            return base
        best = best_interpreter(own, installed_interpreters(self.environ.get("PATH", "")))
        if best.optimized:
            print(
                f"  .venv uses {best}: {own} was compiled without optimizations and takes up to 50 % more time for "
                f"the same code. To use {own.executable} anyway: make clean, then make serve PYTHON={own.executable}",
                file=sys.stderr,
            )
        else:
            print(
                f"  {own} was compiled without optimizations and takes up to 50 % more time for the same code. "
                f"Distributions install optimized interpreters; pyenv compiles one with "
                f"PYTHON_CONFIGURE_OPTS=--enable-optimizations",
                file=sys.stderr,
            )
        return best.executable

    def _has_pip(self) -> bool:
        argv = [str(self.python), "-c", "import pip"]
        try:
            return subprocess.run(argv, capture_output=True, check=False).returncode == 0
        except OSError:  # the interpreter is missing, or built for another machine
            return False
