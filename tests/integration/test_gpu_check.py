"""`make gpu-check`: the parts that run, their time limits, and its output without a GPU."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from benchmarks import gpu_check, gpu_table
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from tests.rigs.processes import is_alive, wait_until

WRITES = "from benchmarks import gpu_table as t; import pathlib, sys; p = pathlib.Path(sys.argv[1]); "
ROW = "t.append(p, t.Row('part', 'figure', '1'))"


def run(code: str, path: Path, seconds: float = 20.0) -> list[Row]:
    return gpu_check.run_part("part", [sys.executable, "-c", WRITES + code, str(path)], seconds, path)


def test_missing_gpu_is_reported_without_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([], {"INFERENCE_DEVICES": "cpu"}) == 0
    assert "skipped, because llama.cpp sees no NVIDIA GPU here" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        ({"PARTS": "warm,hot"}, "unknown part 'hot'; parts: bytes, decode, growth, experts, warm, kv"),
        ({"GPU_CHECK_SHAPE": "7b"}, "unknown GPU_CHECK_SHAPE '7b'; shapes: "),
    ],
)
def test_unknown_part_or_shape_is_refused_with_the_known_ones(
    environ: dict[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([], environ) == 2
    assert message in capsys.readouterr().out


def test_part_that_takes_too_long_is_ended_and_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that ignores the first signal."""
    monkeypatch.setattr(gpu_check, "END_SECONDS", 0.5)
    pid = tmp_path / "pid"
    ignores = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
    code = f"{ignores}{ROW}; pathlib.Path({str(pid)!r}).write_text(str(os.getpid())); "
    began = time.monotonic()
    rows = run(code + "time.sleep(60)", tmp_path / "rows", 1.5)
    assert time.monotonic() - began < 10
    assert rows == [Row("part", "figure", "1"), Row("part", "not complete", "did not end within 1.5 s", "", False)]
    number = int(pid.read_text())
    wait_until("the process has ended", lambda: not is_alive(number))


def test_part_that_ends_with_an_error_keeps_its_rows(tmp_path: Path) -> None:
    failed = Row("part", "not complete", "ended with status 3", "", False)
    assert run(f"{ROW}; sys.exit(3)", tmp_path / "a") == [Row("part", "figure", "1"), failed]
    assert run(ROW, tmp_path / "b") == [Row("part", "figure", "1")]
    assert run("os = 1", tmp_path / "c") == []


def test_failure_of_a_part_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rows(_target: Target) -> list[Row]:
        raise SystemExit("the model does not answer any more")

    monkeypatch.setattr(gpu_check, "PARTS", {"part": gpu_check.Part(1, rows)})
    path = tmp_path / "rows"
    assert gpu_check.part_process("part", path, Target.of(os.environ)) == 0
    (row,) = gpu_table.read(path)
    assert row == Row("part", "not complete", "the model does not answer any more", "", False)
