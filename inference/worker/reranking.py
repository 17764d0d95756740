"""Turns a /v1/rerank body into one token list per document, and scores into the answer; never computes a score."""

from __future__ import annotations

import difflib
import math
import re
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import orjson

from inference.protocol import Code
from inference.worker import fields
from inference.worker.errors import BadRequestError
from inference.worker.requests import Facts

MAX_DOCUMENTS = 2048
_FIELDS = ("model", "query", "documents", "top_n", "return_documents", "user")
_PLACE = re.compile(r"(\{query\}|\{document\})")


class PairTokenizer(Protocol):
    """What a pair of texts needs of a vocabulary."""

    @property
    def bos(self) -> int | None:
        """Beginning of a text (CLS)."""
        ...

    @property
    def eos(self) -> int | None:
        """End of a text."""
        ...

    @property
    def sep(self) -> int | None:
        """Separator of two texts."""
        ...

    @property
    def adds_bos(self) -> bool:
        """Whether a text begins with BOS."""
        ...

    @property
    def adds_eos(self) -> bool:
        """Whether a text ends with EOS."""
        ...

    @property
    def adds_sep(self) -> bool:
        """Whether SEP stands between two texts."""
        ...

    @property
    def longest_piece(self) -> int | None:
        """Most bytes one token can stand for, None when unknown."""
        ...

    def tokenize(self, text: str, *, add_special: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of a text."""
        ...


@dataclass(frozen=True, slots=True)
class RerankRequest:
    """One token list per document, in their order. `documents` are their texts if the answer is to hold them."""

    inputs: Sequence[Sequence[int]]
    top_n: int
    documents: tuple[str, ...] | None = None


class Reranker:
    """Reads requests and writes answers for one model. Thread-safe.

    Without a template a pair is what cross-encoders were trained on: BOS, query, EOS and SEP as far as the vocabulary
    adds them, document, and the end (EOS, or SEP in vocabularies of BERT, which have no EOS).
    """

    def __init__(
        self, tokenizer: PairTokenizer, facts: Facts, template: str | None, defused: Callable[[str], list[str]]
    ) -> None:
        """`template` holds {query} and {document}; `defused` cuts a text so that no piece spells a control token."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._template = None if template is None else _PLACE.split(template)
        self._defused = defused

    def understand(self, body: Any) -> RerankRequest:
        """The request in a body; raises BadRequestError with `param`."""
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        for name in body:
            if name not in _FIELDS:
                close = difflib.get_close_matches(name[:80], _FIELDS, 1)
                hint = f"; did you mean {close[0]}?" if close else ""
                raise BadRequestError(f"unknown field {name[:80]!r}{hint}", name[:80])
        query = body.get("query")
        if not isinstance(query, str) or not query:
            raise BadRequestError("query is required: what the documents are held against, as text", "query")
        documents = _documents(body.get("documents"))
        top_n = fields.integer(body, "top_n", None, 1)
        keeps = fields.boolean(body, "return_documents", False)
        inputs = self._inputs(query, documents)
        return RerankRequest(inputs, len(documents) if top_n is None else top_n, documents if keeps else None)

    def answer(self, request: RerankRequest, outputs: Sequence[np.ndarray]) -> bytes:
        """The response: the `top_n` best documents, best first, those with the same score in their order.

        A score is from 0 to 1: the sigmoid of a head's single answer, or the first of two that add up to 1.
        """
        scores = [_score(values) for values in outputs]
        ranked = sorted(range(len(scores)), key=lambda index: (-scores[index], index))[: request.top_n]
        results: list[dict[str, Any]] = []
        for index in ranked:
            result: dict[str, Any] = {"index": index, "relevance_score": scores[index]}
            if request.documents is not None:
                result["document"] = {"text": request.documents[index]}
            results.append(result)
        tokens = sum(map(len, request.inputs))
        return orjson.dumps(
            {
                "object": "list",
                "model": self._facts.model_id,
                "results": results,
                "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            }
        )

    def _inputs(self, query: str, documents: Sequence[str]) -> list[Sequence[int]]:
        self._check_size(query, "query", "query")
        build = self._pair(query) if self._template is None else self._rendered(query)
        inputs: list[Sequence[int]] = []
        for index, document in enumerate(documents):
            at = f"documents[{index}]"
            self._check_size(document, at, f"{at} with the query")
            tokens = build(document)
            if len(tokens) > self._facts.context_length:
                raise self._too_long(f"{len(tokens)}", len(tokens), at, f"{at} with the query")
            inputs.append(array("i", tokens))
        return inputs

    def _pair(self, query: str) -> Callable[[str], list[int]]:
        said = self._tokenizer
        eos = [said.eos] if said.adds_eos and said.eos is not None else []
        sep = [said.sep] if said.adds_sep and said.sep is not None else []
        spare = [token for token in (said.sep, said.eos) if token is not None][:1]
        head = [said.bos] if said.adds_bos and said.bos is not None else []
        head += said.tokenize(query) + ((eos + sep) or spare)
        tail = eos or sep
        return lambda document: head + said.tokenize(document) + tail

    def _rendered(self, query: str) -> Callable[[str], list[int]]:
        assert self._template is not None
        template = self._template

        def build(document: str) -> list[int]:
            texts = {"{query}": query, "{document}": document}
            pieces = [""]
            for part in template:
                first, *rest = self._defused(texts[part]) if part in texts else [part]
                pieces = [*pieces[:-1], pieces[-1] + first, *rest]
            return [token for piece in pieces for token in self._tokenizer.tokenize(piece, parse_special=True)]

        return build

    def _check_size(self, text: str, param: str, what: str) -> None:
        """Refuses a text that cannot fit whatever its tokens are, before time is spent on tokenizing it."""
        longest = self._tokenizer.longest_piece
        if longest is not None and (least := len(text) // longest) > self._facts.context_length:
            raise self._too_long(f"at least {least}", least, param, what)

    def _too_long(self, tokens: str, count: int, param: str, what: str) -> BadRequestError:
        context = self._facts.context_length
        return BadRequestError(
            f"this model's context holds {context} tokens, and {what} takes {tokens} tokens; shorten it",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": count, "max_tokens": None},
        )


def _documents(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not value:
        raise BadRequestError("documents must be a non-empty list of texts", "documents")
    if len(value) > MAX_DOCUMENTS:
        raise BadRequestError(f"documents has {len(value)} entries; at most {MAX_DOCUMENTS} are allowed", "documents")
    return tuple(_document(item, f"documents[{index}]") for index, item in enumerate(value))


def _document(item: Any, at: str) -> str:
    text = item.get("text") if isinstance(item, dict) else item
    if not isinstance(text, str):
        raise BadRequestError(f'{at} must be a text, or an object such as {{"text": "..."}}', at)
    return text


def _score(values: np.ndarray) -> float:
    first = float(values[0])
    if len(values) > 1:
        return first
    # The form of the sigmoid that cannot overflow.
    return 1.0 / (1.0 + math.exp(-first)) if first >= 0.0 else math.exp(first) / (1.0 + math.exp(first))
