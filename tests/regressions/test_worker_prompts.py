"""Messages that clients send back: tool calls, results, reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.worker_errors import BadRequestError
from tests.integration.test_worker_tools import ADD, HERMES
from tests.rigs import tiny_gguf
from tests.rigs.chat_templates import chat_template
from tests.rigs.typed_bodies import template_messages
from tests.rigs.worker_rig import WorkerRig, grant_for

WALKS = HERMES.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for name, value in call.function.arguments | items %}{{ name + '=' + value }}{% endfor %}",
)
"""Iterates over the arguments, as the templates of Qwen3-Coder and Nemotron do."""


@pytest.fixture(scope="module", params=[HERMES, WALKS], ids=["written", "walked"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    model = tiny_gguf.generative(template=request.param)
    with WorkerRig(tmp_path_factory.mktemp("calls"), grant_for(model, context_length=2048)) as rig:
        rig.ready()
        yield rig


@pytest.mark.parametrize(
    ("arguments", "shown"), [('{"x": 1, "unit": "ounc', "ounc"), ("mill", "mill"), ('["mill"]', "mill"), ("", "add")]
)
def test_conversation_with_a_call_whose_arguments_are_not_json_is_accepted(
    worker: WorkerRig, arguments: str, shown: str
) -> None:
    """Clients send the call back unchanged, with a result that describes the error. The prompt shows the arguments."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "these arguments are no JSON"},
    ]
    status, answer = worker.post("/v1/chat/completions", {"messages": messages, "tools": [ADD], "max_tokens": 1})
    assert status == 200, answer
    tokens = worker.post("/tokenize", {"messages": messages, "tools": [ADD]})[1]["tokens"]
    prompt = worker.post("/detokenize", {"tokens": tokens})[1]["content"]
    assert shown in prompt


def test_reasoning_of_other_services_is_accepted_and_its_extra_fields_are_ignored() -> None:
    answer = {
        "role": "assistant",
        "content": "Hi",
        "reasoning": "Hm.",
        "reasoning_details": [{"text": "Hm."}],
        "prefix": False,
    }
    assert template_messages([answer]) == ({"role": "assistant", "content": "Hi", "reasoning_content": "Hm."},)
    both = {**answer, "reasoning_content": "Aha."}
    assert template_messages([both])[0]["reasoning_content"] == "Aha."


@pytest.mark.parametrize("role", ["user", "system", "tool"])
def test_unknown_field_in_a_message_of_the_client_is_refused(role: str) -> None:
    with pytest.raises(BadRequestError, match="unknown field 'reasoning'"):
        template_messages([{"role": role, "content": "Hi", "tool_call_id": "c", "reasoning": "Hm."}])


@pytest.mark.parametrize("asks", [{"prefix": True}, {"partial": True}, {"tool_cals": []}], ids=str)
def test_unknown_field_that_requests_something_is_refused(asks: dict[str, object]) -> None:
    """For example a continuation of the answer, as two cloud APIs have it."""
    (name,) = asks
    with pytest.raises(BadRequestError, match=f"unknown field '{name}'") as caught:
        template_messages([{"role": "assistant", "content": "He", **asks}])
    assert caught.value.param == f"messages[0].{name}"


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
CONVERSATION: list[dict[str, Any]] = [
    {"role": "user", "content": "Look."},
    {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "toolu_2"}]},
    {"role": "tool", "tool_call_id": "toolu_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "toolu_2", "content": "rain"},
]


def rendered(source: str, *more: str) -> str:
    """The end of the prompt, after the calls."""
    template = chat_template(source)
    users = [{"role": "user", "content": text} for text in more]
    messages, variables = template.dialect.prepare([*CONVERSATION, *users], [Tool("look")], ToolChoice())
    assert template.dialect.name == "mistral"
    return "".join(template.render(messages, variables, generate=True)).rpartition("[ARGS]")[2]


RESULTS = "[TOOL_RESULTS]9:sun[/TOOL_RESULTS][TOOL_RESULTS]9:rain"


def test_user_text_after_tool_results_joins_the_last_result_if_turns_must_alternate() -> None:
    assert rendered(ALTERNATING, "Quick!", "Now.") == f"{RESULTS}\n\nQuick!\n\nNow.[/TOOL_RESULTS]"
    assert rendered(ALTERNATING) == f"{RESULTS}[/TOOL_RESULTS]"


def test_user_text_after_tool_results_is_a_turn_of_its_own_if_possible() -> None:
    assert rendered(FREE, "Quick!") == f"{RESULTS}[/TOOL_RESULTS][INST]Quick![/INST]"


def test_template_that_refuses_both_forms_gives_its_reason() -> None:
    with pytest.raises(BadRequestError, match="no results"):
        rendered(FREE + "{% if messages[2] %}{{ raise_exception('no results') }}{% endif %}", "Quick!")
