"""`make gpu-check`: its figures on simulated devices, and its output without a GPU."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import Case, Checkpoint, Link, Restore, Sample, Unmeasured
from headgate.shared.units import MIB
from inference import settings
from tests.rigs import tiny_gguf
from tests.rigs.cuda_stub import CudaStub


def test_estimates_are_compared_with_the_counts_of_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A simulated device has no cost beside its buffers, so estimated and observed bytes are equal."""
    (tmp_path / "models.yaml").write_text("models: {}\n")
    config = settings.load(tmp_path, {"INFERENCE_DEVICES": "sim:600MiB"}, {})
    wanted = [Case("first", tiny_gguf.generative(), 256, 1), Case("second", tiny_gguf.generative(), 1024, 4)]
    found = asyncio.run(gpu_check.check(config, lambda: wanted))
    assert found is not None
    samples, rate = found
    assert rate is None, "a simulated device has no link"
    assert [sample.name for sample in samples] == ["first", "second"]
    assert all(0 <= sample.error_bytes(0) <= MIB // 16 for sample in samples)
    assert samples[0].restore is None
    assert samples[1].restore is not None
    assert samples[1].restore.weights_bytes > 0
    bar = gpu_check.report(samples)
    assert bar.reached
    out = capsys.readouterr().out
    assert "gpu-0: simulated GPU" in out
    assert "warm restore: " in out
    assert "first: 0 B came with the first answer; the driver reports no figure for the process" in out


def test_missing_gpu_is_reported_without_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main({"INFERENCE_DEVICES": "cpu"}) == 0
    assert "skipped, because llama.cpp sees no NVIDIA GPU here" in capsys.readouterr().out


def test_error_is_relative_to_the_allowed_difference() -> None:
    """1 %, or 16 MiB if that is more; the cost of a process beside its buffers does not count."""
    small, large = Sample("s", 100 * MIB, 508 * MIB), Sample("l", 10_000 * MIB, 10_450 * MIB)
    assert (small.error_bytes(400 * MIB), small.error(400 * MIB)) == (8 * MIB, 0.5)
    assert large.error(400 * MIB) == pytest.approx(50 / 104)
    assert not gpu_check.report([Sample("first", 0, 0), Sample("wrong", 0, 17 * MIB)]).reached


def test_duration_of_a_checkpoint_is_reported_as_a_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Decimal gigabytes per second, or the reason why there is no figure."""
    done = Sample("done", 0, 2 * 10**9, Checkpoint(0.5, 0.25, 0))
    gpu_check.report([Sample("first", 0, 0), done, Sample("not", 0, 0, Unmeasured("suspend: why"))])
    out = capsys.readouterr().out
    assert "suspended at 4.00 GB/s, resumed at 8.00 GB/s, 0.00 MiB stayed on the device" in out
    assert "driver's checkpoint: suspend: why" in out


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")
def test_link_is_measured_by_the_driver_in_a_separate_process(tmp_path: Path) -> None:
    """Rates of all three ways, even if checkpoints are not supported."""
    stub = CudaStub(tmp_path / "cuda")
    stub.say("version 11040")
    found = gpu_check.link_rate(stub.env, 2 * MIB)
    assert isinstance(found, Link)
    assert min(found.pinned, found.pageable, found.back) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("corrupt", "what came back from the device is not what was copied there"),
        ("error cuMemHostAlloc 999", "cuMemHostAlloc failed with CUDA_ERROR_UNKNOWN (999)"),
    ],
)
def test_link_that_cannot_be_measured_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    stub = CudaStub(tmp_path / "cuda")
    stub.say(fault)
    assert gpu_check.link_rate(stub.env, 2 * MIB) == Unmeasured(why)
    monkeypatch.setattr(gpu_check, "LINK_SECONDS", 0.001)
    late = "the process that copies gave no answer (TimeoutExpired)"
    assert gpu_check.link_rate(stub.env, 2 * MIB) == Unmeasured(late)


def test_restore_is_reported_as_a_share_of_the_link_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Decimal gigabytes of weights on the device; without a link there is no share."""
    samples = [Sample("first", 0, 0), Sample("model", 0, 0, None, Restore(0.5, 2 * 10**9))]
    gpu_check.report(samples, Link(16e9, 8e9, 10e9))
    out = capsys.readouterr().out
    assert "copies 16.00 GB/s to the device from pinned memory, 8.00 from pageable, and 10.00 back" in out
    assert "1.9 GiB of weights in 0.50 s, 4.00 GB/s, 0.25 of the link's own rate" in out
    gpu_check.report(samples, Unmeasured("why"))
    out = capsys.readouterr().out
    assert "the link's own rate is not known: why" in out
    assert "4.00 GB/s\n" in out
