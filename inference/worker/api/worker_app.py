"""The worker's HTTP app on its Unix socket: routes, requests, streams.

Plain ASGI without authentication: the socket is private to the user, and the services in front have checked the client.
The app reads the headers for request id, priority, tenant, KV hint, prefix labels, deadline, stream interval and trace.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from typing import Any

from headgate.shared.asgi import Receive, Scope, Send, error_frame
from headgate.shared.parameters import Sampling
from headgate.shared.traces.trace_context import TRACEPARENT
from inference.protocol import (
    DONE,
    H_TENANT,
    PROGRESS_INTERVAL_SECONDS,
    Code,
    Progress,
)
from inference.worker.answers.answer_shape import Shape
from inference.worker.answers.generation import Output
from inference.worker.api import generation_body, response_writer
from inference.worker.api.body_intake import Intake
from inference.worker.api.kv_api import KvApi
from inference.worker.api.pooled_api import PooledApi, Reranker
from inference.worker.api.response_writer import NO_ECHO, Answer, Echo, Usage
from inference.worker.api.tokenize_api import TokenizeApi
from inference.worker.api.worker_exchange import MAX_STREAM_INTERVAL_SECONDS, Exchange
from inference.worker.backend import Constraint
from inference.worker.constraints import FormQueue
from inference.worker.engine.embedder import Embedder
from inference.worker.engine.engine import Engine
from inference.worker.engine.engine_work import Work
from inference.worker.engine.output_tickets import Ticket
from inference.worker.kv.sequence_control import SequenceControl
from inference.worker.prompt.prompts import Prepared, Prompts
from inference.worker.prompt.vision import Vision
from inference.worker.worker_errors import BadRequestError, GoneError, UnloadedError, WorkerError
from inference.worker.worker_requests import Facts, GenerateRequest
from inference.worker_link import Timings

log = logging.getLogger("headgate.worker.http")

MAX_LOGPROBS_BYTES = 2**25
"""Limit for answers that are not streamed, which are held until they are complete."""
MAX_TIMINGS = 1000
"""Traced requests between two heartbeats; the times of more are lost."""
COMMIT_SECONDS = 1.0
"""Time that a stream waits for its first output before it sends its status, so that a refusal has its own status."""
_PROGRESS_SECONDS = PROGRESS_INTERVAL_SECONDS * 0.75


class App:
    """The ASGI app of one loaded model. `engine` generates or `embedder` pools; the other is None. `reranker` decodes
    requests and encodes answers of `/v1/rerank`, `forms` compiles required forms of answers, `vision` reads images.
    `prepare_sampling` does the slow part of creating a sampler before the request reaches the engine, on neither the
    event loop nor the engine's thread. `control` lists, clears and pins sequences.
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
        forms: FormQueue | None = None,
        vision: Vision | None = None,
        prepare_sampling: Callable[[Sampling], None] = lambda _sampling: None,
        control: SequenceControl | None = None,
    ) -> None:
        self.in_flight = 0
        self.draining = False
        self.timings: deque[Timings] = deque(maxlen=MAX_TIMINGS)
        """Of traced requests that have ended; the reader removes them."""
        self._idle = asyncio.Event()
        self._idle.set()
        self._facts = facts
        self._prompts = prompts
        self._detokenize = detokenize
        self._engine = engine
        self._vision = vision
        self._intake = Intake(executor)
        self._prepare_sampling = prepare_sampling
        self._tokenize_api = TokenizeApi(facts, prompts, detokenize)
        pooled = PooledApi(facts, prompts, self._intake, embedder, reranker)
        kv = KvApi(control, self._intake)
        self._forms = forms
        self._routes: Mapping[str, tuple[str, Callable[[Exchange], Awaitable[None]]]] = {
            "/v1/chat/completions": ("POST", partial(self._generate, generation_body.chat)),
            "/v1/completions": ("POST", partial(self._generate, generation_body.completion)),
            "/v1/embeddings": ("POST", pooled.embeddings),
            "/v1/rerank": ("POST", pooled.rerank),
            "/tokenize": ("POST", self._post_tokenize),
            "/detokenize": ("POST", self._post_detokenize),
            "/kv/sequences": ("GET", kv.show),
            "/kv/clear": ("POST", kv.clear),
            "/kv/pin": ("POST", kv.pin),
            "/livez": ("GET", self._livez),
        }

    async def drained(self) -> None:
        """Returns once no request is being answered."""
        await self._idle.wait()

    def set_idle(self) -> None:
        """Marks the worker as idle."""
        self._idle.set()
        if self._forms is not None and not self.draining:
            self._forms.idle()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI exchange."""
        if scope["type"] != "http":
            return
        exchange = Exchange(scope, receive, send)
        self.in_flight += 1
        self._idle.clear()
        if self._forms is not None:
            self._forms.busy()
        try:
            await self._answer(exchange)
        except GoneError:
            log.info("request %s: the client disconnected", exchange.request_id)
        finally:
            exchange.close()
            self._intake.done(exchange)
            self.in_flight -= 1
            if self.in_flight == 0:
                self.set_idle()

    async def _answer(self, exchange: Exchange) -> None:
        try:
            method, handler = self._routes.get(exchange.path, ("", None))
            if handler is None:
                raise WorkerError(Code.NOT_FOUND, f"unknown path {exchange.path}")
            if exchange.method != method:
                raise WorkerError(Code.METHOD_NOT_ALLOWED, f"{exchange.path} accepts only {method}")
            if self.draining and method == "POST":
                raise UnloadedError
            await handler(exchange)
        except WorkerError as error:
            await exchange.fail(error)
        except (GoneError, asyncio.CancelledError):
            raise
        except Exception:
            log.exception("request %s failed: internal error", exchange.request_id)
            await exchange.fail(WorkerError(Code.INTERNAL_ERROR, "internal error of the model server"))

    # --- endpoints ---------------------------------------------------------------------------------------------------
    async def _livez(self, exchange: Exchange) -> None:
        await exchange.json(200, {"status": "draining" if self.draining else "ok"})

    async def _generate(self, read: Callable[[Any, Facts], GenerateRequest], exchange: Exchange) -> None:
        arrival = time.monotonic()

        def decode(body: Any) -> tuple[GenerateRequest, Prepared | None]:
            request = read(body, self._facts)
            if request.images:
                return request, None
            prepared = self._prompts.generate(request)
            self._prepare_sampling(request.sampling)
            return _without_inputs(request), prepared

        request, prepared = await self._intake.decoded(exchange, decode)
        ticket: Ticket[Output] = Ticket(asyncio.get_running_loop())
        exchange.on_disconnect(ticket.leave)
        if prepared is not None:
            await self._run(exchange, request, prepared, ticket, arrival)
            return
        vision = self._vision
        assert vision is not None, "requests with images are refused without a projector"

        def read_images() -> Prepared:
            prepared = self._prompts.generate(request)
            self._prepare_sampling(request.sampling)
            vision.encode(prepared.images, "messages")
            return prepared

        async with vision.place(exchange.deadline(arrival), sum(map(len, request.images))) as release_files:
            if ticket.gone:
                raise GoneError
            prepared = await vision.off_loop(read_images, exchange.header(H_TENANT))
            request = _without_inputs(request)
            release_files()
            await self._run(exchange, request, prepared, ticket, arrival)

    async def _run(
        self,
        exchange: Exchange,
        request: GenerateRequest,
        prepared: Prepared,
        ticket: Ticket[Output],
        arrival: float,
    ) -> None:
        deadline = exchange.deadline(arrival)
        constraint = await self._compiled(prepared.shape, ticket, deadline)
        if ticket.gone:
            raise GoneError
        engine = self._engine
        if engine is None:
            raise BadRequestError(
                f"model {self._facts.model_id!r} does not generate text", "model", code=Code.UNSUPPORTED_PARAMETER
            )
        work = Work(
            prompts=prepared.prompts,
            n=request.n,
            sampling=request.sampling,
            max_tokens=prepared.max_tokens,
            stops=request.stops,
            logprobs=request.logprobs,
            tenant=exchange.header(H_TENANT)
            if request.shares_cache
            else uuid.uuid4().hex,  # prefixes are shared within a tenant
            priority=exchange.priority(),
            deadline=deadline,
            reading=prepared.shape.reading,
            constraint=constraint,
            score_prompt=request.score_prompt,
            prefix=prepared.prefix,
            kv=exchange.kv_hint(),
            labels=exchange.prefix_labels() if request.shares_cache and len(prepared.prompts) == 1 else (),
            speculates=request.sampling.seed is None,  # a seeded answer repeats to the byte; proposals depend on timing
            max_delay_seconds=exchange.stream_interval() if request.stream else MAX_STREAM_INTERVAL_SECONDS,
        )
        ticket.held = prepared.images
        queued = time.monotonic()
        engine.submit(work, ticket)
        usage: Usage | None = None
        try:
            answer = self._stream if request.stream else self._whole
            usage = await answer(exchange, request, work, ticket)
        finally:
            engine.abort(ticket)
            if traceparent := exchange.header(TRACEPARENT):
                self.timings.append(_timings(traceparent, arrival, queued, ticket, usage or _usage(work, {})))

    async def _whole(self, exchange: Exchange, request: GenerateRequest, work: Work, ticket: Ticket[Output]) -> Usage:
        echoes = await self._echoes(request, work) or [NO_ECHO] * (len(work.prompts) * work.n)
        answers = [Answer(request.kind, echo) for echo in echoes]
        unfinished = len(answers)
        while unfinished:
            for output in await ticket.next():
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
        counts = {
            index: (answer.tokens, answer.cached, answer.reasoning_tokens) for index, answer in enumerate(answers)
        }
        usage = _usage(work, counts)
        await exchange.json_bytes(
            response_writer.whole(
                request.kind,
                self._facts.model_id,
                int(time.time()),
                answers,
                usage,
                with_logprobs=request.logprobs is not None,
            )
        )
        return usage

    async def _stream(self, exchange: Exchange, request: GenerateRequest, work: Work, ticket: Ticket[Output]) -> Usage:
        engine = self._engine
        assert engine is not None, "requests without an engine are refused"
        stream = response_writer.Stream(
            request.kind,
            self._facts.model_id,
            int(time.time()),
            with_usage=request.include_usage,
            prompt_tokens=_usage(work, {}).prompt if request.prompt_usage else None,
            choices=len(work.prompts) * work.n,
            echo=await self._echoes(request, work),
            has_parts=work.reading is not None,
        )
        counts = dict.fromkeys(range(len(work.prompts) * work.n), (0, 0, 0))
        unfinished = len(counts)

        def restores() -> bytes:
            """The SSE comments about sequences that were restored since the last call."""
            frames = b""
            while ticket.restored:  # removed one by one, because the engine may add others
                frames += ticket.restored.pop(0).frame()
            return frames

        def pass_on(output: Output) -> bool:
            """Sends text at once. Ends of choices and errors are left to the loop below."""
            if output.finish is not None or output.error is not None or not exchange.takes_pieces:
                return False
            exchange.piece(restores() + stream.frames(output))
            return True

        ticket.on_arrival = pass_on
        outputs = await ticket.take(COMMIT_SECONDS)
        seen: tuple[int, Progress | None] | None = None
        while unfinished:
            if ticket.gone:
                raise GoneError
            frames: list[bytes] = []
            for output in outputs:
                if output.error is not None:
                    if not exchange.started and not frames:
                        raise output.error
                    await exchange.begin_stream()
                    await exchange.data(b"".join(frames) + error_frame(output.error))
                    await exchange.end()
                    return _usage(work, counts)
                counts[output.choice] = (output.tokens, output.cached, output.reasoning_tokens)
                unfinished -= output.finish is not None
                frames.append(restores() + stream.frames(output))
            if not outputs:
                # Progress is reported only while the engine computes or advances, so that a hung engine is detected.
                now = (engine.counters.steps, ticket.progress)
                if now != seen or engine.counters.is_computing:
                    seen = now
                    frames.append((ticket.progress or Progress("queued", 1)).frame())
            await exchange.begin_stream()
            if frames:
                await exchange.data(b"".join(frames))
            if unfinished:
                outputs = await ticket.take(_PROGRESS_SECONDS)
        usage = _usage(work, counts)
        last = stream.usage(usage) if request.include_usage else b""
        await exchange.data(last + DONE)
        await exchange.end()
        return usage

    async def _echoes(self, request: GenerateRequest, work: Work) -> list[Echo]:
        """The echoed prompt of each choice; empty without `echo`."""
        return await self._intake.off_loop(lambda: self._echoed(request, work)) if request.echo else []

    def _echoed(self, request: GenerateRequest, work: Work) -> list[Echo]:
        echoes: list[Echo] = []
        for prompt, tokens in zip(request.prompts, work.prompts, strict=True):
            text_of_tokens = (
                self._detokenize(list(tokens)) if request.score_prompt or not isinstance(prompt, str) else prompt
            )
            text = prompt if isinstance(prompt, str) else text_of_tokens
            echoes += [Echo(text, hidden=max(0, len(text_of_tokens) - len(text)))] * work.n
        return echoes

    async def _post_tokenize(self, exchange: Exchange) -> None:
        await exchange.json_bytes(await self._intake.decoded(exchange, self._tokenize_api.tokens_of))

    async def _post_detokenize(self, exchange: Exchange) -> None:
        await exchange.json_bytes(await self._intake.decoded(exchange, self._tokenize_api.text_of))

    async def _compiled(self, shape: Shape, ticket: Ticket[Output], deadline: float | None) -> Constraint | None:
        if shape.form is None or self._forms is None:
            return None
        return await self._forms.constraint(
            shape.form, shape.param, guaranteed=shape.guaranteed, deadline=deadline, gone=lambda: ticket.gone
        )


def _usage(work: Work, counts: Mapping[int, tuple[int, int, int]]) -> Usage:
    """Counts each prompt once and all answers. `counts` holds tokens, cached and reasoning tokens of each choice."""
    prompt = sum(len(prompt) for prompt in work.prompts) - work.prefix.tokens
    return Usage(
        prompt=prompt,
        completion=sum(tokens for tokens, _cached, _reasoning in counts.values()),
        cached=min(prompt, sum(counts[index * work.n][1] for index in range(len(work.prompts)))) if counts else 0,
        reasoning=sum(reasoning for _tokens, _cached, reasoning in counts.values()),
    )


def _timings(traceparent: str, arrival: float, queued: float, ticket: Ticket[Output], usage: Usage) -> Timings:
    """The times of a request that has ended; the arguments are on the monotonic clock."""
    unix = time.time() - time.monotonic()
    begun, prefilled = (None if at is None else unix + at for at in (ticket.begun_at, ticket.prefilled_at))
    return Timings(
        traceparent, unix + arrival, unix + queued, begun, prefilled, time.time(), usage.prompt, usage.cached,
        usage.completion,
    )  # fmt: skip


def _without_inputs(request: GenerateRequest) -> GenerateRequest:
    """`request` without the fields that are not needed while the answer is generated."""
    prompts = request.prompts if request.echo else ()
    return replace(request, messages=(), prompts=prompts, tools=(), form=None, suffix=None, images=())
