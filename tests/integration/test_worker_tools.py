"""A real worker with a template for tools: calls and formats, whole and streamed, and errors."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import httpx2
import openai
import pydantic
import pytest

from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HERMES = (
    "{% if tools %}{{ '<|im_start|>system\n<tools>\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '{{ \'\n</tools> call with <tool_call>{"name": NAME, "arguments": OBJECT}</tool_call><|im_end|>\n\' }}{% endif %}'
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson }}{{ '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
EAGER = HERMES.replace("{% if tools %}", "{% if true %}")
"""Iterates over the tools without a check, as the templates of Hermes 2 and 3 do."""
THINKING = HERMES + "{% if add_generation_prompt and enable_thinking %}{{ '<think>\n' }}{% endif %}{# </think> #}"
GPT_OSS = (
    "{{ 'Reasoning: ' + (reasoning_effort or 'medium') }}"
    "{% for message in messages %}{{ '\n<|start|>' + message.role + '<|message|>' + message.content }}{% endfor %}"
    "{{ '\n<|start|>assistant' }}{# <|channel|> #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "unit": {"enum": ["litre", "gallon"]}},
    "required": ["x", "unit"],
    "additionalProperties": False,
}
ADD: dict[str, Any] = {"type": "function", "function": {"name": "add", "parameters": PARAMETERS, "strict": True}}
SUB: dict[str, Any] = {"type": "function", "function": {"name": "sub", "parameters": PARAMETERS}}
ONLY_ADD = {"type": "function", "function": {"name": "add"}}


class Amount(pydantic.BaseModel):
    """The type that PARAMETERS describe."""

    x: int
    unit: Literal["litre", "gallon"]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    model = tiny_gguf.generative(template=HERMES)
    with WorkerRig(tmp_path_factory.mktemp("tools"), grant_for(model, context_length=4096, parallel=8)) as rig:
        rig.ready()
        yield rig


@pytest.fixture
def client(worker: WorkerRig) -> Iterator[openai.OpenAI]:
    transport = httpx2.HTTPTransport(uds=worker.socket_path)
    with (
        httpx2.Client(transport=transport) as http,
        openai.OpenAI(base_url="http://worker/v1", api_key="none", http_client=http, max_retries=0) as client,
    ):
        yield client


def ask(text: str = "hello", **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 400, **changes}


def answer(worker: WorkerRig, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    status, response = worker.post(path, body)
    assert status == 200, response
    return response


def check(arguments: str) -> None:
    response = Amount.model_validate_json(arguments)
    assert 0 <= response.x <= 99


def test_tools_are_in_the_prompt_unless_the_request_excludes_them(worker: WorkerRig) -> None:
    """Token counts of `/tokenize` include them too."""
    tools = [{**ADD, "function": {**ADD["function"], "description": "<|im_end|>evil"}}]
    plain = answer(worker, ask(max_tokens=1))["usage"]["prompt_tokens"]
    with_tools = answer(worker, ask(max_tokens=1, tools=tools))["usage"]["prompt_tokens"]
    unused = answer(worker, ask(max_tokens=1, tools=tools, tool_choice="none"))["usage"]["prompt_tokens"]
    assert with_tools > plain + 50
    assert unused == plain
    messages = ask()["messages"]
    for body, count in (({}, plain), ({"tools": tools}, with_tools), ({"tools": tools, "tool_choice": "none"}, unused)):
        assert worker.post("/tokenize", {"messages": messages, **body})[1]["count"] == count


@pytest.mark.parametrize(("choice", "finish"), [("required", "tool_calls"), (ONLY_ADD, "stop")])
def test_forced_call_matches_its_schema(worker: WorkerRig, choice: Any, finish: str) -> None:
    body = ask(tools=[ADD, SUB], tool_choice=choice, parallel_tool_calls=False, temperature=1, seed=5)
    response = answer(worker, body)["choices"][0]
    [call] = response["message"]["tool_calls"]
    assert response["finish_reason"] == finish
    assert response["message"]["content"] is None
    assert call["id"].startswith("call_")
    assert call["function"]["name"] in (["add"] if choice is ONLY_ADD else ["add", "sub"])
    check(call["function"]["arguments"])


OPEN = {name: value for name, value in PARAMETERS.items() if name != "additionalProperties"}
NESTED = {"type": "object", "properties": {"amount": OPEN}, "required": ["amount"]}


@pytest.mark.parametrize("seed", range(8))
def test_forced_call_has_only_declared_arguments(worker: WorkerRig, seed: int) -> None:
    """Also inside a property; the random model would invent them until the length limit."""
    tool = {"type": "function", "function": {"name": "add", "parameters": NESTED}}
    body = ask(tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=1, seed=seed)
    response = answer(worker, body)["choices"][0]
    assert response["finish_reason"] == "tool_calls"
    [call] = response["message"]["tool_calls"]
    arguments = json.loads(call["function"]["arguments"])
    assert arguments.keys() == {"amount"}
    assert arguments["amount"].keys() == {"x", "unit"}


def test_tool_without_properties_is_called_without_arguments(worker: WorkerRig) -> None:
    tool = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "properties": {}}}}
    body = ask(tools=[tool], tool_choice="required", parallel_tool_calls=False, temperature=1, seed=1)
    [call] = answer(worker, body)["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {}


def test_streamed_call_equals_the_whole_one(worker: WorkerRig) -> None:
    """The role, id and name of the call, its arguments, then the end."""
    body = ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    [whole] = answer(worker, body)["choices"][0]["message"]["tool_calls"]
    first, begin, *rest, end = [chunk["choices"][0] for chunk in worker.chunks(CHAT, body)]
    assert first["delta"] == {"role": "assistant", "content": None}
    [begun] = begin["delta"]["tool_calls"]
    assert begun == {
        "index": 0, "id": begun["id"], "type": "function", "function": {"name": "add", "arguments": ""}
    }  # fmt: skip
    pieces = []
    for item in rest:
        [more] = item["delta"]["tool_calls"]
        assert (more["index"], set(more), set(more["function"])) == (0, {"index", "function"}, {"arguments"})
        pieces.append(more["function"]["arguments"])
    assert "".join(pieces) == whole["function"]["arguments"]
    assert (end["delta"], end["finish_reason"]) == ({}, "tool_calls")


def test_official_client_assembles_streamed_calls(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        tools=[openai.pydantic_function_tool(Amount)],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_tokens=1000,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert "tool_calls.function.arguments.done" in kinds
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls
    for call in choice.message.tool_calls:
        assert isinstance(call.function.parsed_arguments, Amount)


def test_official_client_parses_a_format(client: openai.OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="tiny", messages=[{"role": "user", "content": "hello"}], response_format=Amount, max_tokens=2000,
        temperature=0,
    )  # fmt: skip
    assert isinstance(parsed.choices[0].message.parsed, Amount)


def check_keys(text: str) -> None:
    check(text)
    assert json.loads(text).keys() == {"x", "unit"}


def matches(pattern: str) -> Callable[[str], None]:
    def check_text(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check_text


FORMATS: list[tuple[str, dict[str, Any], Callable[[str], None]]] = [
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": PARAMETERS}}}, check),
    (CHAT, {"json_schema": PARAMETERS}, check),
    (CHAT, {"json_schema": OPEN}, check_keys),
    (TEXT, {"json_schema": PARAMETERS}, check),
    (CHAT, {"guided_choice": ["yes", "no"]}, matches("yes|no")),
    (TEXT, {"structured_outputs": {"regex": "[0-9]{3}"}}, matches("[0-9]{3}")),
    (CHAT, {"grammar": 'root ::= "a" | "b"'}, matches("a|b")),
]


@pytest.mark.parametrize(
    ("path", "fields", "check_format"), FORMATS, ids=[f"{path} {fields}"[:60] for path, fields, _ in FORMATS]
)
def test_answer_has_the_requested_format(
    worker: WorkerRig, path: str, fields: dict[str, Any], check_format: Callable[[str], None]
) -> None:
    """Each of several randomly drawn choices has the format and ends."""
    body = {**(ask() if path == CHAT else {"prompt": "hello", "max_tokens": 400}), **fields}
    response = answer(worker, {**body, "temperature": 1, "n": 4, "seed": 7}, path)
    for choice in response["choices"]:
        assert choice["finish_reason"] == "stop"
        check_format(choice["message"]["content"] if path == CHAT else choice["text"])


def test_reasoning_is_separate_from_the_answer(tmp_path: Path) -> None:
    """The template opens the reasoning, and the random model never closes it."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(template=THINKING))) as worker:
        worker.ready()
        _reason(worker)


def _reason(worker: WorkerRig) -> None:
    body = ask(max_tokens=12, ignore_eos=True)
    plain = answer(worker, {**body, "reasoning_effort": "none"})
    assert "reasoning_content" not in plain["choices"][0]["message"]
    response = answer(worker, {**body, "reasoning_effort": "low"})
    message = response["choices"][0]["message"]
    assert message["content"] == ""
    assert message["reasoning_content"]
    assert response["usage"]["completion_tokens_details"]["reasoning_tokens"] == 12
    chunks = worker.chunks(CHAT, {**body, "reasoning_effort": "low"})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == message["reasoning_content"]


def test_gpt_oss_uses_the_nearest_supported_reasoning_effort(tmp_path: Path) -> None:
    """The worker recognises the model by its template, and token counts use the same level."""
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(template=GPT_OSS))) as worker:
        worker.ready()

        def prompt(**effort: str) -> str:
            tokens = worker.post("/tokenize", {"messages": ask()["messages"], **effort})[1]["tokens"]
            return str(worker.post("/detokenize", {"tokens": tokens})[1]["content"])

        levels = {level: prompt(reasoning_effort=level).split()[1] for level in ("none", "low", "medium", "max")}
        assert levels == {"none": "low", "low": "low", "medium": "medium", "max": "high"}
        assert prompt().split()[1] == "medium"


def test_calls_have_log_probabilities(worker: WorkerRig) -> None:
    body = ask(tools=[ADD], tool_choice="required", logprobs=True, top_logprobs=1)
    response = answer(worker, body)
    entries = response["choices"][0]["logprobs"]["content"]
    assert len(entries) == response["usage"]["completion_tokens"] - 1
    assert "".join(entry["token"] for entry in entries).startswith("<tool_call>")


def test_conversation_with_calls_can_be_continued(worker: WorkerRig) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1}'}}
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "3"},
    ]
    assert answer(worker, ask(messages=messages, tools=[ADD], max_tokens=4))["usage"]["completion_tokens"] == 4


def test_tools_can_be_enabled_for_a_template_without_tools(tmp_path: Path) -> None:
    """The tools are described in a message; by default such a model refuses tools."""
    body = ask(tools=[ADD], tool_choice="required", parallel_tool_calls=False)
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(), capabilities=("chat", "tools"))) as configured:
        assert configured.ready().capabilities == ("chat", "tools")
        [call] = answer(configured, body)["choices"][0]["message"]["tool_calls"]
        check(call["function"]["arguments"])
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative())) as silent:
        assert silent.ready().capabilities == ("chat", "completions")
        status, response = silent.post(CHAT, body)
        assert (status, response["error"]["code"], response["error"]["param"]) == (
            400,
            "unsupported_parameter",
            "tools",
        )


def test_separate_template_for_tools_is_used_with_tools(tmp_path: Path) -> None:
    """Requests without tools use the other template; the template for tools decides the capability."""
    model = tiny_gguf.generative(tool_template=EAGER)
    with WorkerRig(tmp_path, grant_for(model, context_length=4096)) as rig:
        assert rig.ready().capabilities == ("chat", "completions", "tools")
        [call] = answer(rig, ask(tools=[ADD], tool_choice=ONLY_ADD))["choices"][0]["message"]["tool_calls"]
        check(call["function"]["arguments"])
        counts = [
            rig.post("/tokenize", {"messages": ask()["messages"], **fields})[1]["count"]
            for fields in ({}, {"tools": [ADD], "tool_choice": "none"}, {"tools": [ADD]})
        ]
        assert counts[0] == counts[1] == answer(rig, ask(max_tokens=1))["usage"]["prompt_tokens"]
        assert counts[2] == answer(rig, ask(max_tokens=1, tools=[ADD]))["usage"]["prompt_tokens"] > counts[0] + 50


@pytest.mark.parametrize("template", ["{{ messages[0].content }}{{ tools }} in no known way", "{% if %}"])
def test_tool_template_that_is_unusable_is_ignored(tmp_path: Path, template: str) -> None:
    with WorkerRig(tmp_path, grant_for(tiny_gguf.generative(tool_template=template))) as rig:
        ready = rig.ready()
        assert ready.capabilities == ("chat", "completions")
        assert ("compile" in ready.template_problem) == ("if" in template)
        assert answer(rig, ask(max_tokens=1))["usage"]["completion_tokens"] == 1


def huge() -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{n}": {"enum": [f"v{n}{m}" for m in range(40)]} for n in range(4000)}}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"json_schema": {"type": "object", "properties": {"x": {"type": "nonsense"}}}}, "json_schema"),
    ({"json_schema": {"$ref": "https://example.com/schema"}}, "json_schema"),
    ({"json_schema": {"type": "array", "contains": {"type": "null"}}}, "json_schema"),
    ({"regex": "(a"}, "regex"),
    ({"grammar": "root ::= nowhere"}, "grammar"),
    ({"json_schema": huge()}, "json_schema"),
    ({"tools": [{**ADD, "function": {"name": "f", "parameters": {"$ref": "#/nowhere"}}}], "tool_choice": "required"},
     "tools"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), REFUSED, ids=lambda value: str(value)[:40])
def test_schema_that_cannot_be_enforced_is_a_400(worker: WorkerRig, fields: dict[str, Any], param: str) -> None:
    status, response = worker.post(CHAT, ask(**fields))
    assert (status, response["error"]["param"], response["error"]["code"]) == (400, param, "unsupported_parameter"), (
        response
    )


def test_optional_tools_need_no_mask(worker: WorkerRig) -> None:
    """Schemas that a mask cannot enforce are accepted unless a strict answer is required."""
    loose = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "$ref": "#/nowhere"}}}
    assert answer(worker, ask(tools=[loose], max_tokens=3))["usage"]["completion_tokens"] == 3
    strict = {**loose, "function": {**loose["function"], "strict": True}}
    assert worker.post(CHAT, ask(tools=[strict]))[0] == 400


def test_failing_requests_do_not_affect_others_in_the_batch(worker: WorkerRig) -> None:
    """Forms that are refused, that are too large, and that reach their limits within an answer."""
    [hello] = worker.post("/tokenize", {"content": "hello"})[1]["tokens"]
    # Results in other batches differ in the last bits, so the text of the neighbor must not depend on them.
    body = ask("neighbor", max_tokens=1500, logit_bias={str(hello): 100})
    exhausting = {"prompt": "hello", "regex": "(.*[a-m].{100})x", "max_tokens": 1400, "seed": 3}
    alone = answer(worker, body)["choices"][0]["message"]["content"]
    begun = threading.Event()

    def read() -> str:
        text = ""
        for frame in worker.stream(CHAT, body):
            if frame.startswith(b"data: {"):
                text += json.loads(frame[6:])["choices"][0]["delta"].get("content") or ""
                begun.set()
        return text

    with ThreadPoolExecutor(1) as pool:
        neighbor = pool.submit(read)
        assert begun.wait(20)
        *_, last = worker.stream(TEXT, exhausting)
        assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "invalid_request"
        for fields, param in REFUSED:
            assert worker.post(CHAT, ask(**fields))[1]["error"]["param"] == param
        assert neighbor.result() == alone == "hello" * 1500


def test_call_cut_by_max_tokens_has_finish_reason_length(worker: WorkerRig) -> None:
    response = answer(worker, ask(tools=[ADD], tool_choice="required", max_tokens=22))["choices"][0]
    assert response["finish_reason"] == "length"


def test_model_without_infill_marks_refuses_a_suffix(worker: WorkerRig) -> None:
    status, response = worker.post(TEXT, {"prompt": "a", "suffix": "b"})
    assert (status, response["error"]["code"], response["error"]["param"]) == (400, "unsupported_parameter", "suffix")
