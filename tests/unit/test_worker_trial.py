"""Grammars are tried in a child process with limits."""

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


def test_valid_grammar_has_no_error_and_an_invalid_one_has_a_message(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    assert "unclosed" in trial.check(LLMatcher.grammar_from_regex("("))
    assert trial.check("no JSON and no grammar") != ""
    assert trial.check(grammar({"enum": ["\u00e9", "x" * 100_000]})) == ""


def test_child_over_its_limits_is_replaced(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    first = pid_of(trial)
    with pytest.raises(OverLimitsError):
        trial.check(grammar(EXPLODING))
    assert not is_alive(first)
    assert trial.check(grammar({"type": "object"})) == ""


def test_ended_child_is_replaced(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    process = trial._process
    assert process is not None
    process.kill()
    process.wait()
    assert trial.check(grammar({"type": "object"})) == ""
    assert pid_of(trial) != process.pid


def test_child_ends_with_its_input(trial: Trial) -> None:
    assert trial.check(grammar({"type": "object"})) == ""
    assert trial._process is not None
    assert trial._process.stdin is not None
    trial._process.stdin.close()
    wait_until("it is gone", lambda: trial._process is not None and trial._process.poll() is not None)
