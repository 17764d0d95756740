"""Parameters of a route: defaults, overrides, removal, and their validation in gateway.yaml."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gateway.apis.messages.messages_request import parse as parse_messages
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import ChatRequest, parse
from gateway.apis.openai.route_parameters import NAMES, with_route_parameters
from gateway.settings_loading import load
from headgate.shared.errors import ConfigError
from tests.rigs.typed_bodies import json_of

CHAT = {"model": "demo", "messages": [{"role": "user", "content": "Hi"}]}


def applied(
    given: dict[str, Any], endpoint: Endpoint = Endpoint.CHAT, base: Any = CHAT, **rules: Any
) -> tuple[Any, ...]:
    """The parameters of the request afterwards, and the changes."""
    request = parse(endpoint, json.dumps({**base, **given}).encode())
    rules = {"defaults": {}, "overrides": {}, "remove": ()} | rules
    again, changes = with_route_parameters(request, **rules)
    assert (again is request) == (not changes)
    assert (again.size_bytes, again.model) == (request.size_bytes, request.model)
    return {name: value for name, value in json_of(again.body).items() if name not in base}, changes


def test_defaults_are_for_absent_parameters() -> None:
    rules = {"defaults": {"temperature": 0, "max_tokens": 9}}
    assert applied({}, **rules) == ({"temperature": 0, "max_tokens": 9}, {"temperature": 0, "max_tokens": 9})
    assert applied({"temperature": 1, "max_completion_tokens": 5}, **rules) == (
        {"temperature": 1, "max_completion_tokens": 5}, {},
    )  # fmt: skip


def test_override_replaces_the_parameter_under_its_other_name_too() -> None:
    given = {"max_completion_tokens": 5, "repetition_penalty": 1.5, "seed": 1}
    rules = {"overrides": {"max_tokens": 9, "repeat_penalty": 1.1, "seed": -1}}
    assert applied(given, **rules) == ({"max_tokens": 9, "repeat_penalty": 1.1}, rules["overrides"])


def test_removal_comes_first() -> None:
    given = {"temperature": 1, "max_completion_tokens": 5}
    rules = {"remove": ("temperature", "max_tokens", "top_p"), "defaults": {"temperature": 0}}
    assert applied(given, **rules) == ({"temperature": 0}, {"temperature": 0, "max_tokens": None})


def test_template_variables_are_merged() -> None:
    given = {"chat_template_kwargs": {"a": 1, "b": 1}}
    rules = {"defaults": {"chat_template_kwargs": {"a": 2, "c": 2}}, "overrides": {"chat_template_kwargs": {"b": 3}}}
    found, changes = applied(given, **rules)
    assert found == {"chat_template_kwargs": {"a": 1, "b": 3, "c": 2}}
    assert changes == {"chat_template_kwargs": {"b": 3}}
    for given_none in ({}, {"chat_template_kwargs": {}}):
        assert applied(given_none, **rules)[0] == {"chat_template_kwargs": {"a": 2, "b": 3, "c": 2}}
    assert applied(given, defaults={"chat_template_kwargs": {"a": 2}}) == (given, {})


def test_other_endpoints_get_the_parameters_that_they_have() -> None:
    rules = {"defaults": {"verbosity": "low"}, "overrides": {"reasoning_effort": "low", "temperature": 0}}
    prompt = {"model": "demo", "prompt": "Hi"}
    assert applied({}, Endpoint.COMPLETIONS, prompt, **rules) == ({"temperature": 0}, {"temperature": 0})
    assert applied({}, Endpoint.EMBEDDINGS, {"model": "demo", "input": "Hi"}, **rules) == ({}, {})


def test_limit_of_a_messages_request_is_replaced() -> None:
    request = parse_messages(json.dumps({**CHAT, "max_tokens": 50}).encode())
    again, _ = with_route_parameters(request, defaults={}, overrides={"max_tokens": 9}, remove=())
    assert (again.max_tokens, again.clamps_max_tokens) == (9, True)


def test_every_parameter_of_a_route_is_one_of_a_chat() -> None:
    assert {*NAMES} <= {*ChatRequest.__struct_fields__}


def test_invalid_parameters_have_line_and_advice(tmp_path: Path) -> None:
    (tmp_path / "gateway.yaml").write_text("""
routes:
  a:
    chain: [local/a]
    parameters:
      defaults:
        temprature: 0
        max_completion_tokens: 5
        top_p: 3
        seed: null
        min_p: 0.1
      overrides: {min_p: 0.2}
      remove: [stops, qqq]
""")
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, {})
    problems = [str(problem).partition("parameters.")[2] for problem in caught.value.problems]
    unknown = "is not a parameter that a route can set; did you mean"
    assert problems[:6] == [
        f"defaults.temprature: 'temprature' {unknown} temperature?",
        f"defaults.max_completion_tokens: 'max_completion_tokens' {unknown} max_tokens?",
        "defaults.top_p: `top_p` must be between 0 and 1; it is 3",
        "defaults.seed: null is no value; list the parameter under `remove`",
        "defaults.min_p: it has no effect, because `overrides` has the same parameter",
        f"remove.0: 'stops' {unknown} stop?",
    ]
    assert problems[6].startswith("remove.1: 'qqq' is not a parameter that a route can set; known parameters: cache")
