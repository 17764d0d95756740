"""Makes `.venv` complete before Headgate runs; decides what is missing there, and touches nothing outside it.

Runs with any Python from 3.11 on and imports the standard library only, because nothing else is there yet:

    python3 headgate/bootstrap.py

Everything but llama-cpp-python comes from `requirements.lock` in a minute. llama-cpp-python is compiled from source
with ggml's RPC backend (simulated GPUs need it) and whatever backends CMAKE_ARGS asks for; pip may hold a wheel of it
that was compiled without them, so what was installed is looked at, by name and symbol, never by loading it: a compute
driver has no business in this process.

A child process then checks that the build computes on this CPU (`inference/helpers/build_proof_job.py`). Where it
does not,
llama-cpp-python is compiled again with the next arguments of `headgate.build.ladder`. The stamp keeps which ones work.

An interpreter that was compiled without optimizations, as pyenv compiles one unless told otherwise, takes up to a
half more time for the same code. Where the one that runs this is such, and nobody named it by `PYTHON`, `.venv` is made
with an optimized one that is installed as well.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import re
import selectors
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script, where the package is not on the path
    sys.path.insert(0, str(ROOT))

from headgate.build import Compiler, Cpu, Rung, chooses_instructions, ladder  # noqa: E402
from headgate.machine import Build, compiler_at, this_cpu  # noqa: E402

LOCK = "requirements.lock"
ENGINE = "llama-cpp-python"
OUR_CMAKE_ARGS = "-DGGML_RPC=ON"
OLDEST_PYTHON = (3, 11)
PROBE_SECONDS = 20.0
"""How long an interpreter may take to say what it is; one that hangs is passed over."""
PROOF_SECONDS = 120.0
"""How long the check of a build may take; on an idle machine it takes about a second."""
REPORT_SECONDS = 20.0
"""Where no terminal shows a live line, the build says how far it is this often."""

_BACKEND = re.compile(
    r"-DGGML_(RPC|CUDA|HIP|VULKAN|SYCL|MUSA|CANN|OPENCL|OPENVINO)(?::\w+)?=(?:ON|1|TRUE|YES)\b", re.IGNORECASE
)
_DESCRIBE = """
import ensurepip, json, sys, sysconfig, venv
usual = sys.version_info.releaselevel == "final" and not hasattr(sys, "gettotalrefcount")
usual = usual and sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
print(json.dumps({
    "executable": getattr(sys, "_base_executable", None) or sys.executable, "version": sys.version_info[:3],
    "prefix": sys.base_prefix, "configured": sysconfig.get_config_var("CONFIG_ARGS") or "", "usual": usual,
}))
"""
"""What an interpreter is asked. One without `ensurepip` cannot make an environment with pip."""
_PYTHON = re.compile(r"python3(\.\d+)?")
_STEP = re.compile(r"\[(\d+)/(\d+)\]|\[ *(\d+)%\]")


class SetupError(Exception):
    """Something a person has to mend; the message says how."""


@dataclass(frozen=True)
class Stamp:
    """What `.venv` was made from. `cmake_args` are the user's own, kept for later rebuilds.

    `build` says for which CPU, libraries and place the build is proven to compute; `rung` are the user's arguments with
    those that this took, `reason` is why they are used, and `compiler` is the one they were chosen for.
    """

    digest: str
    cmake_args: str
    rung: str | None = None
    reason: str = ""
    compiler: str = ""
    build: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """The stamp of a complete `.venv`, or None."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Marks `.venv` as complete."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def digest(root: Path) -> str:
    """Changes when the lock, the project's metadata, this script or the place of the clone change."""
    parts = [
        str(root).encode(),
        *(
            (root / name).read_bytes()
            for name in (LOCK, "pyproject.toml", "headgate/bootstrap.py", "headgate/build.py")
        ),
    ]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def split_lock(text: str) -> tuple[list[str], str]:
    """The lock's lines without the engine, and the engine's line; raises SetupError when the engine is not locked."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    engine = [line for line in lines if re.split(r"[=<>~!; ]", line)[0].lower().replace("_", "-") == ENGINE]
    if len(engine) != 1:
        raise SetupError(f"{LOCK} must name {ENGINE} once")
    return [line for line in lines if line not in engine], engine[0]


def wanted_backends(cmake_args: str) -> list[str]:
    """The ggml backends that these CMake arguments switch on, in lower case."""
    return sorted({found.lower() for found in _BACKEND.findall(cmake_args)})


def missing_backends(package: Path, wanted: Sequence[str]) -> list[str]:
    """Those of `wanted` that the libraries in `package` (the `llama_cpp` folder) do not hold.

    A backend is a library of its own (`libggml-rpc.so`) or, in a static build, a symbol inside another one.
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


def progress(line: str) -> float | None:
    """The share of a build that a line of Ninja's or Make's output stands for, 0.0 to 1.0, or None."""
    if (match := _STEP.search(line)) is None:
        return None
    if match[3]:
        return int(match[3]) / 100
    return int(match[1]) / max(int(match[2]), 1)


@dataclass(frozen=True)
class Interpreter:
    """A Python that `.venv` can be made with."""

    executable: str
    version: tuple[int, int, int]
    optimized: bool
    usual: bool = True
    """A release of CPython, neither for debugging nor without the global lock."""

    @classmethod
    def ask(cls, path: str, seconds: float = PROBE_SECONDS) -> Interpreter | None:
        """What the interpreter at `path` is; None if it is none, is too old, or cannot make an environment."""
        try:
            said = subprocess.run(
                [path, "-I", "-c", _DESCRIBE], capture_output=True, text=True, check=True, timeout=seconds
            )
            about = json.loads(said.stdout)
            version = tuple(about["version"])
            optimized = is_optimized(about["configured"], about["prefix"])
            found = cls(about["executable"], version, optimized, about["usual"])
        except (OSError, subprocess.SubprocessError, ValueError, TypeError, KeyError):
            return None
        return found if version >= OLDEST_PYTHON else None

    def __str__(self) -> str:
        return f"{self.executable} ({'.'.join(map(str, self.version))})"


def is_optimized(configured: str, prefix: str) -> bool:
    """By the arguments of its `configure` and where it is installed. Those of distributions all are; Debian's, which is
    so by a target of its own, does not show it among the arguments.
    """
    return "--enable-optimizations" in configured or prefix == "/usr"


def installed_interpreters(path: str, ask: Callable[[str], Interpreter | None] = Interpreter.ask) -> list[Interpreter]:
    """Every usable Python in the folders of `path` (as in `PATH`), also those that another one hides; each is asked
    once.
    """
    found: dict[Path, Interpreter | None] = {}
    for folder in filter(None, path.split(os.pathsep)):
        with contextlib.suppress(OSError):  # not there, or nothing for this user
            for file in sorted(file for file in Path(folder).iterdir() if _PYTHON.fullmatch(file.name)):
                real = file.resolve()
                itself = real if _PYTHON.fullmatch(real.name) else file  # a link to a launcher goes by its own name
                if itself not in found:
                    found[itself] = ask(str(file))
    return [interpreter for interpreter in found.values() if interpreter is not None]


def best_interpreter(own: Interpreter, others: Sequence[Interpreter]) -> Interpreter:
    """`own`, unless only others are optimized: then the one of the nearest minor version, of several the newest."""
    better = [other for other in others if other.optimized and other.usual and other.version[0] == own.version[0]]
    if own.optimized or not better:
        return own
    return max(better, key=lambda other: (-abs(other.version[1] - own.version[1]), other.version))


def compiler(environ: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> str:
    """The C++ compiler that a build would use; raises SetupError saying what to install when there is none."""
    named = environ.get("CXX")
    for name in [named.split()[0]] if named and named.split() else ["c++", "g++", "clang++"]:
        if found := which(name):
            return found
    advice = "xcode-select --install" if sys.platform == "darwin" else (
        "apt install build-essential (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or apk add build-base (Alpine)"
    )  # fmt: skip
    what = f"CXX names {named!r}, which is not there" if named else "no C++ compiler was found"
    raise SetupError(f"{what}, and llama-cpp-python is compiled here; run: {advice}")


def proof_failure(status: int, out: bytes, errors: bytes) -> str | None:
    """What the proof's end says about a build: None where it computes, else one sentence.

    Raises SetupError where the proof did not come to computing.
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
        raise SetupError(f"llama-cpp-python was installed and cannot be used: {last}") from None
    return f"this build computes nonsense: {wrong}" if wrong else None


class Progress:
    """Says how far a long step is: one live line on a terminal, a line now and then elsewhere."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._start = time.monotonic()
        self._last = self._start
        self._live = sys.stderr.isatty()
        self._share: float | None = None

    @property
    def elapsed(self) -> str:
        """Minutes and seconds since the start."""
        seconds = int(time.monotonic() - self._start)
        return f"{seconds // 60}:{seconds % 60:02d}"

    def read(self, line: str) -> None:
        """Takes from a line of output how far the step is."""
        if (share := progress(line)) is not None:
            self._share = share

    def tell(self) -> None:
        """Shows how far the step is, if it is time to; also while it prints nothing."""
        now = time.monotonic()
        if now - self._last < (0.2 if self._live else REPORT_SECONDS):
            return
        self._last = now
        percent = "" if self._share is None else f"{self._share:.0%}, "
        self._write(f"{percent}{self.elapsed} so far", end="" if self._live else "\n")

    def end(self, how: str) -> None:
        """Replaces the live line by the result."""
        self._write(f"{how} ({self.elapsed})", end="\n")

    def _write(self, text: str, end: str) -> None:
        line = f"  {self._what}: {text}"
        print(f"\r{line:<70}" if self._live else line, end=end, file=sys.stderr, flush=True)


def run_logged(what: str, argv: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
    """Runs a command with its output in `log` and its progress on stderr; raises SetupError with the log's tail."""
    shown = Progress(what)
    with log.open("a", encoding="utf-8") as out:
        out.write(f"$ {' '.join(argv)}\n")
        with subprocess.Popen(
            argv, env=dict(environ), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as process:
            try:
                for line in _lines(process, shown.tell):
                    out.write(line)
                    shown.read(line)
            except BaseException:
                process.terminate()
                raise
        status = process.returncode
    if status != 0:
        shown.end("failed")
        tail = log.read_text(encoding="utf-8", errors="replace").splitlines()[-30:]
        raise SetupError("\n".join([*tail, "", f"{what} failed with status {status}; the whole log is {log}"]))
    shown.end("done")


def _lines(process: subprocess.Popen[bytes], meanwhile: Callable[[], None]) -> Iterator[str]:
    """The process's output line by line; `meanwhile` is called about every second, also while nothing comes."""
    assert process.stdout is not None
    held = b""
    with selectors.DefaultSelector() as ready:
        ready.register(process.stdout, selectors.EVENT_READ)
        while True:
            meanwhile()
            if not ready.select(1.0):
                continue
            chunk = os.read(process.stdout.fileno(), 1 << 16)
            *whole, held = (held + chunk).split(b"\n")
            for line in whole:
                yield line.decode("utf-8", "replace") + "\n"
            if not chunk:
                if held:
                    yield held.decode("utf-8", "replace") + "\n"
                return


class Setup:
    """The steps from nothing to a complete `.venv` below `root`."""

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
        """The arguments that are used where nothing is known against them: the user's."""

    def run(self) -> None:
        """Does what is missing; quick when nothing is."""
        found = Stamp.read(self.stamp) if self.python.exists() else None
        made_of = digest(self.root)
        cmake_args = self.cmake_args or (found.cmake_args if found else "")
        changed = False
        if found and found.build and (found.digest, found.cmake_args) == (made_of, cmake_args):
            if self._is_unchanged(found.build) or self._computes_here(found):
                return
            changed = True
        else:
            print("Headgate sets itself up in .venv; this takes a few minutes once.", file=sys.stderr)
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
        """Whether CPU, libraries and place are those for which the build is proven to compute."""
        return build == asdict(Build.at(Path(build.get("place", self.root)), self.cpu))

    def _computes_here(self, found: Stamp) -> bool:
        """Whether a build computes although its CPU or its libraries changed; the stamp then says so."""
        print("Headgate checks its build of llama.cpp: the CPU or the libraries changed.", file=sys.stderr)
        try:
            failure = self._proof()
        except SetupError as error:
            failure = str(error)
        if failure is not None:
            print(f"  {failure}; it is installed again for {self.cpu}", file=sys.stderr)
            return False
        replace(found, build=asdict(Build.at(self._package(), self.cpu))).write(self.stamp)
        return True

    def _compiler(self, path: str) -> Compiler:
        return compiler_at(path)

    def _ladder(self, compiles_with: Compiler, cmake_args: str) -> tuple[Rung, ...]:
        try:
            return ladder(self.cpu, compiles_with, cmake_args, self.environ.get("CXXFLAGS", ""))
        except ValueError as error:
            raise SetupError(f"CMAKE_ARGS={cmake_args} cannot be read ({error}); check its quotes") from error

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
                f"{base} cannot make a virtual environment:\n{(made.stdout + made.stderr).strip()}\n"
                f"on Debian and Ubuntu, run: apt install python3-venv"
            )

    def _base(self) -> str:
        """The interpreter that `.venv` is made with; says which one where that is not the one that runs this."""
        base: str = getattr(sys, "_base_executable", None) or sys.executable
        own = Interpreter.ask(base)
        if own is None or own.optimized or self.environ.get("PYTHON"):
            return base
        best = best_interpreter(own, installed_interpreters(self.environ.get("PATH", "")))
        if best.optimized:
            print(
                f"  .venv is made with {best}: {own} was compiled without optimizations and takes up to a half more "
                f"time for the same code. To have that one all the same: make clean, then make serve "
                f"PYTHON={own.executable}",
                file=sys.stderr,
            )
        else:
            print(
                f"  {own} was compiled without optimizations and takes up to a half more time than one with them for "
                f"the same code. Those of distributions have them; pyenv compiles with them when "
                f"PYTHON_CONFIGURE_OPTS=--enable-optimizations is set",
                file=sys.stderr,
            )
        return best.executable

    def _has_pip(self) -> bool:
        argv = [str(self.python), "-c", "import pip"]
        try:
            return subprocess.run(argv, capture_output=True, check=False).returncode == 0
        except OSError:  # an interpreter of another machine, or one that is gone
            return False

    def _engine(self, requirement: str, rungs: Sequence[Rung], *, changed: bool) -> Rung:
        """Installs the engine by the first of `rungs` with which it computes, and returns that one.

        Raises SetupError where there is none.
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
                    print(f"  {failure}; it was not compiled now, so it is compiled anew", file=sys.stderr)
                    self._compile(requirement, rung.arguments, anew=True)
                    failure = self._proof()
            if failure is None:
                return rung
            failures.append(failure)
            more = "; it is compiled again with other arguments" if number + 1 < len(rungs) else ""
            print(f"  {failure}{more}", file=sys.stderr)
        raise SetupError(self._no_rung(rungs, failures))

    def _no_rung(self, rungs: Sequence[Rung], failures: Sequence[str]) -> str:
        tried = [f"  CMAKE_ARGS={rung.arguments or '(none)'}: {why}" for rung, why in zip(rungs, failures, strict=True)]
        advice = (
            "remove the instruction sets from CMAKE_ARGS, which were the only ones tried, or name other ones"
            if chooses_instructions(self._plain)
            else "install another C++ compiler (GCC 13 or Clang 16 or newer) and name it by CXX and CC"
        )
        return "\n".join(
            [f"llama.cpp does not compute on this CPU, {self.cpu}:", *tried, f"{advice}; the whole log is {self.log}"]
        )

    def _compile(self, requirement: str, cmake_args: str, *, anew: bool) -> bool:
        """Installs the engine with every backend asked for; compiles it again, once, where a cached build lacks one.

        Returns whether it was compiled, and not taken from pip's cache or left as it was.
        """
        arguments = f"{OUR_CMAKE_ARGS} {cmake_args}".strip()
        wanted = wanted_backends(arguments)
        self.environ["CMAKE_ARGS"] = arguments
        compiled = self._build(requirement, arguments, anew=anew)
        if (missing := missing_backends(self._package(), wanted)) and not compiled:
            print(
                f"  a cached {ENGINE} without {', '.join(missing)} was installed; it is compiled again", file=sys.stderr
            )
            compiled = self._build(requirement, arguments, anew=True)
            missing = missing_backends(self._package(), wanted)
        if missing:
            raise SetupError(
                f"{requirement} was compiled with CMAKE_ARGS={arguments!r} and still has no ggml backend "
                f"{', '.join(missing)}; the log of the build is {self.log}"
            )
        return compiled

    def _build(self, requirement: str, arguments: str, *, anew: bool) -> bool:
        """Has pip install the engine; returns whether it was compiled now. `anew` leaves no other way."""
        print(
            f"  {requirement}, {arguments}: compiled from source unless pip has kept a build; "
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
        """None where the build computes, else one sentence; raises SetupError where it cannot be loaded at all."""
        argv = [str(self.python), "-m", "inference.helper", "proof"]
        shown = Progress("checking that it computes")
        environ = {**self.environ, "PYTHONPATH": str(self.root)}
        try:
            done = subprocess.run(
                argv, input=b"{}", capture_output=True, check=False, timeout=PROOF_SECONDS, cwd=self.venv, env=environ
            )
        except subprocess.TimeoutExpired:
            failure: str | None = f"this build computed nothing within {PROOF_SECONDS:g} s"
        else:
            failure = proof_failure(done.returncode, done.stdout, done.stderr)
        shown.end("done" if failure is None else "failed")
        return failure

    def _package(self) -> Path:
        """Where `llama_cpp` was installed, found without importing it."""
        script = "import importlib.util; print(importlib.util.find_spec('llama_cpp').origin)"
        said = subprocess.run(
            [str(self.python), "-c", script], capture_output=True, text=True, check=True, cwd=self.venv
        )
        return Path(said.stdout.strip()).parent

    def _pip(self, what: str, *words: str) -> None:
        run_logged(what, [str(self.python), "-m", "pip", *words], self.log, self.environ)


def main(
    environ: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    setup: Callable[[Path, Mapping[str, str]], Setup] = Setup,
) -> int:
    """Sets up the clone at `root`; exit status 1 with one explanation when that is impossible."""
    try:
        setup(root, environ).run()
    except SetupError as error:
        print(f"headgate: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nheadgate: stopped; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
