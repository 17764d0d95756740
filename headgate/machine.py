"""Reads what a compiled llama.cpp depends on: the CPU, the C++ compiler, the installed libraries and their place.

Standard library only: `headgate/bootstrap.py` uses it before anything is installed.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from headgate.build import Compiler, Cpu, compiler_of_macros, cpu_of_cpuinfo, cpu_of_sysctl

CPUINFO = Path("/proc/cpuinfo")
_FIRST_CPU_BYTES = 2**14
"""Enough for the first CPU in /proc/cpuinfo: the kernel takes milliseconds to describe hundreds of them."""
_ASK_SECONDS = 20.0
_LIBRARY = re.compile(r"\.(so|dylib|dll)(\.|$)")


def this_cpu(cpuinfo: Path = CPUINFO) -> Cpu:
    """The CPU of this machine; one without a model and features where the system does not tell."""
    machine = platform.machine()
    if sys.platform == "darwin":
        words = ["sysctl", "machdep.cpu", "hw.optional"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return Cpu("", machine)
        return cpu_of_sysctl(done.stdout, machine)
    try:
        with cpuinfo.open("rb", buffering=0) as file:
            text = file.read(_FIRST_CPU_BYTES).decode("utf-8", "replace")
    except OSError:
        return Cpu("", machine)
    return cpu_of_cpuinfo(text, machine)


def compiler_at(path: str) -> Compiler:
    """The kind and version of the C++ compiler at `path`; an unknown one where it does not tell."""
    words = [path, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_ASK_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Compiler()
    return compiler_of_macros(done.stdout)


def main() -> int:
    """Prints the CPU, its features and how many cores this process may use: the first line of tests and benchmarks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"CPU: {this_cpu()}, {cores} cores", flush=True)
    return 0


@dataclass(frozen=True)
class Build:
    """What a proof of a build holds for: the CPU, the libraries (a hash of names, sizes and times) and their place."""

    cpu: str
    libraries: str
    place: str

    @classmethod
    def at(cls, package: Path, cpu: Cpu | None = None) -> Build:
        """The build in the folder `package` of `llama_cpp`, on this machine's CPU."""
        found = hashlib.sha256()
        for path in sorted(package.rglob("*")):
            if _LIBRARY.search(path.name):
                status = path.stat()
                found.update(f"{path.relative_to(package)} {status.st_size} {status.st_mtime_ns}\n".encode())
        return cls(str(cpu or this_cpu()), found.hexdigest(), str(package.resolve()))

    def differences(self, other: Build) -> list[str]:
        """What is not the same as in `other`, in words."""
        names = {"cpu": "the CPU", "libraries": "llama.cpp", "place": "the folder of llama.cpp"}
        return [words for name, words in names.items() if getattr(self, name) != getattr(other, name)]


if __name__ == "__main__":
    sys.exit(main())
