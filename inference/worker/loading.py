"""Loads the model of a grant: weights, context, projector, chat template and capabilities."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.protocol import ExitCause
from inference.worker import llama, malloc_trim, sampling
from inference.worker.cpu_cores import usable_cores
from inference.worker.llama import ggml_library
from inference.worker.llama.draft_loading import LoadedDraft, open_draft, reopen_draft
from inference.worker.llama.llama_process import LogTail
from inference.worker.llama.split_modes import log_parts
from inference.worker.prompt.templates import ChatTemplate
from inference.worker.worker_errors import LoadError
from inference.worker.worker_requests import Facts
from inference.worker_link import Grant, Ready

MAX_CELLS = 2**31
GENERATIVE = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model."""

    model: llama.Model
    context: llama.Context
    template: ChatTemplate | None
    facts: Facts
    ready: Ready
    projector: llama.Projector | None = None
    draft: LoadedDraft | None = None

    @property
    def contexts(self) -> tuple[llama.Context, ...]:
        """The context of the model, and that of its draft model."""
        return (self.context,) if self.draft is None else (self.context, self.draft.context)


def load(grant: Grant, tail: LogTail, on_progress: Callable[[float], bool], parts: Sequence[str] = ()) -> Loaded:
    """Loads the model and computes a first step. `on_progress` gets 0.0 to 1.0 and cancels the load by returning False.

    `parts`: the paths of all parts of a split file, if their names do not show their order.

    Raises LoadError: OOM_LOAD if llama.cpp returns NULL, which does not distinguish reasons, OOM_COMPUTE if the first
    step fails, and STARTUP if the reason is known and is not memory.
    """
    started = time.monotonic()
    _check(grant)
    params = llama.model_params(grant, on_progress)
    try:
        model, context, pooling = open_context(grant, params, parts)
        context.apply_lora(grant.lora)
        projector = _projector(grant, model, params)
    except LoadError as error:
        raise _explained(error, tail) from None
    # The warm-up runs on a thread that ends: OpenMP keeps a team of threads for each thread that has computed. With
    # more threads than cores all of them sleep at each barrier, and a small model takes twice as long per token.
    with ThreadPoolExecutor(1, thread_name_prefix="warm-up") as alone:
        step = alone.submit(context.warm_up)
        if model.reads_text:
            model.tokenize(" ")  # llama.cpp aborts on a wrong vocabulary: here, and not in a request
        template, problem = template_of(model)  # reads the vocabulary during the warm-up
        step.result()
        draft = _draft(grant, model, context, tail)
        if draft is not None:
            alone.submit(draft.context.warm_up).result()
    capabilities = capabilities_of(grant, pooling, template)
    context_length = _context_length(grant, model, context)
    facts = Facts(
        model_id=grant.model_id,
        context_length=context_length,
        n_vocab=model.n_vocab,
        n_embd=model.n_embd,
        capabilities=capabilities,
        sampling_defaults=sampling.defaults(model.metadata),
        image_marker=f"<image-{secrets.token_hex(12)}>" if "vision" in capabilities else "",
        family=family_of(template),
    )
    names = {
        ggml_library.buffer_name(handle): device.id
        for handle, device in zip(
            params.handles, [device for device in grant.devices if device.kind != "cpu"], strict=False
        )
    }
    ready = Ready(
        load_seconds=time.monotonic() - started,
        buffers=tail.buffers(names, log_parts(grant.split_mode, grant.tensor_split, model.handle)),
        context_length=context_length,
        capabilities=capabilities,
        template_problem=problem,
    )
    return Loaded(model, context, template, facts, ready, projector, draft)


def _draft(grant: Grant, model: llama.Model, context: llama.Context, tail: LogTail) -> LoadedDraft | None:
    """The draft model of the grant; raises LoadError."""
    if grant.draft is None:
        return None
    tail.keep_buffers()
    try:
        return open_draft(grant, model, context)
    except LoadError as error:
        raise _explained(error, tail) from None


def _projector(grant: Grant, model: llama.Model, params: Any) -> llama.Projector | None:
    """The vision projector of the model, on its first device; raises LoadError."""
    if grant.mmproj is None:
        return None
    device = params.handles[0] if params.handles else None
    return llama.Projector(grant.mmproj, model, device, grant.threads or usable_cores())


def open_context(grant: Grant, params: Any, parts: Sequence[str] = ()) -> tuple[llama.Model, llama.Context, int | None]:
    """Opens the model and its context; also returns the pooling type (None: generative). Raises LoadError.

    With `no_alloc` in `params` nothing is allocated, and the context reports the memory that a load would take.
    """
    on_gpu = params.n_gpu_layers != 0
    with malloc_trim.reused() if on_gpu else contextlib.nullcontext():
        model = llama.Model(grant.path, params, parts)
    pooling = _pooling(model, grant)
    context = _context(grant, model, pooling, on_gpu=on_gpu)
    if pooling is None and context.memory is None:
        raise LoadError(
            ExitCause.STARTUP,
            f"a {_architecture(model)} model has no KV cache, so it cannot generate; for an embedding model set "
            "capabilities: [embeddings]",
        )
    return model, context, pooling


def _context(grant: Grant, model: llama.Model, pooling: int | None, *, on_gpu: bool) -> llama.Context:
    in_pieces = pooling in (llama.POOLING_LAST, llama.POOLING_RANK) and _is_causal(model)
    return llama.Context(model, llama.context_params(grant, pooling=pooling, in_pieces=in_pieces, on_gpu=on_gpu))


def reopen(loaded: Loaded, grant: Grant, tail: LogTail) -> Loaded:
    """Opens a new context on the CPU for loaded weights whose context was closed. Raises LoadError."""
    started = time.monotonic()
    tail.forget_context()
    try:
        context = _context(grant, loaded.model, _pooling(loaded.model, grant), on_gpu=False)
        context.inherit(loaded.context)
        tail.keep_buffers()
        draft = None if loaded.draft is None else reopen_draft(grant, loaded.draft)
    except LoadError as error:
        raise _explained(error, tail) from None
    ready = replace(loaded.ready, load_seconds=time.monotonic() - started, buffers=tail.buffers({}))
    return replace(loaded, context=context, ready=ready, draft=draft)


def _context_length(grant: Grant, model: llama.Model, context: llama.Context) -> int:
    """Maximum tokens of a sequence: the configured length, at most the model's positions and what pooling takes."""
    bounds = [grant.context_length, model.n_positions, context.pool_tokens if context.pooling > 0 else None]
    return min(bound for bound in bounds if bound is not None)


def _check(grant: Grant) -> None:
    """Raises LoadError for sizes on which llama.cpp would assert, and for missing files."""
    if grant.kv_cells is None and grant.context_length * grant.parallel >= MAX_CELLS:
        raise LoadError(
            ExitCause.STARTUP,
            f"context_length {grant.context_length} x parallel {grant.parallel} is too large; the product "
            f"must be less than {MAX_CELLS}",
        )
    if grant.kv_cells is not None and not grant.context_length <= grant.kv_cells < MAX_CELLS:
        raise LoadError(
            ExitCause.STARTUP,
            f"kv_cells {grant.kv_cells} must be at least context_length ({grant.context_length}) and less than "
            f"{MAX_CELLS}",
        )
    if grant.parallel > grant.batch:
        raise LoadError(ExitCause.STARTUP, f"parallel {grant.parallel} must be at most batch ({grant.batch})")
    named = {grant.mmproj: " (mmproj)", grant.draft: " (draft)"}
    for path in (grant.path, *grant.lora, *filter(None, named)):
        if not Path(path).is_file():
            what = named.get(path, "")
            raise LoadError(ExitCause.STARTUP, f"file not found: {path}{what}")


def _pooling(model: llama.Model, grant: Grant) -> int | None:
    """The pooling type of the model, None for a generative one; raises LoadError for an unsupported model."""
    requested = set(grant.capabilities or ())
    if len([kind for kind in (GENERATIVE, ("embeddings",), ("rerank",)) if requested & set(kind)]) > 1:
        raise LoadError(
            ExitCause.STARTUP,
            "a model either generates, embeds or reranks; for several uses of a file, configure one model per use",
        )
    if model.is_encoder_decoder:
        raise LoadError(
            ExitCause.STARTUP, f"a {_architecture(model)} model is an encoder with a decoder, which is not supported"
        )
    named = model.metadata.get(f"{_architecture(model)}.pooling_type", "-1")
    pooling = int(named) if re.fullmatch(r"-?\d{1,9}", named, re.ASCII) else llama.POOLING_RANK + 1
    if pooling > llama.POOLING_RANK:
        raise LoadError(ExitCause.STARTUP, f"unknown pooling type {named[:40]}; supported types: mean, cls, last, rank")
    if "rerank" in requested or (pooling == llama.POOLING_RANK and not requested & set(GENERATIVE)):
        _check_reranker(model, requested)
        return llama.POOLING_RANK
    if "embeddings" in requested or (pooling > llama.POOLING_NONE and not requested):
        if pooling == llama.POOLING_NONE:
            raise LoadError(
                ExitCause.STARTUP,
                "its pooling type is none (one vector per token); embeddings need one vector per text",
            )
        return pooling if pooling > 0 else llama.POOLING_MEAN
    if not model.generates:
        raise LoadError(ExitCause.STARTUP, f"a {_architecture(model)} model does not generate and has no pooling type")
    return None


def _check_reranker(model: llama.Model, requested: set[str]) -> None:
    """Raises LoadError if the scores of the model would be meaningless, although llama.cpp would compute them."""
    problem = None
    has_softmax = _architecture(model) in _TWO_ANSWERS
    if "embeddings" in requested:
        problem = "this is a reranking model without embeddings; remove capabilities or set capabilities: [rerank]"
    elif not model.has_head:
        problem = "it has no classification head (cls.weight or cls.output.weight), so it cannot rerank"
    elif has_softmax and model.n_scores != 2:
        problem = f"a {_architecture(model)} reranker has two outputs (yes and no), and this one has {model.n_scores}"
    elif not has_softmax and model.n_scores != 1:
        problem = f"it is a classifier with {model.n_scores} classes; a reranker has one output"
    elif model.rerank_template is None and model.sep is None and model.eos is None:
        problem = "it has neither a rerank template nor a separator token for query and document"
    if problem is not None:
        raise LoadError(ExitCause.STARTUP, problem)


_TWO_ANSWERS = ("qwen3", "qwen3vl")
"""Architectures for which llama.cpp ends the ranking with a softmax over two outputs; the first is yes."""


def _architecture(model: llama.Model) -> str:
    return model.metadata.get("general.architecture", "")


def _is_causal(model: llama.Model) -> bool:
    return model.metadata.get(f"{_architecture(model)}.attention.causal", "true") == "true"


def family_of(template: ChatTemplate | None) -> str:
    """The name of the dialect of the template; empty without a template."""
    return "" if template is None else template.dialect.name


def template_of(model: llama.Model) -> tuple[ChatTemplate | None, str]:
    """The chat template of the file, or None, and the reason why a template cannot be used.

    A separate template for tools is used if its dialect has a notation of calls, otherwise the main template.
    """
    with_tools, problem = _compiled(model, model.tool_template)
    if with_tools is not None and not with_tools.dialect.has_call_notation:
        with_tools = None
    template, worse = _compiled(model, model.template, with_tools)
    return template, worse or problem


def _compiled(
    model: llama.Model, source: str | None, with_tools: ChatTemplate | None = None
) -> tuple[ChatTemplate | None, str]:
    if not source or source.isspace():
        return None, ""
    bos, eos = model.text_of(model.bos), model.text_of(model.eos)
    try:
        return ChatTemplate(source, bos=bos, eos=eos, control_texts=model.control_texts, with_tools=with_tools), ""
    except ValueError as error:
        return None, str(error)


def capabilities_of(grant: Grant, pooling: int | None, template: ChatTemplate | None) -> tuple[str, ...]:
    """The capabilities of the model that the grant allows; raises LoadError if the grant needs a missing one."""
    if grant.mmproj is not None and (pooling is not None or template is None):
        raise LoadError(
            ExitCause.STARTUP, "mmproj is set, but images need chat, which this model does not support; remove mmproj"
        )
    if pooling is not None:
        return ("rerank",) if pooling == llama.POOLING_RANK else ("embeddings",)
    if template is None:
        can: tuple[str, ...] = ("completions",)
    else:
        # Without tools in the template, a message can describe them; the configuration decides whether that is useful.
        wanted = template.with_tools.dialect.has_call_notation if grant.capabilities is None else True
        can = (*GENERATIVE, "tools") if wanted else GENERATIVE
        can = can if grant.mmproj is None else (*can, "vision")
    if grant.capabilities is None:
        return can
    if "vision" in grant.capabilities and grant.mmproj is None:
        raise LoadError(
            ExitCause.STARTUP, "capabilities contain vision, but mmproj is not set; set it, or remove vision"
        )
    if template is None and (missing := [name for name in ("chat", "tools") if name in grant.capabilities]):
        remedy = f"remove {missing[0]} from capabilities"
        raise LoadError(ExitCause.STARTUP, f"the model file has no usable chat template; {remedy}")
    return tuple(name for name in can if name in grant.capabilities)


def _explained(error: LoadError, tail: LogTail) -> LoadError:
    """Adds log lines of llama.cpp; the cause becomes STARTUP if they do not mention memory."""
    log_lines = tail.complaints()
    is_memory = not log_lines or any(word in log_lines for word in _MEMORY_WORDS)
    cause = error.cause if is_memory else ExitCause.STARTUP
    return LoadError(cause, f"{error.message}{': ' + log_lines if log_lines else ''}")


_MEMORY_WORDS = ("failed to allocate", "unable to allocate", "out of memory", "bad_alloc", "cannot allocate")
