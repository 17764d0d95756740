"""A worker that was aborted from outside was said to have ended with a line that it had logged while all was well."""

from __future__ import annotations

from inference.workers.exit_cause import most_telling_line

LOADED = "02:21:09.355 info    headgate.worker loaded model=demo seconds=1.11 restored_tokens=0"


def test_what_it_logged_while_all_was_well_is_no_reason() -> None:
    assert most_telling_line(["sched_reserve: graph: nodes = 204", LOADED]) == "sched_reserve: graph: nodes = 204"
    assert most_telling_line([LOADED, ""]) == ""


def test_what_it_complained_of_is_one() -> None:
    complaint = "02:21:10.000 error   headgate.worker the device does not answer"
    assert most_telling_line([complaint, LOADED]) == complaint
