"""Loads what a grant asks for and says what it is: model, context, capabilities; never serves and never retries."""

from __future__ import annotations

import contextlib
import re
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from inference.protocol import ExitCause
from inference.worker import llama, malloc_trim
from inference.worker.cpu_cores import usable_cores
from inference.worker.llama import ggml_library
from inference.worker.llama.llama_log import LogTail
from inference.worker.prompt.templates import ChatTemplate
from inference.worker.sampling import sampling
from inference.worker.worker_errors import LoadError
from inference.worker.worker_requests import Facts
from inference.workers.worker_link import Grant, Ready

MAX_CELLS = 2**31
MAX_PARALLEL = 256
GENERATIVE = ("chat", "completions")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model ready to serve."""

    model: llama.Model
    context: llama.Context
    template: ChatTemplate | None
    facts: Facts
    ready: Ready
    projector: llama.Projector | None = None


def load(grant: Grant, tail: LogTail, on_progress: Callable[[float], bool]) -> Loaded:
    """Loads the model on this thread; `on_progress` gets 0.0 to 1.0 and may return False to give up.

    Raises LoadError; its cause is OOM_LOAD for a clean NULL of llama.cpp, which cannot tell memory from other reasons,
    and STARTUP where the reason is known to be another.
    """
    started = time.monotonic()
    _check(grant)
    params = llama.model_params(grant, on_progress)
    try:
        model, context, pooling = open_context(grant, params)
        context.apply_lora(grant.lora)
        projector = _projector(grant, model, params)
    except LoadError as error:
        raise _explained(error, grant, tail) from None
    # On a thread that ends: OpenMP keeps the threads of whoever computed as long as that one lives. Once they are more
    # than cores, all of them sleep at every barrier, and a small model takes twice as long for a token.
    with ThreadPoolExecutor(1, thread_name_prefix="warm-up") as alone:
        step = alone.submit(context.warm_up)
        if model.reads_text:
            model.tokenize(
                " "
            )  # with the wrong kind of vocabulary llama.cpp aborts here, and no caller is blamed for it
        template, problem = template_of(model)  # walks over the vocabulary, for which nobody needs to wait
        step.result()
    capabilities = capabilities_of(grant, model, pooling, template)
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
        buffers=tail.buffers(names),
        context_length=context_length,
        capabilities=capabilities,
        metadata={
            "description": model.description,
            "architecture": _architecture(model),
            "name": model.metadata.get("general.name", ""),
            "parameters": model.n_params,
            "n_ctx_train": model.n_ctx_train,
            "n_embd": model.n_embd,
            "n_vocab": model.n_vocab,
            **({"template_problem": problem} if problem else {}),
        },
    )
    return Loaded(model, context, template, facts, ready, projector)


def _projector(grant: Grant, model: llama.Model, params: Any) -> llama.Projector | None:
    """What reads images for the model, on its first device; raises LoadError."""
    if grant.mmproj is None:
        return None
    device = params.handles[0] if params.handles else None
    return llama.Projector(grant.mmproj, model, device, grant.threads or usable_cores())


def open_context(grant: Grant, params: Any) -> tuple[llama.Model, llama.Context, int | None]:
    """The model and its context as a worker opens them, and the pooling (None: generative); raises LoadError.

    With `no_alloc` in `params` nothing is allocated: what a load would take can then be read from the context.
    """
    on_gpu = params.n_gpu_layers != 0
    with malloc_trim.reused() if on_gpu else contextlib.nullcontext():
        model = llama.Model(grant.path, params)
    pooling = _pooling(model, grant)
    context = _context(grant, model, pooling, on_gpu=on_gpu)
    if pooling is None and context.memory is None:
        raise LoadError(
            ExitCause.STARTUP,
            f"a {_architecture(model)} model keeps no memory of what it read, so it cannot generate here; if it gives "
            "embeddings, say so in capabilities",
        )
    return model, context, pooling


def _context(grant: Grant, model: llama.Model, pooling: int | None, *, on_gpu: bool) -> llama.Context:
    in_pieces = pooling in (llama.POOLING_LAST, llama.POOLING_RANK) and _is_causal(model)
    return llama.Context(model, llama.context_params(grant, pooling=pooling, in_pieces=in_pieces, on_gpu=on_gpu))


def reopen(loaded: Loaded, grant: Grant, tail: LogTail) -> Loaded:
    """A fresh context over weights that are still there, after `loaded`'s was closed; on the CPU. Raises LoadError."""
    started = time.monotonic()
    tail.forget_context()
    try:
        context = _context(grant, loaded.model, _pooling(loaded.model, grant), on_gpu=False)
        context.inherit(loaded.context)
    except LoadError as error:
        raise _explained(error, grant, tail) from None
    ready = replace(loaded.ready, load_seconds=time.monotonic() - started, buffers=tail.buffers({}))
    return replace(loaded, context=context, ready=ready)


def _context_length(grant: Grant, model: llama.Model, context: llama.Context) -> int:
    """Most tokens of one sequence: what was asked for, within the positions the model knows and what pools at once."""
    bounds = [grant.context_length, model.n_positions, context.pool_tokens if context.pooling > 0 else None]
    return min(bound for bound in bounds if bound is not None)


def _check(grant: Grant) -> None:
    if grant.kv_type not in llama.KV_TYPES:
        raise LoadError(ExitCause.STARTUP, f"kv_type {grant.kv_type!r} is not one of {', '.join(llama.KV_TYPES)}")
    if grant.kv_type not in ("f16", "f32") and not grant.flash_attention:
        raise LoadError(ExitCause.STARTUP, f"kv_type {grant.kv_type} needs flash_attention: true")
    if not 0 < grant.context_length * grant.parallel < MAX_CELLS:
        raise LoadError(
            ExitCause.STARTUP,
            f"context_length {grant.context_length} x parallel {grant.parallel} is more than llama.cpp can count; "
            f"together they must stay below {MAX_CELLS}",
        )
    if not 0 < grant.parallel <= min(grant.batch, MAX_PARALLEL):
        raise LoadError(
            ExitCause.STARTUP,
            f"parallel {grant.parallel} must be from 1 to {MAX_PARALLEL} and at most batch ({grant.batch})",
        )
    for path in (grant.path, *grant.lora, *([grant.mmproj] if grant.mmproj else [])):
        if not Path(path).is_file():
            what = " (mmproj)" if path == grant.mmproj else ""
            raise LoadError(ExitCause.STARTUP, f"there is no file {path}{what}")


def _pooling(model: llama.Model, grant: Grant) -> int | None:
    """How the model pools, None for a generative one; raises LoadError for what can be neither."""
    requested = set(grant.capabilities or ())
    if len([kind for kind in (GENERATIVE, ("embeddings",), ("rerank",)) if requested & set(kind)]) > 1:
        raise LoadError(
            ExitCause.STARTUP,
            "one worker either generates, embeds or reranks; configure two models for the same file",
        )
    if model.is_encoder_decoder:
        raise LoadError(
            ExitCause.STARTUP, f"a {_architecture(model)} model is an encoder with a decoder, which is not supported"
        )
    named = model.metadata.get(f"{_architecture(model)}.pooling_type", "-1")
    pooling = int(named) if re.fullmatch(r"-?\d{1,9}", named, re.ASCII) else llama.POOLING_RANK + 1
    if pooling > llama.POOLING_RANK:
        raise LoadError(ExitCause.STARTUP, f"its pooling type {named[:40]} is not known; mean, cls, last and rank are")
    if "rerank" in requested or (pooling == llama.POOLING_RANK and not requested & set(GENERATIVE)):
        _check_reranker(model, requested)
        return llama.POOLING_RANK
    if "embeddings" in requested or (pooling > llama.POOLING_NONE and not requested):
        if pooling == llama.POOLING_NONE:
            raise LoadError(
                ExitCause.STARTUP, "its pooling is none: it gives a vector per token, and an embedding is one per text"
            )
        return pooling if pooling > 0 else llama.POOLING_MEAN
    if not model.generates:
        raise LoadError(ExitCause.STARTUP, f"a {_architecture(model)} model neither generates text nor names a pooling")
    return None


def _check_reranker(model: llama.Model, requested: set[str]) -> None:
    """Raises LoadError where a score would mean nothing, though llama.cpp would compute one."""
    problem = None
    has_softmax = _architecture(model) in _TWO_ANSWERS
    if "embeddings" in requested:
        problem = "this is a reranking model: it gives no embeddings; leave capabilities out or write rerank"
    elif not model.has_head:
        problem = "it has no classification head (cls.weight or cls.output.weight), so it cannot rerank"
    elif has_softmax and model.n_scores != 2:
        problem = f"a {_architecture(model)} reranker answers yes or no, and this one has {model.n_scores} answers"
    elif not has_softmax and model.n_scores != 1:
        problem = f"it is a classifier with {model.n_scores} classes; a reranker has one"
    elif model.rerank_template is None and model.sep is None and model.eos is None:
        problem = "it has neither a rerank template nor a token that could separate query and document"
    if problem is not None:
        raise LoadError(ExitCause.STARTUP, problem)


_TWO_ANSWERS = ("qwen3", "qwen3vl")
"""Architectures whose ranking llama.cpp ends in a softmax over two answers, the first of which is yes."""


def _architecture(model: llama.Model) -> str:
    return model.metadata.get("general.architecture", "")


def _is_causal(model: llama.Model) -> bool:
    return model.metadata.get(f"{_architecture(model)}.attention.causal", "true") == "true"


def family_of(template: ChatTemplate | None) -> str:
    """The name of the template's dialect; empty without one."""
    return "" if template is None else template.dialect.name


def template_of(model: llama.Model) -> tuple[ChatTemplate | None, str]:
    """The chat template of the file, or None, and why one cannot be used.

    One of its own for tools counts where it presents them as a family does; all others are told in the first.
    """
    with_tools, problem = _compiled(model, model.tool_template)
    if with_tools is not None and not with_tools.dialect.writes_tools:
        with_tools = None
    template, worse = _compiled(model, model.template, with_tools)
    return template, worse or problem


def _compiled(
    model: llama.Model, source: str | None, with_tools: ChatTemplate | None = None
) -> tuple[ChatTemplate | None, str]:
    if not source:
        return None, ""
    bos, eos = model.text_of(model.bos), model.text_of(model.eos)
    try:
        return ChatTemplate(source, bos=bos, eos=eos, control_texts=model.control_texts, with_tools=with_tools), ""
    except ValueError as error:
        return None, str(error)


def capabilities_of(
    grant: Grant, model: llama.Model, pooling: int | None, template: ChatTemplate | None
) -> tuple[str, ...]:
    """What the model can do, within what the grant allows; raises LoadError when it asks for what is not there."""
    if grant.mmproj is not None and (pooling is not None or template is None):
        raise LoadError(ExitCause.STARTUP, "mmproj is set, and images are read in chats only, which this model has not")
    if pooling is not None:
        return ("rerank",) if pooling == llama.POOLING_RANK else ("embeddings",)
    if template is None:
        can: tuple[str, ...] = ("completions",)
    else:
        # A template that knows no tools can still be told of them in a message: whether that is any use, people say.
        wanted = template.with_tools.dialect.writes_tools if grant.capabilities is None else True
        can = (*GENERATIVE, "tools") if wanted else GENERATIVE
        can = can if grant.mmproj is None else (*can, "vision")
    if grant.capabilities is None:
        return can
    if "vision" in grant.capabilities and grant.mmproj is None:
        raise LoadError(ExitCause.STARTUP, "capabilities name vision, and there is no mmproj that reads images")
    if template is None and (missing := [name for name in ("chat", "tools") if name in grant.capabilities]):
        raise LoadError(ExitCause.STARTUP, f"capabilities name {missing[0]}, and the file has no usable chat template")
    return tuple(name for name in can if name in grant.capabilities)


def _explained(error: LoadError, grant: Grant, tail: LogTail) -> LoadError:
    """Adds llama.cpp's own words; a file it could not read is no matter of memory."""
    log_lines = tail.complaints()
    is_memory = not log_lines or any(word in log_lines for word in _MEMORY_WORDS)
    cause = error.cause if is_memory else ExitCause.STARTUP
    return LoadError(cause, f"{error.message}{': ' + log_lines if log_lines else ''}")


_MEMORY_WORDS = ("failed to allocate", "unable to allocate", "out of memory", "bad_alloc", "cannot allocate")
