"""Setting up `.venv`: interpreters, backends, repeated builds, error messages. Installs nothing."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headgate import bootstrap, build, engine_build, virtual_environment
from headgate.bootstrap import Setup, Stamp
from headgate.build import Compiler, Cpu
from headgate.engine_build import EngineBuild
from headgate.virtual_environment import Interpreter, SetupError, VirtualEnvironment

LOCK = "# header\naiohttp==3.0\nllama-cpp-python==0.3.36\nyarl==1.0\n"


@pytest.mark.parametrize(
    ("arguments", "backends"),
    [
        ("", []),
        ("-DGGML_RPC=ON", ["rpc"]),
        ("-DGGML_CUDA=on -DGGML_RPC=ON -DCMAKE_CUDA_ARCHITECTURES=90", ["cuda", "rpc"]),
        ("-DGGML_CUDA:BOOL=TRUE", ["cuda"]),
        ("-D GGML_VULKAN=ON", ["vulkan"]),
        ("-DGGML_CUDA=OFF -DGGML_NATIVE=ON", []),
    ],
)
def test_backends_are_read_from_cmake_arguments(arguments: str, backends: list[str]) -> None:
    assert engine_build.wanted_backends(arguments) == backends


def test_build_without_rpc_is_detected(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    (lib / "libggml-base.so").write_bytes(b"\x7fELF ggml_backend_reg")
    (lib / "libggml.so").write_bytes(b"")
    assert engine_build.missing_backends(tmp_path, ["rpc"]) == ["rpc"]


@pytest.mark.parametrize("name", ["libggml-rpc.so", "libggml-rpc.so.0.25.3", "libggml-rpc.dylib", "ggml-rpc.dll"])
def test_backend_is_found_as_a_separate_library(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert engine_build.missing_backends(tmp_path, ["rpc"]) == []


def test_backend_is_found_as_a_symbol_of_a_static_build(tmp_path: Path) -> None:
    (tmp_path / "libggml.so").write_bytes(b"\x7fELF\0ggml_backend_rpc_add_server\0ggml_backend_cuda_reg\0")
    assert engine_build.missing_backends(tmp_path, ["cuda", "rpc", "vulkan"]) == ["vulkan"]


def test_installed_engine_has_the_rpc_backend() -> None:
    import importlib.util

    found = importlib.util.find_spec("llama_cpp")
    assert found is not None
    assert found.origin is not None
    assert engine_build.missing_backends(Path(found.origin).parent, ["rpc"]) == []


@pytest.mark.parametrize(
    ("line", "share"),
    [
        ("[12/48] Building CXX object ggml/src/ggml.cpp.o", 0.25),
        ("[ 37%] Building C object", 0.37),
        ("  -- Configuring done (3.1s)", None),
        ("[0/0] nothing", 0.0),
    ],
)
def test_progress_is_read_from_ninja_and_make(line: str, share: float | None) -> None:
    assert virtual_environment.progress(line) == share


def test_lock_is_split_at_the_engine() -> None:
    assert bootstrap.split_lock(LOCK) == (["aiohttp==3.0", "yarl==1.0"], "llama-cpp-python==0.3.36")
    with pytest.raises(SetupError, match="exactly one line for llama-cpp-python"):
        bootstrap.split_lock("aiohttp==3.0\n")


def test_message_of_a_missing_compiler_names_the_package() -> None:
    with pytest.raises(SetupError, match=r"no C\+\+ compiler was found.*run: "):
        engine_build.compiler_path({}, which=lambda name: None)
    with pytest.raises(SetupError, match="compiler 'weird'"):
        engine_build.compiler_path({"CXX": "weird"}, which=lambda name: None)
    assert engine_build.compiler_path({"CXX": "clang++ -v"}, which=lambda name: f"/bin/{name}") == "/bin/clang++"


def test_failed_step_shows_the_end_of_its_log_and_its_path(tmp_path: Path, capsys: Any) -> None:
    log = tmp_path / "log"
    script = "print('\\n'.join(f'line {n}' for n in range(100))); raise SystemExit(3)"
    with pytest.raises(SetupError) as caught:
        virtual_environment.run_logged("doing it", [sys.executable, "-c", script], log, {})
    message = str(caught.value)
    assert "line 99" in message
    assert "line 50" not in message
    assert f"failed with status 3; the complete log is {log}" in message
    assert "line 0" in log.read_text()
    assert "doing it: failed" in capsys.readouterr().err


def _python(folder: Path, name: str, version: str, optimized: bool, also: str = "") -> Path:
    """A shell script that answers like an interpreter, after the command `also`."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / name
    configured = "--enable-shared --enable-optimizations" if optimized else "--enable-shared"
    numbers = [int(part) for part in version.split(".")]
    about = {
        "executable": str(file),
        "version": numbers,
        "prefix": "/opt",
        "configured": configured,
        "is_standard": True,
    }
    file.write_text(f"#!/bin/sh\n{also}\necho '{json.dumps(about)}'\n")
    file.chmod(0o755)
    return file


def test_running_interpreter_can_be_queried() -> None:
    found = Interpreter.query(sys.executable)
    assert found is not None
    assert found.version == sys.version_info[:3]
    base = getattr(sys, "_base_executable", sys.executable)  # an environment may have its own copy
    assert Path(found.executable).resolve() == Path(base).resolve()


@pytest.mark.parametrize(
    ("configured", "prefix", "expected"),
    [
        ("'--enable-shared' '--prefix=/root/.pyenv/versions/3.11.7'", "/root/.pyenv/versions/3.11.7", False),
        ("'--prefix=/opt/pyenv' '--enable-optimizations' '--with-lto'", "/opt/pyenv", True),
        ("'--enable-shared' '--prefix=/usr' '--with-computed-gotos'", "/usr", True),
        ("'--build=x86_64-linux-gnu' '--enable-optimizations'", "/usr/local", True),
        ("'--build=x86_64-linux-gnu'", "/usr/local", False),
        ("", "/home/me/python", False),
    ],
    ids=["pyenv", "pyenv with options", "Debian", "container image", "by hand", "unknown"],
)
def test_interpreters_of_distributions_and_with_optimization_flags_are_optimized(
    configured: str, prefix: str, expected: bool
) -> None:
    assert virtual_environment.is_optimized(configured, prefix) is expected


def test_query_of_a_hanging_interpreter_times_out(tmp_path: Path) -> None:
    silent = _python(tmp_path, "python3", "3.12.1", True, also="exec sleep 60")
    assert Interpreter.query(str(silent), seconds=0.2) is None


def test_unreadable_folders_of_the_path_are_skipped(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    here = _python(tmp_path / "here", "python3.12", "3.12.1", True)
    path = os.pathsep.join([str(tmp_path / "file"), str(tmp_path / "gone"), str(here.parent)])
    assert [found.executable for found in virtual_environment.installed_interpreters(path)] == [str(here)]


def test_unusable_interpreters_are_skipped(tmp_path: Path) -> None:
    """Too old, failing, with invalid output, a dangling link; each usable file is found once."""
    _python(tmp_path / "a", "python3", "3.10.4", True)
    _python(tmp_path / "a", "python3.11", "3.11.1", True, also="exit 1")
    _python(tmp_path / "a", "python3.12", "3.12.1", True, also="echo 5; exit 0")
    _python(tmp_path / "a", "python3.13", "3.13.1", True, also="echo command not found")
    (tmp_path / "a" / "python3.14").symlink_to(tmp_path / "b" / "python3.11")
    _python(tmp_path / "a", "python3-config", "3.13.1", True)
    hidden = _python(tmp_path / "b", "python3.11", "3.11.2", True)
    path = os.pathsep.join(["", str(tmp_path / "a"), str(tmp_path / "gone"), str(tmp_path / "b")])
    assert virtual_environment.installed_interpreters(path) == [Interpreter(str(hidden), (3, 11, 2), True)]


SLOW, SAME, NEWEST = (
    Interpreter("slow", (3, 12, 1), False),
    Interpreter("same", (3, 12, 0), True),
    Interpreter("newest", (3, 13, 0), True),
)


@pytest.mark.parametrize(
    ("own", "others", "best"),
    [
        (SAME, [NEWEST], SAME),
        (SLOW, [], SLOW),
        (SLOW, [Interpreter("slow too", (3, 13, 9), False)], SLOW),
        (SLOW, [NEWEST, SAME], SAME),
        (SLOW, [Interpreter("older", (3, 11, 9), True), NEWEST], NEWEST),
        (SLOW, [Interpreter("far", (3, 15, 0), True), NEWEST], NEWEST),
        (SLOW, [Interpreter("debug", (3, 12, 0), True, is_standard=False)], SLOW),
    ],
)
def test_another_interpreter_is_chosen_only_if_it_is_optimized_and_the_own_is_not(
    own: Interpreter, others: list[Interpreter], best: Interpreter
) -> None:
    assert virtual_environment.best_interpreter(own, others) == best


def _base_of(root: Path, environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, own: Path) -> str:
    monkeypatch.setattr(sys, "_base_executable", str(own))
    return VirtualEnvironment(root, environ)._base()


def test_environment_uses_an_optimized_interpreter_and_prints_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    own = _python(tmp_path / "own", "python3", "3.12.1", False)
    path = {"PATH": str(tmp_path / "others")}
    assert _base_of(tmp_path, path, monkeypatch, own) == str(own)
    assert "compiled without optimizations" in capsys.readouterr().err
    other = _python(tmp_path / "others", "python3.11", "3.11.2", True)
    assert _base_of(tmp_path, path, monkeypatch, own) == str(other)
    message = capsys.readouterr().err
    assert f".venv uses {other} (3.11.2)" in message
    assert f"make serve PYTHON={own}" in message


def test_interpreter_of_the_variable_python_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`make PYTHON=...` sets the variable."""
    own = _python(tmp_path / "own", "python3", "3.12.1", False)
    _python(tmp_path / "others", "python3.11", "3.11.2", True)
    environ = {"PATH": str(tmp_path / "others"), "PYTHON": "python3"}
    assert _base_of(tmp_path, environ, monkeypatch, own) == str(own)
    assert capsys.readouterr().err == ""


PLAIN_CPU = Cpu("Plain", "x86_64", ("sse4_2", "avx", "avx2"))
AMX_CPU = Cpu("Xeon", "x86_64", ("sse4_2", "avx", "avx2", *build._AVX512, "amx_tile", "amx_int8"))
GCC_12, GCC_14 = Compiler("gcc", (12, 2, 0)), Compiler("gcc", (14, 2, 0))
STORES_KEPT = "'-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse'"


class _Environment(VirtualEnvironment):
    """An environment that records the calls of pip. `builds`: the backends of each build of the engine."""

    def __init__(self, root: Path, environ: dict[str, str], builds: list[str]) -> None:
        super().__init__(root, environ)
        self.steps: list[str] = []
        self.builds = builds
        self.package = root / "llama_cpp"

    def create(self) -> None:
        self.python.parent.mkdir(parents=True, exist_ok=True)
        self.python.touch()

    def pip(self, what: str, *words: str) -> None:
        self.steps.append(" ".join([self.environ.get("CMAKE_ARGS", ""), *words]))
        if what == "llama-cpp-python":
            if self.builds[0] == "fails":
                raise SetupError(self.builds.pop(0))
            if not self.builds[0].startswith("cached"):
                self.log.write_text("Building wheel for llama-cpp-python (pyproject.toml): started")
            self.package.mkdir(exist_ok=True)
            for old in self.package.iterdir():
                old.unlink()
            for backend in self.builds.pop(0).split():
                (self.package / f"libggml-{backend}.so").touch()

    @property
    def compiled(self) -> list[str]:
        """The steps that build the engine."""
        return [step for step in self.steps if "--no-binary" in step]


class _Engine(EngineBuild):
    """An engine whose checks have the results `proofs`; None, and each check after them, means that it computes."""

    def __init__(self, environment: _Environment, cpu: Cpu, compiler: Compiler, proofs: list[str | None]) -> None:
        super().__init__(environment, cpu)
        self._compiler = compiler
        self._folder = environment.package
        self._proofs = proofs
        self.proven = 0

    def compiler(self) -> Compiler:
        return self._compiler

    def package(self) -> Path:
        return self._folder

    def proof(self) -> str | None:
        self.proven += 1
        return self._proofs.pop(0) if self._proofs else None


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "headgate").mkdir()
    for name in bootstrap.INPUTS:
        (tmp_path / name).write_text(LOCK if name == bootstrap.LOCK else "")
    return tmp_path


@dataclass
class _Done:
    """What a set-up did: the steps of pip, those that build the engine, and the number of checks."""

    steps: list[str]
    compiled: list[str]
    proven: int


def _set_up(
    clone: Path,
    builds: list[str],
    cmake_args: str = "",
    *,
    cpu: Cpu = PLAIN_CPU,
    compiles_with: Compiler = GCC_14,
    proofs: list[str | None] | None = None,
) -> _Done:
    environment = _Environment(clone, {"PATH": "/usr/bin:/bin", "CMAKE_ARGS": cmake_args}, builds)
    engine = _Engine(environment, cpu, compiles_with, proofs or [])
    Setup(environment, engine, cpu).run()
    return _Done(environment.steps, environment.compiled, engine.proven)


def test_second_set_up_does_nothing(clone: Path) -> None:
    assert _set_up(clone, ["rpc"]).steps
    assert _set_up(clone, []).steps == []


def test_changed_lock_is_installed(clone: Path) -> None:
    _set_up(clone, ["rpc"])
    (clone / "requirements.lock").write_text(LOCK.replace("3.0", "3.1"))
    assert _set_up(clone, ["rpc"]).steps


def test_cached_build_without_rpc_is_compiled_once_more(clone: Path, capsys: Any) -> None:
    setup = _set_up(clone, ["cached cpu", "cpu rpc"])
    assert ["--no-cache-dir" in step and "--force-reinstall" in step for step in setup.compiled] == [False, True]
    assert all("--no-deps" in step for step in setup.compiled)
    assert "has no backend rpc; compiling it again" in capsys.readouterr().err


def test_build_without_the_backend_after_compilation_is_an_error(clone: Path) -> None:
    with pytest.raises(SetupError, match="has no ggml backend rpc"):
        _set_up(clone, ["cached cpu", "cpu"])
    assert Stamp.read(clone / ".venv" / "headgate.json") is None


def test_cmake_arguments_of_the_user_are_kept_for_later_set_ups(clone: Path) -> None:
    """Later runs without CMAKE_ARGS neither compile again nor fall back to the CPU."""
    first = _set_up(clone, ["cached cpu rpc", "cpu rpc cuda"], "-DGGML_CUDA=ON")
    assert [step.split(" install")[0] for step in first.compiled] == ["-DGGML_RPC=ON -DGGML_CUDA=ON"] * 2
    assert _set_up(clone, []).steps == []
    (clone / "requirements.lock").write_text(LOCK.replace("3.0", "3.1"))
    later = _set_up(clone, ["rpc cuda"])
    assert later.compiled[0].startswith("-DGGML_RPC=ON -DGGML_CUDA=ON")


def test_changed_cmake_arguments_compile_without_the_cache(clone: Path) -> None:
    _set_up(clone, ["rpc"])
    setup = _set_up(clone, ["rpc vulkan"], "-DGGML_VULKAN=ON")
    assert ["--no-cache-dir" in step for step in setup.compiled] == [True]


def test_missing_compiler_is_reported_before_anything_is_built(clone: Path, capsys: Any) -> None:
    environment = _Environment(clone, {"PATH": "/nonexistent", "CXX": "no-such-compiler"}, [])
    setup = Setup(environment, EngineBuild(environment, PLAIN_CPU), PLAIN_CPU)
    assert bootstrap.main({}, root=clone, setup=lambda root, environ: setup) == 1
    assert environment.steps == []
    assert "CXX names the C++ compiler 'no-such-compiler'" in capsys.readouterr().err


# --- a build is used only where it computes -------------------------------------------------------------------------
def _stamp(clone: Path) -> Stamp:
    found = Stamp.read(clone / ".venv" / "headgate.json")
    assert found is not None
    return found


def test_build_that_computes_is_recorded_with_its_cpu_and_arguments(clone: Path) -> None:
    setup = _set_up(clone, ["rpc"], "-DGGML_BLAS=ON")
    found = _stamp(clone)
    assert setup.proven == 1
    assert (found.rung, found.reason) == ("-DGGML_BLAS=ON", "compiling llama.cpp for this CPU")
    assert found.build is not None
    assert found.build["cpu"] == str(PLAIN_CPU)
    assert found.build["place"] == str(clone / "llama_cpp")


def test_known_bad_compiler_gets_its_flags_before_the_first_compilation(clone: Path, capsys: Any) -> None:
    """GCC 12 with AMX: one compilation, not two."""
    setup = _set_up(clone, ["rpc"], cpu=AMX_CPU, compiles_with=GCC_12)
    assert [step.split(" install")[0] for step in setup.compiled] == [f"-DGGML_RPC=ON {STORES_KEPT}"]
    assert "gcc 12.2.0 miscompiles AMX" in capsys.readouterr().err
    assert _stamp(clone).rung == STORES_KEPT


def test_build_that_crashes_is_compiled_again_with_the_next_arguments(clone: Path, capsys: Any) -> None:
    crash = engine_build.proof_failure(-11, b"", b"")
    setup = _set_up(clone, ["rpc", "rpc", "rpc"], cpu=AMX_CPU, proofs=[crash, crash])
    arguments = [step.split(" install")[0] for step in setup.compiled]
    assert arguments[:2] == ["-DGGML_RPC=ON", f"-DGGML_RPC=ON {STORES_KEPT}"]
    assert "-DGGML_NATIVE=OFF" in arguments[2]
    assert ["--no-cache-dir" in step for step in setup.compiled] == [False, True, True]
    message = capsys.readouterr().err
    assert "ended with signal SIGSEGV; compiling again with other arguments" in message
    assert "compiling without AMX" in message
    assert _stamp(clone).reason == "compiling without AMX"
    assert _set_up(clone, [], cpu=AMX_CPU).steps == []


def test_working_arguments_are_the_first_of_the_next_set_up(clone: Path) -> None:
    _set_up(clone, ["rpc", "rpc", "rpc"], cpu=AMX_CPU, proofs=["broken", "broken"])
    (clone / "requirements.lock").write_text(LOCK.replace("3.0", "3.1"))
    later = _set_up(clone, ["cached rpc"], cpu=AMX_CPU)
    assert len(later.compiled) == 1
    assert "-DGGML_NATIVE=OFF" in later.compiled[0]
    assert "--no-cache-dir" not in later.compiled[0]


def test_another_compiler_starts_with_the_fastest_build_again(clone: Path) -> None:
    _set_up(clone, ["rpc", "rpc"], cpu=AMX_CPU, compiles_with=GCC_12, proofs=["broken"])
    (clone / "requirements.lock").write_text(LOCK.replace("3.0", "3.1"))
    later = _set_up(clone, ["rpc"], cpu=AMX_CPU, compiles_with=GCC_14)
    assert [step.split(" install")[0] for step in later.compiled] == ["-DGGML_RPC=ON"]
    assert "--no-cache-dir" in later.compiled[0]


def test_cached_build_that_does_not_compute_is_compiled_with_the_same_arguments(clone: Path, capsys: Any) -> None:
    """pip keeps wheels that were compiled on other CPUs or with other flags."""
    setup = _set_up(clone, ["cached rpc", "rpc"], proofs=["this build is broken"])
    assert [step.split(" install")[0] for step in setup.compiled] == ["-DGGML_RPC=ON"] * 2
    assert ["--no-cache-dir" in step for step in setup.compiled] == [False, True]
    assert "this build was made earlier, so it is compiled again" in capsys.readouterr().err


def test_arguments_that_do_not_compile_are_skipped(clone: Path) -> None:
    setup = _set_up(clone, ["rpc", "fails", "rpc"], cpu=AMX_CPU, compiles_with=GCC_12, proofs=["broken"])
    assert len(setup.compiled) == 3
    assert _stamp(clone).reason == "compiling without AMX and AVX-512"


def test_first_compilation_that_fails_ends_the_set_up(clone: Path) -> None:
    with pytest.raises(SetupError, match="fails"):
        _set_up(clone, ["fails"])


def test_message_without_a_working_build_lists_attempts_and_advice(clone: Path) -> None:
    with pytest.raises(SetupError) as caught:
        _set_up(clone, ["rpc", "rpc"], proofs=["it crashes", "it computes nonsense"])
    message = str(caught.value)
    assert "no build of llama.cpp works on this CPU, Plain (x86_64 sse4_2 avx avx2)" in message
    assert "(none): it crashes" in message
    assert "-DGGML_AVX2=OFF" in message
    assert "install another C++ compiler" in message
    assert Stamp.read(clone / ".venv" / "headgate.json") is None


def test_instruction_sets_of_the_user_are_not_replaced_by_others(clone: Path) -> None:
    with pytest.raises(SetupError, match="remove the instruction sets from CMAKE_ARGS"):
        _set_up(clone, ["rpc"], "-DGGML_NATIVE=OFF", proofs=["it crashes"], cpu=AMX_CPU)


def test_unbalanced_quotes_in_cmake_args_are_an_error(clone: Path) -> None:
    with pytest.raises(SetupError, match="check its quotes"):
        _set_up(clone, [], "-DCMAKE_CXX_FLAGS='-O2")


def test_build_is_checked_on_another_cpu_and_kept_if_it_computes(clone: Path, capsys: Any) -> None:
    _set_up(clone, ["rpc"])
    moved = _set_up(clone, [], cpu=AMX_CPU)
    assert (moved.steps, moved.proven) == ([], 1)
    assert "the CPU, the libraries or their folder changed" in capsys.readouterr().err
    assert _set_up(clone, [], cpu=AMX_CPU).proven == 0


def test_build_that_fails_on_another_cpu_is_compiled(clone: Path) -> None:
    _set_up(clone, ["rpc"], cpu=AMX_CPU)
    moved = _set_up(clone, ["rpc"], proofs=["illegal instruction"])
    assert ["--no-cache-dir" in step for step in moved.compiled] == [True]
    assert (_stamp(clone).build or {})["cpu"] == str(PLAIN_CPU)


def test_replaced_libraries_are_checked(clone: Path) -> None:
    library = clone / "llama_cpp" / "libggml-rpc.so"
    _set_up(clone, ["rpc"])
    assert _set_up(clone, []).proven == 0
    library.write_bytes(b"another build")
    assert _set_up(clone, []).proven == 1
    assert _set_up(clone, []).proven == 0
    library.unlink()
    assert len(_set_up(clone, ["rpc"], proofs=["this build cannot be used"]).compiled) == 1


def test_stamp_of_an_earlier_version_keeps_the_users_arguments(clone: Path) -> None:
    _set_up(clone, ["rpc cuda"], "-DGGML_CUDA=ON")
    stamp = clone / ".venv" / "headgate.json"
    stamp.write_text(json.dumps({"digest": _stamp(clone).digest, "cmake_args": "-DGGML_CUDA=ON"}))
    later = _set_up(clone, ["cached rpc cuda"])
    assert [step.split(" install")[0] for step in later.compiled] == ["-DGGML_RPC=ON -DGGML_CUDA=ON"]
    assert later.proven == 1


@pytest.mark.parametrize(
    ("status", "out", "failure"),
    [
        (0, b'{"buffers": ["CPU"], "answer": "I am"}', None),
        (0, b'{"error": "all numbers are zero"}', "this build computes wrong results: all numbers are zero"),
        (-4, b"", "this build is broken: its first computation ended with signal SIGILL"),
        (-11, b"", "this build is broken: its first computation ended with signal SIGSEGV"),
        (-99, b"", "this build is broken: its first computation ended with signal 99"),
    ],
)
def test_exit_status_and_output_of_the_check_give_the_failure(status: int, out: bytes, failure: str | None) -> None:
    assert engine_build.proof_failure(status, out, b"") == failure


def test_library_that_cannot_be_loaded_is_not_compiled_again() -> None:
    with pytest.raises(SetupError, match=r"cannot be loaded: OSError: libcuda\.so\.1"):
        engine_build.proof_failure(1, b"", b"Traceback\nOSError: libcuda.so.1: cannot open shared object file\n")


def test_engine_that_pip_did_not_install_is_an_error(tmp_path: Path) -> None:
    environment = VirtualEnvironment(tmp_path, {})
    _python(environment.python.parent, "python", "3.12.1", True, also="exit 1")
    with pytest.raises(SetupError, match=rf"llama-cpp-python is not in {environment.folder} although pip installed it"):
        EngineBuild(environment, PLAIN_CPU).package()


def test_installed_build_passes_the_check() -> None:
    environment = VirtualEnvironment(Path(__file__).resolve().parents[2], os.environ)
    assert EngineBuild(environment, build.this_cpu()).proof() is None
