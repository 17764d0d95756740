"""`headgate doctor`: findings about machines, services and streams, with advice and an exit status."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx2
import pytest

from headgate.build import Cpu
from headgate.cli.doctor import machine_checks, service_checks, stream_check
from headgate.cli.doctor.findings import Finding, Level
from headgate.cli.doctor.stream_check import Stream
from headgate.cli.main import main
from inference.environment_settings import InferenceSettings
from inference.workers.helper_client import HelperError
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.nvml_stub.two_cards import FIRST, SECOND, two_cards
from tests.rigs.processes import forget_own, free_port

pytestmark = pytest.mark.unmeasured

SHIPPED = Path(__file__).resolve().parents[2] / "config"
SETTINGS = InferenceSettings()
GIB = 2**30


def put(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def texts(found: list[Finding], level: Level) -> list[str]:
    return [f"{each.check}: {each.message} -> {each.advice}" for each in found if each.level is level]


def card(vendor: str, number: int = 0) -> dict[str, str]:
    folder = f"sys/bus/pci/devices/0000:0{number}:00.0"
    return {f"{folder}/vendor": f"{vendor}\n", f"{folder}/class": "0x030200\n"}


DRIVER = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27\n"}


# --- the machine ------------------------------------------------------------------------------------------------------
def test_gpu_without_a_backend_names_the_flag(tmp_path: Path) -> None:
    root = put(tmp_path, {**card("0x10de"), **DRIVER, "dev/nvidia0": ""})
    found = list(machine_checks.accelerators(set(), SETTINGS, root))
    assert any("driver: NVIDIA 580.65.06" in text for text in texts(found, Level.OK))
    [text] = texts(found, Level.WARNING)
    assert (
        'built without cuda or vulkan -> compile it once with the toolkit installed: CMAKE_ARGS="-DGGML_CUDA=ON"'
        in text
    )
    assert texts(list(machine_checks.accelerators({"cuda"}, SETTINGS, root)), Level.WARNING) == []


def test_gpu_without_a_driver_and_without_device_files(tmp_path: Path) -> None:
    root = put(tmp_path, {**card("0x1002"), **card("0x1002", 1)})
    [text] = texts(list(machine_checks.accelerators({"hip"}, SETTINGS, root)), Level.WARNING)
    assert text.startswith("driver: 2 AMD GPUs without a driver -> load the kernel module amdgpu")
    put(root, DRIVER)
    [text] = texts(list(machine_checks.accelerators({"cuda"}, SETTINGS, root)), Level.PROBLEM)
    assert "device files: this system or container has no" in text
    assert "--gpus all" in text


def test_device_file_without_permission_names_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = put(tmp_path, {**card("0x1002"), "dev/kfd": "", "dev/dri/renderD128": ""})
    monkeypatch.setattr("os.access", lambda path, _mode: Path(path).name == "kfd")
    [text] = texts(list(machine_checks.accelerators({"hip"}, SETTINGS, root)), Level.PROBLEM)
    assert "renderD128 is not accessible for this user -> add the user to its group" in text


def test_machine_without_accelerators_and_chosen_cpu(tmp_path: Path) -> None:
    assert [each.level for each in machine_checks.accelerators(set(), SETTINGS, tmp_path)] == [Level.OK]
    found = list(machine_checks.accelerators(set(), InferenceSettings(devices="cpu"), put(tmp_path, card("0x10de"))))
    assert "restricts the service to the CPU" in found[-1].message


def test_unused_instructions_are_a_warning() -> None:
    cpu = Cpu("X", "x86_64", ("avx", "avx2", "avx512f", "fma"))
    assert machine_checks.instructions(cpu, "CPU : AVX = 1 | AVX2 = 1 | FMA = 1 | AVX512 = 1 |").level is Level.OK
    found = machine_checks.instructions(cpu, "CPU : AVX = 1 | FMA = 0 |")
    assert found.level is Level.WARNING
    assert "does not use FMA, AVX2, AVX512 of this CPU" in found.message


def memory_files(total: int, available: int, limit: str = "max", used: int = 0) -> dict[str, str]:
    group = "sys/fs/cgroup/box"
    return {
        "proc/meminfo": f"MemTotal: {total // 1024} kB\nMemAvailable: {available // 1024} kB\n",
        "proc/self/cgroup": "0::/box\n",
        f"{group}/memory.max": limit,
        f"{group}/memory.current": str(used),
        f"{group}/memory.stat": "inactive_file 0\n",
    }


@pytest.mark.parametrize(
    ("files", "level", "words"),
    [
        (memory_files(32 * GIB, 16 * GIB), Level.OK, "models on the CPU may take 16.0 GiB"),
        (memory_files(32 * GIB, 16 * GIB, str(8 * GIB), GIB), Level.NOTE, "allows 8.0 GiB"),
        (memory_files(32 * GIB, 16 * GIB, str(512 * 2**20)), Level.PROBLEM, "models on the CPU may take 256.0 MiB"),
    ],
)
def test_memory_limit_of_the_container_is_shown(tmp_path: Path, files: Any, level: Level, words: str) -> None:
    [found] = machine_checks.memory(SETTINGS, put(tmp_path, files))
    assert found.level is level
    assert words in found.message


def test_limit_of_processes_is_a_warning(tmp_path: Path) -> None:
    root = put(tmp_path, {"proc/self/cgroup": "0::/box\n", "sys/fs/cgroup/box/pids.max": "64\n"})
    assert "allows 64 processes" in texts(list(machine_checks.limits(root)), Level.WARNING)[0]
    put(root, {"sys/fs/cgroup/box/pids.max": "max\n"})
    assert texts(list(machine_checks.limits(root)), Level.WARNING) == []


@pytest.mark.parametrize("answer", [{"error": "wrong product"}, HelperError("it ended with SIGILL")])
def test_build_that_does_not_compute_is_a_problem(answer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run(*_: Any, **__: Any) -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(machine_checks, "run_helper", run)
    [found] = machine_checks.build()
    assert found.level is Level.PROBLEM
    assert "make clean" in found.advice
    monkeypatch.setattr(machine_checks, "package", lambda: None)
    assert "not installed" in next(machine_checks.build()).message


def test_nvml_reads_the_cards_or_says_what_is_wrong_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that cannot be read is not a missing library."""
    stub = two_cards(tmp_path)
    for name, value in stub.env.items():
        monkeypatch.setenv(name, value)
    stub.errors, stub.actions = [("nvmlDeviceGetMemoryInfo_v2", 15, FIRST)], {SECOND: 1}
    stub.write()
    found = list(machine_checks.nvml())
    assert texts(found, Level.OK) == ["NVML: reads NVIDIA Second (15.8 GiB) -> "]
    problems = texts(found, Level.PROBLEM)
    assert [text.partition(" -> ")[0] for text in problems] == [
        "NVML: device 0: NVML: GPU is lost (15)",
        "NVML: NVIDIA Second: its driver requests recovery action 1",
    ]
    assert "dmesg" in problems[0]
    stub.errors = [("all", 18, "")]
    stub.write()
    [text] = texts(list(machine_checks.nvml()), Level.PROBLEM)
    assert "(18) -> restart the machine after an update of the driver" in text


def test_missing_nvml_is_a_warning_beside_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    if list(machine_checks.nvml(tmp_path)):
        pytest.skip("this machine has NVML")
    [text] = texts(list(machine_checks.nvml(put(tmp_path, DRIVER))), Level.WARNING)
    assert "libnvidia-ml.so is not found" in text


def test_devices_are_those_that_llama_cpp_lists() -> None:
    [found] = machine_checks.devices(SETTINGS)
    assert found.level in (Level.OK, Level.NOTE)
    assert list(machine_checks.devices(InferenceSettings(devices="cpu"))) == []


# --- the stream -------------------------------------------------------------------------------------------------------
SSE = httpx2.Headers({"content-type": "text/event-stream; charset=utf-8"})
WHOLE = b"data: {}\n\ndata: [DONE]\n\n"


@pytest.mark.parametrize(
    ("found", "level", "words"),
    [
        (Stream(200, SSE, [0.1, 0.4, 0.8, 1.2], WHOLE, 1.2), Level.OK, "arrived in 4 pieces from 100ms"),
        (Stream(200, SSE, [2.0], WHOLE, 2.0), Level.PROBLEM, "arrived at once after 2s"),
        (Stream(200, SSE, [1.99, 2.0], WHOLE, 2.0), Level.PROBLEM, "something on the way buffers it"),
        (Stream(200, SSE, [0.1], WHOLE, 0.1), Level.NOTE, "too short"),
        (Stream(200, SSE, [0.1], b"data: {}\n\n", 60.0), Level.PROBLEM, "cut after 60s (no [DONE])"),
        (Stream(200, SSE, [0.1], b"", 60.0, "peer closed"), Level.PROBLEM, "cut after 60s (peer closed)"),
        (Stream(200, httpx2.Headers({"content-type": "text/html"}), [0.1], WHOLE, 1), Level.PROBLEM, "text/html, not"),
        (Stream(401, text=b'{"error": {"message": "no key"}}'), Level.PROBLEM, "status 401: no key"),
        (Stream(504, text=b"<html>"), Level.PROBLEM, "status 504: <html>"),
        (Stream(error="certificate verify failed"), Level.PROBLEM, "no answer: certificate verify failed"),
    ],
)
def test_arrival_of_a_stream_is_judged(found: Stream, level: Level, words: str) -> None:
    [finding] = stream_check.judge(found)
    assert finding.level is level
    assert words in finding.message
    assert finding.advice or level is Level.OK


def test_compression_and_known_fronts_are_named() -> None:
    headers = httpx2.Headers({**SSE, "content-encoding": "gzip", "cf-ray": "1"})
    found = list(stream_check.judge(Stream(200, headers, [0.1, 3.1, 3.2, 4.0], WHOLE, 4.0)))
    assert [each.level for each in found] == [Level.OK, Level.WARNING, Level.NOTE]
    assert "Cloudflare; the longest silence was 3s" in found[2].message


# --- the verb ---------------------------------------------------------------------------------------------------------
@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with the shipped configuration, and checks of the machine that find nothing."""
    forget_own(monkeypatch)
    (tmp_path / "config").mkdir()
    for file in SHIPPED.glob("*.yaml"):
        shutil.copy(file, tmp_path / "config")
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HEADGATE_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    for name in ("GATEWAY_PORT", "INFERENCE_PORT"):
        monkeypatch.setenv(name, str(free_port()))
    monkeypatch.chdir(tmp_path)
    for check in ("build", "nvml"):
        monkeypatch.setattr(machine_checks, check, lambda: iter(()))
    monkeypatch.setattr(machine_checks, "devices", lambda _settings: iter(()))
    return tmp_path


def run(capsys: Any, *words: str) -> tuple[int, dict[str, dict[str, str]]]:
    status = main(["doctor", "--json", *words])
    return status, {each["check"]: each for each in json.loads(capsys.readouterr().out)}


def test_good_machine_has_exit_status_0(place: Path, capsys: Any) -> None:
    status, found = run(capsys)
    assert status == 0
    assert "2 models, 2 routes" in found["configuration"]["message"]
    assert found["gateway"]["message"].startswith("does not run; port")
    assert "5m or more" in found["proxy in front"]["advice"]
    assert main(["doctor"]) == 0
    output = capsys.readouterr()
    assert "ok       configuration:" in output.out
    assert output.err.endswith("no problems\n")


def test_problems_have_advice_and_exit_status_1(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    state = place / "state"
    state.mkdir()
    (state / "gateway.key").write_text("hg-key")
    (state / "gateway.key").chmod(0o644)
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    with (place / "config" / "models.yaml").open("a") as out:
        out.write("  a: {path: none.gguf}\n")
    status, found = run(capsys)
    assert status == 1
    assert "chmod 600" in found["key files"]["message"]
    assert found["configuration"]["level"] == "problem"
    assert "models.a.path" in found["configuration"]["message"]
    assert main(["doctor"]) == 1
    assert "-> correct it" in capsys.readouterr().out


def test_lock_space_and_providers_without_a_key_are_reported(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    (place / "config" / "gateway.yaml").write_text(
        'providers: {openai: {kind: openai, api_key: "${env:OPENAI_API_KEY}"}}\n'
        "routes: {gpt: {chain: [openai/gpt-5-mini]}}\n"
    )
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("HEADGATE_LOCK_DIR", str(place / "none"))
    monkeypatch.setattr(service_checks, "MIN_DISK_BYTES", 2**60)
    status, found = run(capsys)
    assert (status, found["lock"]["level"]) == (1, "problem")
    assert "HEADGATE_LOCK_DIR" in found["lock"]["advice"]
    assert (found["state directory"]["level"], found["providers"]["level"]) == ("warning", "note")
    assert found["providers"]["advice"].startswith("set OPENAI_API_KEY")


def test_files_that_the_gateway_needs_and_that_are_missing_are_a_warning(place: Path, capsys: Any) -> None:
    text = "inference: {tls: {ca: /missing/ca.pem}}\nroutes: {demo: {chain: [local/demo]}}\n"
    (place / "config" / "gateway.yaml").write_text(text)
    status, found = run(capsys)
    assert (status, found["configuration"]["level"]) == (0, "warning")
    assert "/missing/ca.pem" in found["configuration"]["message"]


def test_used_ports_and_refused_keys_are_problems(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    refusal = Canned({"error": {"message": "key", "code": "invalid_api_key"}}, 401)
    with canned_service({"GET /v1/models": refusal}) as service:
        monkeypatch.setenv("GATEWAY_PORT", service.url.rpartition(":")[2])
        status, found = run(capsys)
    assert status == 1
    assert "refuses the key of this user" in found["gateway"]["message"]
    monkeypatch.setenv("HTTP_PROXY", "http://proxy:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert "NO_PROXY=127.0.0.1" in run(capsys)[1]["outgoing proxy"]["advice"]


def test_stream_check_uses_the_given_url(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setenv("HEADGATE_KEY", "hg-key")
    frames = (b'data: {"choices": []}\n\n', b"data: [DONE]\n\n")
    stream = Canned(frames=frames, headers={"content-type": "text/event-stream"})
    with canned_service({"POST /v1/chat/completions": stream}) as service:
        status, found = run(capsys, "--url", f"{service.url}/v1")
        assert (status, found["stream"]["level"]) == (0, "note")
        assert [request.body["max_tokens"] for request in service.requests] == [1, stream_check.TOKENS]
        assert service.requests[0].headers["authorization"] == "Bearer hg-key"
        assert service.requests[0].body["model"] == "demo"
        status, found = run(capsys, "--url", f"{service.url}/elsewhere", "--model", "x")
    assert (status, found["stream"]["level"]) == (1, "problem")
    assert "base_url" in found["stream"]["advice"]
    status, found = run(capsys, "--url", f"http://127.0.0.1:{free_port()}")
    assert (status, found["stream"]["level"]) == (1, "problem")


@pytest.mark.parametrize(("words", "advice"), [(["--model", "x"], "--model needs --url"), (["--url", "x"], "https://")])
def test_wrong_use_is_explained(place: Path, words: list[str], advice: str, capsys: Any) -> None:
    assert main(["doctor", *words]) == 2
    assert advice in capsys.readouterr().err
