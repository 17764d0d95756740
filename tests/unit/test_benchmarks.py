"""Arithmetic of the benchmarks: percentiles, limits, bars, and parsing of measured streams."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import client, report
from benchmarks.engine import Prompts
from benchmarks.figures import Bar, Middle, geometric_mean, is_quick, limit_seconds, ratios
from benchmarks.models import BLOCK_BYTES, SHAPES, Blocks
from benchmarks.samples import (
    CHAIN,
    LLAMA_CPP_SERVER,
    LLAMA_SERVER,
    QUESTION_TOKENS,
    WORKER,
    Limit,
    Prefix,
    Results,
    Sample,
)
from headgate.cli.bench import percentile


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3.0], 0.99, 3.0), ([1, 2, 3, 4], 0.5, 2.5), ([4, 1, 3, 2], 1.0, 4), ([1, 2], 0.0, 1), ([0, 10], 0.25, 2.5)],
)
def test_percentiles_are_interpolated(values: list[float], share: float, expected: float) -> None:
    assert percentile(values, share) == pytest.approx(expected)


def test_median_of_measurements_is_printed_with_its_range() -> None:
    assert math.isnan(percentile([], 0.5))
    assert math.isnan(Middle.of([math.nan]).value)
    assert Middle.of([0.003, 0.001, 0.002]).text(0, 1000) == "2 [1 .. 3]"


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("yes", True), ("0", False), ("", False)])
def test_short_run_is_chosen_by_any_value_but_zero(value: str, expected: bool) -> None:
    assert is_quick({"QUICK": value}) is expected
    assert not is_quick({})


def test_limit_is_the_sum_of_prefill_and_decode() -> None:
    assert limit_seconds(8, 80, 64, prefill_rate=640, decode_rate=256) == pytest.approx(1 + 2)


def test_ratios_are_paired_by_round_and_better_is_above_one() -> None:
    assert ratios([2, 3], [1, 6]) == [2, 0.5]
    assert ratios([2, 3], [1, 6], smaller_is_better=True) == [0.5, 2]
    assert geometric_mean([2, 0.5]) == pytest.approx(1)
    assert math.isnan(geometric_mean([]))


@pytest.mark.parametrize(
    ("bar", "line"),
    [
        (Bar("a", 0.97, "ratio", ">=", 0.97), "BAR a 0.97 ratio >= 0.97 ok"),
        (Bar("a", 1.0, "ratio", ">", 1.0), "BAR a 1 ratio > 1 short"),
        (Bar("b", 119.94, "MB", "<", 120), "BAR b 119.9 MB < 120 ok"),
        (Bar("c", 11.0, "percent", "<=", 10), "BAR c 11 percent <= 10 short"),
        (Bar("d", math.nan, "ratio", ">=", 1), "BAR d nan ratio >= 1 short"),
    ],
)
def test_bar_is_one_line(bar: Bar, line: str) -> None:
    assert bar.line() == line


def _sample(system: str, streams: int, round: int, rate: float, ttft: float = 1.0, gap: float = 0.1) -> Sample:
    return Sample("135m", system, streams, round, rate, [ttft] * streams, [gap] * 3, 0.01, 2.0)


def test_bars_are_computed_from_samples() -> None:
    """The second of two rounds ran at half speed; ratios within a round do not change."""
    found = Results()
    for round, speed in enumerate((1.0, 0.5)):
        for system, rate, ttft in ((WORKER, 100, 2), (CHAIN, 98, 2), (LLAMA_SERVER, 80, 1), (LLAMA_CPP_SERVER, 25, 9)):
            found.samples.append(_sample(system, 8, round, rate * speed, ttft / speed))
        found.limits.append(Limit("135m", 8, round, prefill_rate=640 * speed, decode_rate=128 * speed))
    assert found.limits[0].tokens_per_second == pytest.approx(8 * 64 / 5)
    found.prefixes = [Prefix("135m", WORKER, 0, 4.0, 0.2, 40), Prefix("135m", LLAMA_SERVER, 0, 4.0, 0.1, 44)]
    found.idle = {"pss": 200_000_000, "weights": 70_000_000, "kv": 20_000_000, "compute": 5_000_000}
    made = {bar.name: bar for bar in report.bars(found)}
    expected = {
        "of_limit_135m_8": (100 / 102.4, True),
        "services_cost_135m_8": (2.0, True),
        "throughput_over_llama_cpp_server_135m_8": (4.0, True),
        "throughput_vs_llama_server_135m_8": (1.25, True),
        "throughput_vs_llama_server_overall": (1.25, True),
        "ttft_p50_vs_llama_server_135m_8": (0.5, False),
        "ttft_p50_vs_llama_server_overall": (0.5, False),
        "inter_token_p99_vs_llama_server_135m_8": (1.0, True),
        "inter_token_p99_vs_llama_server_overall": (1.0, False),
        "shared_prefix_prefilled": (QUESTION_TOKENS, True),
        "shared_prefix_ttft_vs_llama_server": (0.5, False),
        "idle_worker_pss_beyond_model": (105.0, True),
    }
    assert {name: (pytest.approx(bar.value), bar.reached) for name, bar in made.items()} == expected
    shown = "\n".join(report.tables(found))
    assert "75.0 [50.0 .. 100.0]" in shown
    assert "idle worker: pss 200.0 MB" in shown


def test_without_measurements_there_are_no_bars(tmp_path: Path) -> None:
    found = Results([_sample(WORKER, 1, 0, 10.0)])
    assert report.bars(found) == []
    found.write(tmp_path / "results" / "engine.json")
    assert Results.read(tmp_path / "results" / "engine.json") == found


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nContent-Type: text/event-stream\r\n\r\n"


def _event(value: object) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _text(text: str, finish: str | None = None) -> bytes:
    return _event({"choices": [{"text": text, "finish_reason": finish}], "usage": None})


FRAMES = (
    b": a comment\n\n",
    _text(""),
    _text("a"),
    _event({"choices": [{"delta": {"content": "b"}}]}),
    _text("", "length"),
    _event({"choices": [], "usage": {"completion_tokens": 2}}),
    b"data: [DONE]\n\n",
)


def _chunked(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=30))
def test_stream_split_at_any_byte_is_parsed_alike(sizes: list[int]) -> None:
    """Text, end and usage are found, and the time of a text is that of its last byte."""
    raw = HEAD + b"".join(map(_chunked, FRAMES)) + b"0\r\n\r\n"
    pieces = []
    at = number = 0
    while at < len(raw):
        size = sizes[number % len(sizes)]
        pieces.append((float(number), raw[at : at + size]))
        at, number = at + size, number + 1
    seen = client.read(pieces)
    assert (seen.text, seen.finish, seen.usage, seen.error) == ("ab", "length", {"completion_tokens": 2}, "")
    assert len(seen.times) == 2
    ends = [raw.index(mark) + len(mark) for mark in (b'"a", "finish_reason": null}], "usage": null}\n', b'"b"}}]}\n')]
    for when, end in zip(seen.times, ends, strict=True):
        assert sum(len(data) for _when, data in pieces[: int(when)]) < end
        assert sum(len(data) for _when, data in pieces[: int(when) + 1]) >= end


def test_gaps_are_between_texts() -> None:
    assert client.Seen([1.0, 1.5, 1.5, 3.0]).gaps == [0.5, 0.0, 1.5]


@pytest.mark.parametrize(
    ("raw", "error"),
    [
        (HEAD + _chunked(FRAMES[2]) + b"0\r\n\r\n", "ended before its end"),
        (HEAD + _chunked(FRAMES[2]) + _chunked(FRAMES[-1]), "ended before its end"),
        (HEAD + _chunked(_event({"error": {"code": "model_failed"}})), "model_failed"),
        (b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nbusy", "status 503: busy"),
        (b"", "ended before its end"),
    ],
)
def test_invalid_stream_has_an_error(raw: bytes, error: str) -> None:
    assert error in client.read([(0.0, raw)]).error


def test_body_without_chunks_is_parsed() -> None:
    raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + b"".join(FRAMES).replace(b"\n", b"\r\n")
    assert client.read([(0.0, raw), (1.0, b"")]).text == "ab"


def test_prompts_have_different_beginnings() -> None:
    prompts = Prompts(["a", "b", "c", "d"], seed=1)
    texts = [prompts.text(5) for _ in range(16)]
    assert {len(text.split()) for text in texts} == {5}
    assert len({text[:4] for text in texts}) == 16


def test_shapes_have_the_sizes_of_their_names() -> None:
    millions = {name: shape.parameters / 1e6 for name, shape in SHAPES.items()}
    assert millions == {
        "15m": pytest.approx(15.2, abs=0.1),
        "20m": pytest.approx(20.1, abs=0.1),
        "135m": pytest.approx(134.5, abs=0.1),
        "1b": pytest.approx(1235.8, abs=0.1),
        "moe": pytest.approx(1685.9, abs=0.1),
        "moe-small": pytest.approx(35.1, abs=0.1),
    }


def test_random_weights_repeat_the_same_blocks_with_the_scale_of_each_tensor() -> None:
    blocks = Blocks(count=7)
    first, second = blocks.take((3, 64), 1.0), blocks.take((4, 64), 2.0)
    assert first.shape == (3, 2 * BLOCK_BYTES)
    scales = [part.reshape(-1, BLOCK_BYTES)[:, :2].copy().view("<f2") for part in (first, second)]
    assert [part.ravel().tolist() for part in scales] == [
        [pytest.approx(0.025, rel=1e-3)] * 6,
        [pytest.approx(0.05, rel=1e-3)] * 8,
    ]
    assert (first.reshape(-1, BLOCK_BYTES)[0, 2:] == second.reshape(-1, BLOCK_BYTES)[1, 2:]).all()
