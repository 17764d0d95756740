"""Reads what a build of llama.cpp depends on: the CPU, the C++ compiler, and the installed libraries.

Needs only the standard library: `headgate/bootstrap.py` uses it before packages are installed.
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
_QUERY_SECONDS = 20.0
_LIBRARY = re.compile(r"\.(so|dylib|dll)(\.|$)")


def this_cpu(cpuinfo: Path = CPUINFO) -> Cpu:
    """The CPU of this machine; without model and features when the system does not report them."""
    machine = platform.machine()
    if sys.platform == "darwin":
        words = ["sysctl", "machdep.cpu", "hw.optional"]
        try:
            done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
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
    """The C++ compiler at `path`; unknown when it does not report its version."""
    words = [path, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Compiler()
    return compiler_of_macros(done.stdout)


def main() -> int:
    """Prints the CPU, its features and the usable cores: the first line of tests and benchmarks."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"CPU: {this_cpu()}, {cores} cores", flush=True)
    return 0


@dataclass(frozen=True)
class Build:
    """What a check of a build is valid for: CPU, libraries (a hash of names, sizes and times) and their folder."""

    cpu: str
    libraries: str
    place: str

    @classmethod
    def at(cls, package: Path, cpu: Cpu | None = None) -> Build:
        """The build in `package`, the folder of `llama_cpp`, on the CPU of this machine."""
        found = hashlib.sha256()
        for path in sorted(package.rglob("*")):
            if _LIBRARY.search(path.name):
                status = path.stat()
                found.update(f"{path.relative_to(package)} {status.st_size} {status.st_mtime_ns}\n".encode())
        return cls(str(cpu or this_cpu()), found.hexdigest(), str(package.resolve()))

    def differences(self, other: Build) -> list[str]:
        """Names of the parts that differ from `other`."""
        names = {"cpu": "the CPU", "libraries": "llama.cpp", "place": "the folder of llama.cpp"}
        return [words for name, words in names.items() if getattr(self, name) != getattr(other, name)]


if __name__ == "__main__":
    sys.exit(main())
