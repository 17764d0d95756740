"""Set-up: creates `.venv` and installs Headgate and llama.cpp into it. Changes nothing else but pip's cache.

It needs Python 3.11 or newer and no other package:

    python3 headgate/bootstrap.py

1. `virtual_environment` creates `.venv`, and pip installs the packages of `requirements.lock` except llama-cpp-python.
2. `engine_build` compiles llama-cpp-python with ggml's RPC backend (for simulated GPUs) and the backends in CMAKE_ARGS.
3. A child process checks that the build computes on this CPU (`inference/devices/build_proof_job.py`). If it does
   not, llama-cpp-python is compiled again with the next of `headgate.build.compile_options`. The stamp file
   `.venv/headgate.json` records the CMake arguments that work.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if not __package__:  # run as a script: the package is not on the path
    sys.path.insert(0, str(ROOT))

from headgate.build import Build, CompileOptions, Compiler, Cpu, compile_options, this_cpu  # noqa: E402
from headgate.engine_build import ENGINE, EngineBuild  # noqa: E402
from headgate.virtual_environment import SetupError, VirtualEnvironment  # noqa: E402

LOCK = "requirements.lock"
INPUTS = (
    LOCK,
    "pyproject.toml",
    *(f"headgate/{name}.py" for name in ("bootstrap", "build", "engine_build", "virtual_environment")),
)
"""The files whose change requires another set-up."""


@dataclass(frozen=True)
class Stamp:
    """Describes how `.venv` was made.

    `digest` identifies the inputs. `cmake_args` are the CMake arguments of the user, kept for rebuilds. `rung` are
    those of the installed build, a step of `compile_options`; `reason` is why they were chosen, and `compiler` the
    compiler that they were chosen for. `build` is the CPU, libraries and folder for which the build was checked.
    """

    digest: str
    cmake_args: str
    rung: str | None = None
    reason: str = ""
    compiler: str = ""
    build: Mapping[str, str] | None = None

    @classmethod
    def read(cls, path: Path) -> Stamp | None:
        """The stamp in `path`. None when it is missing or invalid: `.venv` is not complete."""
        try:
            return cls(**json.loads(path.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Writes the stamp, which marks `.venv` as complete."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")


def digest(root: Path) -> str:
    """A hash of the content of INPUTS and of the path of the clone."""
    parts = [str(root).encode(), *((root / name).read_bytes() for name in INPUTS)]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def split_lock(text: str) -> tuple[list[str], str]:
    """The requirements in a lock: those without llama-cpp-python, and the one of llama-cpp-python.

    Raises SetupError unless exactly one line is for llama-cpp-python.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    engine = [line for line in lines if re.split(r"[=<>~!; ]", line)[0].lower().replace("_", "-") == ENGINE]
    if len(engine) != 1:
        raise SetupError(f"{LOCK} must contain exactly one line for {ENGINE}; `make lock` writes it")
    return [line for line in lines if line not in engine], engine[0]


class Setup:
    """The steps that make `.venv` complete."""

    def __init__(self, environment: VirtualEnvironment, engine: EngineBuild, cpu: Cpu) -> None:
        self._environment = environment
        self._engine = engine
        self._cpu = cpu
        self._stamp = environment.folder / "headgate.json"

    @classmethod
    def at(cls, root: Path, environ: Mapping[str, str]) -> Setup:
        """The set-up of the clone at `root` on this machine."""
        environment, cpu = VirtualEnvironment(root, environ), this_cpu()
        return cls(environment, EngineBuild(environment, cpu), cpu)

    def run(self) -> None:
        """Installs what is missing. Returns quickly when `.venv` is complete. Raises SetupError."""
        environment = self._environment
        found = Stamp.read(self._stamp) if environment.python.exists() else None
        made_of = digest(environment.root)
        cmake_args = environment.environ.get("CMAKE_ARGS", "").strip() or (found.cmake_args if found else "")
        changed = False
        if found and found.build and (found.digest, found.cmake_args) == (made_of, cmake_args):
            if self._is_unchanged(found.build) or self._computes_here(found):
                return
            changed = True
        else:
            print("Setting up Headgate in .venv; this takes a few minutes once.", file=sys.stderr)
        compiler = self._engine.compiler()
        choices = self._choices(compiler, cmake_args)
        if found:
            if found.compiler == str(compiler) and found.build and found.build.get("cpu") == str(self._cpu):
                used = [index for index, options in enumerate(choices) if options.arguments == found.rung]
                choices = choices[used[0] :] if used else choices
            changed = changed or found.cmake_args != cmake_args or found.rung not in (None, choices[0].arguments)
        self._stamp.unlink(missing_ok=True)
        environment.create()
        environment.log.unlink(missing_ok=True)
        rest, engine = split_lock((environment.root / LOCK).read_text(encoding="utf-8"))
        without_engine = environment.folder / "requirements-without-engine.txt"
        without_engine.write_text("\n".join(rest) + "\n", encoding="utf-8")
        environment.pip("installing packages", "install", "--no-deps", "-r", str(without_engine))
        options = self._engine.install(engine, choices, cmake_args=cmake_args, changed=changed)
        environment.pip("installing headgate", "install", "--no-deps", "--editable", str(environment.root))
        environment.pip("checking versions", "check")
        build = asdict(Build.at(self._engine.package(), self._cpu))
        Stamp(made_of, cmake_args, options.arguments, options.reason, str(compiler), build).write(self._stamp)

    def _is_unchanged(self, build: Mapping[str, str]) -> bool:
        """Whether CPU, libraries and folder are those for which the build was checked."""
        return build == asdict(Build.at(Path(build.get("place", self._environment.root)), self._cpu))

    def _computes_here(self, found: Stamp) -> bool:
        """Whether the build computes after a change of CPU, libraries or folder. Updates the stamp if it does."""
        print("Checking the build of llama.cpp: the CPU, the libraries or their folder changed.", file=sys.stderr)
        try:
            failure = self._engine.proof()
        except SetupError as error:
            failure = str(error)
        if failure is not None:
            print(f"  {failure}; compiling llama.cpp again for {self._cpu}", file=sys.stderr)
            return False
        replace(found, build=asdict(Build.at(self._engine.package(), self._cpu))).write(self._stamp)
        return True

    def _choices(self, compiler: Compiler, cmake_args: str) -> tuple[CompileOptions, ...]:
        try:
            return compile_options(self._cpu, compiler, cmake_args, self._environment.environ.get("CXXFLAGS", ""))
        except ValueError as error:
            raise SetupError(f"CMAKE_ARGS={cmake_args} is invalid ({error}); check its quotes") from error


def main(
    environ: Mapping[str, str] = os.environ,
    root: Path = ROOT,
    setup: Callable[[Path, Mapping[str, str]], Setup] = Setup.at,
) -> int:
    """Sets up the clone at `root`. Returns the exit status: 1 after an error (printed), 130 after Ctrl-C."""
    if sys.platform == "win32":
        print("headgate: Windows is not supported (docs/decisions.md explains why); use WSL 2", file=sys.stderr)
        return 1
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
