"""Answers embedding and reranking requests of models that pool."""

from __future__ import annotations

import asyncio
import math
import re
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson

from headgate.shared.bodies.body_decoder import decode
from headgate.shared.bodies.openai_bodies import EmbeddingRequest, RerankRequest
from inference.protocol import Code, context_overflow
from inference.worker.api import generation_body, response_writer
from inference.worker.api.body_intake import Intake, typed
from inference.worker.api.worker_exchange import Exchange
from inference.worker.backend import Vocabulary
from inference.worker.engine.embedder import Embedder, Vector, normalized
from inference.worker.engine.output_tickets import Ticket
from inference.worker.prompt.prompts import Prompts
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts

MAX_DOCUMENTS = 2048
MAX_TOKENS = 2**21
"""Limit of all pairs of a request together. Every document is combined with the query, so a small body can mean many
tokens. This number takes 8 MiB, and tokenizing takes one to two seconds.
"""
_read = partial(decode, type_=RerankRequest, path="")
_PLACE = re.compile(r"(\{query\}|\{document\})")


class PooledApi:
    """The two endpoints of a model that pools. Without `embedder` or `reranker` they refuse requests."""

    def __init__(
        self, facts: Facts, prompts: Prompts, intake: Intake, embedder: Embedder | None, reranker: Reranker | None
    ) -> None:
        self._facts = facts
        self._prompts = prompts
        self._intake = intake
        self._embedder = embedder
        self._reranker = reranker

    async def embeddings(self, exchange: Exchange) -> None:
        """POST /v1/embeddings."""
        arrival = time.monotonic()

        def decode(body: Any) -> tuple[EmbeddingRequest, list[array[int]]]:
            given, prompts = generation_body.embedding(body, self._facts)
            # Arrays take 4 bytes per token instead of 36 while the request waits.
            return given, [array("i", tokens) for tokens in self._prompts.embed(prompts)]

        given, inputs = await self._intake.decoded(exchange, decode)
        vectors = await self._pooled(exchange, inputs, arrival)
        if given.dimensions is not None:
            vectors = [normalized(values[: given.dimensions]) for values in vectors]
        tokens = sum(len(tokens) for tokens in inputs)
        as_base64 = given.encoding_format == "base64"
        await exchange.json_bytes(
            await self._intake.off_loop(
                lambda: response_writer.embeddings(self._facts.model_id, vectors, tokens, as_base64=as_base64)
            )
        )

    async def rerank(self, exchange: Exchange) -> None:
        """POST /v1/rerank."""
        arrival = time.monotonic()
        reranker = self._reranker
        generation_body.need_capability(self._facts, "rerank")
        assert reranker is not None, "models with the capability have a reranker"
        request = await self._intake.decoded(exchange, reranker.decode)
        outputs = await self._pooled(exchange, request.inputs, arrival)
        await exchange.json_bytes(await self._intake.off_loop(lambda: reranker.answer(request, outputs)))

    async def _pooled(self, exchange: Exchange, inputs: Sequence[Sequence[int]], arrival: float) -> list[np.ndarray]:
        """The output of the model for each input, in order."""
        embedder = self._embedder
        if embedder is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} does not support embeddings", "model", code=Code.UNSUPPORTED_PARAMETER
            )
        deadline, priority = exchange.deadline(arrival), exchange.priority()
        ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
        exchange.on_disconnect(ticket.leave)
        embedder.submit(inputs, ticket, deadline, priority)
        vectors: dict[int, np.ndarray] = {}
        try:
            while len(vectors) < len(inputs):
                for vector in await ticket.next():
                    if vector.error is not None:
                        raise vector.error
                    assert vector.values is not None
                    vectors[vector.index] = vector.values
        finally:
            embedder.abort(ticket)
        return [vectors[index] for index in range(len(inputs))]


@dataclass(frozen=True, slots=True)
class Ranking:
    """One token list per document, in order. `documents` are their texts if the response contains them."""

    inputs: Sequence[Sequence[int]]
    top_n: int
    documents: tuple[str, ...] | None = None


class Reranker:
    """Decodes requests and encodes responses for one model. Thread-safe.

    Without a template a pair has the form that cross-encoders are trained on: BOS, query, EOS and SEP as far as the
    vocabulary adds them, document, and the end (EOS, or SEP in vocabularies of BERT, which have no EOS).
    """

    def __init__(
        self, tokenizer: Vocabulary, facts: Facts, template: str | None, split: Callable[[str], list[str]]
    ) -> None:
        """`template` holds {query} and {document}; `split` cuts a text into pieces without texts of control tokens."""
        self._tokenizer = tokenizer
        self._facts = facts
        self._template = None if template is None else _PLACE.split(template)
        self._split = split

    def decode(self, body: Any) -> Ranking:
        """The request in a body; raises BadRequestError with `param`."""
        given = typed(body, _read, self._facts)
        if (count := len(given.documents)) > MAX_DOCUMENTS:
            raise BadRequestError(f"documents has {count} entries; at most {MAX_DOCUMENTS} are allowed", "documents")
        documents = tuple(item if isinstance(item, str) else item.text for item in given.documents)
        inputs = self._inputs(given.query, documents)
        return Ranking(inputs, given.top_n or count, documents if given.return_documents else None)

    def answer(self, request: Ranking, outputs: Sequence[np.ndarray]) -> bytes:
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
        for index, document in enumerate(documents):
            self._check_size(document, f"documents[{index}]", f"documents[{index}] with the query")
        if (least := len(documents) * len(self._tokenizer.tokenize(query))) > MAX_TOKENS:
            raise _too_many(f"at least {least}", len(documents))
        build = self._pair(query) if self._template is None else partial(self._rendered, self._template, query)
        inputs: list[Sequence[int]] = []
        total = 0
        for index, document in enumerate(documents):
            tokens = build(document)
            if len(tokens) > self._facts.context_length:
                at = f"documents[{index}]"
                raise self._too_long(f"{len(tokens)}", len(tokens), at, f"{at} with the query")
            total += len(tokens)
            if total > MAX_TOKENS:
                raise _too_many(f"more than {MAX_TOKENS}", len(documents))
            inputs.append(array("i", tokens))
        return inputs

    def _pair(self, query: str) -> Callable[[str], list[int]]:
        tokenizer = self._tokenizer
        eos = [tokenizer.eos] if tokenizer.adds_eos and tokenizer.eos is not None else []
        sep = [tokenizer.sep] if tokenizer.adds_sep and tokenizer.sep is not None else []
        spare = [token for token in (tokenizer.sep, tokenizer.eos) if token is not None][:1]
        head = [tokenizer.bos] if tokenizer.adds_bos and tokenizer.bos is not None else []
        head += tokenizer.tokenize(query) + ((eos + sep) or spare)
        tail = eos or sep
        return lambda document: head + tokenizer.tokenize(document) + tail

    def _rendered(self, template: Sequence[str], query: str, document: str) -> list[int]:
        """Pieces of texts contain no control token, also at their borders."""
        texts = {"{query}": query, "{document}": document}
        pieces = [""]
        for part in template:
            first, *rest = self._split(texts[part]) if part in texts else [part]
            pieces = [*pieces[:-1], pieces[-1] + first, *rest]
        return [token for piece in pieces for token in self._tokenizer.tokenize(piece, parse_special=True)]

    def _check_size(self, text: str, param: str, what: str) -> None:
        """Refuses a text that is too long for any tokenization, before it is tokenized."""
        longest = self._tokenizer.longest_piece
        if longest is not None and (least := len(text) // longest) > self._facts.context_length:
            raise self._too_long(f"at least {least}", least, param, what)

    def _too_long(self, tokens: str, count: int, param: str, what: str) -> BadRequestError:
        context = self._facts.context_length
        return BadRequestError(
            f"{context_overflow(context, f'{what} takes {tokens} tokens')} Shorten it.",
            param,
            code=Code.CONTEXT_LENGTH_EXCEEDED,
            details={"context_length": context, "prompt_tokens": count, "max_tokens": None},
        )


def _too_many(tokens: str, documents: int) -> BadRequestError:
    return BadRequestError(
        f"the query with each of {documents} documents takes {tokens} tokens; at most {MAX_TOKENS} are allowed, "
        "so send fewer documents",
        "documents",
    )


def _score(values: np.ndarray) -> float:
    first = float(values[0])
    if len(values) > 1:
        return first
    # The form of the sigmoid that cannot overflow.
    return 1.0 / (1.0 + math.exp(-first)) if first >= 0.0 else math.exp(first) / (1.0 + math.exp(first))
