"""Container images and systemd units: checks that need no container engine and no systemd."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.settings import GatewayConfig
from headgate.build import KEEP_STORES
from headgate.cli.main import VERBS, verb_parser
from headgate.shared.units import parse_duration
from inference.environment_settings import InferenceSettings, environment_names

ROOT = Path(__file__).resolve().parents[2]
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILES = sorted((ROOT / "docker").glob("Dockerfile*"))
UNITS = sorted((ROOT / "config" / "systemd").glob("*.service"))
OURS = {
    *environment_names(),
    "GATEWAY_HOST",
    "GATEWAY_PORT",
    "GATEWAY_INFERENCE__URL",
    "HEADGATE_CONFIG_DIR",
    "HEADGATE_STATE_DIR",
    "HEADGATE_LOCK_DIR",
}


def _stages(dockerfile: Path) -> dict[str, str]:
    """The text of each build stage by its name."""
    parts = re.split(r"^FROM \S+ AS (\S+)$", dockerfile.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def _is_a_command(words: list[str]) -> bool:
    """Parse the words as a command line of headgate; SystemExit if they are invalid."""
    assert words[0].rpartition("/")[2] == "headgate"
    verb_parser(VERBS[words[1]]).parse_args(words[2:])
    return True


@pytest.mark.parametrize("name", SERVICES)
def test_services_restart_and_get_time_to_drain(name: str) -> None:
    service = SERVICES[name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    drains = [GatewayConfig().drain_seconds, InferenceSettings().drain_seconds]
    assert parse_duration(service["stop_grace_period"]) > max(drains) + 5
    assert "no-new-privileges:true" in service["security_opt"]
    assert service["cap_drop"] == ["ALL"]


@pytest.mark.parametrize("name", SERVICES)
def test_health_check_runs_headgate_against_livez(name: str) -> None:
    test = SERVICES[name]["healthcheck"]["test"]
    assert test[0] == "CMD"
    assert _is_a_command(test[1:])
    port = SERVICES[name]["environment"]["GATEWAY_PORT" if name == "gateway" else "INFERENCE_PORT"]
    assert test[-1] == f"http://127.0.0.1:{port}/livez"


def test_each_profile_has_one_gateway_and_one_inference_service_with_the_same_name() -> None:
    for profile in ("cpu", "gpu"):
        chosen = {name: service for name, service in SERVICES.items() if profile in service["profiles"]}
        assert len(chosen) == 2
        (inner,) = (name for name in chosen if name != "gateway")
        aliases = {inner}
        if isinstance(chosen[inner]["networks"], dict):
            aliases |= set(chosen[inner]["networks"]["inside"]["aliases"])
        host = SERVICES["gateway"]["environment"]["GATEWAY_INFERENCE__URL"].removeprefix("http://").partition(":")[0]
        assert host in aliases


def test_only_the_gateway_publishes_a_port_and_only_locally() -> None:
    assert SERVICES["gateway"]["ports"] == ["${HEADGATE_PUBLISH:-127.0.0.1:8080}:8080"]
    assert [name for name, service in SERVICES.items() if "ports" in service] == ["gateway"]


def test_only_the_gpu_profile_reserves_a_gpu() -> None:
    (device,) = SERVICES["inference-gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert [name for name, service in SERVICES.items() if "deploy" in service] == ["inference-gpu"]


def test_services_share_the_state_volume_with_the_token() -> None:
    for service in SERVICES.values():
        assert "state:/state" in service["volumes"]
        named = [volume.partition(":")[0] for volume in service["volumes"] if not volume.startswith(("/", "."))]
        assert set(named) <= set(COMPOSE["volumes"])


@pytest.mark.parametrize("name", SERVICES)
def test_variables_and_referenced_files_exist(name: str) -> None:
    service = SERVICES[name]
    assert set(service["environment"]) <= OURS
    build = service["build"]
    stages = _stages(ROOT / build["dockerfile"])
    assert build["target"] in stages
    for volume in service["volumes"]:
        if volume.startswith("./"):
            assert (ROOT / volume.partition(":")[0]).is_dir()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_run_as_the_same_unprivileged_user(path: Path) -> None:
    """The images share a volume."""
    stages = _stages(path)
    for name in ("gateway", "inference"):
        if name in stages:
            users = re.findall(r"^USER (\S+)$", stages.get("base", "") + stages[name], re.MULTILINE)
            assert users[-1] == "10001:10001"


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_commands_and_variables_of_images_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    commands = [json.loads(found) for found in re.findall(r"CMD (\[.*\])$", text, re.MULTILINE)]
    assert commands
    assert all(_is_a_command(words) for words in commands)
    assert text.count("HEALTHCHECK") == sum(words[1] in ("gateway", "inference") for words in commands)
    variables = re.findall(r"\b((?:HEADGATE|INFERENCE|GATEWAY)_[A-Z_]+)=", text)
    assert set(variables) <= OURS


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_files_copied_by_images_exist_and_are_not_ignored(path: Path) -> None:
    allowed = [
        line[1:] for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines() if line[:1] == "!"
    ]
    for line in re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(encoding="utf-8"), re.MULTILINE):
        for source in line.split():
            assert (ROOT / source).exists()
            assert source == "." or source in allowed
    for name in allowed:
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_stages_build_on_stages_before_them(path: Path) -> None:
    """FROM and COPY --from name an image of a registry or a stage further up."""
    seen: set[str] = set()
    for line in path.read_text(encoding="utf-8").splitlines():
        if found := re.match(r"FROM (\S+) AS (\S+)$", line):
            assert found[1] in seen or re.match(r"(python|nvidia/cuda):", found[1])
            seen.add(found[2])
        elif found := re.match(r"COPY --from=(\S+)", line):
            assert found[1] in seen


def test_images_compile_the_engine_with_rpc_and_the_gateway_has_none() -> None:
    for path in DOCKERFILES:
        text = path.read_text(encoding="utf-8")
        assert 'CMAKE_ARGS="$(sh docker/engine_arguments.sh) ' in text
        assert re.search(r"^COPY docker/.*engine_arguments\.sh docker/$", text, re.MULTILINE)
    lines = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").splitlines()
    assert "FROM packages AS gateway-program" in lines
    argv = [sys.executable, "docker/runtime_requirements.py"]
    requirements = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=20).stdout
    assert "llama-cpp-python" not in requirements
    assert "fastapi" in requirements


COMPOSE_KEYS = {
    "build", "cap_drop", "deploy", "env_file", "environment", "healthcheck", "image", "init", "networks", "ports",
    "profiles", "read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "volumes",
}  # fmt: skip


def test_compose_file_is_valid() -> None:
    """Keys are known ones; where Docker Compose is installed, it reads the file for both profiles."""
    for name, service in SERVICES.items():
        assert set(service) <= COMPOSE_KEYS, name
    assert {key for key in COMPOSE if not key.startswith("x-")} == {"name", "services", "networks", "volumes"}
    if shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0:
        for profile in ("cpu", "gpu"):
            argv = ["docker", "compose", "--profile", profile, "config", "--quiet"]
            result = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60)
            assert result.returncode == 0, result.stderr


# --- systemd -------------------------------------------------------------------------------------------------------
def _settings(unit: Path) -> dict[str, str]:
    lines = (line for line in unit.read_text(encoding="utf-8").splitlines() if "=" in line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_restart_services_except_after_a_configuration_error(unit: Path) -> None:
    settings = _settings(unit)
    assert settings["Restart"] == "always"
    assert settings["RestartForceExitStatus"] == "70"
    assert settings["RestartPreventExitStatus"] == "2"
    drains = GatewayConfig().drain_seconds + (InferenceSettings().drain_seconds if unit.stem == "headgate" else 0)
    assert parse_duration(settings["TimeoutStopSec"]) > drains
    assert settings["StateDirectory"] == "headgate"
    assert _is_a_command(settings["ExecStart"].split())


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_units_are_valid(unit: Path, tmp_path: Path) -> None:
    """Where systemd is installed, it verifies the unit with a program that exists."""
    text = unit.read_text(encoding="utf-8")
    assert re.findall(r"^\[(\w+)\]$", text, re.MULTILINE) == ["Unit", "Service", "Install"]
    if shutil.which("systemd-analyze"):
        copy = tmp_path / unit.name
        copy.write_text(text.replace("/opt/headgate/.venv/bin/headgate", "/bin/true").replace("/opt/headgate\n", "/\n"))
        argv = ["systemd-analyze", "verify", "--man=no", str(copy)]
        result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
        assert [line for line in result.stderr.splitlines() if unit.name in line] == []


def _engine_arguments(machine: str, folder: Path, macros: str) -> list[str]:
    """Output of docker/engine_arguments.sh with a compiler that predefines `macros`."""
    compiler = folder / "c++"
    compiler.write_text(f"#!/bin/sh\ncat <<'EOF'\n#define __OPTIMIZE__ 1\n{macros}\nEOF\n")
    compiler.chmod(0o755)
    script = ROOT / "docker" / "engine_arguments.sh"
    environ = {**os.environ, "CXX": str(compiler)}
    done = subprocess.run(["sh", str(script), machine], capture_output=True, text=True, check=True, env=environ)
    return shlex.split(done.stdout)


@pytest.mark.parametrize(
    ("machine", "macros", "has_flags"),
    [
        ("x86_64", "#define __GNUC__ 12", True),
        ("x86_64", "#define __GNUC__ 13", False),
        ("x86_64", "#define __GNUC__ 4\n#define __clang__ 1", False),
        ("x86_64", "", False),
        ("aarch64", "#define __GNUC__ 12", False),
    ],
)
def test_images_from_gcc_before_13_keep_the_stores_that_amx_needs(
    machine: str, macros: str, has_flags: bool, tmp_path: Path
) -> None:
    assert (f"-DCMAKE_CXX_FLAGS={KEEP_STORES}" in _engine_arguments(machine, tmp_path, macros)) is has_flags


@pytest.mark.parametrize(
    ("machine", "expected"),
    [
        ("x86_64", {"-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DCMAKE_INSTALL_BINDIR=llama_cpp/lib"}),
        ("aarch64", set()),
    ],
)
def test_images_contain_code_for_each_cpu(machine: str, expected: set[str], tmp_path: Path) -> None:
    """The CPU that builds the image does not matter; on x86-64 the fastest code is chosen at start."""
    assert set(_engine_arguments(machine, tmp_path, "#define __GNUC__ 14")) == {
        "-DGGML_RPC=ON", "-DGGML_NATIVE=OFF", *expected,
    }  # fmt: skip
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8")
    assert "!docker/engine_arguments.sh" in ignored
