"""Downloads and builds the programs that Headgate is compared with, outside the repository.

llama-server and llama-batched-bench come from the llama.cpp sources inside the source package of the very
llama-cpp-python that is installed, with the same options; `llama_cpp.server` is installed into an environment of its
own. `python -m benchmarks.peers` builds everything, HEADGATE_PEERS_DIR says where (default: the user's cache).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from headgate.bootstrap import Stamp
from headgate.engine_build import OUR_CMAKE_ARGS

ENGINE = "llama-cpp-python"
TARGETS = ("llama-server", "llama-batched-bench")
OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_UI=OFF",
    "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DLLAMA_BUILD_APP=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
"""Options of the wheel, and no downloads during the build."""

REPOSITORY = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Peers:
    """Paths of the installed programs."""

    llama_server: Path
    batched_bench: Path
    python: Path
    """An interpreter that has `llama_cpp.server`."""


def root() -> Path:
    """The build directory."""
    chosen = os.environ.get("HEADGATE_PEERS_DIR")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(chosen) if chosen else cache / "headgate-peers" / version(ENGINE)


def ensure() -> Peers:
    """Returns the programs and builds missing ones, which takes some minutes."""
    place = root()
    place.mkdir(parents=True, exist_ok=True)
    binaries = place / "build" / "bin"
    if not all((binaries / target).exists() for target in TARGETS):
        _build(place)
    python = place / "server" / "bin" / "python"
    if not (python.parent / "uvicorn").exists():
        _install_server(place / "server", python)
    return Peers(binaries / TARGETS[0], binaries / TARGETS[1], python)


def _build(place: Path) -> None:
    source = place / "src"
    if not source.exists():
        _run([sys.executable, "-m", "pip", "download", "--no-binary", ENGINE, "--no-deps", "-d", str(place), _pinned()])
        archive = next(place.glob("llama_cpp_python-*.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extraction_filter = getattr(tarfile, "data_filter", None)  # not before Python 3.11.4
            opened.extractall(place)
        archive.unlink()
        next(place.glob("llama_cpp_python-*/")).rename(source)
    where = ["-S", str(source / "vendor" / "llama.cpp"), "-B", str(place / "build")]
    _run(["cmake", *where, *OPTIONS, *shlex.split(_wheel_options())])
    jobs = str(os.cpu_count() or 1)
    _run(["nice", "-n", "10", "cmake", "--build", str(place / "build"), "-j", jobs, "--target", *TARGETS])


def _install_server(environment: Path, python: Path) -> None:
    _run([sys.executable, "-m", "venv", str(environment)])
    pinned = f"{ENGINE}[server]=={version(ENGINE)}"
    options = {"CMAKE_ARGS": _wheel_options()}
    _run([str(python), "-m", "pip", "install", "--no-binary", ENGINE, pinned], options)


def _pinned() -> str:
    return f"{ENGINE}=={version(ENGINE)}"


def _wheel_options() -> str:
    """CMake options of the installed wheel: our own and those recorded in `.venv`."""
    stamp = Stamp.read(REPOSITORY / ".venv" / "headgate.json")
    used = stamp.rung or stamp.cmake_args if stamp else os.environ.get("CMAKE_ARGS", "")
    return f"{OUR_CMAKE_ARGS} {used}".strip()


def _run(argv: Sequence[str], more: Mapping[str, str] | None = None) -> None:
    """Runs a tool and writes its output to a log in the build directory. Raises SystemExit with the name of the log."""
    log = root() / "build.log"
    print(f"{' '.join(argv[:6])} ... (log: {log})", file=sys.stderr, flush=True)
    with log.open("ab") as out:
        status = subprocess.run(argv, stdout=out, stderr=out, env={**os.environ, **(more or {})}).returncode
    if status:
        raise SystemExit(f"{argv[0]} ended with status {status}; see {log}")


if __name__ == "__main__":
    print(ensure())
