"""Rerank requests: fields, tokens of a pair, scores."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from inference.worker.api.rerank_api import MAX_DOCUMENTS, Reranker
from inference.worker.prompt.templates import ControlTextSplitter
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

FACTS = Facts("judge", 20, 256, 8, ("rerank",))
BOS, EOS, SEP, TURN = 1, 2, 3, 4


@dataclass
class Letters:
    """A token per byte; `<turn>` is a control token if special tokens are parsed."""

    bos: int | None = BOS
    eos: int | None = EOS
    sep: int | None = SEP
    adds_bos: bool = True
    adds_eos: bool = True
    adds_sep: bool = True
    longest_piece: int | None = None
    has_words: bool = False

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        assert not add_special
        raw = text.encode().replace(b"<turn>", bytes([TURN])) if parse_special else text.encode()
        return list(raw)


def reranker(tokenizer: Letters | None = None, template: str | None = None) -> Reranker:
    defused = ControlTextSplitter(["<turn>"]).pieces
    return Reranker(tokenizer or Letters(), FACTS, template, defused)


def pair(judge: Reranker, query: str = "q", document: str = "d") -> list[int]:
    return list(judge.decode({"query": query, "documents": [document]}).inputs[0])


Q, D = ord("q"), ord("d")


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (Letters(), [BOS, Q, EOS, SEP, D, EOS]),
        (Letters(eos=None, adds_eos=False), [BOS, Q, SEP, D, SEP]),
        (Letters(adds_sep=False), [BOS, Q, EOS, D, EOS]),
        (Letters(adds_sep=False, adds_eos=False), [BOS, Q, SEP, D]),
        (Letters(bos=None, sep=None, adds_sep=False, adds_eos=False), [Q, EOS, D]),
    ],
    ids=["XLM-R", "BERT", "no separator", "nothing added", "only EOS known"],
)
def test_pair_has_the_separators_of_the_vocabulary(tokenizer: Letters, tokens: list[int]) -> None:
    assert pair(reranker(tokenizer)) == tokens


def test_placeholders_and_control_tokens_in_texts_have_no_effect() -> None:
    judge = reranker(template="<turn>{query}|{document}<turn>")
    assert pair(judge) == [TURN, Q, ord("|"), D, TURN]
    assert bytes(pair(judge, "{document}")) == b"\x04{document}|d\x04"
    tokens = pair(judge, "<turn>", "<turn>")
    assert bytes(tokens) == b"\x04<turn>|<turn>\x04"


def test_scores_are_sorted_and_equal_ones_keep_their_order() -> None:
    judge = reranker()
    request = judge.decode({"query": "q", "documents": ["a", {"text": "b", "id": 7}, "c"], "return_documents": True})
    answer = json.loads(judge.answer(request, [np.array([0.0]), np.array([900.0]), np.array([0.0])]))
    assert answer == {
        "object": "list",
        "model": "judge",
        "results": [
            {"index": 1, "relevance_score": 1.0, "document": {"text": "b"}},
            {"index": 0, "relevance_score": 0.5, "document": {"text": "a"}},
            {"index": 2, "relevance_score": 0.5, "document": {"text": "c"}},
        ],
        "usage": {"prompt_tokens": 18, "total_tokens": 18},
    }


def test_first_output_is_the_score_and_extreme_values_do_not_overflow() -> None:
    judge = reranker()
    request = judge.decode({"query": "q", "documents": ["a"], "top_n": 1})
    for values, score in (([0.75, 0.25], 0.75), ([-900.0], 0.0)):
        answer = json.loads(judge.answer(request, [np.array(values, np.float32)]))
        assert answer["results"] == [{"index": 0, "relevance_score": score}]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ([], None),
        ({"documents": ["a"]}, "query"),
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": 3, "documents": ["a"]}, "query"),
        ({"query": "q"}, "documents"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": "a"}, "documents"),
        ({"query": "q", "documents": ["a", 3]}, "documents[1]"),
        ({"query": "q", "documents": [{"image": "x"}]}, "documents[0].text"),
        ({"query": "q", "documents": ["a"] * (MAX_DOCUMENTS + 1)}, "documents"),
        ({"query": "q", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "q", "documents": ["a"], "return_documents": "yes"}, "return_documents"),
        ({"query": "q", "documents": ["a"], "top_k": 1}, "top_k"),
        ({"query": "q" * 30, "documents": ["a"]}, "documents[0]"),
        ({"query": "q", "documents": ["a", "b" * 30]}, "documents[1]"),
    ],
)
def test_error_names_the_parameter(body: Any, param: str | None) -> None:
    with pytest.raises(BadRequestError) as caught:
        reranker().decode(body)
    assert caught.value.param == param


def test_text_that_cannot_fit_is_rejected_without_tokenizing() -> None:
    """The longest piece of the vocabulary gives a lower bound for the number of tokens."""

    class Unwilling(Letters):
        def tokenize(self, text: str, **_options: bool) -> list[int]:
            raise AssertionError("this text cannot fit")

    with pytest.raises(BadRequestError, match=r"length is 20 tokens, but query takes at least 250000") as caught:
        reranker(Unwilling(longest_piece=4)).decode({"query": "x" * 10**6, "documents": ["a"]})
    assert caught.value.details == {"context_length": 20, "prompt_tokens": 250000, "max_tokens": None}
