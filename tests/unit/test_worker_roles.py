"""Orders of roles that chat templates accept: each message of a conversation reaches the prompt."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inference.worker.dialects.conversation import Roles, arranged, needs_arranging
from inference.worker.worker_errors import BadRequestError
from tests.rigs.chat_templates import chat_template

ALL = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As in Qwen3.5."""
DROPS_LATER = ALL.replace("[{{", "{% if m.role != 'system' or loop.first %}[{{").replace(
    "{% endfor", "{% endif %}{% endfor"
)
"""As in SmolLM3 and gpt-oss."""
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As in Gemma 2."""
ALTERNATING = (
    "{% set ns = namespace(turn=0) %}{% for m in messages %}{% if m.role == 'system' and loop.first %}{% else %}"
    "{% if m.role != ['user', 'assistant'][ns.turn % 2] %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)
"""As in Mistral Nemo."""


def conversation(*turns: str) -> list[dict[str, Any]]:
    """Messages written as `role:text`."""
    return [dict(zip(("role", "content"), turn.split(":"), strict=True)) for turn in turns]


def prompt(source: str, *turns: str) -> str:
    template = chat_template(source)
    return "".join(template.render(conversation(*turns), {}, generate=True))


AGENT = ("system:S", "user:U", "system:L", "assistant:A", "user:V")
"""A coding agent that adds to its system prompt in the middle of a conversation."""


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (ALL, "[system]S[user]U[system]L[assistant]A[user]V"),
        (ONE_SYSTEM, "[system]S[user]U\n\nL[assistant]A[user]V"),
        (DROPS_LATER, "[system]S[user]U\n\nL[assistant]A[user]V"),
        (NO_SYSTEM, "[user]S\n\nU\n\nL[assistant]A[user]V"),
        (ALTERNATING, "[system]S[user]U\n\nL[assistant]A[user]V"),
    ],
)
def test_system_message_inside_a_conversation_reaches_the_prompt(source: str, expected: str) -> None:
    assert prompt(source, *AGENT) == expected


@pytest.mark.parametrize("source", [ONE_SYSTEM, DROPS_LATER, ALTERNATING])
def test_system_messages_at_the_beginning_become_one(source: str) -> None:
    assert prompt(source, "system:S", "system:T", "user:U") == "[system]S\n\nT[user]U"


@pytest.mark.parametrize(("source", "expected"), [(ALL, "[user]E[user]U"), (ALTERNATING, "[user]E\n\nU")])
def test_adjacent_messages_of_the_user_are_joined_if_the_template_rejects_them(source: str, expected: str) -> None:
    """Codex sends its environment and the question as two messages."""
    assert prompt(source, "user:E", "user:U") == expected


def test_adjacent_messages_of_the_assistant_are_joined_if_the_template_rejects_them() -> None:
    assert prompt(ALTERNATING, "user:U", "assistant:A", "assistant:B", "user:V") == "[user]U[assistant]A\n\nB[user]V"


def test_system_message_after_an_answer_starts_the_turn_of_the_user() -> None:
    turns = ("user:U", "assistant:A", "system:L", "user:V")
    assert prompt(ONE_SYSTEM, *turns) == "[user]U[assistant]A[user]L\n\nV"


def test_error_of_a_template_that_rejects_all_messages_is_reported() -> None:
    with pytest.raises(BadRequestError, match="'missing' is undefined"):
        prompt("{{ missing.field }}", "system:S", "system:T", "user:U")


def test_messages_with_calls_are_not_joined() -> None:
    calls = {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}
    messages = [*conversation("user:U"), calls, *conversation("assistant:A")]
    assert arranged(messages, Roles(neighbors=False)) == messages


def test_adjacent_results_are_not_joined() -> None:
    results = conversation("user:U", "tool:1", "tool:2", "assistant:A")
    assert not needs_arranging(results)
    assert arranged(results, Roles(False, False, False)) == results


def test_content_parts_stay_parts() -> None:
    image = {"type": "image"}
    messages = [{"role": "user", "content": [image]}, *conversation("system:L")]
    content = arranged(messages, Roles(later_system=False))[0]["content"]
    assert content == [image, {"type": "text", "text": "L"}]


ROLE = st.sampled_from(["system", "user", "assistant"])


@given(st.lists(ROLE, min_size=1, max_size=12), st.builds(Roles, st.booleans(), st.booleans(), st.booleans()))
def test_all_text_is_kept_and_the_roles_are_accepted(order: list[str], roles: Roles) -> None:
    """Texts keep their order; system messages are only where they are accepted; turns alternate if required."""
    found = arranged([{"role": role, "content": f"t{number}"} for number, role in enumerate(order)], roles)
    texts = [text for message in found for text in message["content"].split("\n\n")]
    assert texts == [f"t{number}" for number in range(len(order))]
    for index, message in enumerate(found):
        if message["role"] == "system":
            assert roles.later_system if index else roles.first_system
    if not roles.neighbors:
        turns = [message["role"] for message in found]
        assert all(first != then or first == "system" for first, then in itertools.pairwise(turns))
