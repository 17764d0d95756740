"""Answers end to end: real clients, gateway, inference service and llama.cpp."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.rigs.stack import Stack, chat_body

STORY = "Tell me a long story about a water mill."


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("answers")).start()
    yield stack
    stack.kill()


def _client(stack: Stack) -> openai.OpenAI:
    return openai.OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0, timeout=30)


def _messages(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_openai_client_streams_the_text_of_the_worker(stack: Stack) -> None:
    direct = stack.ask("/v1/chat/completions", chat_body(STORY), direct=True)
    with _client(stack) as client:
        chunks = list(
            client.chat.completions.create(
                model="demo",
                messages=_messages(STORY),
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
    assert (
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        == (direct["choices"][0]["message"]["content"])
    )
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == direct["usage"]["completion_tokens"]
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_choices_and_log_probabilities_are_equal_whole_and_streamed(stack: Stack) -> None:
    request: dict[str, Any] = {"model": "demo", "messages": _messages("Hello!"), "temperature": 0, "n": 2}
    request |= {"logprobs": True, "top_logprobs": 2}
    with _client(stack) as client:
        whole = client.chat.completions.create(**request)
        streamed = {0: "", 1: ""}
        for chunk in client.chat.completions.create(stream=True, **request):
            for choice in chunk.choices:
                if choice.logprobs is not None:
                    streamed[choice.index] += "".join(one.token for one in choice.logprobs.content or ())
    texts = {choice.index: choice.message.content for choice in whole.choices}
    assert texts == streamed
    for choice in stack.ask("/v1/chat/completions", request)["choices"]:
        assert set(choice["logprobs"]) == {"content", "refusal"}, "clients may require both"
    alone = stack.ask("/v1/chat/completions", chat_body("Hello!"))
    assert texts[0] == texts[1] == alone["choices"][0]["message"]["content"]
    for choice in whole.choices:
        assert choice.logprobs is not None
        for token in choice.logprobs.content or ():
            assert token.logprob <= 0
            assert token.top_logprobs[0].token == token.token
            assert len(token.top_logprobs) == 2


def test_tokens_of_a_fast_model_are_sent_together(stack: Stack) -> None:
    """Through all three processes: a demo model generates a token every few milliseconds."""
    request: dict[str, Any] = {"model": "demo-mini", "messages": _messages(STORY), "temperature": 0, "max_tokens": 200}
    began = time.monotonic()
    with _client(stack) as client:
        chunks = list(client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    seconds = time.monotonic() - began
    texts = [chunk for chunk in chunks if chunk.choices and chunk.choices[0].delta.content]
    assert chunks[-1].usage is not None
    assert len(texts) < chunks[-1].usage.completion_tokens
    assert len(texts) <= seconds / 0.016 + 2, "one piece per `stream_interval`, besides the first and the last"


def test_completions_and_models_work_with_the_official_client(stack: Stack) -> None:
    with _client(stack) as client:
        completion = client.completions.create(model="demo", prompt="Once upon a time", max_tokens=8, temperature=0)
        models = [model.id for model in client.models.list()]
    assert completion.object == "text_completion"
    assert completion.usage is not None
    assert completion.usage.completion_tokens <= 8
    assert {"demo", "demo-mini"} <= set(models)


def test_concurrent_clients_get_the_same_answers_as_single_clients(stack: Stack) -> None:
    from concurrent.futures import ThreadPoolExecutor

    questions = ["Hello!", "How are you?", "What is your name?", "Tell me a joke."] * 4
    alone = {text: stack.ask("/v1/chat/completions", chat_body(text)) for text in set(questions)}
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda text: stack.ask("/v1/chat/completions", chat_body(text)), questions))
    for text, answer in zip(questions, together, strict=True):
        assert answer["choices"][0]["message"]["content"] == alone[text]["choices"][0]["message"]["content"]


def test_gateway_and_inference_service_map_no_compute_library(stack: Stack) -> None:
    for service in (stack.inference, stack.front):
        maps = Path(f"/proc/{service.pid}/maps").read_text()
        for library in ("libllama", "libggml", "libcuda", "libnvidia"):
            assert library not in maps
