"""Whoever asks for a model named like a log line had one written: names of callers stay within their own line."""

from __future__ import annotations

import io
import json
import logging

import pytest

from headgate.cli.terminal import Terminal
from headgate.shared import log

FORGED = "x\ngateway 05:00:00.000 error gateway.fake injected \x1b[31m \x9b2J \u2028 \u202e é"


@pytest.fixture(autouse=True)
def _loggers_as_before() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def _written(capsys: pytest.CaptureFixture[str], form: str) -> str:
    log.set_up({"HEADGATE_LOG_FORMAT": form})
    logging.getLogger("gateway.requests").info("request %s: %s -> nobody", "req_1", FORGED)
    return capsys.readouterr().err.removesuffix("\n")


def test_a_message_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = _written(capsys, "text")

    assert line.isprintable()
    assert line.endswith(
        r"x\ngateway 05:00:00.000 error gateway.fake injected \x1b[31m \x9b2J \u2028 \u202e é -> nobody"
    )


def test_json_keeps_what_was_said_in_plain_characters(capsys: pytest.CaptureFixture[str]) -> None:
    line = _written(capsys, "json")

    assert line.isprintable()
    assert json.loads(line)["message"] == f"request req_1: {FORGED} -> nobody"


def test_a_table_shows_what_a_provider_said_in_one_row() -> None:
    out = io.StringIO()

    Terminal(out, io.StringIO()).table(["BREAKER", "LAST FAILURE"], [["cloud", "gone\nlocal  closed \x1b[2J"]])

    assert out.getvalue() == "BREAKER  LAST FAILURE\ncloud    gone\\nlocal  closed \\x1b[2J\n"
