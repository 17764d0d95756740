"""Text of clients stays within one printable line of the log."""

from __future__ import annotations

import io
import json
import logging

import pytest

from headgate.cli.terminal import Terminal
from headgate.shared import log

FORGED = "x\ngateway 05:00:00.000 error gateway.fake injected \x1b[31m \x9b2J \u2028 \u202e é"


@pytest.fixture(autouse=True)
def _restore_loggers() -> object:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def _written(capsys: pytest.CaptureFixture[str], form: str) -> str:
    log.set_up({"HEADGATE_LOG_FORMAT": form})
    logging.getLogger("gateway.requests").info("request %s: %s -> none", "req_1", FORGED)
    return capsys.readouterr().err.removesuffix("\n")


def test_log_message_is_one_printable_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = _written(capsys, "text")

    assert line.isprintable()
    assert line.endswith(r"x\ngateway 05:00:00.000 error gateway.fake injected \x1b[31m \x9b2J \u2028 \u202e é -> none")


def test_json_log_line_keeps_the_exact_text(capsys: pytest.CaptureFixture[str]) -> None:
    line = _written(capsys, "json")

    assert line.isprintable()
    assert json.loads(line)["message"] == f"request req_1: {FORGED} -> none"


def test_table_escapes_control_characters() -> None:
    out = io.StringIO()

    Terminal(out, io.StringIO()).table(["BREAKER", "LAST FAILURE"], [["cloud", "gone\nlocal  closed \x1b[2J"]])

    assert out.getvalue() == "BREAKER  LAST FAILURE\ncloud    gone\\nlocal  closed \\x1b[2J\n"
