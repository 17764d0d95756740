"""What a user says right behind a tool's result was refused by templates whose turns alternate, as Mistral's do."""

from __future__ import annotations

from typing import Any

import pytest

from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.worker_errors import BadRequestError
from tests.rigs.chat_templates import chat_template

FREE = (
    "{{ '[AVAILABLE_TOOLS]' ~ tools }}{% for m in messages %}"
    "{% if m.role == 'tool' %}[TOOL_RESULTS]{{ m.tool_call_id | length }}:{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]"
    "{% else %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{% endfor %}{{ m.content }}{% endif %}"
    "{% endfor %}"
)
ALTERNATING = (
    "{% set ns = namespace(index=0) %}{% for m in messages %}{% if not (m.role == 'tool' or m.tool_calls) %}"
    "{% if (m.role == 'user') != (ns.index % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set ns.index = ns.index + 1 %}{% endif %}{% endfor %}"
) + FREE
CALL = {"id": "toolu_1", "function": {"name": "look", "arguments": {}}}
ASKED: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "toolu_2"}]},
    {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "rain"},
]


def rendered(source: str, *more: str) -> str:
    """The prompt's end, behind what was called."""
    template = chat_template(source)
    said = [{"role": "user", "content": text} for text in more]
    messages, variables = template.dialect.prepare([*ASKED, *said], [Tool("look")], ToolChoice())
    assert template.dialect.name == "mistral"
    return "".join(template.render(messages, variables, generate=True)).rpartition("[ARGS]")[2]


RESULTS = "[TOOL_RESULTS]9:sun[/TOOL_RESULTS][TOOL_RESULTS]9:rain"


def test_it_stands_in_the_last_result_where_turns_alternate() -> None:
    assert rendered(ALTERNATING, "Quick!", "Now.") == f"{RESULTS}\n\nQuick!\n\nNow.[/TOOL_RESULTS]"
    assert rendered(ALTERNATING) == f"{RESULTS}[/TOOL_RESULTS]"


def test_it_stands_alone_where_it_may() -> None:
    assert rendered(FREE, "Quick!") == f"{RESULTS}[/TOOL_RESULTS][INST]Quick![/INST]"


def test_who_takes_it_neither_way_says_why() -> None:
    with pytest.raises(BadRequestError, match="no results"):
        rendered(FREE + "{% if messages[2] %}{{ raise_exception('no results') }}{% endif %}", "Quick!")
