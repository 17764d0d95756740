"""Answers embedding and reranking requests of models that pool."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from inference.protocol import Code
from inference.worker.api import generation_body, response_writer
from inference.worker.api.body_intake import Intake
from inference.worker.api.rerank_api import Reranker
from inference.worker.api.worker_exchange import Exchange
from inference.worker.engine.embedder import Embedder, Vector, normalized
from inference.worker.engine.output_tickets import Ticket
from inference.worker.prompt.prompts import Prompts
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import EmbeddingRequest, Facts


class Vectors:
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
            request = generation_body.embedding(body, self._facts)
            # Arrays take 4 bytes per token instead of 36 while the request waits.
            return request, [array("i", tokens) for tokens in self._prompts.embed(request)]

        request, inputs = await self._intake.decoded(exchange, decode)
        vectors = await self._pooled(exchange, inputs, arrival)
        if request.dimensions is not None:
            vectors = [normalized(values[: request.dimensions]) for values in vectors]
        tokens = sum(len(tokens) for tokens in inputs)
        await exchange.json_bytes(
            await self._intake.off_loop(
                lambda: response_writer.embeddings(self._facts.model_id, vectors, tokens, as_base64=request.as_base64)
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
