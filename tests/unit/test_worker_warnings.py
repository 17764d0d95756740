"""The log of the service repeats a worker's warnings about stored sequences, and nothing else."""

from __future__ import annotations

import io
import logging

import pytest

from headgate.shared import log
from inference.workers.worker_warnings import LOGGER, MAX_LINES, PERIOD_SECONDS, WarningSelector


@pytest.mark.parametrize("format", ["text", "json"])
def test_warnings_are_selected_from_text_and_json_lines(
    format: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the worker's own formatter writes them."""
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(log._JsonFormatter() if format == "json" else log._TextFormatter())
    own, other = logging.getLogger(LOGGER), logging.getLogger("headgate.worker.engine")
    for logger in (own, other):
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "propagate", False)
        caplog.set_level(logging.DEBUG, logger.name)  # also forgets the level that other tests have used
    own.info("found")
    own.warning("the disk is full\nreally")
    other.warning("a step failed")
    own.error("gone")
    selector = WarningSelector()
    found = [selector.select(line, 0.0) for line in written.getvalue().splitlines()]
    message = "the disk is full\nreally" if format == "json" else "the disk is full\\nreally"
    assert found == [None, (logging.WARNING, message), None, (logging.ERROR, "gone")]


@pytest.mark.parametrize(
    "line", ["", f"{LOGGER} x", f'["{LOGGER}"]', f'{{"logger": "{LOGGER}"', f'{{"a": "{LOGGER}"}}']
)
def test_other_lines_are_not_selected(line: str) -> None:
    assert WarningSelector().select(line, 0.0) is None


def test_many_warnings_are_cut_off_for_a_while() -> None:
    selector = WarningSelector()
    line = f"10:00:00.000 warning {LOGGER} removed"
    found = [selector.select(line, 1.0) for _ in range(MAX_LINES + 5)]
    assert found[0] == (logging.WARNING, "removed")
    assert found[MAX_LINES - 1] == (logging.WARNING, "removed; further lines are left out for a while")
    assert found[MAX_LINES:] == [None] * 5
    assert selector.select(line, 1.0 + PERIOD_SECONDS) == (logging.WARNING, "removed")
