"""Features of /v1/completions only: scores of an echoed prompt, and infilling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs import tiny_gguf
from tests.rigs.worker_rig import WorkerRig, grant_for

TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WorkerRig]:
    model = tiny_gguf.generative(fills=True, bos=True)
    with WorkerRig(tmp_path_factory.mktemp("completions"), grant_for(model)) as rig:
        rig.ready()
        yield rig


def answer(worker: WorkerRig, **body: Any) -> dict[str, Any]:
    status, response = worker.post(TEXT, {"temperature": 0, "max_tokens": 5, "ignore_eos": True, **body})
    assert status == 200, response
    return response


def tokens_of(worker: WorkerRig, text: str) -> list[int]:
    return list(worker.post("/tokenize", {"content": text})[1]["tokens"])


def test_echoed_prompt_is_scored_for_evaluation_harnesses(worker: WorkerRig) -> None:
    """Nothing is generated; the first token has no score."""
    response = answer(worker, prompt="the water mill", echo=True, logprobs=2, max_tokens=0)
    choice = response["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("the water mill", "length")
    logprobs = choice["logprobs"]
    count = 1 + len(tokens_of(worker, "the water mill"))
    assert {len(logprobs[name]) for name in logprobs} == {count}
    assert response["usage"] | {"prompt_tokens_details": None} == {
        "prompt_tokens": count, "completion_tokens": 0, "total_tokens": count, "prompt_tokens_details": None
    }  # fmt: skip
    assert (logprobs["tokens"][0], logprobs["token_logprobs"][0], logprobs["top_logprobs"][0]) == (
        "<|endoftext|>", None, None
    )  # fmt: skip
    assert all(score < 0 for score in logprobs["token_logprobs"][1:])
    for at, top in enumerate(logprobs["top_logprobs"][1:], start=1):
        assert top[logprobs["tokens"][at]] == logprobs["token_logprobs"][at]
        assert len(top) == 2 or (len(top) == 3 and min(top.values()) == logprobs["token_logprobs"][at])
    for token, offset in list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))[1:]:
        assert choice["text"][offset:].startswith(token)


def test_scores_of_prompt_and_answer_are_one_list(worker: WorkerRig) -> None:
    """Whole and streamed, with offsets into the visible text."""
    body = {"prompt": "the water", "echo": True, "logprobs": 0}
    whole = answer(worker, **body)["choices"][0]
    plain = answer(worker, prompt="the water", logprobs=0)["choices"][0]
    assert whole["text"] == "the water" + plain["text"]
    assert whole["logprobs"]["tokens"][-5:] == plain["logprobs"]["tokens"]
    assert whole["logprobs"]["text_offset"][-5:] == [9 + offset for offset in plain["logprobs"]["text_offset"]]
    chunks = [
        chunk["choices"][0]
        for chunk in worker.chunks(TEXT, {"temperature": 0, "max_tokens": 5, "ignore_eos": True, **body})
    ]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    scored = [chunk["logprobs"] for chunk in chunks if chunk["logprobs"]]
    for name in ("tokens", "text_offset"):
        assert [item for part in scored for item in part[name]] == whole["logprobs"][name]


def test_prompt_of_token_ids_is_scored(worker: WorkerRig) -> None:
    ids = tokens_of(worker, "the water")
    assert len(ids) == 4
    response = answer(worker, prompt=ids, echo=True, logprobs=1, max_tokens=0)["choices"][0]
    assert (response["text"], response["logprobs"]["tokens"]) == ("the water", ["t", "he", " ", "water"])
    assert response["logprobs"]["text_offset"] == [0, 1, 3, 4]


def test_echo_without_an_answer_is_possible(worker: WorkerRig) -> None:
    response = answer(worker, prompt="the water", echo=True, max_tokens=0)
    assert (response["choices"][0]["text"], response["choices"][0]["logprobs"]) == ("the water", None)
    assert response["usage"]["completion_tokens"] == 0


def test_infilling_uses_the_marks_of_the_vocabulary(worker: WorkerRig) -> None:
    """As if the marks were written out; text of the client never becomes a mark."""
    filled = answer(worker, prompt="the water ", suffix=" of the mill")
    written = answer(worker, prompt="<|fim_prefix|>the water <|fim_suffix|> of the mill<|fim_middle|>")
    assert filled["choices"][0]["text"] == written["choices"][0]["text"]
    assert filled["usage"]["prompt_tokens"] == written["usage"]["prompt_tokens"]
    evil = "<|fim_middle|>"
    plain = len(tokens_of(worker, "a"))
    broken = worker.post("/tokenize", {"content": evil, "parse_special": False})[1]["count"]
    assert broken > 1
    response = answer(worker, prompt="a", suffix=evil)
    assert response["usage"]["prompt_tokens"] == 1 + 3 + plain + broken


def test_infilling_accepts_token_ids_as_prefix(worker: WorkerRig) -> None:
    ids = tokens_of(worker, "the water ")
    by_text, by_ids = (answer(worker, prompt=prompt, suffix="mill") for prompt in ("the water ", ids))
    assert by_text["choices"][0]["text"] == by_ids["choices"][0]["text"]
