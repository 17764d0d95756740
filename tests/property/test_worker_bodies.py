"""Whatever JSON stands in a field that shapes an answer, the body is a request or a 400 that names a parameter."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headgate.shared.bodies.openai_bodies import SHAPES
from inference.worker.api import generation_body
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, GenerateRequest

pytestmark = pytest.mark.unmeasured

FACTS = Facts("tiny", 128, 300, 64, ("chat", "completions", "tools"))
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
WORDS = st.sampled_from(
    ["type", "function", "name", "parameters", "strict", "schema", "json_schema", "json", "regex", "choice", "mode",
     "allowed_tools", "tools", "auto", "required", "none", "object", "add", "text", "json_object", "grammar", ""]
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=5),
    max_leaves=20,
)
FIELDS = st.sampled_from(
    sorted({*SHAPES, "response_format", "tools", "tool_choice", "parallel_tool_calls", "functions", "function_call",
            "suffix", "reasoning_effort", "echo", "ignore_eos", "continue_final_message"})
)  # fmt: skip


@given(st.dictionaries(FIELDS, VALUES | st.just([TOOL]), max_size=4))
def test_any_json_in_a_field_is_a_request_or_a_400(fields: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for read, body in ((generation_body.chat, {"messages": messages}), (generation_body.completion, {"prompt": "a"})):
        try:
            request = read({**body, **fields}, FACTS)
        except BadRequestError as error:
            assert error.status == 400
            assert error.param is not None
            assert error.param.partition(".")[0].partition("[")[0] in fields
        else:
            assert isinstance(request, GenerateRequest)
            assert (request.form is None) == (request.form_param == "")
            assert request.tools or request.choice.mode == "none"


@given(VALUES)
def test_any_json_in_a_message_is_a_message_or_a_400(value: Any) -> None:
    for name in ("tool_calls", "function_call", "content", "reasoning_content", "tool_call_id"):
        message = {"role": "assistant", "content": "a", name: value}
        try:
            generation_body.chat({"messages": [{"role": "user", "content": "a"}, message]}, FACTS)
        except BadRequestError as error:
            assert error.param is not None
            assert error.param.startswith("messages[1]")
