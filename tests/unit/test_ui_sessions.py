"""Sessions of the dashboard end in time, failed sign-ins are limited, and requests of other pages are recognised."""

from __future__ import annotations

import pytest

from gateway.ui import sessions
from gateway.ui.sessions import Sessions, SignInLimit, cookie_value, is_same, is_same_origin


def test_session_is_found_by_its_token_until_it_ends() -> None:
    held = Sessions()
    session = held.begin("token", "csrf", b"digest", 10.0)
    assert held.find("token", 20.0) is session
    assert session.used_at == 20.0
    assert held.find("another", 20.0) is None
    held.end("token")
    held.end("token")
    assert held.find("token", 20.0) is None


def test_session_ends_twelve_hours_after_its_last_use() -> None:
    held = Sessions()
    held.begin("token", "csrf", b"digest", 0.0)
    assert held.find("token", sessions.IDLE_SECONDS) is not None
    assert held.find("token", 2 * sessions.IDLE_SECONDS) is not None, "each use counts"
    assert held.find("token", 3 * sessions.IDLE_SECONDS + 1) is None
    assert len(held) == 0


def test_only_digests_of_session_tokens_are_held() -> None:
    held = Sessions()
    held.begin("token", "csrf", b"digest", 0.0)
    assert b"token" not in next(iter(held._sessions))


def test_session_without_a_request_for_longest_ends_when_there_are_too_many() -> None:
    held = Sessions()
    for number in range(sessions.MAX_SESSIONS):
        held.begin(str(number), "", b"", 0.0)
    held.find("0", 1.0)
    held.begin("new", "", b"", 2.0)
    assert len(held) == sessions.MAX_SESSIONS
    assert held.find("1", 2.0) is None
    assert held.find("0", 2.0) is not None


def test_address_may_try_once_a_second_after_five_failures() -> None:
    limit = SignInLimit()
    for _ in range(5):
        assert limit.wait_seconds("a", 0.0) == 0.0
        limit.failed("a", 0.0)
    assert limit.wait_seconds("a", 0.25) == 0.75
    assert limit.wait_seconds("a", 1.0) == 0.0
    assert limit.wait_seconds("b", 0.0) == 0.0
    limit.failed("a", 1.0)
    assert limit.wait_seconds("a", 1.0) == 1.0
    limit.succeeded("a")
    assert limit.wait_seconds("a", 1.0) == 0.0


def test_old_failures_and_old_addresses_are_forgotten() -> None:
    limit = SignInLimit()
    for _ in range(5):
        limit.failed("a", 0.0)
    later = sessions.FORGET_SECONDS + 1
    assert limit.wait_seconds("a", later) == 0.0
    limit.failed("a", later)
    assert limit.wait_seconds("a", later) == 0.0
    for _ in range(5):
        limit.failed("a", later)
    for number in range(sessions.MAX_ADDRESSES):
        limit.failed(str(number), later)
    assert limit.wait_seconds("a", later) == 0.0


def test_cookie_is_found_among_others() -> None:
    assert cookie_value("a=1; session=x=y; b=2", "session") == "x=y"
    assert cookie_value("asession=1", "session") == ""
    assert cookie_value("", "session") == ""


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        (None, True),
        ("http://Gate.example:8080", True),
        ("https://gate.example:8080", True),
        ("http://gate.example", False),
        ("http://evil.example", False),
        ("null", False),
        ("file://gate.example:8080", False),
    ],
)
def test_only_pages_of_the_same_host_have_the_same_origin(origin: str | None, allowed: bool) -> None:
    assert is_same_origin(origin, "gate.example:8080") is allowed


def test_secrets_are_compared_also_with_other_characters() -> None:
    assert is_same("a", "a")
    assert not is_same("\udcff", "a")
