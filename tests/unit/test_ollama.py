"""Requests of Ollama's API are translated into the gateway's, and answers and errors back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from gateway.apis.ollama import ollama_answer
from gateway.apis.ollama.ollama_answer import AnswerContext, OllamaLines
from gateway.apis.ollama.ollama_body import IGNORED_OPTIONS
from gateway.apis.ollama.ollama_request import (
    ParsedRequest,
    parse_chat,
    parse_embed,
    parse_embeddings,
    parse_generate,
    plain_name,
)
from gateway.apis.openai import generation_request
from gateway.apis.openai.frames import Comment, Endpoint, frame_of
from gateway.errors import RequestError
from inference.protocol import Code
from tests.rigs.typed_bodies import json_of

HI = {"role": "user", "content": "Hi"}
PNG = "iVBORw0KGgo="
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}, "x": 1}}
PARSERS = {"chat": parse_chat, "generate": parse_generate, "embed": parse_embed, "embeddings": parse_embeddings}


def parsed(path: str, **body: Any) -> ParsedRequest:
    return PARSERS[path](json.dumps({"model": "demo:latest", **body}).encode())


def sent(path: str, **body: Any) -> dict[str, Any]:
    """The translated body without the model; it passes the checks of OpenAI's bodies."""
    request = parsed(path, **body).request
    found = json_of(request.body)
    generation_request.parse(request.endpoint, json.dumps(found).encode())
    assert found.pop("model") == "demo"
    return found


def refused(path: str, **body: Any) -> tuple[str | None, str]:
    with pytest.raises(RequestError) as caught:
        parsed(path, **body)
    assert caught.value.status == 400
    return caught.value.param, caught.value.message


# --- requests ---------------------------------------------------------------------------------------------------------
def test_minimal_chat_streams() -> None:
    assert sent("chat", messages=[HI]) == {"messages": [HI], "stream": True}
    assert "stream" in sent("chat", messages=[HI], stream=False)
    assert not parsed("chat", messages=[HI], stream=False).request.stream
    assert (plain_name("a:7b"), plain_name(":latest")) == ("a:7b", ":latest")


def test_options_become_parameters() -> None:
    options: dict[str, Any] = dict.fromkeys(IGNORED_OPTIONS, 1)
    options |= {"temperature": 0, "min_p": 0.1, "top_k": 3, "min_tokens": 2, "seed": 7, "num_predict": 5, "stop": ["x"]}
    found = sent("chat", messages=[HI], options=options, keep_alive="5m", truncate=True)
    assert {name: found[name] for name in found if name not in ("messages", "stream")} == {
        "temperature": 0, "min_p": 0.1, "top_k": 3, "min_tokens": 2, "seed": 7, "max_tokens": 5, "stop": ["x"],
    }  # fmt: skip
    endless = sent("chat", messages=[HI], options={"num_predict": -1, "seed": -1, "stop": []})
    assert endless == {"messages": [HI], "stream": True}
    assert parsed("chat", messages=[HI], options={"num_predict": 9}).request.clamps_max_tokens


def test_format_and_think_become_fields_of_a_chat() -> None:
    found = sent("chat", messages=[HI], format={"type": "object"}, think=False)
    assert found["response_format"]["json_schema"]["schema"] == {"type": "object"}
    assert found["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False}
    found = sent("chat", messages=[HI], format="json", think="low", logprobs=True, top_logprobs=2)
    assert found["response_format"] == {"type": "json_object"}
    assert (found["reasoning_effort"], found["logprobs"], found["top_logprobs"]) == ("low", True, 2)


def test_images_become_parts() -> None:
    found = sent("chat", messages=[{**HI, "images": [PNG, f"data:image/jpeg;base64,{PNG}"]}])["messages"][0]["content"]
    assert [part.get("image_url", {}).get("url") for part in found] == [
        None, f"data:image/png;base64,{PNG}", f"data:image/jpeg;base64,{PNG}",
    ]  # fmt: skip
    found = sent("generate", prompt="look", images=["/9j/AAAA"])["messages"][0]["content"]
    assert found[1]["image_url"]["url"] == "data:image/jpeg;base64,/9j/AAAA"
    assert len(sent("chat", messages=[{"role": "user", "images": [PNG]}])["messages"][0]["content"]) == 1
    assert refused("chat", messages=[{**HI, "images": ["AAAA"]}])[0] == "messages[0].images[0]"


def test_tool_results_are_matched_to_their_calls() -> None:
    calls = [{"function": {"name": name, "arguments": {"at": 1}}} for name in ("look", "go")]
    turns = [
        HI,
        {"role": "assistant", "thinking": "hm", "tool_calls": [*calls, {**calls[0], "id": "own"}]},
        {"role": "tool", "tool_name": "go", "content": "gone"},
        {"role": "tool", "tool_call_id": "own", "content": "third"},
        {"role": "tool", "content": "seen"},
        {"role": "assistant", "content": "Done"},
    ]
    found = sent("chat", messages=turns, tools=[LOOK])
    assert found["tools"] == [LOOK]
    assistant = found["messages"][1]
    assert [call["id"] for call in assistant["tool_calls"]] == ["call_1_0", "call_1_1", "own"]
    assert (assistant["content"], assistant["reasoning_content"]) == (None, "hm")
    assert [turn["tool_call_id"] for turn in found["messages"][2:5]] == ["call_1_1", "own", "call_1_0"]
    assert refused("chat", messages=[HI, {"role": "tool", "content": "x"}])[0] == "messages[1]"
    assert refused("chat", messages=[*turns[:2], {"role": "tool", "tool_call_id": "no"}])[0] == "messages[2]"


def test_prompt_becomes_a_chat_or_is_completed_as_it_is() -> None:
    found = sent("generate", prompt="Why?", system="Be brief.")
    assert found["messages"] == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    raw = sent("generate", prompt="Why?", raw=True, stream=False, format="json")
    assert raw == {"prompt": "Why?", "max_tokens": -1, "stream": False, "json_schema": {"type": "object"}}
    assert sent("generate", prompt="a", raw=True, format={"type": "string"})["json_schema"] == {"type": "string"}
    filled = sent("generate", prompt="def", suffix="return", options={"num_predict": 4})
    assert (filled["suffix"], filled["max_tokens"]) == ("return", 4)
    assert parsed("generate", prompt="a", raw=True).request.endpoint is Endpoint.COMPLETIONS


def test_empty_request_loads_the_model() -> None:
    for found in (parsed("chat"), parsed("generate", keep_alive=-1), parsed("generate", prompt="", keep_alive="5m")):
        assert found.only_loads
        assert found.request.max_tokens == 1
    for duration in (0, "0", "0s"):
        param, message = refused("generate", keep_alive=duration)
        assert param == "keep_alive"
        assert "headgate unload" in message


def test_embeddings_of_both_forms() -> None:
    assert sent("embed", input=["a", "b"], dimensions=8, truncate=True) == {
        "input": ["a", "b"], "dimensions": 8, "encoding_format": "float",
    }  # fmt: skip
    assert sent("embeddings", prompt="a") == {"input": "a", "encoding_format": "float"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("chat", {"messages": [HI], "mesages": []}, "mesages"),
        ("chat", {"messages": [HI], "options": {"temprature": 1}}, "options.temprature"),
        ("chat", {"messages": [HI], "options": {"temperature": 9}}, "options.temperature"),
        ("chat", {"messages": [HI], "options": {"num_predict": 0}}, "options.num_predict"),
        ("chat", {"messages": [HI], "think": "deeply"}, "think"),
        ("chat", {"messages": [HI], "format": "xml"}, "format"),
        ("chat", {"messages": [HI], "keep_alive": []}, "keep_alive"),
        ("generate", {"prompt": "a", "template": "{{ .Prompt }}"}, "template"),
        ("generate", {"prompt": "a", "context": [1]}, "context"),
        ("generate", {"prompt": "a", "raw": True, "system": "b"}, "system"),
        ("generate", {"prompt": "a", "suffix": "b", "images": [PNG]}, "images"),
        ("embed", {"input": []}, "input"),
    ],
)
def test_refused_field_is_named(path: str, body: dict[str, Any], param: str) -> None:
    found, message = refused(path, **body)
    assert found == param
    assert param.rpartition(".")[2] in message


# --- answers ----------------------------------------------------------------------------------------------------------
class Clock:
    """Each reading is 5 ns later."""

    def __init__(self) -> None:
        self._elapsed = 0

    def now(self) -> str:
        return "now"

    def elapsed_nanoseconds(self) -> int:
        self._elapsed += 5
        return self._elapsed


USAGE = {"prompt_tokens": 20, "completion_tokens": 3}
CALL = {"id": "c", "function": {"name": "look", "arguments": '{"at": 1}'}}
SHOWN_CALL = {"id": "c", "function": {"name": "look", "arguments": {"at": 1}}}
LOGPROB = {"token": "a", "logprob": -1.0}


def how(shows: Any = ollama_answer.in_message, *, only_loads: bool = False) -> AnswerContext:
    return AnswerContext("demo", Clock(), shows, only_loads)


def frames(*choices: Mapping[str, Any]) -> list[Any]:
    chunks = [{"model": "mini", "choices": [choice]} for choice in choices] + [{"choices": [], "usage": USAGE}]
    return [Comment(b": x\n\n"), *(frame_of(json.dumps(chunk).encode()) for chunk in chunks)]


def lines(raw: bytes) -> list[Any]:
    return [json.loads(line) for line in raw.splitlines()]


def test_whole_answers() -> None:
    message = {"content": "a", "reasoning_content": "hm", "tool_calls": [CALL, {"function": {"name": "go"}}]}
    choice = {"message": message, "finish_reason": "tool_calls", "logprobs": {"content": [LOGPROB]}}
    answer = {"model": "mini", "choices": [choice], "usage": USAGE}
    assert ollama_answer.whole(answer, how()) == {
        "model": "mini",
        "created_at": "now",
        "message": {
            "role": "assistant", "content": "a", "thinking": "hm",
            "tool_calls": [SHOWN_CALL, {"function": {"name": "go", "arguments": {}}}],
        },
        "logprobs": [LOGPROB],
        "done": True,
        "done_reason": "stop",
        "total_duration": 5,
        "load_duration": 0,
        "prompt_eval_count": 20,
        "prompt_eval_duration": 5,
        "eval_count": 3,
        "eval_duration": 5,
    }  # fmt: skip
    plain = {"choices": [{"text": "b", "finish_reason": "length"}]}
    found = ollama_answer.whole(plain, how(ollama_answer.in_response))
    assert (found["model"], found["response"], found["done_reason"]) == ("demo", "b", "length")
    loaded = ollama_answer.whole(answer, how(only_loads=True))
    assert (loaded["message"]["content"], loaded["done_reason"]) == ("", "load")
    assert (loaded["load_duration"], "tool_calls" in loaded["message"]) == (5, False)


def test_streamed_chat_with_calls() -> None:
    first, second = {"index": 0, "id": "c", "function": {"name": "look"}}, {"index": 0, "function": {"arguments": "{}"}}
    writer = OllamaLines(how())
    raw = writer.write(
        frames(
            {"delta": {"role": "assistant"}},
            {"delta": {"reasoning_content": "hm"}},
            {"delta": {"content": "a"}, "logprobs": {"content": [LOGPROB]}},
            {"delta": {"tool_calls": [first, {"index": 1}]}},
            {"delta": {"tool_calls": [second]}, "finish_reason": "tool_calls"},
        )
    )
    thought, shown = lines(raw)
    assert thought["message"] == {"role": "assistant", "content": "", "thinking": "hm"}
    assert (shown["message"]["content"], shown["logprobs"], shown["done"]) == ("a", [LOGPROB], False)
    called, last = lines(writer.end())
    assert called["message"]["tool_calls"] == [{"id": "c", "function": {"name": "look", "arguments": {}}}]
    assert (last["model"], last["message"], last["done_reason"]) == (
        "mini",
        {"role": "assistant", "content": ""},
        "stop",
    )
    durations = {name: last[name] for name in last if name.endswith("duration")}
    assert durations == {"total_duration": 10, "load_duration": 0, "prompt_eval_duration": 5, "eval_duration": 5}
    assert (last["prompt_eval_count"], last["eval_count"]) == (20, 3)


def test_streamed_generation_load_and_error() -> None:
    writer = OllamaLines(how(ollama_answer.in_response))
    assert lines(writer.write(frames({"text": "a", "finish_reason": "length"})))[0]["response"] == "a"
    assert lines(writer.end())[0]["done_reason"] == "length"
    assert lines(writer.end_with_error(Code.MODEL_FAILED, "it broke")) == [{"error": "it broke"}]
    empty = OllamaLines(how())
    (last,) = lines(empty.end())
    assert (last["done_reason"], last["eval_duration"]) == ("stop", 0)
    loading = OllamaLines(how(only_loads=True))
    assert loading.write(frames({"delta": {"content": "a", "tool_calls": [{**CALL, "index": 0}]}})) == b""
    assert [line["done_reason"] for line in lines(loading.end())] == ["load"]


def test_embedding_answers_and_errors() -> None:
    answer = {"model": "mini", "data": [{"embedding": [1.0]}, {"embedding": [2.0]}], "usage": {"prompt_tokens": 4}}
    found = ollama_answer.embeddings(answer, how())
    assert (found["model"], found["embeddings"], found["prompt_eval_count"]) == ("mini", [[1.0], [2.0]], 4)
    assert ollama_answer.single_embedding(answer, how()) == {"embedding": [1.0]}
    assert ollama_answer.error_body(RequestError(Code.MODEL_NOT_FOUND, "unknown")) == {"error": "unknown"}
