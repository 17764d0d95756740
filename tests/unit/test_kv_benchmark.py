"""The benchmark of stored sequences: its bars follow from its samples."""

from __future__ import annotations

import math

import pytest

from benchmarks import kv


def paths(place: str = "cpu") -> kv.Paths:
    """Two rounds in which the model was computed once and restored from RAM and from disk."""
    return kv.Paths(
        "135m",
        place,
        "f16",
        seconds={"cold": [10.0, 12.0], "ram": [1.0, 0.6], "disk": [2.0, 6.0]},
        missed={"ram": 0, "disk": 1},
        texts={"ram": 0, "disk": 0},
        numbers={"ram": 1, "disk": 0},
        rates={"ram": [8.0, 8.0], "memory": [10.0, 20.0], "disk": [3.0, 3.0], "file": [4.0, 4.0]},
    )


def test_ratios_of_tiers_are_medians_of_paired_rounds() -> None:
    """A tier from which one restore failed has no time, so that its bar falls short."""
    found = {bar.name: bar for bar in kv.bars([paths()], kv.Samples())}
    assert found["kv_ttft_ram_over_prefill_f16_135m_cpu"].value == pytest.approx(0.075)
    assert found["kv_ttft_ram_over_prefill_f16_135m_cpu"].reached
    assert math.isnan(found["kv_ttft_disk_over_prefill_f16_135m_cpu"].value)
    assert not found["kv_logprobs_differ_ram_f16_135m_cpu"].reached
    assert found["kv_answers_differ_ram_f16_135m_cpu"].reached
    assert found["kv_ram_rate_over_copy_f16_135m_cpu"].value == pytest.approx(0.6)
    assert found["kv_disk_rate_over_read_f16_135m_cpu"].value == pytest.approx(0.75)
    assert not any("killed" in name for name in found)


def test_simulated_devices_have_no_bar_for_the_rate_of_copies() -> None:
    assert not any("over_copy" in bar.name for bar in kv.bars([paths("sim")], kv.Samples()))


def test_bars_of_loads_compare_situations_of_a_round() -> None:
    loads = kv.Samples()
    for situation, values in {"stored": (6.0, 8.0), "dropped": (2.0, 2.0), "llama-server": (5.0, 5.0)}.items():
        for value in values:
            loads.add("alternating", situation, "135m_cpu", value)
    loads.add("lookup", "seconds", "10000", 0.0005)
    found = {bar.name: bar for bar in kv.bars([], loads)}
    assert found["kv_alternating_stored_over_dropped_135m_cpu"].value == pytest.approx(3.5)
    assert found["kv_alternating_stored_over_llama-server_135m_cpu"].value == pytest.approx(1.4)
    assert found["kv_lookup_slowest_10000"].value == pytest.approx(0.5)
    assert "stored" in "\n".join(kv.tables([paths()], loads))


def test_waves_cover_all_conversations() -> None:
    prompts = [str(number) for number in range(kv.CONVERSATIONS)]
    assert [prompt for wave in kv.waves(prompts) for prompt in wave] == prompts
    assert {len(wave) for wave in kv.waves(prompts)} == {kv.SLOTS}
    assert kv.rotated(["a", "b", "c"], 4) == ["b", "c", "a"]


def test_lookup_is_measured_for_each_prompt() -> None:
    assert len(kv.lookup_seconds(50, 16)) == 100
