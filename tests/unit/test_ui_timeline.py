"""Entries of the dashboard's timeline: one sentence for each event that an operator wants to know."""

from __future__ import annotations

from typing import Any

import pytest

from gateway.ui.timeline import Timeline
from inference.protocol import ModelState, ModelStatus


def _model(state: ModelState, **more: Any) -> dict[str, Any]:
    return {"model": ModelStatus("demo", state, **more).to_json()}


def _texts(timeline: Timeline, *states: tuple[float, ModelState]) -> list[str]:
    found = []
    for at, state in states:
        devices = () if state in (ModelState.COLD, ModelState.FAILED) else ("gpu-0", "gpu-1")
        entry = timeline.note_event("", "model", _model(state, devices=devices), at)
        if entry is not None:
            found.append(f"{entry['kind']}: {entry['text']}")
    return found


def test_load_has_a_begin_and_an_end_with_its_time() -> None:
    states = ((1.0, ModelState.LOADING), (2.0, ModelState.LOADING), (3.5, ModelState.READY), (4.0, ModelState.BUSY))
    assert _texts(Timeline(), *states) == [
        "load: demo is being loaded on gpu-0 and gpu-1",
        "load: demo is ready on gpu-0 and gpu-1 after 2.5 s",
    ]


def test_departure_and_return_have_one_entry_each() -> None:
    timeline = Timeline()
    timeline.note_event("", "snapshot", {"models": [_model(ModelState.READY)["model"]]}, 0.0)
    s = ModelState
    states = (s.DRAINING, s.UNLOADING, s.COLD, s.OFFLOADING, s.WARM, s.RESTORING, s.BUSY)
    assert _texts(timeline, *enumerate(states)) == [
        "state: demo is draining (ready before)",
        "state: demo is warm (offloading before)",
        "load: demo is being restored on gpu-0 and gpu-1",
        "load: demo is ready on gpu-0 and gpu-1 after 1.0 s",
    ]


def test_failure_is_an_error_with_its_reason() -> None:
    timeline = Timeline()
    entry = timeline.note_event("", "model", _model(ModelState.FAILED, reason="it aborted"), 1.0)
    assert entry == {
        "at": 1.0, "kind": "state", "subject": "demo", "text": "demo failed: it aborted", "severity": "error"
    }  # fmt: skip
    assert _texts(timeline, (2.0, ModelState.COLD)) == ["state: demo is cold (failed before)"]
    assert timeline.note_event("", "removed", {"id": "demo"}, 3.0) is None
    entry = timeline.note_event("", "model", _model(ModelState.FAILED), 4.0)
    assert entry is not None
    assert entry["text"] == "demo failed: no reason given"
    assert timeline.note_event("", "model", _model(ModelState.LOADING), 5.0)["text"] == "demo is being loaded"  # type: ignore[index]
    assert timeline.note_event("", "model", _model(ModelState.READY), 6.0)["text"] == "demo is ready after 1.0 s"  # type: ignore[index]


EVICTION = {"model_name": "demo", "reason": "idle", "action": "offload", "memory_freed_mb": 1.5}


@pytest.mark.parametrize(
    ("kind", "data", "text", "severity"),
    [
        ("removed", {"device": "gpu-0"}, "gpu-0 is no longer listed", "error"),
        ("device", {"device": {"id": "gpu-0", "state": "lost", "note": "Xid 79"}}, "gpu-0 is lost: Xid 79", "error"),
        ("device", {"device": {"id": "gpu-0", "state": "suspect"}}, "gpu-0 is suspect", "warning"),
        ("device", {"device": {"id": "gpu-0", "state": "healthy", "note": ""}}, "gpu-0 is healthy", "info"),
        ("eviction", {"eviction": EVICTION}, "demo was offloaded (idle), 1.5 MiB freed", "info"),
        ("eviction", {"eviction": {**EVICTION, "action": "unload"}}, "demo was unloaded (idle), 1.5 MiB freed", "info"),
        (
            "crash",
            {"crash": {"id": "a", "cause": "assert", "message": "m"}},
            "The worker of a ended (assert): m",
            "error",
        ),
        ("pressure", {"device": "cpu", "level": "high"}, "Memory pressure of cpu is high", "warning"),
        ("pressure", {"device": "cpu", "level": "low"}, "Memory pressure of cpu is low", "info"),
    ],
)
def test_other_events_are_sentences(kind: str, data: dict[str, Any], text: str, severity: str) -> None:
    entry = Timeline().note_event("", kind, data, 1.0)
    assert entry is not None
    assert (entry["text"], entry["severity"]) == (text, severity)


def test_progress_and_beats_have_no_entry() -> None:
    assert Timeline().note_event("", "load", {"id": "demo", "progress": 0.5}, 1.0) is None


def test_service_and_breakers_have_an_entry_for_each_change() -> None:
    timeline = Timeline()
    assert timeline.note_reachable("", True, 1.0) is None
    down = timeline.note_reachable("", False, 2.0)
    assert down is not None
    assert (down["subject"], down["severity"]) == ("inference", "error")
    assert timeline.note_reachable("", False, 3.0) is None
    assert timeline.note_reachable("", True, 4.0) is not None
    assert timeline.note_breaker("local", "closed", None, 1.0) is None, "a new breaker is closed"
    opened = timeline.note_breaker("local", "open", "refused", 2.0)
    assert opened is not None
    assert (opened["text"], opened["severity"]) == ("The breaker of local is open: refused", "error")
    assert timeline.note_breaker("local", "open", "refused", 3.0) is None
    closed = timeline.note_breaker("local", "closed", "refused", 4.0)
    assert closed is not None
    assert closed["text"] == "The breaker of local is closed"
    assert timeline.note_breaker("local", None, None, 5.0) is None


def test_entries_of_several_nodes_name_the_node_and_do_not_mix() -> None:
    timeline = Timeline()
    loading = timeline.note_event("a", "model", _model(ModelState.LOADING), 1.0)
    assert loading is not None
    assert (loading["text"], loading["node"], loading["subject"]) == ("a: demo is being loaded", "a", "demo")
    assert timeline.note_event("b", "model", _model(ModelState.LOADING), 2.0) is not None
    down = timeline.note_reachable("b", False, 3.0)
    assert down is not None
    assert (down["text"], down["subject"]) == ("The node b does not answer", "b")
    assert timeline.note_reachable("a", True, 4.0) is None
    timeline.keep({"a"})
    assert timeline.note_reachable("b", True, 5.0) is None, "it was removed in the meantime"
    assert timeline.note_event("a", "model", _model(ModelState.LOADING), 6.0) is None
