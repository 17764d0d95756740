"""What a caller says about the shape of an answer passes the gateway as it is, and keeps it from being resumed."""

from __future__ import annotations

import json
from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat.chat_completion_content_part_image_param import ImageURL

from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import InferenceRequest, parse
from gateway.errors import RequestError
from tests.rigs.typed_bodies import json_of

SCHEMA = {"type": "object"}
TOOLS = [{"type": "function", "function": {"name": "add"}}]


def chat(**fields: Any) -> InferenceRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **fields}
    return parse(Endpoint.CHAT, json.dumps(body).encode())


@pytest.mark.parametrize(
    "fields",
    [
        {"json_schema": SCHEMA},
        {"json_schema": True},
        {"regex": "a+"},
        {"grammar": 'root ::= "a"'},
        {"guided_json": json.dumps(SCHEMA)},
        {"guided_regex": "a+"},
        {"guided_choice": ["a", "b"]},
        {"guided_grammar": 'root ::= "a"'},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "schema": SCHEMA}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    ],
    ids=str,
)
def test_a_shape_is_let_through_and_is_nothing_to_resume(fields: dict[str, Any]) -> None:
    """The second half of a JSON text alone is no JSON text."""
    request = chat(**fields)
    assert not request.is_plain
    assert request.needs == frozenset()
    name, value = next(iter(fields.items()))
    assert json_of(request.body)[name] == value


def test_completions_take_the_extensions_too() -> None:
    assert not parse(Endpoint.COMPLETIONS, b'{"model":"m","prompt":"a","regex":"b"}').is_plain


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"json_schema": "x"}, "json_schema"),
        ({"regex": 5}, "regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_choice": [1]}, "guided_choice[0]"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
    ],
    ids=str,
)
def test_a_shape_of_the_wrong_type_is_named(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert caught.value.param == param


def test_text_is_no_shape() -> None:
    assert chat(response_format={"type": "text"}).is_plain
    assert chat(regex=None).is_plain


def test_tools_that_must_not_be_called_need_no_capability() -> None:
    assert chat(tools=TOOLS).needs == {"tools"}
    assert chat(tools=TOOLS, tool_choice="none").needs == frozenset()


@pytest.mark.parametrize("detail", get_args(get_type_hints(ImageURL)["detail"]))
def test_every_detail_of_an_image_that_the_official_client_knows_is_taken(detail: str) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "detail": detail}}
    assert chat(messages=[{"role": "user", "content": [image]}]).needs == {"vision"}
