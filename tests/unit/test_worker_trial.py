"""Grammars are tried in a process that can be ended, and its end is nobody else's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from llguidance import LLMatcher

from inference.worker.bounded_child import OverLimitsError
from inference.worker.constraints.grammar_trial import Trial
from tests.rigs.processes import is_alive, wait_until

STACK_BYTES = 64 << 20
EXPLODING = {"type": "string", "allOf": [{"pattern": f"a.{{{size}}}b"} for size in range(1, 30)]}


def grammar(schema: Any) -> str:
    return LLMatcher.grammar_from_json_schema(schema)


@pytest.fixture
def trial() -> Iterator[Trial]:
    trial = Trial({"initial_lexer_fuel": 1_000_000}, STACK_BYTES, cpu_seconds=1)
    yield trial
    trial.close()


def pid_of(trial: Trial) -> int:
    assert trial._process is not None
    return trial._process.pid


def test_a_good_grammar_has_no_faults_and_a_bad_one_has_words(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    assert "unclosed" in trial.check(LLMatcher.grammar_from_regex("("))
    assert trial.check("no JSON and no grammar") != ""
    assert trial.check(grammar({"enum": ["\u00e9", "x" * 100_000]})) == ""


def test_one_that_explodes_is_ended_and_the_next_one_tried(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    first = pid_of(trial)
    with pytest.raises(OverLimitsError):
        trial.check(grammar(EXPLODING))
    assert not is_alive(first)
    assert trial.check(grammar({"type": "object"})) == ""


def test_a_process_that_left_is_replaced(trial: Trial) -> None:
    """It leaves when nothing came for a while."""
    assert trial.check(grammar({"type": "object"})) == ""
    process = trial._process
    assert process is not None
    process.kill()
    process.wait()
    assert trial.check(grammar({"type": "object"})) == ""
    assert pid_of(trial) != process.pid


def test_it_does_not_outlive_its_parent(trial: Trial) -> None:
    """The end of its input is its end."""
    assert trial.check(grammar({"type": "object"})) == ""
    assert trial._process is not None
    assert trial._process.stdin is not None
    trial._process.stdin.close()
    wait_until("it is gone", lambda: trial._process is not None and trial._process.poll() is not None)
