"""The part `bytes` of `make gpu-check`: its figures on simulated devices, and its rows."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import gpu_bytes
from benchmarks.gpu_bytes import Case, Checkpoint, Link, Restore, Sample, Unmeasured
from benchmarks.gpu_table import Row, markdown
from headgate.shared.units import MIB
from inference import settings
from tests.rigs import tiny_gguf
from tests.rigs.cuda_stub import CudaStub


def table(samples: list[Sample], rate: Link | Unmeasured | None = None) -> list[Row]:
    rows = [row for sample in samples for row in gpu_bytes.sample_rows(sample, samples[0], rate)]
    return [*gpu_bytes.link_rows(rate), *rows]


def row(rows: list[Row], figure: str) -> Row:
    (found,) = [one for one in rows if one.figure == figure]
    return found


def test_estimates_are_compared_with_the_counts_of_the_device(tmp_path: Path) -> None:
    """A simulated device has no cost beside its buffers, so estimated and observed bytes are equal."""
    (tmp_path / "models.yaml").write_text("models: {}\n")
    config = settings.load(tmp_path, {"INFERENCE_DEVICES": "sim:600MiB"}, {})
    wanted = [Case("first", tiny_gguf.generative(), 256, 1), Case("second", tiny_gguf.generative(), 1024, 4)]
    found = list(gpu_bytes.check(config, lambda: wanted))
    samples = [sample for sample, _rate in found]
    assert {rate for _sample, rate in found} == {None}, "a simulated device has no link"
    assert [sample.name for sample in samples] == ["first", "second"]
    assert all(0 <= sample.error_bytes(0) <= MIB // 16 for sample in samples)
    assert samples[0].restore is None
    assert samples[1].restore is not None
    assert samples[1].restore.weights_bytes > 0
    rows = table(samples)
    assert all(one.reached for one in rows)
    assert row(rows, "first: the driver's figure for its process; more with the first answer").value == "no figure; 0 B"
    assert "second: warm restore" in markdown(rows)


def test_error_is_relative_to_the_allowed_difference() -> None:
    """1 %, or 16 MiB if that is more; the cost of a process beside its buffers does not count."""
    small, large = Sample("s", 100 * MIB, 508 * MIB), Sample("l", 10_000 * MIB, 10_450 * MIB)
    assert (small.error_bytes(400 * MIB), small.error(400 * MIB)) == (8 * MIB, 0.5)
    assert large.error(400 * MIB) == pytest.approx(50 / 104)
    rows = table([Sample("first", 0, 0), Sample("wrong", 0, 17 * MIB)])
    assert not row(rows, "wrong: on the device").reached


def test_duration_of_a_checkpoint_is_reported_as_a_rate() -> None:
    """Decimal gigabytes per second, or the reason why there is no figure."""
    done = Sample("done", 0, 2 * 10**9, Checkpoint(0.5, 0.25, 0))
    failed = Sample("not", 0, 0, Unmeasured("suspend: why"))
    rows = table([Sample("first", 0, 0), done, failed])
    found = row(rows, "done: checkpoint by the driver").value
    assert found == "suspended at 4.00 GB/s, resumed at 8.00 GB/s, 0.00 MiB stayed"
    missing = row(rows, "not: checkpoint by the driver")
    assert (missing.value, missing.reached) == ("suspend: why", False)


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")
def test_link_is_measured_by_the_driver_in_a_separate_process(tmp_path: Path) -> None:
    """Rates of all three ways, even if checkpoints are not supported."""
    stub = CudaStub(tmp_path / "cuda")
    stub.set_faults("version 11040")
    found = gpu_bytes.link_rate(stub.env, 2 * MIB)
    assert isinstance(found, Link)
    assert min(found.pinned, found.pageable, found.back) > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the library's name is Linux's")
@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("corrupt", "the bytes copied back from the device differ from those copied to it"),
        ("error cuMemHostAlloc 999", "cuMemHostAlloc failed with CUDA_ERROR_UNKNOWN (999)"),
    ],
)
def test_link_that_cannot_be_measured_has_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, why: str
) -> None:
    stub = CudaStub(tmp_path / "cuda")
    stub.set_faults(fault)
    assert gpu_bytes.link_rate(stub.env, 2 * MIB) == Unmeasured(why)
    monkeypatch.setattr(gpu_bytes, "LINK_SECONDS", 0.001)
    late = "the process that copies gave no answer (TimeoutExpired)"
    assert gpu_bytes.link_rate(stub.env, 2 * MIB) == Unmeasured(late)


def test_restore_is_reported_as_a_share_of_the_page_locked_copy() -> None:
    """Decimal gigabytes of weights on the device; without a link there is no share."""
    samples = [Sample("first", 0, 0), Sample("model", 0, 0, None, Restore(0.5, 2 * 10**9))]
    rows = table(samples, Link(16e9, 8e9, 10e9))
    copies = row(rows, "copies by the driver to the device: page-locked, pageable; back")
    assert copies.value == "16.00, 8.00; 10.00 GB/s"
    restore = row(rows, "model: warm restore").value
    assert restore == "1.9 GiB in 0.50 s, 4.00 GB/s, 0.25 of the page-locked copy; 0 B locked in RAM"
    rows = table(samples, Unmeasured("why"))
    assert not row(rows, "copies by the driver").reached
    assert "4.00 GB/s; 0 B" in row(rows, "model: warm restore").value
