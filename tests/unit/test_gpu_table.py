"""The table of `gpu-check`: which parts run, what its rows say, and which figures fall short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_decode, gpu_services, gpu_table, kv
from benchmarks.figures import Middle
from benchmarks.gpu_table import Row
from benchmarks.gpu_target import Target
from benchmarks.switching import Samples
from headgate.shared.units import MIB


def test_figures_that_fall_short_are_bold_and_cells_stay_in_their_column() -> None:
    table = gpu_table.markdown([Row("a", "x", "1 s", "2 s"), Row("a", "y|z", "3\ns", "2 s", reached=False)])
    assert table.splitlines()[2:] == ["| a | x | 1 s | 2 s |", "| a | y/z | **3 s** | 2 s |"]


def test_parts_are_selected_in_their_order() -> None:
    assert gpu_table.selected(["a", "b", "c"], "") == ["a", "b", "c"]
    assert gpu_table.selected(["a", "b", "c"], "c, a,") == ["a", "c"]
    with pytest.raises(ValueError, match="unknown part 'd'; parts: a, b"):
        gpu_table.selected(["a", "b"], "d")


def test_rows_of_a_process_that_was_killed_can_be_read(tmp_path: Path) -> None:
    """Without the line that it had begun."""
    path = tmp_path / "rows"
    assert gpu_table.read(path) == []
    gpu_table.append(path, Row("a", "x", "1", "2", reached=False))
    with path.open("a") as file:
        file.write('{"part": "a", "fig')
    assert gpu_table.read(path) == [Row("a", "x", "1", "2", reached=False)]


def test_models_follow_from_the_device() -> None:
    assert [Target.of({}).shape, Target.of({"QUICK": "1"}).shape] == ["1b", "135m"]
    simulated = Target.of({"INFERENCE_DEVICES": "sim:1x4GiB"})
    assert (simulated.simulated, simulated.shape, simulated.moe) == (True, "15m", "moe-small")
    assert Target.of({"GPU_CHECK_SHAPE": "135m"}).shape == "135m"


def grown(mb: float, **more: Any) -> dict[str, Any]:
    growth = {"gpu-0": {"mb": more["grown"], "evidence": "why"}} if "grown" in more else {}
    return {"devices_mb": {"gpu-0": mb}, "growth": growth}


@pytest.mark.parametrize(
    ("model", "process", "difference", "missed"),
    [
        (grown(500, grown=400), 510 * MIB, 1.0, []),
        (grown(100), 510 * MIB, 410.0, [1, 2, 3]),
        (grown(500, grown=400), None, -90.0, [3]),
    ],
    ids=["booked", "not booked", "no figure"],
)
def test_growth_is_compared_with_the_figure_of_the_process(
    model: dict[str, Any], process: int | None, difference: float, missed: list[int]
) -> None:
    rows = list(gpu_services.growth_rows(100 * MIB, model, "gpu-0", process, difference))
    assert [number for number, row in enumerate(rows) if not row.reached] == missed


def test_experts_are_compared_by_what_they_free_on_the_device() -> None:
    """The context of a process is the same in all placements, so it is not part of the difference."""
    plan = {"need_bytes": {"gpu-0": 100 * MIB, "cpu": 950 * MIB}, "expected": {"tokens_per_second": 41.26}}
    speed = Middle.of([39.0, 40.0])
    used = {"device": (1400 * MIB, 1000 * MIB)}
    first = list(gpu_services.experts_rows("device", {"need_bytes": {}}, speed, None, used))
    assert [row.value for row in first][1] == "unknown"
    assert first[-1].expected == "not known before the first run"
    used["host"] = 510 * MIB, 100 * MIB
    rows = list(gpu_services.experts_rows("host", plan, speed, 940.0, used))
    assert (rows[0].value, rows[0].reached) == ("890.0 MiB", True)
    assert (rows[2].value, rows[2].expected) == ("39.5 [39.0 .. 40.0]", "41.3")
    assert (rows[1].value, rows[1].expected, rows[1].reached) == ("940.0 MiB", "at most 950.0 MiB and 64.0 MiB", True)
    used["host"] = 530 * MIB, 100 * MIB
    rows = list(gpu_services.experts_rows("host", plan, speed, 1015.0, used))
    assert [row.reached for row in rows] == [False, False, True]


def test_decoding_worker_is_compared_with_a_loop() -> None:
    rows = list(gpu_decode.decode_rows("1b", [660.0, 3250.0, 5000.0], [770.0, 3500.0, 7600.0]))
    assert [(row.value, row.reached) for row in rows] == [("660", True), ("3250", True), ("5000", False)]
    assert rows[2].figure == "1b, tokens/s of 32 concurrent answers"
    assert rows[2].expected == "7600 in a loop, at least 0.7 of it"


def test_warm_models_are_compared_with_cold_ones() -> None:
    found = Samples("1b", "gpu", [2.0, 4.0], [1.0], [1.0, 1.0], [2.0], [0.2], device_bytes=[0, MIB], locked_bytes=MIB)
    rows = {row.figure.rpartition(": ")[2]: row for row in gpu_services.warm_rows(found)}
    assert (rows["warm over cold"].value, rows["warm over cold"].reached) == ("0.38", False)
    assert rows["kept over computed"].reached
    assert not rows["device memory while warm"].reached
    assert rows["copy locked in RAM"].value == "1.0 MiB"


def test_stored_sequences_are_compared_with_their_prefill_and_with_copies() -> None:
    paths = kv.Paths(
        "1b", "gpu", "f16",
        seconds={"cold": [10.0], "ram": [0.5, 1.0, 1.0, 1.0, 9.0], "disk": [2.0]},
        missed={"ram": 0, "disk": 1},
        texts={"ram": 0, "disk": 0},
        numbers={"ram": 1, "disk": 0},
        rates={"ram": [8e9], "memory": [1e10], "disk": [3e9], "file": [5e9]},
    )  # fmt: skip
    rows = {row.figure: row for row in gpu_services.kv_rows(paths)}
    assert rows["first token, ram, s"].value == "1.000, 0.100 of the prefill"
    assert (rows["first token, disk, s"].reached, rows["first token, disk, s"].expected) == (
        False,
        "a restore; it was computed",
    )
    assert not rows["answers, log probabilities that differ"].reached
    assert rows["restore from ram, GB/s"].expected == "10.00 by a copy in memory"
    assert not rows["restore from disk, GB/s"].reached
    del paths.rates["file"]
    assert "restore from disk, GB/s" not in {row.figure for row in gpu_services.kv_rows(paths)}
