"""A call that the limit of its answer cut was sent back with what became of it, and refused for its arguments from then
on: nobody could go on with that conversation. So was an answer with another service's word for reasoning.
"""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker.errors import BadRequestError
from inference.worker.messages import messages_of


def called(arguments: Any) -> Any:
    """The arguments that a template is given for a call with these."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": arguments}}
    (message,) = messages_of([{"role": "assistant", "content": None, "tool_calls": [call]}])
    return message["tool_calls"][0]["function"]["arguments"]


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ('{"at": 1}', {"at": 1}),
        ({"at": 1}, {"at": 1}),
        ('{"at": "the ri', {"arguments": '{"at": "the ri'}),
        ("[1]", {"arguments": "[1]"}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
        ("", {}),
        (" ", {}),
        (None, {}),
    ],
)
def test_arguments_are_an_object_whatever_was_written(written: Any, read: dict[str, Any]) -> None:
    assert called(written) == read


def test_arguments_of_another_type_are_refused_by_name() -> None:
    with pytest.raises(BadRequestError, match=r"tool_calls\[0\].function.arguments must be a string"):
        called([1])


def test_reasoning_by_its_other_name_is_reasoning_and_what_stands_beside_it_is_passed_over() -> None:
    answer = {"role": "assistant", "content": "Hi", "reasoning": "Hm.", "reasoning_details": [{"text": "Hm."}]}
    assert messages_of([answer]) == ({"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},)
    both = {**answer, "reasoning_content": "Aha."}
    assert messages_of([both])[0]["reasoning_content"] == "Aha."


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_field_that_nobody_knows_is_still_refused_where_callers_write(role: str) -> None:
    with pytest.raises(BadRequestError, match="unknown field 'reasoning'"):
        messages_of([{"role": role, "content": "Hi", "reasoning": "Hm."}])
