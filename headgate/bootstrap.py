"""Set-up: creates `.venv` and installs Headgate and llama.cpp into it. Changes nothing outside `.venv`.

It runs with Python 3.11 or newer and imports only the standard library:

    python3 headgate/bootstrap.py

1. It installs the packages of `requirements.lock` except llama-cpp-python.
2. It compiles llama-cpp-python with ggml's RPC backend (for simulated GPUs) and the backends in CMAKE_ARGS. pip may
   have cached a wheel without them, so the installed libraries are searched for each backend, without loading them.
3. A child process checks that the build computes on this CPU (`inference/devices/build_proof_job.py`). If it does
   not, llama-cpp-python is compiled again with the next arguments of `headgate.build.ladder`. The stamp file records
   the arguments that work.

An interpreter compiled without optimizations (the default of pyenv) takes up to 50 % more time for the same code. If
the running interpreter is one of them and `PYTHON` does not name it, `.venv` uses an installed optimized interpreter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: the package is not on the path
    sys.path.insert(0, str(ROOT))

from headgate.build import (  # noqa: E402
    Build,
    Compiler,
    Cpu,
    Rung,
    chooses_instructions,
    compiler_at,
    ladder,
    this_cpu,
)

LOCK = "requirements.lock"
ENGINE = "llama-cpp-python"
OUR_CMAKE_ARGS = "-DGGML_RPC=ON"
OLDEST_PYTHON = (3, 11)
PROBE_SECONDS = 20.0
"""Timeout for querying an interpreter. An interpreter that hangs is ignored."""
PROOF_SECONDS = 120.0
"""Timeout of the check of a build, which takes about a second on an idle machine."""
REPORT_SECONDS = 20.0
"""Interval of progress lines when stderr is not a terminal."""
_TICK_SECONDS = 0.5
_TAIL_BYTES = 2**14
"""The part of a log that is searched for the progress."""

_BACKEND = re.compile(
    r"-DGGML_(RPC|CUDA|HIP|VULKAN|SYCL|MUSA|CANN|OPENCL|OPENVINO)(?::\w+)?=(?:ON|1|TRUE|YES)\b", re.IGNORECASE
)
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
class Stamp:
    """Describes how `.venv` was made.

    `digest` identifies the inputs, `cmake_args` are the user's (kept for rebuilds), `rung` the arguments in use with
    their `reason`, `compiler` the compiler they were chosen for. `build` is the CPU, libraries and folder for which
    the build was checked.
    """

    digest: str
    cmake_args: str
    rung: str | None = None
    reason: str = ""
    compiler: str = ""
    build: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """The stamp in `path`, or None when `.venv` is not complete."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Writes the stamp, which marks `.venv` as complete."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def digest(root: Path) -> str:
    """A hash of the inputs of the set-up: lock, project metadata, these scripts, and the folder of the clone."""
    parts = [
        str(root).encode(),
        *(
            (root / name).read_bytes()
            for name in (LOCK, "pyproject.toml", "headgate/bootstrap.py", "headgate/build.py")
        ),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def split_lock(text: str) -> tuple[list[str], str]:
    """The lines of the lock without llama-cpp-python, and its line. Raises SetupError when it is not locked."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    engine = [line for line in lines if re.split(r"[=<>~!; ]", line)[0].lower().replace("_", "-") == ENGINE]
    if len(engine) != 1:
        raise SetupError(f"{LOCK} must contain exactly one line for {ENGINE}; `make lock` writes it")
    return [line for line in lines if line not in engine], engine[0]


def wanted_backends(cmake_args: str) -> list[str]:
    """The ggml backends that the CMake arguments enable, in lower case."""
    return sorted({found.lower() for found in _BACKEND.findall(cmake_args)})


def missing_backends(package: Path, wanted: Sequence[str]) -> list[str]:
    """The backends of `wanted` that the libraries in `package` (the `llama_cpp` folder) lack.

    A backend is a library of its own (`libggml-rpc.so`) or, in a static build, a symbol in another library.
    """
    libraries = [path for path in package.rglob("*") if re.search(r"\.(so|dylib|dll)(\.|$)", path.name)]
    return [name for name in wanted if not any(_holds(path, name) for path in libraries)]


def _holds(library: Path, backend: str) -> bool:
    if re.match(rf"(lib)?ggml-{backend}\b", library.name):
        return True
    symbol = {"hip": b"ggml_backend_hip_", "rpc": b"ggml_backend_rpc_add_server"}.get(
        backend, f"ggml_backend_{backend}_".encode()
    )
    if library.is_symlink() or library.stat().st_size == 0 or "ggml" not in library.name:
        return False
    with library.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(symbol) >= 0


def progress(text: str) -> float | None:
    """The completed share (0.0 to 1.0) in the output of Ninja or Make, or None."""
    steps = list(_STEP.finditer(text))
    if not steps:
        return None
    done, of, percent = steps[-1].groups()
    return int(percent) / 100 if percent else int(done) / max(int(of), 1)


@dataclass(frozen=True)
class Interpreter:
    """A Python that `.venv` can be made with."""

    executable: str
    version: tuple[int, int, int]
    optimized: bool
    is_standard: bool = True
    """Whether it is a release of CPython with the global lock and without debugging."""

    @classmethod
    def query(cls, path: str, seconds: float = PROBE_SECONDS) -> Interpreter | None:
        """The interpreter at `path`; None when it fails, is too old, or cannot create environments."""
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

    Interpreters of distributions are. Debian's arguments do not show it, so the prefix `/usr` counts.
    """
    return "--enable-optimizations" in configured or prefix == "/usr"


def installed_interpreters(path: str) -> list[Interpreter]:
    """All usable interpreters in the folders of `path` (a value of `PATH`), each once."""
    found: dict[Path, Interpreter | None] = {}
    for folder in filter(None, path.split(os.pathsep)):
        with contextlib.suppress(OSError):  # missing or not readable
            for file in sorted(file for file in Path(folder).iterdir() if _PYTHON.fullmatch(file.name)):
                real = file.resolve()
                key = real if _PYTHON.fullmatch(real.name) else file  # links to one launcher are different ones
                if key not in found:
                    found[key] = Interpreter.query(str(file))
    return [interpreter for interpreter in found.values() if interpreter is not None]


def best_interpreter(own: Interpreter, others: Sequence[Interpreter]) -> Interpreter:
    """`own`, or the optimized one of the nearest minor version when `own` is not optimized; of several the newest."""
    better = [other for other in others if other.optimized and other.is_standard and other.version[0] == own.version[0]]
    if own.optimized or not better:
        return own
    return max(better, key=lambda other: (-abs(other.version[1] - own.version[1]), other.version))


def compiler(environ: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> str:
    """The C++ compiler for the build. Raises SetupError with the command that installs one."""
    named = environ.get("CXX")
    for name in [named.split()[0]] if named and named.split() else ["c++", "g++", "clang++"]:
        if found := which(name):
            return found
    advice = "xcode-select --install" if sys.platform == "darwin" else (
        "apt install build-essential (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or apk add build-base (Alpine)"
    )  # fmt: skip
    problem = f"CXX is {named!r}, which does not exist" if named else "no C++ compiler was found"
    raise SetupError(f"{problem}; llama-cpp-python needs one to compile; run: {advice}")


def proof_failure(status: int, out: bytes, errors: bytes) -> str | None:
    """Why a build is unusable, from the exit of the check; None when it computes correctly.

    Raises SetupError when the check ended before it computed anything.
    """
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            name = str(-status)
        return f"this build is broken: its first computation ended with signal {name}"
    try:
        answer = json.loads(out)
        wrong = answer.get("error")
    except (ValueError, AttributeError):
        last = (errors.decode("utf-8", "replace").strip().splitlines() or [f"status {status}"])[-1]
        raise SetupError(f"llama-cpp-python is installed but cannot be loaded: {last}") from None
    return f"this build computes wrong results: {wrong}" if wrong else None


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


class Setup:
    """The steps that make `.venv` below `root` complete."""

    def __init__(self, root: Path, environ: Mapping[str, str]) -> None:
        self.root = root
        self.venv = root / ".venv"
        self.python = self.venv / "bin" / "python"
        self.stamp = self.venv / "headgate.json"
        self.log = self.venv / "headgate-setup.log"
        self.environ = {**environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}
        self.cmake_args = environ.get("CMAKE_ARGS", "").strip()
        self.cpu: Cpu = this_cpu()
        self._plain = ""
        """The user's CMake arguments."""

    def run(self) -> None:
        """Installs what is missing. Returns quickly when `.venv` is complete."""
        found = Stamp.read(self.stamp) if self.python.exists() else None
        made_of = digest(self.root)
        cmake_args = self.cmake_args or (found.cmake_args if found else "")
        changed = False
        if found and found.build and (found.digest, found.cmake_args) == (made_of, cmake_args):
            if self._is_unchanged(found.build) or self._computes_here(found):
                return
            changed = True
        else:
            print("Setting up Headgate in .venv; this takes a few minutes once.", file=sys.stderr)
        self._plain = cmake_args
        compiles_with = self._compiler(compiler(self.environ))
        rungs = self._ladder(compiles_with, cmake_args)
        if found:
            if found.compiler == str(compiles_with) and found.build and found.build.get("cpu") == str(self.cpu):
                kept = [index for index, rung in enumerate(rungs) if rung.arguments == found.rung]
                rungs = rungs[kept[0] :] if kept else rungs
            changed = changed or found.cmake_args != cmake_args or found.rung not in (None, rungs[0].arguments)
        self.stamp.unlink(missing_ok=True)
        self._venv()
        self.log.unlink(missing_ok=True)
        rest, engine = split_lock((self.root / LOCK).read_text(encoding="utf-8"))
        without_engine = self.venv / "requirements-without-engine.txt"
        without_engine.write_text("\n".join(rest) + "\n", encoding="utf-8")
        self._pip("installing packages", "install", "--no-deps", "-r", str(without_engine))
        rung = self._engine(engine, rungs, changed=changed)
        self._pip("installing headgate", "install", "--no-deps", "--editable", str(self.root))
        self._pip("checking versions", "check")
        build = asdict(Build.at(self._package(), self.cpu))
        Stamp(made_of, cmake_args, rung.arguments, rung.reason, str(compiles_with), build).write(self.stamp)

    def _is_unchanged(self, build: Mapping[str, str]) -> bool:
        """Whether CPU, libraries and folder are those for which the build was checked."""
        return build == asdict(Build.at(Path(build.get("place", self.root)), self.cpu))

    def _computes_here(self, found: Stamp) -> bool:
        """Checks a build after a change of CPU or libraries. Updates the stamp when it computes."""
        print("Checking the build of llama.cpp: the CPU or the libraries changed.", file=sys.stderr)
        try:
            failure = self._proof()
        except SetupError as error:
            failure = str(error)
        if failure is not None:
            print(f"  {failure}; installing it again for {self.cpu}", file=sys.stderr)
            return False
        replace(found, build=asdict(Build.at(self._package(), self.cpu))).write(self.stamp)
        return True

    def _compiler(self, path: str) -> Compiler:
        return compiler_at(path)

    def _ladder(self, compiles_with: Compiler, cmake_args: str) -> tuple[Rung, ...]:
        try:
            return ladder(self.cpu, compiles_with, cmake_args, self.environ.get("CXXFLAGS", ""))
        except ValueError as error:
            raise SetupError(f"CMAKE_ARGS={cmake_args} is invalid ({error}); check its quotes") from error

    def _venv(self) -> None:
        if self.python.exists() and self._has_pip():
            return
        if self.venv.exists():
            shutil.rmtree(self.venv)
        base = self._base()
        made = subprocess.run([base, "-m", "venv", str(self.venv)], capture_output=True, text=True, check=False)
        if made.returncode != 0 or not self._has_pip():
            shutil.rmtree(self.venv, ignore_errors=True)
            raise SetupError(
                f"{base} cannot create a virtual environment:\n{(made.stdout + made.stderr).strip()}\n"
                f"on Debian and Ubuntu, run: apt install python3-venv"
            )

    def _base(self) -> str:
        """The interpreter for `.venv`. Prints which one when it is not the running one."""
        base: str = getattr(sys, "_base_executable", None) or sys.executable
        own = Interpreter.query(base)
        if own is None or own.optimized or self.environ.get("PYTHON"):
            return base
        best = best_interpreter(own, installed_interpreters(self.environ.get("PATH", "")))
        if best.optimized:
            print(
                f"  .venv uses {best}: {own} was compiled without optimizations and takes up to 50 % more time for "
                f"the same code. To use it anyway: make clean, then make serve PYTHON={own.executable}",
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
        except OSError:  # the interpreter is missing or of another machine
            return False

    def _engine(self, requirement: str, rungs: Sequence[Rung], *, changed: bool) -> Rung:
        """Installs llama-cpp-python with the first of `rungs` that computes correctly, and returns that rung.

        Raises SetupError when none does.
        """
        failures = []
        for number, rung in enumerate(rungs):
            if number or rung.arguments != self._plain:
                print(f"  {rung.reason}", file=sys.stderr)
            try:
                compiled = self._compile(requirement, rung.arguments, anew=changed or number > 0)
            except SetupError as error:
                if number == 0:
                    raise
                failure: str | None = str(error).splitlines()[-1]
            else:
                failure = self._proof()
                if failure is not None and not compiled:
                    print(f"  {failure}; it came from pip's cache and is compiled again", file=sys.stderr)
                    self._compile(requirement, rung.arguments, anew=True)
                    failure = self._proof()
            if failure is None:
                return rung
            failures.append(failure)
            next_step = "; compiling again with other arguments" if number + 1 < len(rungs) else ""
            print(f"  {failure}{next_step}", file=sys.stderr)
        raise SetupError(self._no_rung(rungs, failures))

    def _no_rung(self, rungs: Sequence[Rung], failures: Sequence[str]) -> str:
        tried = [f"  CMAKE_ARGS={rung.arguments or '(none)'}: {why}" for rung, why in zip(rungs, failures, strict=True)]
        advice = (
            "remove the instruction sets from CMAKE_ARGS, so that others are tried, or choose other ones"
            if chooses_instructions(self._plain)
            else "install another C++ compiler (GCC 13 or Clang 16 or newer) and set CXX and CC to it"
        )
        return "\n".join(
            [f"no build of llama.cpp works on this CPU, {self.cpu}:", *tried, f"{advice}; the log is {self.log}"]
        )

    def _compile(self, requirement: str, cmake_args: str, *, anew: bool) -> bool:
        """Installs llama-cpp-python with all requested backends. Compiles it when the cached build lacks one.

        Returns whether it was compiled, and not taken from pip's cache.
        """
        arguments = f"{OUR_CMAKE_ARGS} {cmake_args}".strip()
        wanted = wanted_backends(arguments)
        self.environ["CMAKE_ARGS"] = arguments
        compiled = self._build(requirement, arguments, anew=anew)
        if (missing := missing_backends(self._package(), wanted)) and not compiled:
            print(f"  the cached {ENGINE} has no backend {', '.join(missing)}; compiling it again", file=sys.stderr)
            compiled = self._build(requirement, arguments, anew=True)
            missing = missing_backends(self._package(), wanted)
        if missing:
            raise SetupError(
                f"{requirement} was compiled with CMAKE_ARGS={arguments!r} but has no ggml backend "
                f"{', '.join(missing)}; the log is {self.log}"
            )
        return compiled

    def _build(self, requirement: str, arguments: str, *, anew: bool) -> bool:
        """Installs llama-cpp-python. Returns whether it was compiled; `anew` forces that."""
        print(
            f"  {requirement}, {arguments}: compiling from source unless pip has cached a build; "
            f"4 to 8 minutes on two cores",
            file=sys.stderr,
        )
        name = re.split(r"[=<>~!; ]", requirement)[0]
        options = ["--no-cache-dir", "--force-reinstall"] if anew else []
        self._pip(name, "install", "--verbose", "--no-deps", "--no-binary", name, *options, requirement)
        return anew or self._has_logged(f"Building wheel for {name}")

    def _has_logged(self, text: str) -> bool:
        return self.log.exists() and text.encode() in self.log.read_bytes()

    def _proof(self) -> str | None:
        """Why the build is unusable, or None when it computes. Raises SetupError when it cannot be loaded."""
        argv = [str(self.python), "-m", "inference.helper", "proof"]
        step = Progress("checking that it computes")
        environ = {**self.environ, "PYTHONPATH": str(self.root)}
        try:
            done = subprocess.run(
                argv, input=b"{}", capture_output=True, check=False, timeout=PROOF_SECONDS, cwd=self.venv, env=environ
            )
        except subprocess.TimeoutExpired:
            failure: str | None = f"this build computed nothing within {PROOF_SECONDS:g} s"
        else:
            failure = proof_failure(done.returncode, done.stdout, done.stderr)
        step.end("done" if failure is None else "failed")
        return failure

    def _package(self) -> Path:
        """The folder of `llama_cpp`, found without importing it."""
        script = "import importlib.util; print(importlib.util.find_spec('llama_cpp').origin)"
        found = subprocess.run(
            [str(self.python), "-c", script], capture_output=True, text=True, check=True, cwd=self.venv
        )
        return Path(found.stdout.strip()).parent

    def _pip(self, what: str, *words: str) -> None:
        run_logged(what, [str(self.python), "-m", "pip", *words], self.log, self.environ)


def main(
    environ: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    setup: Callable[[Path, Mapping[str, str]], Setup] = Setup,
) -> int:
    """Sets up the clone at `root`. Returns the exit status: 1 after a printed error."""
    try:
        setup(root, environ).run()
    except SetupError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nheadgate: stopped; run the same command again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
