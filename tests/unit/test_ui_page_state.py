"""Records of the dashboard's page, the differences that it gets, and counters of finished requests."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.routing.explain_record import AttemptRecord, Record
from gateway.telemetry import traffic_counters
from gateway.telemetry.traffic_counters import Finished, TrafficCounters, percentile
from gateway.ui.page_state import (
    MAX_FINISHED,
    MAX_NEW,
    LiveFigures,
    ShownRequests,
    first_requests,
    is_news,
    model_json,
    request_json,
)
from inference.protocol import ModelState, ModelStatus, Progress, ReplicaStatus


# --- figures ---------------------------------------------------------------------------------------------------------
def _figures(total: int, **more: Any) -> dict[str, Any]:
    return {"devices": [{"id": "cpu"}], "models": {"demo": {"generated_tokens": total, **more}}}


def test_rate_is_that_of_the_last_five_seconds() -> None:
    figures = LiveFigures()
    assert figures.tokens_per_second("demo", 0.0) is None
    figures.take(_figures(100), 0.0)
    assert figures.tokens_per_second("demo", 0.0) == 0.0
    figures.take(_figures(140), 2.0)
    assert figures.tokens_per_second("demo", 2.0) == 20.0
    figures.take(_figures(140), 4.0)
    figures.take(_figures(190), 6.0)
    assert figures.tokens_per_second("demo", 6.0) == 18.0, "from 100 at 1 s"
    assert figures.tokens_per_second("demo", 20.0) == 0.0
    for second in range(8, 100):
        figures.take(_figures(200 + second), float(second))
    assert len(figures._totals["demo"]) < 10


def test_rate_begins_again_with_a_new_worker() -> None:
    figures = LiveFigures()
    figures.take(_figures(100), 0.0)
    figures.take(_figures(5), 1.0)
    figures.take(_figures(15), 2.0)
    assert figures.tokens_per_second("demo", 2.0) == 10.0
    assert figures.of("demo")["generated_tokens"] == 15
    assert figures.devices == [{"id": "cpu"}]


def test_malformed_figures_are_refused() -> None:
    with pytest.raises(KeyError):
        LiveFigures().take({"devices": [], "models": {"demo": {}}}, 0.0)


def _model(state: ModelState, figures: dict[str, Any], now: float = 100.0, **more: Any) -> dict[str, Any]:
    return model_json(ModelStatus("demo", state, **more).to_json(), figures, 1.5, (0.1, 0.2), now)


FIGURES = {
    "in_flight": 2, "progress": 0.5, "idle_deadline": 130.0, "blocks": {"gpu-0": {"weights": 1}},
    "prefix_hit_ratio": 0.5, "kv_hits": {"hot": 1, "ram": 0, "disk": 0},
}  # fmt: skip


def test_model_has_the_figures_that_suit_its_state() -> None:
    ready = _model(ModelState.READY, FIGURES)
    assert ready["headgate"]["in_flight"] == 2
    assert (ready["progress"], ready["blocks"]) == (None, FIGURES["blocks"])
    assert ready["figures"] == {
        "tokens_per_second": 1.5, "ttft_p50": 0.1, "ttft_p99": 0.2, "prefix_hit_ratio": 0.5,
        "kv": FIGURES["kv_hits"], "idle_deadline_seconds": 30.0,
    }  # fmt: skip
    assert _model(ModelState.LOADING, FIGURES)["progress"] == 0.5
    cold = _model(ModelState.COLD, FIGURES)
    assert (cold["progress"], cold["blocks"], cold["figures"]["idle_deadline_seconds"]) == (None, {}, None)
    assert _model(ModelState.READY, {})["blocks"] == {}


def test_model_is_news_unless_only_the_clock_went_on() -> None:
    before = _model(ModelState.READY, FIGURES, idle_seconds=1.0)
    assert is_news(before, None)
    assert not is_news(_model(ModelState.READY, FIGURES, now=101.0, idle_seconds=2.0), before)
    assert is_news(_model(ModelState.READY, {**FIGURES, "in_flight": 0}), before)
    assert is_news(_model(ModelState.READY, {**FIGURES, "idle_deadline": None}), before)
    replicas = (ReplicaStatus("demo@1", ModelState.READY, idle_seconds=1.0),)
    later = (ReplicaStatus("demo@1", ModelState.READY, idle_seconds=2.0),)
    assert not is_news(
        _model(ModelState.READY, FIGURES, replicas=later), _model(ModelState.READY, FIGURES, replicas=replicas)
    )


# --- requests --------------------------------------------------------------------------------------------------------
def test_request_shows_its_phase_from_admission_to_end() -> None:
    record = Record("r", 1.0, "/v1/chat/completions", key="team")
    assert (request_json(record)["phase"], request_json(record)["outcome"]) == ("admission", None)
    record.note_prefill()
    record.note_progress(Progress("loading", 40, 100))
    shown = request_json(record)
    assert (shown["phase"], shown["done"], shown["total"]) == ("loading", 40, 100)
    record.note_progress(Progress("queued", 3))
    assert (request_json(record)["done"], request_json(record)["total"]) == (3, None)
    record.first_token_seconds = 1.0
    record.note_decoding()
    record.note_progress(Progress("prefill", 1, 2))
    assert (request_json(record)["phase"], request_json(record)["done"]) == ("decoding", None), "a late comment"
    record.note_usage(b'{"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens" : 21}}')
    record.outcome = "success"
    record.note_end(3.0)
    shown = request_json(record)
    assert (shown["phase"], shown["outcome"], shown["total_seconds"]) == ("done", "success", 3.0)
    assert (shown["prompt_tokens"], shown["completion_tokens"], shown["tokens_per_second"]) == (7, 21, 10.0)


@pytest.mark.parametrize(
    ("first", "total", "tokens"), [(None, 2.0, 5), (1.0, None, 5), (1.0, 2.0, None), (1.0, 2.0, 1), (2.0, 2.0, 5)]
)
def test_request_has_no_rate_without_its_parts(first: float | None, total: float | None, tokens: int | None) -> None:
    record = Record("r", 1.0, "", first_token_seconds=first, total_seconds=total, completion_tokens=tokens)
    assert request_json(record)["tokens_per_second"] is None


def test_request_that_ends_without_an_outcome_failed_inside_the_gateway() -> None:
    record = Record("r", 1.0, "")
    record.note_end(1.0)
    record.note_usage(b"{}")
    assert (record.outcome, record.completion_tokens) == ("internal_error", None)


def test_each_change_of_a_request_is_sent_once() -> None:
    shown = ShownRequests()
    old, new = Record("old", 1.0, ""), Record("new", 2.0, "")
    old.note_end(1.0)
    assert shown.changed([new, old]) == [old, new]
    assert shown.changed([new, old]) == []
    new.note_prefill()
    assert shown.changed([new, old]) == [new]
    new.attempts.append(AttemptRecord("a", "success", "", 1.0))
    assert shown.changed([new, old]) == [new]
    repeated = Record("old", 3.0, "")
    repeated.note_end(1.0)
    assert shown.changed([new, repeated]) == [repeated], "a client used the id again"


def test_all_ends_of_running_requests_and_the_last_new_ones_are_sent() -> None:
    shown = ShownRequests()
    running = [Record(str(number), float(number), "") for number in range(MAX_NEW + 5)]
    assert shown.changed(running) == running
    for record in running:
        record.note_end(1.0)
    new = [Record(f"new {number}", 1000.0 + number, "") for number in range(MAX_NEW + 5)]
    for record in new:
        record.note_end(1.0)
    assert shown.changed(new) == [*running, *new[5:]], "the running ones are no longer in the store"
    assert shown.changed(new) == []


def test_page_begins_with_all_running_and_the_last_finished_requests() -> None:
    records = [Record(str(number), float(number), "", key="ab"[number % 2]) for number in range(MAX_FINISHED + 10)]
    for record in records[1:]:
        record.note_end(1.0)
    found = first_requests(reversed(records), None)
    assert len(found) == MAX_FINISHED + 1
    assert [found[0]["id"], found[1]["id"], found[-1]["id"]] == ["0", "10", "209"]
    assert {item["key"] for item in first_requests(records, "b")} == {"b"}
    assert len(first_requests(records, "a")) == 105


# --- counters --------------------------------------------------------------------------------------------------------
def test_minutes_count_tiers_errors_fallbacks_and_tokens() -> None:
    counters = TrafficCounters()
    counters.note(Finished("k", "demo", "local", "success", "none", 0.5, 10), 61.0)
    counters.note(Finished("k", "", "cloud", "broken", "breaker_open", 1.5, 5), 62.0)
    counters.note(Finished("", "", "none", "invalid_api_key", "policy"), 119.0)
    assert counters.minute(119.9) == {
        "start": 60,
        "by_tier": {"local": 1, "local-fallback": 0, "cloud": 1, "none": 1},
        "errors": {"broken": 1, "invalid_api_key": 1},
        "fallbacks": {"breaker_open": 1},
        "ttft_p50": 0.5,
        "tokens": 15,
    }
    assert counters.minute(120.0)["tokens"] == 0
    assert (counters.keys["k"].requests, counters.keys["k"].tokens) == (2, 15)
    assert TrafficCounters().minute(0.0)["ttft_p50"] is None


def test_last_hour_is_kept_with_its_empty_minutes() -> None:
    counters = TrafficCounters()
    for minute in range(100):
        if minute != 98:
            counters.note(Finished(tokens=minute), 60.0 * minute)
    found = counters.minutes(60.0 * 99 + 30)
    assert [entry["start"] for entry in found] == [60 * minute for minute in range(40, 100)]
    assert [entry["tokens"] for entry in found[-3:]] == [97, 0, 99]
    counters.note(Finished(tokens=1), 0.0)
    assert counters.minutes(60.0 * 99 + 30)[-1]["tokens"] == 100, "the clock went back"


def test_times_of_a_model_are_those_of_the_last_five_minutes() -> None:
    counters = TrafficCounters()
    for number in range(100):
        counters.note(Finished(model="demo", ttft_seconds=number / 100), 1000.0)
    assert counters.times("demo", 1000.0) == (0.49, 0.98)
    assert counters.times("demo", 1000.0 + traffic_counters.RECENT_SECONDS) == (None, None)
    assert counters.times("other", 1000.0) == (None, None)
    assert percentile([1.0], 0.5) == 1.0


def test_memory_of_counters_is_bounded() -> None:
    counters = TrafficCounters()
    for number in range(traffic_counters.MAX_MODELS + 1):
        counters.note(Finished(model=str(number), ttft_seconds=1.0), 0.0)
    assert counters.times("0", 0.0) == (None, None)
    assert counters.times("1", 0.0) == (1.0, 1.0)
    for _ in range(traffic_counters.MAX_TIMES + 1):
        counters.note(Finished(model="1", ttft_seconds=2.0), 0.0)
    assert counters.times("1", 0.0) == (2.0, 2.0)
    assert len(counters._minutes[-1].times) == traffic_counters.MAX_TIMES
