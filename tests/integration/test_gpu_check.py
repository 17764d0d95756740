"""`make gpu-check`: what it measures on simulated devices, and what it says where there is nothing to measure."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Case, Checkpoint, Sample
from headgate.shared.units import MIB
from inference import settings
from tests.rigs import tiny_gguf


def test_predictions_are_held_against_what_the_device_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated device costs nothing beside its buffers, so that predicted and observed bytes are the same."""
    (tmp_path / "models.yaml").write_text("models: {}\n")
    config = settings.load(tmp_path, {"INFERENCE_DEVICES": "sim:600MiB"}, {})
    wanted = [Case("first", tiny_gguf.generative(), 256, 1), Case("second", tiny_gguf.generative(), 1024, 4)]
    samples = asyncio.run(gpu_check.check(config, lambda: wanted))
    assert samples is not None
    assert [sample.name for sample in samples] == ["first", "second"]
    assert all(0 <= sample.error_bytes(0) <= MIB // 16 for sample in samples)
    bar = gpu_check.report(samples)
    assert bar.reached
    assert "gpu-0: simulated GPU" in capsys.readouterr().out


def test_without_a_gpu_it_says_so_and_is_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main({"INFERENCE_DEVICES": "cpu"}) == 0
    assert "skipped, because llama.cpp sees no NVIDIA GPU here" in capsys.readouterr().out


def test_an_error_is_a_share_of_what_is_allowed() -> None:
    """1 % of everything, or 16 MiB where that is more; what a process costs beside its buffers is no error."""
    small, large = Sample("s", 100 * MIB, 508 * MIB), Sample("l", 10_000 * MIB, 10_450 * MIB)
    assert (small.error_bytes(400 * MIB), small.error(400 * MIB)) == (8 * MIB, 0.5)
    assert large.error(400 * MIB) == pytest.approx(50 / 104)
    assert not gpu_check.report([Sample("first", 0, 0), Sample("wrong", 0, 17 * MIB)]).reached


def test_what_a_checkpoint_took_is_told_as_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Decimal gigabytes of what the worker held, or why there is no figure."""
    done = Sample("done", 0, 2 * 10**9, Checkpoint(0.5, 0.25))
    gpu_check.report([Sample("first", 0, 0), done, Sample("not", 0, 0, Checkpoint(failure="suspend: why"))])
    out = capsys.readouterr().out
    assert "suspended at 4.00 GB/s, resumed at 8.00 GB/s, 0.00 MiB stayed on the device" in out
    assert "driver's checkpoint: suspend: why" in out
