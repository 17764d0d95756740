"""Requests that another tier may serve are `unsupported_parameter`; reserved values are invalid everywhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from inference.protocol import Code
from inference.worker.api import generation_body
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

HELLO = {"messages": [{"role": "user", "content": "hello"}]}


def facts(*capabilities: str) -> Facts:
    return Facts("tiny", 128, 300, 64, capabilities)


FULL = facts("chat", "completions", "tools")


def refused(read: Callable[[Any, Facts], object], body: Any, known: Facts = FULL) -> BadRequestError:
    with pytest.raises(BadRequestError) as caught:
        read(body, known)
    return caught.value


@pytest.mark.parametrize(
    ("read", "body", "capabilities", "message"),
    [
        (generation_body.chat, HELLO, ("embeddings",), "does not support chats; it supports /v1/embeddings"),
        (generation_body.chat, HELLO, ("rerank",), "does not support chats; it supports /v1/rerank"),
        (generation_body.chat, HELLO, ("completions",), "does not support chats; it supports /v1/completions"),
        (generation_body.chat, HELLO, (), "does not support chats; use another model"),
        (
            generation_body.completion,
            {"prompt": "a"},
            ("embeddings",),
            "does not support completions; it supports /v1/embeddings",
        ),
        (
            generation_body.embedding,
            {"input": "a"},
            ("chat", "completions", "tools"),
            "does not support embeddings; it supports /v1/chat/completions and /v1/completions",
        ),
    ],
)
def test_wrong_endpoint_is_refused_with_the_right_ones(
    read: Callable[[Any, Facts], object], body: Any, capabilities: tuple[str, ...], message: str
) -> None:
    error = refused(read, body, facts(*capabilities))
    assert (error.message, error.param, error.code) == (f"model 'tiny' {message}", "model", Code.UNSUPPORTED_PARAMETER)


@pytest.mark.parametrize(
    ("read", "body", "param"),
    [
        (generation_body.chat, {**HELLO, "n": 17}, "n"),
        (generation_body.completion, {"prompt": "a", "n": 17}, "n"),
        (generation_body.completion, {"prompt": ["a"] * 100, "n": 2}, "n"),
        (generation_body.completion, {"prompt": "a", "best_of": 3}, "best_of"),
        (generation_body.completion, {"prompt": "a", "best_of": 20}, "best_of"),
    ],
)
def test_too_many_choices_are_an_unsupported_parameter(
    read: Callable[[Any, Facts], object], body: Any, param: str
) -> None:
    error = refused(read, body)
    assert (error.param, error.code) == (param, Code.UNSUPPORTED_PARAMETER)


@pytest.mark.parametrize("fields", [{"n": 0}, {"n": "2"}, {"n": 1.5}, {"best_of": 0}, {"best_of": True}], ids=str)
def test_invalid_numbers_are_an_invalid_request(fields: dict[str, Any]) -> None:
    assert refused(generation_body.completion, {"prompt": "a", **fields}).code is Code.INVALID_REQUEST


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("messages", "use messages"),
        ("tools", "use tools"),
        ("add_generation_prompt", "use continue_final_message"),
        ("bos_token", "remove it"),
        ("eos_token", "remove it"),
    ],
)
def test_reserved_template_variables_are_refused(name: str, instead: str) -> None:
    """Set here they would pass by every check of the fields that they belong to."""
    error = refused(generation_body.chat, {**HELLO, "chat_template_kwargs": {"enable_thinking": True, name: ["x"]}})
    assert (error.param, error.code) == (f"chat_template_kwargs.{name}", Code.INVALID_REQUEST)
    assert error.message.endswith(instead)


def test_documents_can_be_set_in_template_variables() -> None:
    """No other field brings them to the templates that show them."""
    arguments = {"documents": [{"title": "a", "text": "b"}]}
    assert generation_body.chat({**HELLO, "chat_template_kwargs": arguments}, FULL).template_arguments == arguments
