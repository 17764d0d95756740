"""Loads the draft model of a grant, and checks that it fits the model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from inference.protocol import ExitCause
from inference.worker import llama
from inference.worker.worker_errors import LoadError
from inference.worker_link import Grant

MAX_PADDING = 128
"""Vocabularies of one family may differ by up to this number of unused tokens at their end
(SPEC_VOCAB_MAX_SIZE_DIFFERENCE of llama.cpp)."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A loaded draft model. `n_vocab`: number of tokens that the model has as well."""

    model: llama.Model
    context: llama.Context
    n_vocab: int

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of a sequence."""
        return min(self.context.n_ctx_seq, self.model.n_positions or self.context.n_ctx_seq)


def draft_grant(grant: Grant) -> Grant:
    """The grant for the draft model of `grant`: the same sequences and batches, all layers on the first device."""
    assert grant.draft is not None
    return replace(
        grant,
        path=grant.draft,
        devices=grant.devices[:1],
        gpu_layers=-1 if grant.gpu_layers else 0,
        tensor_split=(),
        host_expert_layers=0,
    )


def open_draft(grant: Grant, target: llama.Model, context: llama.Context, *, no_alloc: bool = False) -> LoadedDraft:
    """Opens the draft model of `grant`; `target` and `context` are those of the model. `no_alloc`: see `open_context`.

    Raises LoadError if it cannot be opened, or cannot propose tokens for the model.
    """
    if context.pooling > 0:
        raise LoadError(ExitCause.STARTUP, "draft is set, but this model does not generate; remove draft")
    _check_removal(target, context, "this model")
    own = draft_grant(grant)
    params = llama.model_params(own, no_alloc=no_alloc)
    draft = llama.Model(own.path, params)
    if (difference := vocabulary_difference(target, draft)) is not None:
        raise LoadError(
            ExitCause.STARTUP,
            f"the draft model {own.path} has another vocabulary than the model: {difference}; choose a smaller model "
            "of the same family, or remove draft",
        )
    if not draft.generates:
        raise LoadError(ExitCause.STARTUP, f"the draft model {own.path} does not generate; choose another one")
    opened = _context(own, draft, on_gpu=params.n_gpu_layers != 0)
    if opened.memory is None:
        raise LoadError(ExitCause.STARTUP, f"the draft model {own.path} has no KV cache; choose another one")
    _check_removal(draft, opened, f"the draft model {own.path}")
    return LoadedDraft(draft, opened, min(target.n_vocab, draft.n_vocab))


def reopen_draft(grant: Grant, draft: LoadedDraft) -> LoadedDraft:
    """Opens a new context on the CPU for a draft model whose context was closed. Raises LoadError."""
    context = _context(draft_grant(grant), draft.model, on_gpu=False)
    context.inherit(draft.context)
    return replace(draft, context=context)


def _context(own: Grant, draft: llama.Model, *, on_gpu: bool) -> llama.Context:
    return llama.Context(draft, llama.context_params(own, pooling=None, on_gpu=on_gpu))


def _check_removal(model: llama.Model, context: llama.Context, name: str) -> None:
    """Raises LoadError if rejected proposals cannot be removed from a context."""
    if model.has_recurrent_state:
        raise LoadError(
            ExitCause.STARTUP,
            f"draft is set, but {name} has recurrent layers, where rejected tokens cannot be removed; remove draft",
        )
    if context.window:
        raise LoadError(
            ExitCause.STARTUP,
            f"draft is set, but {name} has sliding-window layers, where rejected tokens cannot be removed; "
            "set swa_full: true, or remove draft",
        )


def vocabulary_difference(target: Any, draft: Any) -> str | None:
    """The first difference between two vocabularies that makes proposals wrong, None without one."""
    sizes = target.n_vocab, draft.n_vocab
    if abs(sizes[0] - sizes[1]) > MAX_PADDING:
        return f"it has {sizes[1]} tokens instead of {sizes[0]}"
    for name in ("bos", "eos"):
        ours, theirs = getattr(target, name), getattr(draft, name)
        if ours != theirs:
            return f"its {name.upper()} token is {theirs} instead of {ours}"
    for token in range(min(sizes)):
        if target.raw_text(token) != draft.raw_text(token):
            return f"its token {token} is {draft.raw_text(token)!r} instead of {target.raw_text(token)!r}"
    return None
