"""If only a new process can help, the service ends with status 70, and the next one does not use the CPU instead."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from headgate.shared.errors import Exit
from headgate.shared.state_directory import StateDir
from inference.devices.accelerator_record import NAME, AcceleratorRecord, Circumstances, OutOfReachError
from tests.rigs.processes import Service, inference_service

REPOSITORY = Path(__file__).resolve().parents[2]
NOW = Circumstances({"INFERENCE_DEVICES": "auto"}, "boot-1", ("cpu", "cuda"))
ELSE = [
    replace(NOW, choice={"INFERENCE_DEVICES": "sim:600MiB"}),
    replace(NOW, choice={**NOW.choice, "CUDA_VISIBLE_DEVICES": ""}),
    replace(NOW, boot="boot-2"),
    replace(NOW, backends=("cpu",)),
]


def service(root: Path, gpus: int, **env: str) -> Service:
    """A service with a demo model and `gpus` GPUs that new processes cannot reach."""
    (root / "config").mkdir(exist_ok=True)
    (root / "config" / "models.yaml").write_text('models: {demo: {path: "bundled:demo"}}')
    env = {"UNREACHABLE_GPUS": str(gpus), "PYTHONPATH": str(REPOSITORY), **env}
    made = inference_service(root, root / "config", env)
    return replace(made, argv=[sys.executable, "-m", "tests.rigs.unreachable_gpu", *made.argv[3:]])


def refused(service: Service) -> str:
    """The log of a service that ends with status 70."""
    with contextlib.suppress(AssertionError):  # it may end before it answers
        service.start()
    assert service.wait() == Exit.RESTART_OUTSIDE
    return service.log


def test_service_ends_with_70_and_does_not_restart_on_the_cpu(tmp_path: Path) -> None:
    first = service(tmp_path, 1)
    try:
        first.start()
        assert first.wait() == Exit.RESTART_OUTSIDE
        assert "the service ends and must be restarted: new processes cannot reach gpu-0" in first.log
        assert "1 accelerators were in use and 0 are reachable now" in refused(service(tmp_path, 0))
    finally:
        first.kill()


def test_killed_service_restarts_on_the_cpu_only_if_configured(tmp_path: Path) -> None:
    killed = service(tmp_path, 1, GPUS_READ_WELL="1")
    on_cpu = service(tmp_path, 0, INFERENCE_FORCE_CPU_MODE="true")
    try:
        killed.start(wait_for="/readyz")
        killed.kill()
        log = refused(service(tmp_path, 0))
        assert "1 accelerators were in use and 0 are reachable now" in log
        assert "INFERENCE_FORCE_CPU_MODE=true" in log
        on_cpu.start(wait_for="/readyz")
    finally:
        killed.kill()
        on_cpu.kill()


def start(root: Path, found: int, under: Circumstances = NOW, *, cpu_configured: bool = False) -> AcceleratorRecord:
    """Simulates a start that finds `found` accelerators."""
    record = AcceleratorRecord(StateDir(root), under)
    record.check(found, cpu_configured=cpu_configured)
    return record


def test_accelerators_of_earlier_starts_are_expected(tmp_path: Path) -> None:
    start(tmp_path, 0)  # no accelerator before: the CPU is expected
    assert not (tmp_path / NAME).exists()
    start(tmp_path, 2)
    for _ in range(2):
        with pytest.raises(OutOfReachError, match="2 accelerators were in use and 0 are reachable now") as caught:
            start(tmp_path, 0)
    assert caught.value.exit_code == Exit.RESTART_OUTSIDE
    start(tmp_path, 1)  # one was removed: the number is not checked
    with pytest.raises(OutOfReachError, match="1 accelerators"):
        start(tmp_path, 0)


def test_all_accelerators_are_expected_after_an_exit_with_70(tmp_path: Path) -> None:
    start(tmp_path, 2).note(2)
    with pytest.raises(OutOfReachError, match="2 accelerators were in use and 1 are reachable now"):
        start(tmp_path, 1)
    start(tmp_path, 3)
    start(tmp_path, 1)  # they were available in between


def test_each_remedy_of_the_message_works(tmp_path: Path) -> None:
    start(tmp_path, 2).note(2)
    with pytest.raises(OutOfReachError) as caught:
        start(tmp_path, 1)
    message = str(caught.value)
    assert "INFERENCE_FORCE_CPU_MODE=true" in message
    start(tmp_path, 0, cpu_configured=True)
    with pytest.raises(OutOfReachError):  # the CPU was allowed once
        start(tmp_path, 1)
    assert "restart the machine" in message
    start(tmp_path, 0, replace(NOW, boot="boot-2"))
    assert message.endswith(f"delete {tmp_path / NAME}")
    (tmp_path / NAME).unlink()
    start(tmp_path, 0)


@pytest.mark.parametrize("under", ELSE, ids=["devices", "visible", "boot", "backends"])
def test_no_accelerator_is_expected_under_other_circumstances(tmp_path: Path, under: Circumstances) -> None:
    start(tmp_path, 2)
    start(tmp_path, 0, under)
    with pytest.raises(OutOfReachError):  # a start without accelerators does not replace the record
        start(tmp_path, 0)
    start(tmp_path, 1, under)
    start(tmp_path, 0)


@pytest.mark.parametrize(
    ("under", "words"),
    [
        (ELSE[0], None),
        (ELSE[2], "no accelerators found; there were 2 before the machine was restarted; check the driver"),
        (ELSE[3], "no accelerators found; there were 2 before llama.cpp was changed; check the driver"),
    ],
    ids=["devices", "boot", "backends"],
)
def test_use_of_the_cpu_after_a_reboot_or_another_build_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, under: Circumstances, words: str | None
) -> None:
    start(tmp_path, 2)
    with caplog.at_level(logging.WARNING):
        start(tmp_path, 0, under)
    assert caplog.messages == ([] if words is None else [words])


@pytest.mark.parametrize("damage", ["", "[]", "{}", '{"version": 1, "count": 0}', '{"version": 2}', "\xff"])
def test_damaged_record_is_ignored(tmp_path: Path, damage: str) -> None:
    (tmp_path / NAME).write_text(damage, encoding="latin-1")
    start(tmp_path, 0)
    start(tmp_path, 2)
    with pytest.raises(OutOfReachError):
        start(tmp_path, 0)


def test_record_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    start(tmp_path, 1).note(1)
    start(tmp_path, 0)


def test_circumstances_are_read_without_llama_cpp(tmp_path: Path) -> None:
    boot, engine = tmp_path / "boot_id", tmp_path / "llama_cpp"
    (engine / "lib").mkdir(parents=True)
    for name in ("libggml-base.so", "libggml-cuda.so.0", "libggml-cuda.so", "libggml-cpu.dylib", "libllama.so"):
        (engine / "lib" / name).touch()
    environ = {"CUDA_VISIBLE_DEVICES": "1", "HOME": "/"}
    unknown = Circumstances.now("auto", environ, boot=boot, engine=engine)
    assert unknown == Circumstances(
        {"INFERENCE_DEVICES": "auto", "CUDA_VISIBLE_DEVICES": "1"}, "", ("base", "cpu", "cuda")
    )
    boot.write_text("3c1f\n")
    assert Circumstances.now("auto", environ, boot=boot, engine=engine) == replace(unknown, boot="3c1f")


def test_circumstances_of_this_process_are_read(tmp_path: Path) -> None:
    here = Circumstances.now("auto")
    assert {"base", "cpu"} <= set(here.backends)
    assert here == Circumstances.now("auto")
    start(tmp_path, 1, here)
    assert json.loads((tmp_path / NAME).read_bytes())["under"]["boot"] == here.boot
    with pytest.raises(OutOfReachError):
        start(tmp_path, 0, here)
