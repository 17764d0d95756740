"""Reranking tokenizes the query once and limits query times documents."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import pytest

from inference.worker.api.pooled_api import MAX_DOCUMENTS, MAX_TOKENS, Reranker
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

QUERY = "how does a gate hold water"
TEMPLATE = "query: {query}\ndocument: {document} judge"


@dataclass
class Words:
    """A token is a word with the white space before it; with `glued`, a letter that depends on the text before it."""

    has_words: bool = True
    glued: bool = False
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
        if self.glued:
            return [sum(map(ord, text[: end + 1])) for end in range(len(text))]
        return [sum(map(ord, word)) for word in re.findall(r"\s*\S+", text)]


def reranker(words: Words, template: str | None = TEMPLATE, context: int = 100_000) -> Reranker:
    return Reranker(words, Facts("judge", context, 256, 8, ("rerank",)), template, lambda text: [text])


def inputs(words: Words, documents: list[str], template: str | None = TEMPLATE) -> list[list[int]]:
    request = reranker(words, template).decode({"query": QUERY, "documents": documents})
    return [list(tokens) for tokens in request.inputs]


DOCUMENTS = ["the mill", "a gate", "water"]


def test_query_is_not_tokenized_for_every_document() -> None:
    few, many = Words(), Words()
    expected = [Words().tokenize(TEMPLATE.format(query=QUERY, document=text)) for text in DOCUMENTS]
    assert inputs(few, DOCUMENTS) == expected
    inputs(many, DOCUMENTS * 100)
    assert sum(QUERY in text for text in few.seen) == sum(QUERY in text for text in many.seen)


@pytest.mark.parametrize(
    ("words", "template"),
    [
        (Words(glued=True), TEMPLATE),
        (Words(has_words=False), TEMPLATE),
        (Words(), "{query}|{document}"),
        (Words(), "{document} {query}"),
        (Words(), "{query} only"),
    ],
    ids=["tokens depend on earlier text", "no words", "no white space", "query last", "no document"],
)
def test_query_that_cannot_be_tokenized_alone_is_tokenized_with_its_document(words: Words, template: str) -> None:
    whole = [template.format(query=QUERY, document=text) for text in DOCUMENTS]
    assert inputs(words, DOCUMENTS, template) == [Words(glued=words.glued).tokenize(text) for text in whole]


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
