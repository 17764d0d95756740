"""An answer of another service, sent back with that service's word for reasoning, was refused from then on: nobody
could go on with that conversation.
"""

from __future__ import annotations

import pytest

from inference.worker.prompt.template_messages import messages_of
from inference.worker.worker_errors import BadRequestError


def test_reasoning_by_its_other_name_is_reasoning_and_what_stands_beside_it_is_passed_over() -> None:
    answer = {
        "role": "assistant",
        "content": "Hi",
        "reasoning": "Hm.",
        "reasoning_details": [{"text": "Hm."}],
        "prefix": False,
    }
    assert messages_of([answer]) == ({"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},)
    both = {**answer, "reasoning_content": "Aha."}
    assert messages_of([both])[0]["reasoning_content"] == "Aha."


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_a_field_that_nobody_knows_is_still_refused_where_callers_write(role: str) -> None:
    with pytest.raises(BadRequestError, match="unknown field 'reasoning'"):
        messages_of([{"role": role, "content": "Hi", "reasoning": "Hm."}])


@pytest.mark.parametrize("asks", [{"prefix": True}, {"partial": True}, {"tool_cals": []}], ids=str)
def test_a_field_by_which_an_answer_asks_for_something_is_refused(asks: dict[str, object]) -> None:
    """To go on with it, as two clouds are asked; passed over it got a new answer without a word."""
    (name,) = asks
    with pytest.raises(BadRequestError, match=f"unknown field '{name}'") as caught:
        messages_of([{"role": "assistant", "content": "He", **asks}])
    assert caught.value.param == f"messages[0].{name}"
