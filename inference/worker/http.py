"""The worker's HTTP app on its Unix socket: routes, bodies, disconnects, streams; decides nothing about tokens.

Raw ASGI without authentication: the socket is the parent's, private to the user, and the services in front have checked
the caller. Headers it reads: request id, priority, tenant, deadline.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import orjson

from inference.protocol import (
    DONE,
    H_TENANT,
    PROGRESS_INTERVAL_SECONDS,
    Code,
    Progress,
)
from inference.worker import bodies, fields, heap, responses
from inference.worker.embedder import Embedder, Vector, normalized
from inference.worker.engine import Engine, Work
from inference.worker.errors import BadRequestError, UnloadedError, WorkerError
from inference.worker.exchange import Exchange, GoneError, Receive, Scope, Send, parse
from inference.worker.generation import Output
from inference.worker.messages import messages_of
from inference.worker.prompts import Prompts
from inference.worker.requests import EmbeddingRequest, Facts, GenerateRequest
from inference.worker.reranking import Reranker
from inference.worker.responses import Answer, Usage
from inference.worker.tickets import Ticket

log = logging.getLogger("headgate.worker.http")

BIG_BODY_BYTES = 2**18
"""Requests whose bodies are larger are read one after the other: what one takes while it is read is many times that."""
BODY_SECONDS = 30.0
"""For a body to arrive, and for the large ones before it to be read."""
MAX_TOKENIZED_CHARS = 2**20
MAX_DETOKENIZED = 2**20
MAX_LOGPROBS_BYTES = 2**25
"""Of an answer that is not streamed: it is held until it is whole."""
COMMIT_SECONDS = 1.0
"""How long a stream's status waits for the first output, so that a refusal can still be a status of its own."""
_PATIENCE_SECONDS = 3600.0
_PROGRESS_SECONDS = PROGRESS_INTERVAL_SECONDS * 0.75

T = TypeVar("T")


class App:
    """The ASGI app of one loaded model. `engine` generates or `embedder` pools; the other is None. `reranker` reads and
    writes for an embedder whose model ranks.
    """

    def __init__(
        self,
        facts: Facts,
        prompts: Prompts,
        detokenize: Callable[[list[int]], str],
        engine: Engine | None,
        embedder: Embedder | None,
        executor: Executor,
        *,
        reranker: Reranker | None = None,
    ) -> None:
        self.in_flight = 0
        self.draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._facts = facts
        self._prompts = prompts
        self._detokenize = detokenize
        self._engine = engine
        self._embedder = embedder
        self._reranker = reranker
        self._executor = executor
        self._reading_big = asyncio.Lock()
        self._routes: Mapping[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/completions": ("POST", self._completion),
            "/v1/embeddings": ("POST", self._embeddings),
            "/v1/rerank": ("POST", self._rerank),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenized),
            "/livez": ("GET", self._livez),
        }

    async def drained(self) -> None:
        """Returns once no request is being answered."""
        await self._idle.wait()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI exchange."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        self.in_flight += 1
        self._idle.clear()
        try:
            await self._answer(exchange)
        except GoneError:
            log.info("client left request_id=%s", exchange.request_id)
        finally:
            exchange.close()
            if exchange.announced_bytes > BIG_BODY_BYTES:
                self._executor.submit(heap.trim)
            self.in_flight -= 1
            if self.in_flight == 0:
                self._idle.set()

    async def _answer(self, exchange: Exchange) -> None:
        try:
            method, handler = self._routes.get(exchange.path, ("", None))
            if handler is None:
                raise WorkerError(Code.NOT_FOUND, f"there is nothing at {exchange.path}")
            if exchange.method != method:
                raise WorkerError(Code.METHOD_NOT_ALLOWED, f"{exchange.path} takes {method} only")
            if self.draining and method == "POST":
                raise UnloadedError
            await handler(exchange)
        except WorkerError as error:
            await exchange.fail(error)
        except (GoneError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request failed request_id=%s", exchange.request_id)
            await exchange.fail(WorkerError(Code.INTERNAL_ERROR, "the model server failed on this request"))

    # --- endpoints ---------------------------------------------------------------------------------------------------
    async def _livez(self, exchange: Exchange) -> None:
        await exchange.json(orjson.dumps({"status": "draining" if self.draining else "ok"}))

    async def _chat(self, exchange: Exchange) -> None:
        await self._generate(exchange, bodies.chat)

    async def _completion(self, exchange: Exchange) -> None:
        await self._generate(exchange, bodies.completion)

    async def _generate(self, exchange: Exchange, read: Callable[[Any, Facts], GenerateRequest]) -> None:
        arrival = time.monotonic()

        def understand(body: Any) -> tuple[GenerateRequest, list[list[int]], int]:
            request = read(body, self._facts)
            prompts, most = self._prompts.generate(request)
            # What was understood is held for as long as the answer takes; the texts are not needed any more.
            return replace(request, messages=(), prompts=request.prompts if request.echo else ()), prompts, most

        request, prompts, most = await self._understood(exchange, understand)
        engine = self._engine
        if engine is None:
            raise BadRequestError(f"model {self._facts.model_id!r} does not generate text", "model")
        deadline = exchange.deadline(arrival)
        work = Work(
            prompts=prompts,
            n=request.n,
            sampling=request.sampling,
            max_tokens=most,
            stops=request.stops,
            logprobs=request.logprobs,
            tenant=exchange.header(H_TENANT),
            priority=exchange.priority(),
            deadline=deadline,
        )
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        exchange.on_disconnect(ticket.leave)
        engine.submit(work, ticket)
        try:
            if request.stream:
                await self._stream(exchange, request, work, ticket, engine)
            else:
                await self._whole(exchange, request, work, ticket)
        finally:
            engine.abort(ticket)

    async def _whole(self, exchange: Exchange, request: GenerateRequest, work: Work, ticket: Ticket[Output]) -> None:
        echoes = self._echoes(request, work) or [""] * (len(work.prompts) * work.n)
        answers = [Answer(request.kind, text) for text in echoes]
        unfinished = len(answers)
        while unfinished:
            for output in await _next(ticket):
                if output.error is not None:
                    raise output.error
                answers[output.choice].add(output)
                unfinished -= output.finish is not None
            if sum(answer.logprobs.size_bytes for answer in answers) > MAX_LOGPROBS_BYTES:
                raise BadRequestError(
                    f"the log probabilities of this answer are more than {MAX_LOGPROBS_BYTES} bytes; stream it, or ask "
                    "for fewer alternatives, choices or tokens",
                    "top_logprobs" if request.kind == "chat" else "logprobs",
                )
        usage = _usage(work, {index: (answer.tokens, answer.cached) for index, answer in enumerate(answers)})
        await exchange.json(
            responses.whole(
                request.kind,
                self._facts.model_id,
                int(time.time()),
                answers,
                usage,
                with_logprobs=request.logprobs is not None,
            )
        )

    async def _stream(
        self, exchange: Exchange, request: GenerateRequest, work: Work, ticket: Ticket[Output], engine: Engine
    ) -> None:
        stream = responses.Stream(
            request.kind,
            self._facts.model_id,
            int(time.time()),
            with_usage=request.include_usage,
            echo=self._echoes(request, work),
        )
        counts = dict.fromkeys(range(len(work.prompts) * work.n), (0, 0))
        unfinished = len(counts)
        outputs = await ticket.take(COMMIT_SECONDS)
        seen: tuple[int, Progress | None] | None = None
        while unfinished:
            if ticket.gone:
                raise GoneError
            frames: list[bytes] = []
            for output in outputs:
                if output.error is not None:
                    if not exchange.begun and not frames:
                        raise output.error
                    await exchange.chunk(b"".join(frames) + responses.error_frame(output.error))
                    await exchange.end()
                    return
                counts[output.choice] = (output.tokens, output.cached)
                unfinished -= output.finish is not None
                frames.append(stream.frames(output))
            if not outputs:
                # Silence is only explained while the engine moves: a hung one must look hung.
                now = (engine.pulse.steps, ticket.progress)
                if now != seen:
                    seen = now
                    frames.append((ticket.progress or Progress("queued", 1)).frame())
            if not exchange.begun:
                await exchange.begin_stream()
            if frames:
                await exchange.chunk(b"".join(frames))
            if unfinished:
                outputs = await ticket.take(_PROGRESS_SECONDS)
        last = stream.usage(_usage(work, counts)) if request.include_usage else b""
        await exchange.chunk(last + DONE)
        await exchange.end()

    def _echoes(self, request: GenerateRequest, work: Work) -> list[str]:
        """What each choice begins with when a completion echoes its prompt; empty otherwise."""
        if not request.echo:
            return []
        texts = [prompt if isinstance(prompt, str) else self._detokenize(list(prompt)) for prompt in request.prompts]
        return [text for text in texts for _choice in range(work.n)]

    async def _embeddings(self, exchange: Exchange) -> None:
        arrival = time.monotonic()

        def understand(body: Any) -> tuple[EmbeddingRequest, list[list[int]]]:
            request = bodies.embedding(body, self._facts)
            return request, self._prompts.embed(request)

        request, inputs = await self._understood(exchange, understand)
        vectors = await self._pooled(exchange, inputs, arrival)
        if request.dimensions is not None:
            vectors = [normalized(values[: request.dimensions]) for values in vectors]
        tokens = sum(len(tokens) for tokens in inputs)
        await exchange.json(
            await self._off_loop(
                lambda: responses.embeddings(self._facts.model_id, vectors, tokens, as_base64=request.as_base64)
            )
        )

    async def _rerank(self, exchange: Exchange) -> None:
        arrival = time.monotonic()
        reranker = self._reranker
        if reranker is None:
            raise BadRequestError(f"model {self._facts.model_id!r} does not rerank; ask a reranking model", "model")
        request = await self._understood(exchange, reranker.understand)
        outputs = await self._pooled(exchange, request.inputs, arrival)
        await exchange.json(await self._off_loop(lambda: reranker.answer(request, outputs)))

    async def _pooled(self, exchange: Exchange, inputs: Sequence[Sequence[int]], arrival: float) -> list[np.ndarray]:
        """What the model says to each input, in their order."""
        embedder = self._embedder
        if embedder is None:
            raise BadRequestError(f"model {self._facts.model_id!r} gives no embeddings", "model")
        deadline = exchange.deadline(arrival)
        ticket: Ticket[Vector] = Ticket(asyncio.get_running_loop())
        exchange.on_disconnect(ticket.leave)
        embedder.submit(inputs, ticket, deadline)
        vectors: dict[int, np.ndarray] = {}
        try:
            while len(vectors) < len(inputs):
                for vector in await _next(ticket):
                    if vector.error is not None:
                        raise vector.error
                    assert vector.values is not None
                    vectors[vector.index] = vector.values
        finally:
            embedder.abort(ticket)
        return [vectors[index] for index in range(len(inputs))]

    async def _tokenize(self, exchange: Exchange) -> None:
        await exchange.json(await self._understood(exchange, self._tokens_of))

    def _tokens_of(self, body: Any) -> bytes:
        if not isinstance(body, dict):
            raise BadRequestError("the body must be a JSON object")
        for name in body:
            if name not in ("content", "messages", "add_special", "parse_special", "chat_template_kwargs", "model"):
                raise BadRequestError(f"unknown field {name[:80]!r}", name[:80])
        if "messages" in body:
            tokens = self._prompts.chat(messages_of(body["messages"]), fields.mapping(body, "chat_template_kwargs"))
        else:
            content = body.get("content")
            if not isinstance(content, str):
                raise BadRequestError("content must be a string (or send messages)", "content")
            if len(content) > MAX_TOKENIZED_CHARS:
                raise BadRequestError(
                    f"content has {len(content)} characters; at most {MAX_TOKENIZED_CHARS} are tokenized at once",
                    "content",
                )
            tokens = self._prompts.text(
                content,
                add_special=fields.boolean(body, "add_special", False),
                parse_special=fields.boolean(body, "parse_special", True),
            )
        return orjson.dumps({"tokens": tokens, "count": len(tokens)})

    async def _detokenized(self, exchange: Exchange) -> None:
        await exchange.json(await self._understood(exchange, self._text_of))

    def _text_of(self, body: Any) -> bytes:
        tokens = body.get("tokens") if isinstance(body, dict) else None
        if not isinstance(tokens, list):
            raise BadRequestError("tokens must be a list of token ids", "tokens")
        if len(tokens) > MAX_DETOKENIZED:
            raise BadRequestError(f"tokens has {len(tokens)} entries; at most {MAX_DETOKENIZED} are allowed", "tokens")
        ids = bodies.prompts_of([tokens], "tokens", self._facts, 1)[0] if tokens else ()
        return orjson.dumps({"content": self._detokenize(list(map(int, ids)))})

    # --- bodies ------------------------------------------------------------------------------------------------------
    async def _understood(self, exchange: Exchange, understand: Callable[[Any], T]) -> T:
        """What `understand` makes of the body's JSON, off the event loop; large bodies one after the other."""
        if exchange.announced_bytes <= BIG_BODY_BYTES:
            return await self._read(exchange, understand)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                await self._reading_big.acquire()
        except TimeoutError:
            raise WorkerError(
                Code.QUEUE_FULL, "this model reads other large requests; ask again", retry_after=1.0
            ) from None
        try:
            return await self._read(exchange, understand)
        finally:
            self._reading_big.release()

    async def _read(self, exchange: Exchange, understand: Callable[[Any], T]) -> T:
        try:
            async with asyncio.timeout(BODY_SECONDS):
                parts = await exchange.body()
        except TimeoutError:
            raise BadRequestError(f"the body did not arrive within {BODY_SECONDS:g} s") from None

        def work() -> T:
            raw = b"".join(parts)
            parts.clear()
            body = parse(raw)
            del raw
            return understand(body)

        return await self._off_loop(work)

    async def _off_loop(self, function: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)


async def _next(ticket: Ticket[T]) -> list[T]:
    """Outputs, however long they take: the engine ends every request. Raises when the client left."""
    outputs = await ticket.take(_PATIENCE_SECONDS)
    if ticket.gone:
        raise GoneError
    return outputs


def _usage(work: Work, counts: Mapping[int, tuple[int, int]]) -> Usage:
    """Prompts count once each, answers all."""
    return Usage(
        prompt=sum(len(prompt) for prompt in work.prompts),
        completion=sum(tokens for tokens, _cached in counts.values()),
        cached=sum(counts[index * work.n][1] for index in range(len(work.prompts))),
    )
