"""Invalid input gets a 4xx in the OpenAI envelope with the parameter, and leaves nothing running."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx2
import openai
import pytest

from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body

GOOD = [{"role": "user", "content": "Hello!"}]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("bad")).start()
    stack.ask("/v1/chat/completions", chat_body("Hello!"))
    yield stack
    stack.kill()


def _post(stack: Stack, content: bytes, key: str | None = None, path: str = "/chat/completions") -> httpx2.Response:
    with httpx2.Client(timeout=30) as client:
        return client.post(
            stack.base_url + path,
            content=content,
            headers={"authorization": f"Bearer {key or stack.key}", "content-type": "application/json"},
        )


def _chat(**more: Any) -> bytes:
    return json.dumps({"model": "demo", "messages": GOOD, **more}).encode()


BAD: list[tuple[str, bytes, int, str | None]] = [
    ("broken JSON", b'{"model": "demo", ', 400, None),
    ("not an object", b"[1, 2]", 400, None),
    ("empty body", b"", 400, None),
    ("invalid UTF-8", b'{"model": "\xff\xfe"}', 400, None),
    (
        "NaN",
        b'{"model": "demo", "messages": [{"role": "user", "content": "x"}], "temperature": NaN}',
        400,
        "temperature",
    ),
    ("no model", json.dumps({"messages": GOOD}).encode(), 400, "model"),
    ("model of a wrong type", json.dumps({"model": 7, "messages": GOOD}).encode(), 400, "model"),
    ("unknown model", json.dumps({"model": "no-such", "messages": GOOD}).encode(), 404, "model"),
    ("no messages", json.dumps({"model": "demo"}).encode(), 400, "messages"),
    ("empty messages", _chat(messages=[]), 400, "messages"),
    ("messages of a wrong type", _chat(messages="hi"), 400, "messages"),
    ("a message without a role", _chat(messages=[{"content": "x"}]), 400, "messages"),
    ("an unknown role", _chat(messages=[{"role": "wizard", "content": "x"}]), 400, "messages"),
    ("content of a wrong type", _chat(messages=[{"role": "user", "content": 5}]), 400, "messages"),
    ("temperature of a wrong type", _chat(temperature="hot"), 400, "temperature"),
    ("temperature out of range", _chat(temperature=99), 400, "temperature"),
    ("negative max_tokens", _chat(max_tokens=-5), 400, "max_tokens"),
    ("max_tokens of a wrong type", _chat(max_tokens="many"), 400, "max_tokens"),
    ("huge n", _chat(n=10_000), 400, "n"),
    ("unknown field", _chat(temprature=0.5), 400, "temprature"),
    ("stop of a wrong type", _chat(stop={"a": 1}), 400, "stop"),
    ("stream of a wrong type", _chat(stream="yes"), 400, "stream"),
    ("top_p out of range", _chat(top_p=7), 400, "top_p"),
    (
        "a prompt longer than the context",
        _chat(messages=[{"role": "user", "content": "water " * 9000}]),
        400,
        "messages",
    ),
]


@pytest.mark.parametrize(("content", "status", "param"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_invalid_input_is_a_4xx_with_the_parameter(
    stack: Stack, content: bytes, status: int, param: str | None
) -> None:
    answer = _post(stack, content)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    assert len(error["message"]) > 10
    if param is not None:
        assert error["param"] is not None
        assert error["param"].startswith(param)
    assert answer.headers["x-request-id"]
    assert answer.headers["x-headgate-tier"] == "none"


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_longer_than_the_context_is_refused_with_both_lengths(stack: Stack, stream: bool) -> None:
    answer = _post(stack, _chat(messages=[{"role": "user", "content": "water " * 9000}], stream=stream))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "2048" in error["message"]
    assert sum(part.strip(".,").isdigit() for part in error["message"].split()) >= 2


def test_body_of_50_mb_is_refused(stack: Stack) -> None:
    answer = _post(stack, _chat(messages=[{"role": "user", "content": "x" * 50_000_000}]))
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "body_too_large"


def test_deeply_nested_json_is_refused(stack: Stack) -> None:
    answer = _post(stack, b'{"model":"demo","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    assert answer.status_code == 400


def test_invalid_and_missing_keys_are_401(stack: Stack) -> None:
    answer = _post(stack, _chat(), key="hg-wrong")
    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    with httpx2.Client(timeout=10) as client:
        answer = client.post(stack.base_url + "/chat/completions", content=_chat())
    assert answer.status_code == 401


def test_unknown_paths_and_methods_have_the_error_envelope(stack: Stack) -> None:
    assert _post(stack, b"{}", path="/no/such/path").json()["error"]["code"] == "not_found"
    with httpx2.Client(timeout=10) as client:
        answer = client.get(stack.base_url + "/chat/completions", headers={"authorization": f"Bearer {stack.key}"})
    assert answer.status_code == 405
    assert answer.json()["error"]["code"] == "method_not_allowed"


def test_tiny_client_timeout_opens_no_breaker_and_leaves_nothing_running(stack: Stack) -> None:
    with openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=0.02) as client:
        for _ in range(8):
            with pytest.raises((openai.APITimeoutError, openai.InternalServerError)) as caught:
                client.chat.completions.create(
                    model="demo", messages=[{"role": "user", "content": "Tell me a long story about a water mill."}]
                )
            if isinstance(caught.value, openai.APIStatusError):  # the gateway answered before the client timed out
                assert caught.value.status_code == 504
                assert caught.value.response.headers["x-should-retry"] == "false"
    wait_until("nothing is in flight", lambda: stack.model("demo")["in_flight"] == 0)
    assert all(entry["state"] == "closed" and entry["failures"] == 0 for entry in stack.breakers())
    assert stack.ask("/v1/chat/completions", chat_body("Hello!"))["model"] == "demo"


def test_service_answers_after_invalid_input(stack: Stack) -> None:
    assert _post(stack, _chat(temperature="hot")).status_code == 400  # the other tests may have used another service
    assert stack.model("demo")["in_flight"] == 0
    assert stack.ask("/v1/chat/completions", chat_body("Hello!"))["model"] == "demo"
    with httpx2.Client(timeout=5) as client:
        counted = client.get(stack.front.url + "/metrics").text
    assert 'outcome="invalid_request"' in counted
    assert "internal_error" not in counted
    assert "Traceback" not in stack.front.log + stack.inference.log
