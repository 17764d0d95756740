"""Builds the parts of a worker around a loaded model: engine or embedder, request preparation, HTTP app."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headgate.shared.parameters import Sampling
from inference.worker.api.pooled_api import Reranker
from inference.worker.api.worker_app import App
from inference.worker.backend import Backend, Constraint, TokenSampler
from inference.worker.constraints import Compiler, FormQueue
from inference.worker.engine.draft_model import DraftModel
from inference.worker.engine.embedder import Embedder
from inference.worker.engine.engine import Engine
from inference.worker.engine.ngram_lookup import NgramSource
from inference.worker.engine.output_tickets import OutputDispatcher
from inference.worker.engine.speculation import Speculation
from inference.worker.engine.vision_context import VisionBackend
from inference.worker.kv.checkpoints import max_checkpoints
from inference.worker.kv.sequence_store import SequenceStore
from inference.worker.llama.draft_loading import LoadedDraft
from inference.worker.loading import Loaded
from inference.worker.prompt.prompts import TOKENIZER_STACK_BYTES, Prompts
from inference.worker.prompt.templates import ControlTextSplitter
from inference.worker.prompt.vision import Vision
from inference.worker.sampling import ChainSampler, ConstrainedSampler, dry_of
from inference.worker.steps import Limits
from inference.worker_link import Grant

log = logging.getLogger("headgate.worker")

PREFETCHED = 8
"""Waiting jobs whose sequences are read from disk before they get a slot."""


@dataclass(frozen=True, slots=True)
class RequestPreparation:
    """What turns a request into tokens and constraints, with the threads for that. Independent of the context."""

    prompts: Prompts
    compiler: Compiler
    executor: ThreadPoolExecutor
    compiling: ThreadPoolExecutor

    @classmethod
    def of(cls, loaded: Loaded, vision: Vision | None) -> RequestPreparation:
        """Creates the parts and starts the threads of `executor`, because a stack size applies only to new threads."""
        threading.stack_size(TOKENIZER_STACK_BYTES)
        executor = ThreadPoolExecutor(2, thread_name_prefix="prompts")
        for started in [executor.submit(time.sleep, 0.01) for _ in range(2)]:
            started.result()
        threading.stack_size(0)
        prompts = Prompts(loaded.model, loaded.template, loaded.facts, None if vision is None else vision.read)
        return cls(prompts, Compiler(loaded.model), executor, ThreadPoolExecutor(1, thread_name_prefix="forms"))


def vision_of(loaded: Loaded) -> Vision | None:
    """The encoder of images, for a model with a projector.

    A batch must hold the tokens of an image and one token of each decoding sequence. An image with full attention must
    fit one physical batch.
    """
    if loaded.projector is None:
        return None
    context = loaded.context
    return Vision(loaded.projector, context.n_batch - context.n_slots, context.n_slots, at_once=context.n_ubatch)


def engines_of(
    loaded: Loaded,
    grant: Grant,
    store: SequenceStore | None,
    vision: Vision | None,
    on_fatal: Callable[[str], None],
) -> tuple[Engine, None] | tuple[None, Embedder]:
    """The engine or the embedder, not started. Called on the event loop that gets the outputs."""
    dispatcher = OutputDispatcher(asyncio.get_running_loop())
    context = loaded.context
    if context.pooling > 0:
        scales = "embeddings" in loaded.facts.capabilities
        queue = grant.queue_limit
        return None, Embedder(context, queue, dispatcher.deliver, on_fatal, scales=scales)
    limits = limits_of(loaded, grant)

    def sampler(sampling: Sampling, choice: int, constraint: Constraint | None) -> TokenSampler:
        mask = None if constraint is None else constraint.start()  # may raise, so before the chain exists
        chain = ChainSampler(loaded.model, context, sampling, choice)
        return chain if mask is None else ConstrainedSampler(chain, context, mask)

    backend: Backend = context if vision is None else VisionBackend(context, context.n_slots, vision.tiles)
    engine = Engine(
        backend,
        loaded.model,
        sampler,
        limits,
        dispatcher.deliver,
        on_fatal,
        store=store,
        speculation=speculation_of(grant, limits, loaded.draft),
    )
    return engine, None


def limits_of(loaded: Loaded, grant: Grant) -> Limits:
    """The sizes of the engine of a generating model."""
    context = loaded.context
    return Limits(
        slots=context.n_slots,
        context=loaded.facts.context_length,
        batch=context.n_batch,
        queue=grant.queue_limit,
        can_trim=context.can_trim,
        outputs=context.n_outputs,
        min_copied=context.min_copied,
        window=context.window,
        window_cells=context.window_cells,
        checkpoints=max_checkpoints(context.checkpoint_bytes, grant.checkpoint_bytes),
        prefetched=PREFETCHED if grant.kv.prefetch else 0,
        threshold=grant.kv.threshold,
        cells=context.cells,
    )


def speculation_of(
    grant: Grant, limits: Limits, draft: LoadedDraft | None = None, clock: Callable[[], float] = time.monotonic
) -> Speculation | None:
    """Speculation with `draft`, or as configured; None if it is off, or rejected tokens cannot be removed."""
    if draft is not None:
        source = DraftModel(
            draft.context,
            slots=limits.slots,
            context=draft.context_length,
            batch=draft.context.n_batch,
            vocabulary=draft.n_vocab,
            cells=draft.context.cells,
            clock=clock,
        )
        return Speculation(source)
    if grant.speculation == "off":
        return None
    if limits.window or not limits.can_trim:
        log.info("speculation is off: rejected tokens cannot be removed from sliding-window or recurrent layers")
        return None
    return Speculation(NgramSource())


def app_of(
    loaded: Loaded,
    engine: Engine | None,
    embedder: Embedder | None,
    preparation: RequestPreparation,
    vision: Vision | None,
) -> App:
    """The HTTP app."""

    def prepare_sampling(sampling: Sampling) -> None:
        if (dry := dry_of(sampling, loaded.context)) is not None:
            loaded.model.dry.prepare(dry)

    return App(
        loaded.facts,
        preparation.prompts,
        loaded.model.detokenize,
        engine,
        embedder,
        preparation.executor,
        reranker=_reranker(loaded),
        forms=None if engine is None else FormQueue(preparation.compiler, preparation.executor, preparation.compiling),
        vision=vision,
        prepare_sampling=prepare_sampling,
        control=engine,
    )


def _reranker(loaded: Loaded) -> Reranker | None:
    """The reranker, for a model that reranks."""
    if "rerank" not in loaded.facts.capabilities:
        return None
    model = loaded.model
    return Reranker(model, loaded.facts, model.rerank_template, ControlTextSplitter(model.control_texts).pieces)
