"""Reranking limits query times documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from inference.worker.api.pooled_api import MAX_DOCUMENTS, MAX_TOKENS, Reranker
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

TEMPLATE = "query: {query}\ndocument: {document} judge"


@dataclass
class Words:
    """A token is a word with the white space before it."""

    seen: list[str] = field(default_factory=list)
    bos: int | None = None
    eos: int | None = 2
    sep: int | None = None
    adds_bos: bool = False
    adds_eos: bool = True
    adds_sep: bool = False
    longest_piece: int | None = None

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        self.seen.append(text)
        return [sum(map(ord, word)) for word in re.findall(r"\s*\S+", text)]


def reranker(words: Words, template: str | None = TEMPLATE, context: int = 100_000) -> Reranker:
    return Reranker(words, Facts("judge", context, 256, 8, ("rerank",)), template, lambda text: [text])


@pytest.mark.parametrize("template", [TEMPLATE, None], ids=["template", "pair"])
def test_query_times_documents_beyond_the_limit_is_refused_before_documents_are_tokenized(template: str | None) -> None:
    words = Words()
    long = "word " * (MAX_TOKENS // MAX_DOCUMENTS + 1)
    with pytest.raises(
        BadRequestError, match=f"at least {MAX_DOCUMENTS * 1025} tokens; at most {MAX_TOKENS}"
    ) as caught:
        reranker(words, template).decode({"query": long.strip(), "documents": ["d"] * MAX_DOCUMENTS})
    assert caught.value.param == "documents"
    assert len(words.seen) == 1


def test_documents_beyond_the_limit_are_refused_at_the_first_excess() -> None:
    class Letters(Words):
        def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
            self.seen.append(text)
            return [0] * len(text)

    words = Letters()
    with pytest.raises(BadRequestError, match=f"more than {MAX_TOKENS} tokens"):
        reranker(words, None).decode({"query": "q", "documents": ["d" * 2**16] * 100})
    assert words.seen.count("d" * 2**16) == MAX_TOKENS // 2**16
