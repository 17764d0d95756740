"""What evidence about a device means: each row of the tables that somebody relies on."""

from __future__ import annotations

import itertools

import pytest

from inference.devices import signs
from inference.devices.signs import Sign, sign_of_action, sign_of_nvml, sign_of_xid, worst, xid_words


def test_the_worst_of_several_is_the_one_that_counts() -> None:
    """In the order of the enumeration, whatever the order they came in."""
    for some in itertools.permutations(Sign, 3):
        assert list(Sign).index(worst(some)) == max(list(Sign).index(sign) for sign in some)
    assert worst([]) is Sign.FINE


@pytest.mark.parametrize(
    ("code", "sign"),
    [(0, Sign.FINE), (9, Sign.DEAD), (15, Sign.DEAD), (16, Sign.DEAD), (18, Sign.ILL), (999, Sign.UNSURE),
     (6, Sign.GONE), (10, Sign.UNSURE), (12345, Sign.UNSURE)],
)  # fmt: skip
def test_codes_of_nvml(code: int, sign: Sign) -> None:
    assert sign_of_nvml(code) is sign


def test_no_single_code_is_beyond_help() -> None:
    """Even those that containers hear for ever are heard for a moment while a driver is replaced."""
    assert Sign.BEYOND not in {sign_of_nvml(code) for code in range(1000)}
    assert {17, 18, 999} == signs.OUT_OF_REACH


@pytest.mark.parametrize(
    ("action", "sign"),
    [(0, Sign.FINE), (1, Sign.DEAD), (2, Sign.DEAD), (3, Sign.ILL), (4, Sign.ILL), (6, Sign.DEAD), (99, Sign.UNSURE)],
)
def test_recovery_actions(action: int, sign: Sign) -> None:
    assert sign_of_action(action) is sign


@pytest.mark.parametrize(
    ("number", "sign"),
    [
        (45, Sign.FINE),  # every worker that is killed leaves one
        (43, Sign.FINE),
        (63, Sign.FINE),
        (13, Sign.FINE),
        (31, Sign.FINE),
        (94, Sign.FINE),
        (130, Sign.FINE),
        (48, Sign.ILL),
        (64, Sign.ILL),
        (79, Sign.DEAD),
        (95, Sign.DEAD),
        (119, Sign.DEAD),
        (74, Sign.UNSURE),
        (154, Sign.UNSURE),
        (9999, Sign.UNSURE),
    ],
)
def test_xid_events(number: int, sign: Sign) -> None:
    """Numbers that the catalog does not list, or that mean several things, are a reason to look."""
    assert sign_of_xid(number) is sign


def test_no_xid_stands_in_two_buckets() -> None:
    buckets = [signs._IGNORE, signs._RESTART_APP, signs._DRAIN, signs._RESET]
    assert sum(map(len, buckets)) == len(frozenset().union(*buckets))


def test_an_event_is_told_in_words_where_there_are_some() -> None:
    assert xid_words(79) == "Xid 79 (fallen off the bus)"
    assert xid_words(9999) == "Xid 9999"
