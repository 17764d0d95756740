"""The order in which stored sequences are removed when there is no room."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from inference.protocol import Priority
from inference.worker.kv.retention_policies import POLICIES, removal_key
from inference.worker.steps import StoredSequence
from inference.worker_link import KvTiers

NOW = 10_000.0


def sequence(age: float = 0.0, tokens: int = 100, **fields: Any) -> StoredSequence:
    return StoredSequence(array("i", range(tokens)), "", used_at=NOW - age, **fields)


def first_out(policy: str, *held: StoredSequence) -> StoredSequence:
    return min(held, key=lambda item: removal_key(item, POLICIES[policy], NOW))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_recently_used_leaves_first(policy: str) -> None:
    """All policies agree where nothing else differs."""
    old, new = (sequence(age, compute_seconds=1.0, count_bytes=100) for age in (50.0, 5.0))
    assert first_out(policy, new, old) is old


@pytest.mark.parametrize("policy", POLICIES)
def test_pinned_sequences_leave_last(policy: str) -> None:
    """Until the end of the pin."""
    pinned = sequence(5000.0, pinned_until=NOW + 1)
    late = sequence(4000.0, pinned_until=NOW - 1)
    fresh = sequence(0.0, compute_seconds=1.0, count_bytes=100)
    assert first_out(policy, pinned, fresh) is fresh
    assert first_out(policy, late, fresh) is late


@pytest.mark.parametrize("policy", POLICIES)
def test_a_use_in_the_future_counts_as_now(policy: str) -> None:
    """A clock that was set back does not keep a sequence for ever."""
    future, now = (sequence(age, compute_seconds=1.0, count_bytes=100) for age in (-1e9, 0.0))
    assert removal_key(future, POLICIES[policy], NOW) == removal_key(now, POLICIES[policy], NOW)


def test_priority_keeps_high_requests_and_short_prefixes() -> None:
    """A request of high priority outweighs minutes, and so does a prefix that many prompts may share."""
    high = sequence(500.0, priority=Priority.HIGH)
    low = sequence(0.0, priority=Priority.LOW)
    normal = sequence(200.0)
    assert first_out("priority", high, low, normal) is low
    assert first_out("priority", high, normal) is normal
    short, long = sequence(20.0, tokens=100), sequence(0.0, tokens=6400)
    assert first_out("priority", short, long) is long


def test_hybrid_keeps_what_saves_most_time_for_its_bytes() -> None:
    """Expensive and small sequences stay, for a time."""
    cheap, dear = (sequence(10.0, compute_seconds=cost, count_bytes=100) for cost in (1.0, 4.0))
    assert first_out("hybrid", cheap, dear) is cheap
    large, small = (sequence(10.0, compute_seconds=1.0, count_bytes=size) for size in (400, 100))
    assert first_out("hybrid", large, small) is large
    old, new = (
        sequence(300.0, compute_seconds=4.0, count_bytes=100),
        sequence(0.0, compute_seconds=1.0, count_bytes=100),
    )
    assert first_out("hybrid", old, new) is old


def test_default_retention_policy_is_one_of_the_policies() -> None:
    """The grant names one of them."""
    assert KvTiers().policy in POLICIES
