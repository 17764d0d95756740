"""The CPU, the C++ compiler, and the CMake arguments with which llama.cpp can be compiled for them.

It needs only the standard library, because the set-up uses it before packages are installed.
`python -m headgate.build` prints the CPU and the number of usable cores.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

KEEP_STORES = "-fno-tree-dse -fno-dse"
"""GCC flags that disable the removal of dead stores; both are needed."""
GCC_WITH_RIGHT_AMX = (13,)
"""The first GCC without this defect: GCC 12.2 treats `_tile_loadconfig` as a read of 8 of its 64 bytes and removes the
other stores, so that `ldtilecfg` faults in every matrix product with AMX.
"""

_AVX512 = ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_AMX = ("amx_tile", "amx_int8", "amx_bf16")
_X86_OPTIONS: Mapping[str, tuple[str, ...]] = {
    "GGML_SSE42": ("sse4_2",),
    "GGML_AVX": ("avx",),
    "GGML_F16C": ("f16c",),
    "GGML_FMA": ("fma",),
    "GGML_AVX2": ("avx2",),
    "GGML_BMI2": ("bmi2",),
    "GGML_AVX_VNNI": ("avx_vnni",),
    "GGML_AVX512": _AVX512,
    "GGML_AVX512_VBMI": ("avx512vbmi",),
    "GGML_AVX512_VNNI": ("avx512_vnni",),
    "GGML_AVX512_BF16": ("avx512_bf16",),
}
"""llama.cpp's options for x86 (`ggml/CMakeLists.txt`) with the CPU features they need, as Linux names them."""
_ARM_FEATURES = ("fphp", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme")
_SHOWN = (*dict.fromkeys(name for names in _X86_OPTIONS.values() for name in names), *_AMX, *_ARM_FEATURES)
_APPLE = {"FEAT_DotProd": "asimddp", "FEAT_I8MM": "i8mm", "FEAT_BF16": "bf16", "FEAT_SME": "sme", "FEAT_FP16": "fphp"}
_CHOICE = re.compile(
    r"-DGGML_(NATIVE|SSE42|AVX\w*|AMX\w*|FMA|F16C|BMI2|CPU_ALL_VARIANTS|CPU_ARM_ARCH)(:\w+)?=|-DCMAKE_C(XX)?_FLAGS.*-m(arch|cpu)="
)
_CXX_FLAGS = re.compile(r"-DCMAKE_CXX_FLAGS(?::\w+)?=(.*)", re.DOTALL)
_ON = ("ON", "1", "TRUE", "YES")


@dataclass(frozen=True)
class Cpu:
    """A CPU. `features` are those that matter to compiled code, in a fixed order."""

    model: str
    machine: str
    features: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.model or 'unknown CPU'} ({' '.join([self.machine, *self.features])})"

    @property
    def is_x86(self) -> bool:
        """Whether it executes x86-64 code."""
        return self.machine.lower() in ("x86_64", "amd64")

    @property
    def has_amx(self) -> bool:
        """Whether it has AMX, the matrix instructions of Sapphire Rapids and later."""
        return "amx_int8" in self.features

    def has(self, names: Sequence[str]) -> bool:
        """Whether it has all of these features."""
        return set(names) <= set(self.features)


def cpu_of_cpuinfo(text: str, machine: str) -> Cpu:
    """The first CPU in Linux's /proc/cpuinfo."""
    fields: dict[str, str] = {}
    for line in text.splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip().lower(), value.strip())
    arm = " ".join(fields[name] for name in ("cpu implementer", "cpu part", "cpu variant") if name in fields)
    model = fields.get("model name") or fields.get("cpu model") or (f"ARM {arm}" if arm else "")
    flags = (fields.get("flags") or fields.get("features") or "").split()
    return Cpu(" ".join(model.split()), machine, _relevant(flags))


def cpu_of_sysctl(text: str, machine: str) -> Cpu:
    """The CPU in the output of macOS's `sysctl machdep.cpu hw.optional`."""
    fields = dict(line.split(": ", 1) for line in text.splitlines() if ": " in line)
    flags = [name.lower().replace(".", "_") for name in fields.get("machdep.cpu.features", "").split()]
    flags += [name.lower() for name in fields.get("machdep.cpu.leaf7_features", "").split()]
    flags += [known for name, known in _APPLE.items() if fields.get(f"hw.optional.arm.{name}") == "1"]
    renamed = {"avx1_0": "avx"}
    return Cpu(fields.get("machdep.cpu.brand_string", ""), machine, _relevant([renamed.get(f, f) for f in flags]))


def _relevant(flags: Sequence[str]) -> tuple[str, ...]:
    has = set(flags)
    return tuple(name for name in _SHOWN if name in has)


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler. `name` is gcc, clang, or empty for others."""

    name: str = ""
    version: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.name or 'unknown compiler'} {'.'.join(map(str, self.version))}".strip()

    @property
    def breaks_amx(self) -> bool:
        """Whether its AMX code is known to crash."""
        return self.name == "gcc" and self.version < GCC_WITH_RIGHT_AMX


def compiler_of_macros(text: str) -> Compiler:
    """The compiler with these predefined macros (the output of `c++ -dM -E -x c++ /dev/null`); `Compiler()` for others
    than GCC and Clang.
    """
    macros = dict(re.findall(r"^#define (__\w+__) (\d+)$", text, re.MULTILINE))
    for name, prefix, parts in (
        ("clang", "__clang_", ("major__", "minor__", "patchlevel__")),
        ("gcc", "__GNUC_", ("_", "MINOR__", "PATCHLEVEL__")),
    ):
        if numbers := [int(macros[prefix + part]) for part in parts if prefix + part in macros]:
            return Compiler(name, tuple(numbers))
    return Compiler()


@dataclass(frozen=True)
class CompileOptions:
    """One way to compile: CMake arguments (with those of the user) and the reason for them."""

    arguments: str
    reason: str


def compile_options(
    cpu: Cpu, compiler: Compiler, arguments: str = "", cxx_flags: str = ""
) -> tuple[CompileOptions, ...]:
    """The ways to compile llama.cpp, with the fastest build first. Each later one is safer: with other compiler
    flags, then with fewer instruction sets.

    `arguments` is the user's CMAKE_ARGS and `cxx_flags` the user's CXXFLAGS. All results contain the arguments. If they
    choose the instruction sets, no other sets are tried. Raises ValueError for unbalanced quotes.
    """
    words = _words(arguments)
    uses_amx = _uses_amx(words, cpu)
    safe_amx = _with_flags(words, cxx_flags)
    if uses_amx and compiler.breaks_amx:
        choices = [CompileOptions(safe_amx, f"{compiler} miscompiles AMX; {KEEP_STORES} prevent that")]
    else:
        choices = [CompileOptions(arguments, "compiling llama.cpp for this CPU")]
        if uses_amx and compiler.name == "gcc":
            choices.append(CompileOptions(safe_amx, f"{compiler} may miscompile AMX; {KEEP_STORES} prevent that"))
    if chooses_instructions(arguments):
        return tuple(choices)
    if cpu.is_x86:
        has = {option for option, needs in _X86_OPTIONS.items() if cpu.has(needs)}
        if cpu.has_amx:
            choices.append(CompileOptions(_added(arguments, _x86(has)), "compiling without AMX"))
        if cpu.has(_AVX512):
            narrow = {option for option in has if not option.startswith("GGML_AVX512")}
            choices.append(CompileOptions(_added(arguments, _x86(narrow)), "compiling without AMX and AVX-512"))
        choices.append(
            CompileOptions(_added(arguments, _x86(set())), "compiling with the instructions of every x86-64 CPU only")
        )
    else:
        choices.append(
            CompileOptions(_added(arguments, "-DGGML_NATIVE=OFF"), "compiling without optimizations for this CPU")
        )
    return tuple(choices)


def chooses_instructions(arguments: str) -> bool:
    """Whether the CMake arguments choose the instruction sets."""
    return any(_CHOICE.match(word) for word in _words(arguments))


def _words(arguments: str) -> list[str]:
    """The arguments as a list, with `-D NAME=VALUE` joined to one word."""
    words: list[str] = []
    for word in shlex.split(arguments):
        if words and words[-1] == "-D":
            words[-1] += word
        else:
            words.append(word)
    return words


def _uses_amx(words: Sequence[str], cpu: Cpu) -> bool:
    """Whether a build with these arguments contains AMX code."""
    values: dict[str, bool] = {}
    for word in words:
        if found := re.match(r"-D(GGML_\w+)(?::\w+)?=(.*)", word):
            values[found[1]] = found[2].upper() in _ON
    if values.get("GGML_AMX_INT8") or values.get("GGML_AMX_TILE") or values.get("GGML_CPU_ALL_VARIANTS"):
        return True
    return cpu.has_amx and values.get("GGML_NATIVE", True)


def _with_flags(words: Sequence[str], cxx_flags: str) -> str:
    """The arguments with KEEP_STORES added to CMAKE_CXX_FLAGS.

    If they do not set it, `cxx_flags` are added, too: CMake ignores the variable CXXFLAGS if CMAKE_CXX_FLAGS is set.
    """
    flags = cxx_flags
    kept = []
    for word in words:
        if found := _CXX_FLAGS.fullmatch(word):
            flags = found[1]
        else:
            kept.append(word)
    return shlex.join([*kept, f"-DCMAKE_CXX_FLAGS={f'{flags} {KEEP_STORES}'.strip()}"])


def _x86(options: set[str]) -> str:
    """Arguments that enable exactly these options."""
    return " ".join(["-DGGML_NATIVE=OFF", *(f"-D{name}={'ON' if name in options else 'OFF'}" for name in _X86_OPTIONS)])


def _added(arguments: str, more: str) -> str:
    return f"{arguments} {more}".strip()


# --- this machine -----------------------------------------------------------------------------------------------------
CPUINFO = Path("/proc/cpuinfo")
_FIRST_CPU_BYTES = 2**14
"""Enough for the first CPU in /proc/cpuinfo. To list hundreds of CPUs, the kernel takes milliseconds."""
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
    """The C++ compiler at `path`; `Compiler()` when it does not report its version."""
    words = [path, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_QUERY_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return Compiler()
    return compiler_of_macros(done.stdout)


@dataclass(frozen=True)
class Build:
    """What a check of a build is valid for: CPU, libraries (a hash of names, sizes and times) and their folder."""

    cpu: str
    libraries: str
    place: str

    @classmethod
    def at(cls, package: Path, cpu: Cpu | None = None) -> Build:
        """The build in `package`, the folder of `llama_cpp`, on `cpu` (default: that of this machine)."""
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


def main() -> int:
    """Prints the CPU, its features and the number of usable cores. Tests and benchmarks print this line first."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"CPU: {this_cpu()}, {cores} cores", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
