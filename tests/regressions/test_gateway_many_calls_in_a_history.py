"""Ids of calls for Anthropic were each looked for among all before: a history of twenty thousand took six seconds."""

from __future__ import annotations

import pytest

from gateway.providers.anthropic.anthropic_request import ToolIds

pytestmark = pytest.mark.timeout(20)

MANY = 200_000
"""One after the other among all before they would take ten minutes."""


def test_however_many_there_are_each_is_looked_up() -> None:
    ids = ToolIds()
    assert len({ids(f"call_{number}") for number in range(MANY)}) == MANY


def test_those_that_look_alike_are_numbered_and_stay_apart() -> None:
    ids = ToolIds()
    assert [ids(id) for id in ("a!", "a?", "a_2", "a_", "a!")] == ["a_", "a__2", "a_2", "a__3", "a_"]
    alike = {ids("b" + chr(0x4E00 + number)) for number in range(20_000)}
    assert len(alike) == 20_000
