"""Meaning of evidence about a device: NVML codes, recovery actions, Xid events."""

from __future__ import annotations

import itertools

import pytest

from inference.devices import signs
from inference.devices.signs import Sign, sign_of_action, sign_of_nvml, sign_of_xid, worst, xid_words


def test_worst_sign_is_the_last_of_the_enumeration() -> None:
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


def test_single_code_is_not_beyond_reach() -> None:
    """Such codes also occur briefly while a driver is replaced."""
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
        (45, Sign.FINE),  # from each killed worker
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
    """Unknown and ambiguous numbers are a reason to look."""
    assert sign_of_xid(number) is sign


def test_each_xid_has_one_meaning() -> None:
    buckets = [signs._IGNORE, signs._RESTART_APP, signs._DRAIN, signs._RESET]
    assert sum(map(len, buckets)) == len(frozenset().union(*buckets))


def test_xid_events_are_described() -> None:
    assert xid_words(79) == "Xid 79 (fallen off the bus)"
    assert xid_words(9999) == "Xid 9999"
