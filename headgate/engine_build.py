"""Compiles llama-cpp-python and checks that the build computes on this CPU.

It needs only the standard library, because it runs before packages are installed. pip may have cached a wheel that
lacks a requested backend, so the installed libraries are searched for each of them, without loading them.
"""

from __future__ import annotations

import json
import mmap
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from headgate.build import CompileOptions, Compiler, Cpu, chooses_instructions, compiler_at
from headgate.virtual_environment import Progress, SetupError, VirtualEnvironment

ENGINE = "llama-cpp-python"
OUR_CMAKE_ARGS = "-DGGML_RPC=ON"
PROOF_SECONDS = 120.0
"""Timeout of the check of a build, which takes about a second on an idle machine."""

_BACKEND = re.compile(
    r"-D\s*GGML_(RPC|CUDA|HIP|VULKAN|SYCL|MUSA|CANN|OPENCL|OPENVINO)(?::\w+)?=(?:ON|1|TRUE|YES)\b", re.IGNORECASE
)


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


def compiler_path(environ: Mapping[str, str], which: Callable[[str], str | None] = shutil.which) -> str:
    """The path of the C++ compiler for the build: CXX, else the first of c++, g++ and clang++.

    Raises SetupError with the command that installs one.
    """
    named = environ.get("CXX")
    for name in [named.split()[0]] if named and named.split() else ["c++", "g++", "clang++"]:
        if found := which(name):
            return found
    advice = "xcode-select --install" if sys.platform == "darwin" else (
        "apt install build-essential (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or apk add build-base (Alpine)"
    )  # fmt: skip
    if named:
        raise SetupError(f"CXX names the C++ compiler {named!r}, which does not exist; correct or unset CXX")
    raise SetupError(f"no C++ compiler was found, and llama-cpp-python has to be compiled; run: {advice}")


def proof_failure(status: int, out: bytes, errors: bytes) -> str | None:
    """Why a build is unusable, from the exit status and the output of the check; None when it computes correctly.

    Raises SetupError when the check printed no result, because the build cannot be loaded.
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


class EngineBuild:
    """Installs llama-cpp-python into `environment` for `cpu`."""

    def __init__(self, environment: VirtualEnvironment, cpu: Cpu) -> None:
        self._environment = environment
        self._cpu = cpu

    def compiler(self) -> Compiler:
        """The C++ compiler for the build. Raises SetupError if there is none."""
        return compiler_at(compiler_path(self._environment.environ))

    def install(
        self, requirement: str, choices: Sequence[CompileOptions], *, cmake_args: str, changed: bool
    ) -> CompileOptions:
        """Installs llama-cpp-python with the first of `choices` that computes correctly, and returns these options.

        `cmake_args` are the arguments of the user. `changed`: an installed build is compiled again. Raises SetupError
        when the first of `choices` cannot be compiled, a build cannot be loaded, or no build computes.
        """
        failures = []
        for number, options in enumerate(choices):
            if number or options.arguments != cmake_args:
                print(f"  {options.reason}", file=sys.stderr)
            try:
                compiled = self._compile(requirement, options.arguments, anew=changed or number > 0)
            except SetupError as error:
                if number == 0:
                    raise
                failure: str | None = str(error).splitlines()[-1]
            else:
                failure = self.proof()
                if failure is not None and not compiled:
                    print(f"  {failure}; this build was made earlier, so it is compiled again", file=sys.stderr)
                    self._compile(requirement, options.arguments, anew=True)
                    failure = self.proof()
            if failure is None:
                return options
            failures.append(failure)
            next_step = "; compiling again with other arguments" if number + 1 < len(choices) else ""
            print(f"  {failure}{next_step}", file=sys.stderr)
        raise SetupError(self._no_build(choices, failures, cmake_args))

    def _no_build(self, choices: Sequence[CompileOptions], failures: Sequence[str], cmake_args: str) -> str:
        tried = [
            f"  CMAKE_ARGS={options.arguments or '(none)'}: {why}"
            for options, why in zip(choices, failures, strict=True)
        ]
        advice = (
            "remove the instruction sets from CMAKE_ARGS, so that others are tried, or choose other ones"
            if chooses_instructions(cmake_args)
            else "install another C++ compiler (GCC 13 or Clang 16 or newer) and set CXX and CC to it"
        )
        return "\n".join(
            [
                f"no build of llama.cpp works on this CPU, {self._cpu}:",
                *tried,
                f"{advice}; the log is {self._environment.log}",
            ]
        )

    def _compile(self, requirement: str, cmake_args: str, *, anew: bool) -> bool:
        """Installs llama-cpp-python with all requested backends. Compiles it when the available build lacks one.

        Returns whether it was compiled: False if it was installed before or came from pip's cache.
        """
        arguments = f"{OUR_CMAKE_ARGS} {cmake_args}".strip()
        wanted = wanted_backends(arguments)
        self._environment.environ["CMAKE_ARGS"] = arguments
        compiled = self._build(requirement, arguments, anew=anew)
        if (missing := missing_backends(self.package(), wanted)) and not compiled:
            print(f"  the available {ENGINE} has no backend {', '.join(missing)}; compiling it again", file=sys.stderr)
            compiled = self._build(requirement, arguments, anew=True)
            missing = missing_backends(self.package(), wanted)
        if missing:
            raise SetupError(
                f"{requirement} was compiled with CMAKE_ARGS={arguments!r} but has no ggml backend "
                f"{', '.join(missing)}; the log is {self._environment.log}"
            )
        return compiled

    def _build(self, requirement: str, arguments: str, *, anew: bool) -> bool:
        """Installs llama-cpp-python. Returns whether it was compiled; `anew` forces that."""
        unless = "" if anew else " unless it is installed or pip has cached a build"
        print(
            f"  {requirement}, {arguments}: compiling from source{unless}; 4 to 8 minutes on two cores", file=sys.stderr
        )
        name = re.split(r"[=<>~!; ]", requirement)[0]
        options = ["--no-cache-dir", "--force-reinstall"] if anew else []
        self._environment.pip(name, "install", "--verbose", "--no-deps", "--no-binary", name, *options, requirement)
        return anew or self._has_logged(f"Building wheel for {name}")

    def _has_logged(self, text: str) -> bool:
        return self._environment.log.exists() and text.encode() in self._environment.log.read_bytes()

    def proof(self) -> str | None:
        """Why the build is unusable, or None when it computes. Raises SetupError when it cannot be loaded."""
        argv = [str(self._environment.python), "-m", "inference.helper", "proof"]
        step = Progress("checking that it computes")
        environ = {**self._environment.environ, "PYTHONPATH": str(self._environment.root)}
        try:
            done = subprocess.run(
                argv,
                input=b"{}",
                capture_output=True,
                check=False,
                timeout=PROOF_SECONDS,
                cwd=self._environment.folder,
                env=environ,
            )
        except subprocess.TimeoutExpired:
            failure: str | None = f"this build computed nothing within {PROOF_SECONDS:g} s"
        else:
            failure = proof_failure(done.returncode, done.stdout, done.stderr)
        step.end("done" if failure is None else "failed")
        return failure

    def package(self) -> Path:
        """The folder of `llama_cpp`, found without importing it. Raises SetupError if it is not installed."""
        script = "import importlib.util; print(importlib.util.find_spec('llama_cpp').origin)"
        found = subprocess.run(
            [str(self._environment.python), "-c", script],
            capture_output=True,
            text=True,
            check=False,
            cwd=self._environment.folder,
        )
        if found.returncode != 0:
            folder = self._environment.folder
            raise SetupError(
                f"{ENGINE} is not in {folder} although pip installed it; remove {folder} and run the same command again"
            )
        return Path(found.stdout.strip()).parent
