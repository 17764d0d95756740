"""Arguments for compiling llama.cpp on each CPU, and the order in which others are tried."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest

from headgate import build
from headgate.build import Compiler, Cpu, chooses_instructions, compile_options

AVX512 = build._AVX512
BASE = ("sse4_2", "avx", "f16c", "fma", "avx2", "bmi2")
SAPPHIRE_RAPIDS = Cpu(
    "Intel(R) Xeon(R) Platinum 8481C", "x86_64",
    (*BASE, "avx_vnni", *AVX512, "avx512vbmi", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"),
)  # fmt: skip
HASWELL = Cpu("Haswell", "x86_64", BASE)
ICE_LAKE = Cpu("Ice Lake", "x86_64", (*BASE, *AVX512, "avx512vbmi", "avx512_vnni"))
GRAVITON = Cpu("ARM 0x41 0xd40 0x1", "aarch64", ("asimddp", "i8mm", "sve"))
GCC_12, GCC_13, CLANG = Compiler("gcc", (12, 2, 0)), Compiler("gcc", (13, 1, 0)), Compiler("clang", (14, 0, 6))
KEEPS = "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse"


def _words(cpu: Cpu, compiler: Compiler, arguments: str = "", cxx_flags: str = "") -> list[list[str]]:
    """The CMake arguments of each of the `compile_options`, as scikit-build-core takes CMAKE_ARGS apart."""
    return [shlex.split(options.arguments) for options in compile_options(cpu, compiler, arguments, cxx_flags)]


def _on(words: list[str]) -> set[str]:
    return {word.removeprefix("-DGGML_").removesuffix("=ON") for word in words if word.endswith("=ON")}


def test_gcc_before_13_with_amx_starts_with_the_flags_that_keep_stores() -> None:
    choices = _words(SAPPHIRE_RAPIDS, GCC_12)
    assert choices[0] == [KEEPS]
    assert len(choices) == 4


def test_amx_is_disabled_before_avx512_and_avx512_before_all_native_code() -> None:
    _, without_amx, without_avx512, generic = _words(SAPPHIRE_RAPIDS, GCC_12)
    base = {"SSE42", "AVX", "F16C", "FMA", "AVX2", "BMI2", "AVX_VNNI"}
    assert _on(without_amx) == base | {"AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16"}
    assert _on(without_avx512) == base
    assert _on(generic) == set()
    assert all(words[0] == "-DGGML_NATIVE=OFF" for words in (without_amx, without_avx512, generic))


def test_later_gcc_with_amx_tries_the_flags_second() -> None:
    choices = _words(SAPPHIRE_RAPIDS, GCC_13)
    assert choices[:2] == [[], [KEEPS]]
    assert len(choices) == 5


@pytest.mark.parametrize("compiler", [CLANG, Compiler()])
def test_other_compilers_do_not_get_flags_of_gcc(compiler: Compiler) -> None:
    choices = _words(SAPPHIRE_RAPIDS, compiler)
    assert choices[0] == []
    assert not any(KEEPS in words for words in choices)


@pytest.mark.parametrize(("cpu", "choices"), [(HASWELL, 2), (ICE_LAKE, 3), (GRAVITON, 2)])
def test_cpu_without_amx_starts_with_the_arguments_of_the_user(cpu: Cpu, choices: int) -> None:
    found = _words(cpu, GCC_12, "-DGGML_CUDA=ON")
    assert found[0] == ["-DGGML_CUDA=ON"]
    assert len(found) == choices
    assert all(words[0] == "-DGGML_CUDA=ON" for words in found)
    assert found[-1][1] == "-DGGML_NATIVE=OFF"


def test_features_that_the_cpu_lacks_are_not_enabled() -> None:
    for words in _words(ICE_LAKE, GCC_12)[1:]:
        assert not _on(words) & {"AVX_VNNI", "AVX512_BF16"}


def test_quoted_flags_of_the_user_are_kept_and_merged() -> None:
    first, *others = _words(SAPPHIRE_RAPIDS, GCC_12, "-DCMAKE_CXX_FLAGS='-O2 -g' -DGGML_CUDA=ON")
    assert first == ["-DGGML_CUDA=ON", "-DCMAKE_CXX_FLAGS=-O2 -g -fno-tree-dse -fno-dse"]
    assert all(words[:2] == ["-DCMAKE_CXX_FLAGS=-O2 -g", "-DGGML_CUDA=ON"] for words in others)


@pytest.mark.parametrize("written", ["-DCMAKE_CXX_FLAGS:STRING=-O2", "-D CMAKE_CXX_FLAGS=-O2"])
def test_cxx_flags_are_found_in_each_notation(written: str) -> None:
    assert _words(SAPPHIRE_RAPIDS, GCC_12, written)[0] == ["-DCMAKE_CXX_FLAGS=-O2 -fno-tree-dse -fno-dse"]


def test_cxxflags_of_the_environment_are_merged() -> None:
    """CMake reads CXXFLAGS only where CMAKE_CXX_FLAGS is not given."""
    assert _words(SAPPHIRE_RAPIDS, GCC_12, "", "-g1")[0] == ["-DCMAKE_CXX_FLAGS=-g1 -fno-tree-dse -fno-dse"]


@pytest.mark.parametrize(
    "arguments",
    ["-DGGML_NATIVE=OFF", "-DGGML_AVX512:BOOL=ON -DGGML_NATIVE=OFF", "-DCMAKE_CXX_FLAGS='-O2 -march=x86-64-v3'"],
)
def test_instruction_sets_of_the_user_are_not_replaced(arguments: str) -> None:
    assert chooses_instructions(arguments)
    assert [options.arguments for options in compile_options(HASWELL, GCC_12, arguments)] == [arguments]


def test_instruction_sets_of_the_user_without_amx_need_no_flags() -> None:
    assert _words(SAPPHIRE_RAPIDS, GCC_12, "-DGGML_NATIVE=OFF") == [["-DGGML_NATIVE=OFF"]]


@pytest.mark.parametrize("option", ["-DGGML_AMX_INT8=ON", "-DGGML_AMX_TILE=1", "-DGGML_CPU_ALL_VARIANTS=on"])
def test_amx_for_other_cpus_gets_the_flags_too(option: str) -> None:
    """An image is compiled on one CPU and runs on another one."""
    assert _words(HASWELL, GCC_12, option) == [[option, KEEPS]]


def test_unbalanced_quotes_raise() -> None:
    with pytest.raises(ValueError, match="quotation"):
        compile_options(HASWELL, GCC_12, "-DA='")


CPUINFO = """processor\t: 0
vendor_id\t: GenuineIntel
model name\t: Intel(R)  Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: fpu amx_int8 sse4_2 avx avx2 amx_tile

processor\t: 1
model name\t: another
flags\t\t: fpu
"""


def test_cpu_is_read_from_cpuinfo() -> None:
    cpu = build.cpu_of_cpuinfo(CPUINFO, "x86_64")
    assert cpu == Cpu(
        "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz", "x86_64", ("sse4_2", "avx", "avx2", "amx_tile", "amx_int8")
    )
    assert cpu.has_amx
    assert str(cpu).endswith("(x86_64 sse4_2 avx avx2 amx_tile amx_int8)")


def test_arm_cpu_without_a_name_is_identified_by_its_numbers() -> None:
    text = "processor : 0\nFeatures : fp asimd i8mm asimddp\nCPU implementer : 0x41\nCPU part : 0xd40\n"
    assert build.cpu_of_cpuinfo(text, "aarch64") == Cpu("ARM 0x41 0xd40", "aarch64", ("asimddp", "i8mm"))


def test_empty_cpuinfo_is_an_unknown_cpu() -> None:
    cpu = build.cpu_of_cpuinfo("", "riscv64")
    assert str(cpu) == "unknown CPU (riscv64)"
    assert not cpu.is_x86


@pytest.mark.parametrize(
    ("text", "cpu"),
    [
        (
            "machdep.cpu.brand_string: Apple M2\nhw.optional.arm.FEAT_DotProd: 1\nhw.optional.arm.FEAT_SME: 0\n",
            Cpu("Apple M2", "arm64", ("asimddp",)),
        ),
        (
            (
                "machdep.cpu.brand_string: Intel i7\nmachdep.cpu.features: FPU SSE4.2 AVX1.0 FMA F16C\n"
                "machdep.cpu.leaf7_features: AVX2 BMI2 AVX512F\n"
            ),
            Cpu("Intel i7", "arm64", ("sse4_2", "avx", "f16c", "fma", "avx2", "bmi2", "avx512f")),
        ),
    ],
)
def test_cpu_is_read_from_sysctl(text: str, cpu: Cpu) -> None:
    assert build.cpu_of_sysctl(text, "arm64") == cpu


@pytest.mark.parametrize(
    ("macros", "compiler", "text"),
    [
        ("#define __GNUC__ 12\n#define __GNUC_MINOR__ 2\n#define __GNUC_PATCHLEVEL__ 0\n", GCC_12, "gcc 12.2.0"),
        (
            (
                "#define __GNUC__ 4\n#define __GNUC_MINOR__ 2\n#define __clang_major__ 14\n#define __clang_minor__ 0\n"
                "#define __clang_patchlevel__ 6\n"
            ),
            CLANG,
            "clang 14.0.6",
        ),
        ("", Compiler(), "unknown compiler"),
    ],
)
def test_compiler_is_identified_by_its_macros(macros: str, compiler: Compiler, text: str) -> None:
    assert build.compiler_of_macros(macros) == compiler
    assert str(compiler) == text


def test_only_gcc_before_13_breaks_amx() -> None:
    assert [compiler.breaks_amx for compiler in (GCC_12, GCC_13, CLANG, Compiler())] == [True, False, False, False]


# --- this machine ----------------------------------------------------------------------------------------------------
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/cpuinfo")
def test_this_cpu_is_read_from_a_file(tmp_path: Path) -> None:
    given = tmp_path / "cpuinfo"
    given.write_text(CPUINFO)
    assert build.this_cpu(given).has_amx
    assert build.this_cpu(tmp_path / "gone").features == ()
    assert build.this_cpu().model


def test_compiler_of_this_machine_has_a_version(tmp_path: Path) -> None:
    assert build.compiler_at("c++").version
    assert build.compiler_at(str(tmp_path / "gone")) == Compiler()


def test_builds_differ_by_cpu_libraries_and_folder(tmp_path: Path) -> None:
    for place in ("one", "two"):
        (tmp_path / place / "lib").mkdir(parents=True)
        (tmp_path / place / "lib" / "libllama.so.0").write_bytes(b"1")
        (tmp_path / place / "notes.txt").write_bytes(b"1")
    one = build.Build.at(tmp_path / "one", HASWELL)
    assert one.differences(build.Build.at(tmp_path / "one", HASWELL)) == []
    assert one.differences(build.Build.at(tmp_path / "one", GRAVITON)) == ["the CPU"]
    (tmp_path / "one" / "notes.txt").write_bytes(b"22")
    assert one == build.Build.at(tmp_path / "one", HASWELL)
    (tmp_path / "one" / "lib" / "libllama.so.0").write_bytes(b"22")
    assert one.differences(build.Build.at(tmp_path / "one", HASWELL)) == ["llama.cpp"]
    assert "the folder of llama.cpp" in one.differences(build.Build.at(tmp_path / "two", HASWELL))
