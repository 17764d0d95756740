"""A model wrote arguments that are no JSON, or was cut within them; the conversation with that call was refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.test_worker_tools import ADD, HERMES
from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

WALKS = HERMES.replace(
    "{{ call.function.arguments | tojson }}",
    "{% for name, value in call.function.arguments | items %}{{ name + '=' + value }}{% endfor %}",
)
"""Goes through the arguments, as templates of Qwen3-Coder and Nemotron do."""


@pytest.fixture(scope="module", params=[HERMES, WALKS], ids=["written", "walked"])
def worker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    model = tiny_gguf.generative(template=request.param)
    with WorkerRig(tmp_path_factory.mktemp("calls"), grant_for(model, context_length=2048)) as rig:
        rig.ready()
        yield rig


@pytest.mark.parametrize("arguments", ['{"x": 1, "unit": "lit', "mill", '["mill"]', ""])
def test_a_conversation_goes_on_behind_a_call_that_is_no_json(worker: WorkerRig, arguments: str) -> None:
    """As clients send it back: the call as it came, and a result that says what was wrong with it."""
    call = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": arguments}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "these arguments are no JSON"},
    ]
    status, said = worker.post("/v1/chat/completions", {"messages": messages, "tools": [ADD], "max_tokens": 1})
    assert status == 200, said
    tokens = worker.post("/tokenize", {"messages": messages, "tools": [ADD]})[1]["tokens"]
    prompt = worker.post("/detokenize", {"tokens": tokens})[1]["content"]
    assert arguments.strip('{}[]"').partition('"')[0] in prompt
