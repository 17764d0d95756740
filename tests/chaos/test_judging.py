"""The plan is fair and reproducible, a cut is not repeated, and every kind of broken promise is detected."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any, cast

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.protocol import ModelState, ModelStatus, ReplicaStatus
from tests.chaos import system
from tests.chaos.injector import KINDS, Injector
from tests.chaos.judge import (
    OTHER_REPLICA,
    OWN_TOKENS,
    SAME_ANSWER,
    End,
    Facts,
    Outcome,
    Violation,
    Window,
    conversations,
    kv_violations,
    tally,
    violations,
)
from tests.chaos.plan import Event, Kind, events
from tests.chaos.watch import Since, on_cpu, unbalanced, unowned, waiting
from tests.rigs import fault_runs

MODELS, DEVICES = ("a", "b", "c"), ("gpu-0", "gpu-1")
GOOD = Outcome(
    "x", "demo", True, 10.0, 10.1, 10.5, End.COMPLETE, tier="local", answered_by="local/demo", done=True, finishes=1
)
BACKED = Facts(backed=frozenset({"demo"}))
TOUCHED = Facts([Window("worker_kill", frozenset({"demo"}), 10.2, 10.3)], backed=frozenset({"demo"}))
ALL_MODELS = Facts([Window("inference_kill", None, 10.2, 10.3)], backed=frozenset({"demo"}))
ELSEWHERE = Facts([Window("worker_kill", frozenset({"other"}), 10.2, 10.3)], backed=frozenset({"demo"}))
LATER = Facts([Window("worker_kill", frozenset({"demo"}), 20.0, 21.0)], backed=frozenset({"demo"}))
ABORTED = Window("worker_abort", frozenset({"demo"}), 10.2, 10.3)
ONCE, TWICE = (Facts([ABORTED] * count, backed=frozenset({"demo"})) for count in (1, 2))
OUT = Facts(outages=[(9.0, 10.2)], backed=frozenset({"demo"}))


def _plan(seed: int, count: int) -> Any:
    return events(seed, count, 1.0, MODELS, DEVICES, tuple(Kind))


@settings(max_examples=20)
@given(st.integers(0, 2**32), st.integers(0, 60))
def test_same_seed_gives_the_same_plan(seed: int, count: int) -> None:
    assert _plan(seed, count) == _plan(seed, count)
    assert len(_plan(seed, count)) == count


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(2 * len(Kind), 150))
def test_kinds_are_equally_frequent_and_cut_devices_return(seed: int, count: int) -> None:
    found = _plan(seed, count)
    counts = Counter(event.kind for event in found)
    assert set(counts) == set(Kind)
    assert max(counts.values()) - min(counts.values()) <= 1
    cuts: list[str] = []
    for event in found:
        if event.kind is Kind.DEVICE_CUT:
            cuts.append(event.device)
        elif event.kind is Kind.DEVICE_RETURN:
            assert cuts.pop() == event.device
    assert len(cuts) <= 1
    assert all(0 < event.seconds <= 4 and 0 <= event.draw <= 1 for event in found)


def test_every_kind_can_be_injected() -> None:
    assert set(KINDS) == set(Kind)


class DeviceWithoutService:
    """A system with one simulated device, whose service is away."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    async def models(self) -> Any:
        raise httpx2.ConnectError("connection refused")

    async def simulator(self, do: str, device: str, **_amount: float) -> Any:
        self.commands.append(do)
        return {device: {"lost": do == "cut"}}


async def test_cut_while_the_service_is_away_is_not_repeated() -> None:
    """A repeated cut would come after the return of the device that is planned for it."""
    away = DeviceWithoutService()
    injector = Injector(cast(system.System, away), cast(Any, None), fault_runs.stopwatch())
    async with asyncio.timeout(5):
        await injector.inject(Event(0, 0.0, Kind.DEVICE_CUT, "demo", "gpu-0", 1.0, 0.5))
    assert away.commands == ["cut"]
    assert [window.models for window in injector.windows] == [frozenset(system.MODELS)]


@pytest.mark.parametrize(
    ("outcome", "facts", "words"),
    [
        (GOOD, BACKED, None),
        (replace(GOOD, finishes=2), BACKED, "one finish reason"),
        (replace(GOOD, done=False), BACKED, "ends in [DONE]"),
        (replace(GOOD, stream=False, done=False), BACKED, None),
        (replace(GOOD, end=End.CUT, done=False, finishes=0), TOUCHED, "cut silently"),
        (replace(GOOD, end=End.CUT, finishes=0), TOUCHED, "ends in [DONE]"),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed", done=False), TOUCHED, None),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed", done=False), ALL_MODELS, None),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed", done=False), OUT, None),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed"), TOUCHED, "ends in [DONE]"),
        (replace(GOOD, end=End.ERROR_FRAME, done=False), TOUCHED, "has a code"),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed", done=False), ELSEWHERE, "no fault touched"),
        (replace(GOOD, end=End.ERROR_FRAME, code="model_failed", done=False), LATER, "no fault touched"),
        (
            replace(GOOD, end=End.ERROR_FRAME, code="x", done=False, answered_by="cloud/demo"),
            ALL_MODELS,
            "no fault touched",
        ),
        (
            replace(GOOD, end=End.ERROR_FRAME, code="x", done=False, first_token=None),
            TOUCHED,
            "before its first token",
        ),
        (replace(GOOD, end=End.REFUSED, status=503, code="x", done=False), TOUCHED, "before its first token"),
        (replace(GOOD, end=End.REFUSED, status=503, code="x", done=False), OUT, None),
        (replace(GOOD, end=End.REFUSED, status=503, code="x", done=False, route="alone"), BACKED, None),
        (replace(GOOD, end=End.REFUSED, status=503, code="x", done=False, endless=True), BACKED, None),
        (replace(GOOD, end=End.REFUSED, status=503, done=False, route="alone"), BACKED, "has a code"),
        (replace(GOOD, end=End.REFUSED, status=422, code="poison_request", done=False), TWICE, None),
        (replace(GOOD, end=End.REFUSED, status=422, code="poison_request", done=False), ONCE, "before its first token"),
        (replace(GOOD, end=End.BROKEN, done=False), ALL_MODELS, "breaks only with the gateway"),
        (replace(GOOD, end=End.BROKEN, done=False), OUT, None),
        (replace(GOOD, end=End.SILENT, done=False), ALL_MODELS, "ends in time"),
        (replace(GOOD, end=End.STRANGE, done=False), ALL_MODELS, "keeps to the protocol"),
        (replace(GOOD, end=End.LEFT, finishes=0), BACKED, None),
        (replace(GOOD, end=None), BACKED, "every request ends"),
    ],
)
def test_outcomes_of_clients_are_judged(outcome: Outcome, facts: Facts, words: str | None) -> None:
    found = [one.promise for one in violations([outcome], facts)]
    if words is None:
        assert found == []
    else:
        assert any(words in promise for promise in found), found


READY = ReplicaStatus("c", ModelState.READY)
TURN = replace(GOOD, prompt="1000/2", cached=0, steps=(("a", 3.0), ("b", 0.9), ("c", 2.0)))


@pytest.mark.parametrize(
    ("other", "promises"),
    [
        (TURN, []),
        (replace(TURN, cached=120), []),
        (replace(TURN, steps=(("a", 3.0), ("x", 0.1))), []),  # rounding decides
        (replace(TURN, steps=(("a", 3.0), ("x", 0.8))), [SAME_ANSWER]),
        (replace(TURN, steps=(("a", 3.0), ("x", 0.8)), prompt="1000/1"), []),
        (replace(TURN, steps=(("a", 3.0), ("x", 0.8)), answered_by="local/other"), []),
        (replace(TURN, steps=(("x", 3.0),), answered_by="cloud/gpt"), []),
        (replace(TURN, steps=(("x", 3.0),), end=End.ERROR_FRAME), []),
        (replace(TURN, spies=True, cached=20), []),
        (replace(TURN, spies=True, cached=120), [OWN_TOKENS]),
        (replace(TURN, spies=True, cached=120, answered_by="cloud/gpt"), []),
    ],
)
def test_answers_of_repeated_prompts_are_judged(other: Outcome, promises: list[str]) -> None:
    found = kv_violations([replace(other, ended=11.0), TURN])
    assert [one.promise for one in found] == promises


@pytest.mark.parametrize(
    ("changes", "windows", "outages", "is_broken"),
    [
        ({}, [], [], True),
        ({"end": End.ERROR_FRAME}, [], [], True),
        ({"end": End.ERROR_FRAME, "first_token": 10.1}, [], [], False),
        ({"end": End.COMPLETE, "finishes": 1, "done": True}, [], [], False),
        ({"survives": ""}, [], [], False),
        ({}, [Window("worker_stop", frozenset({"demo"}), 9.0, 10.2)], [], False),
        ({}, [Window("worker_stop", frozenset({"other"}), 9.0, 10.2)], [], True),
        ({}, [], [(9.0, 10.2)], False),
    ],
)
def test_failure_while_another_replica_is_ready_is_found(
    changes: dict[str, Any], windows: list[Window], outages: list[tuple[float, float]], is_broken: bool
) -> None:
    """Other faults of the same model and outages of the gateway excuse it."""
    refused = replace(
        GOOD, route="alone", end=End.REFUSED, code="x", done=False, finishes=0, first_token=None, survives="demo"
    )
    facts = Facts([Window("replica_kill", frozenset({"demo"}), 9.9, 10.4), *windows], outages)
    found = [one.promise for one in violations([replace(refused, **changes)], facts)]
    assert (OTHER_REPLICA in found) == is_broken


def test_conversations_are_counted() -> None:
    turns = [TURN, replace(TURN, cached=120), replace(TURN, cached=3, spies=True), replace(TURN, steps=()), GOOD]
    assert conversations(turns) == {"turns": 3, "continued": 1, "spied": 1}


def test_ends_are_counted() -> None:
    assert tally([GOOD, GOOD, replace(GOOD, end=None)]) == {"complete": 2, "open": 1}


def test_state_that_lasts_too_long_is_reported_once() -> None:
    since = Since(5.0)
    assert since.note({"a": "a holds 3"}, 0.0) == []
    assert since.note({"a": "a holds 2"}, 4.0) == []
    assert since.note({"a": "a holds 1"}, 6.0) == ["a holds 1, for 6.0 s"]
    assert since.note({"a": "a holds 1"}, 9.0) == []


def test_state_that_changes_is_not_stuck() -> None:
    since = Since(5.0)
    for now in (0.0, 4.0, 8.0):
        assert since.note({"a": "busy"}, now) == []
        assert since.note({}, now + 2.0) == []
    since.note({"b": "busy"}, 20.0)
    since.forget()
    assert since.note({"b": "busy"}, 40.0) == []


def test_bytes_without_an_owner_are_found() -> None:
    def holding(phase: str) -> dict[str, Any]:
        return {"owner": "demo", "phase": phase, "devices_mb": {"gpu-0": 3.0}}

    dump = {
        "workers": {"demo": {"holding": "demo#1"}, "tiny": {"holding": "tiny#2"}},
        "ledger": {
            "holdings": {
                "demo#1": holding("resident"),
                "tiny#2": holding("releasing"),
                "demo#0": holding("reserved"),
                "demo#3": holding("cached"),
            }
        },
    }
    assert set(unowned(dump)) == {"tiny#2", "demo#0"}


@pytest.mark.parametrize(("changed", "is_found"), [({}, False), ({"free_bytes": 3}, True), ({"free_bytes": -1}, True)])
def test_account_that_does_not_add_up_is_found(changed: dict[str, int], is_found: bool) -> None:
    account = {"capacity_bytes": 10, "shortfall_bytes": 0, "free_bytes": 2, "foreign_bytes": 1, "reserved_bytes": 0,
               "resident_bytes": 6, "releasing_bytes": 0, "cached_bytes": 1, "room_bytes": 2,
               "bound": "capacity"}  # fmt: skip
    assert bool(unbalanced({"gpu-0": {"ledger": {**account, **changed}}})) == is_found


def test_model_on_the_cpu_is_found() -> None:
    here = {state.value: ModelStatus(state.value, state, devices=("cpu",)) for state in ModelState}
    kept = {name: here.pop(name) for name in ("offloading", "warm")}
    there = {"elsewhere": ModelStatus("elsewhere", ModelState.READY, devices=("gpu-0",))}
    assert on_cpu({**kept, **there}) == []
    assert on_cpu({**kept, **here, **there}) == [f"{name} is on cpu" for name in here]
    assert "ready is on cpu" in on_cpu({**kept, **here})


def test_models_in_transition_and_queues_are_watched() -> None:
    models = {
        "a": ModelStatus("a", ModelState.LOADING, pid=7),
        "b": ModelStatus("b", ModelState.COLD, queued=2),
        "c": ModelStatus("c", ModelState.READY, replicas=(READY, replace(READY, id="c@2", state=ModelState.DRAINING))),
    }
    assert list(waiting(models).values()) == ["a is loading", "2 wait for b, which is cold", "c@2 is draining"]


async def test_error_of_the_suite_is_reported_with_the_run() -> None:
    async def fail(_event: Any) -> None:
        raise ValueError("a defect of the injector")

    found: list[Violation] = []
    clock = fault_runs.stopwatch()
    with fault_runs.reported_errors(found, clock):
        planned = [replace(event, at_seconds=0.0) for event in events(1, 5, 1.0, MODELS, DEVICES, KINDS)]
        await fault_runs.inject(planned, fail, clock, 1, 60.0)
    (violation,) = found
    assert violation.promise == fault_runs.NO_ERROR
    assert "ValueError: a defect of the injector" in violation.seen
