"""Decodes the bodies of chats, completions and embeddings into validated requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from headgate.shared.bodies.openai_bodies import (
    AnswerSoFar,
    ChatBody,
    CompletionRequest,
    EmbeddingRequest,
    StreamOptions,
    TokenizeBody,
    decode_chat,
    decode_completion,
    decode_embedding,
)
from headgate.shared.parameters import BY_NAME
from inference.protocol import Code
from inference.worker.api.body_intake import refuse_extra, typed
from inference.worker.api.generation_fields import form_of, sampling_of, stops_of, tools_of
from inference.worker.dialects.thinking import EFFORT_LEVELS, effort_variables
from inference.worker.prompt.template_messages import ImageParts, messages_of
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, GenerateRequest, Prompt

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_INPUTS = 2048
MAX_TOKENS = int(BY_NAME["max_tokens"].high)

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

SO_FAR = "answer_so_far"
"""The beginning of an answer that another worker started and did not finish."""

_UNSUPPORTED: Mapping[str, str] = {
    "audio": "this model does not generate audio; remove audio",
    "moderation": "moderation is not supported; remove moderation",
    "prediction": "predicted outputs are not supported; remove prediction",
    "web_search_options": "this model cannot search the web; remove web_search_options",
}

_SERVES = {
    "chat": ("does not support chats", "/v1/chat/completions"),
    "completions": ("does not support completions", "/v1/completions"),
    "embeddings": ("does not support embeddings", "/v1/embeddings"),
    "rerank": ("does not support reranking", "/v1/rerank"),
}
"""For each capability: the message where a model lacks it, and the endpoint that needs it."""

_RESERVED_VARIABLES: Mapping[str, str] = {
    "messages": "use messages",
    "tools": "use tools",
    "add_generation_prompt": "use continue_final_message",
    "bos_token": "it is defined by the model; remove it",
    "eos_token": "it is defined by the model; remove it",
}
"""Template variables that requests cannot set, and what to do instead."""


_read_chat = partial(decode_chat, type_=ChatBody, path="")
_read_completion = partial(decode_completion, path="")
_read_embedding = partial(decode_embedding, path="")


def chat(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/chat/completions body; raises BadRequestError with `param`."""
    given = typed(body, _read_chat, facts)
    need_capability(facts, "chat")
    for name, reason in _UNSUPPORTED.items():
        if getattr(given, name) is not None:
            raise BadRequestError(reason, name, code=Code.UNSUPPORTED_PARAMETER)
    if given.modalities not in (None, [], ["text"]):
        raise BadRequestError(
            f'this model only generates text: modalities must be ["text"], not {str(given.modalities)[:60]}',
            "modalities",
        )
    images = ImageParts(facts.image_marker) if facts.image_marker else None
    messages = messages_of(given.messages, images)
    continue_final = continues(given, messages)
    tools, choice = tools_of(given, facts)
    form, form_param = form_of(given)
    common = _common(given, facts)
    forced = form_param or ("tool_choice" if choice.mode in ("required", "named") else "")
    if forced and continue_final:
        raise _not_together("continue_final_message", forced)
    _check_ignore_eos(common, forced)
    so_far = _answer_so_far(given, form_param)
    wants_logprobs = given.logprobs or bool(given.n_probs)
    if so_far is not None and (continue_final or tools or wants_logprobs):
        raise _not_together(SO_FAR, "continue_final_message" if continue_final else "tools" if tools else "logprobs")
    if given.top_logprobs is not None and not given.logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    newer = _limit(given.max_completion_tokens, "max_completion_tokens")
    max_tokens, max_tokens_param = (
        (_limit(given.max_tokens, "max_tokens"), "max_tokens") if newer is None else (newer, "max_completion_tokens")
    )
    _check_min_tokens(common, max_tokens, max_tokens_param)
    top = given.top_logprobs if given.logprobs else given.n_probs
    return replace(
        common,
        kind="chat",
        messages=messages,
        logprobs=(top or 0) if wants_logprobs else None,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        template_arguments=variables(given, facts),
        continue_final=continue_final,
        tools=tools,
        choice=choice,
        form=form,
        form_param=form_param,
        images=() if images is None else tuple(images.found),
        answer_so_far=so_far,
    )


def completion(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/completions body; raises BadRequestError with `param`."""
    given = typed(body, _read_completion, facts)
    need_capability(facts, "completions")
    prompts = prompts_of(given.prompt, "prompt", facts, MAX_SEQUENCES)
    form, form_param = form_of(given)
    common = _common(given, facts)
    if given.best_of is not None and given.best_of != common.n:
        raise BadRequestError(
            "best_of is not supported; remove it or set it to n",
            "best_of",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    if len(prompts) * common.n > MAX_SEQUENCES:
        raise BadRequestError(
            f"a request can have at most {MAX_SEQUENCES} answers; the number of prompts times n is larger",
            "n",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    max_tokens = COMPLETION_TOKENS if given.max_tokens is None else _limit(given.max_tokens, "max_tokens")
    _check_min_tokens(common, max_tokens, "max_tokens")
    if max_tokens == 0 and not given.echo:
        raise BadRequestError("max_tokens may only be 0 together with echo", "max_tokens")
    if given.suffix and given.echo:
        raise _not_together("suffix", "echo")
    so_far = _answer_so_far(given, form_param)
    if so_far is not None:
        _check_resumed(given, prompts, so_far)
    _check_ignore_eos(common, form_param)
    return replace(
        common,
        kind="completion",
        prompts=prompts,
        logprobs=(given.n_probs or None) if given.logprobs is None else given.logprobs,
        echo=bool(given.echo),
        max_tokens=max_tokens,
        suffix=given.suffix or None,
        form=form,
        form_param=form_param,
        answer_so_far=so_far,
    )


def embedding(body: Any, facts: Facts) -> tuple[EmbeddingRequest, tuple[Prompt, ...]]:
    """The request in a /v1/embeddings body and its inputs; raises BadRequestError with `param`."""
    given = typed(body, _read_embedding, facts)
    need_capability(facts, "embeddings")
    inputs = prompts_of(given.input, "input", facts, MAX_INPUTS)
    if given.dimensions is not None and given.dimensions > facts.n_embd:
        raise BadRequestError(f"dimensions must be from 1 to {facts.n_embd}", "dimensions")
    return given, inputs


def need_capability(facts: Facts, name: str) -> None:
    """Raises BadRequestError (`unsupported_parameter`) with the endpoints of the model unless it has the capability."""
    if name in facts.capabilities:
        return
    places = " and ".join(place for other, (_, place) in _SERVES.items() if other in facts.capabilities)
    hint = f"it supports {places}" if places else "use another model"
    raise BadRequestError(
        f"model {facts.model_id!r} {_SERVES[name][0]}; {hint}", "model", code=Code.UNSUPPORTED_PARAMETER
    )


def continues(given: ChatBody | TokenizeBody, messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer continues the last message.

    Raises BadRequestError if that is not text of the assistant, or if add_generation_prompt contradicts it.
    """
    found = bool(given.continue_final_message)
    if found and messages[-1]["role"] != "assistant":
        raise BadRequestError(
            "continue_final_message needs an assistant message at the end of messages", "continue_final_message"
        )
    if found and "tool_calls" in messages[-1]:
        raise BadRequestError(
            "continue_final_message needs text to continue, and the last message ends in calls; send their results",
            "continue_final_message",
        )
    if given.add_generation_prompt is found:
        raise BadRequestError(
            "add_generation_prompt must be the opposite of continue_final_message", "add_generation_prompt"
        )
    return found


def variables(given: ChatBody | TokenizeBody, facts: Facts) -> Mapping[str, Any]:
    """The chat template's variables that the request sets; raises BadRequestError for a reserved one."""
    found: dict[str, Any] = {}
    if (effort := given.reasoning_effort) is not None:
        if effort not in EFFORT_LEVELS:
            raise BadRequestError(f"reasoning_effort must be one of {', '.join(EFFORT_LEVELS)}", "reasoning_effort")
        found |= effort_variables(effort, facts.family)
    if given.enable_thinking is not None:
        found["enable_thinking"] = given.enable_thinking
    arguments = given.chat_template_kwargs or {}
    for name, instead in _RESERVED_VARIABLES.items():
        if name in arguments:
            raise BadRequestError(f"chat_template_kwargs cannot set {name}; {instead}", f"chat_template_kwargs.{name}")
    return found | arguments


def prompts_of(value: str | Sequence[str | int | list[int]], param: str, facts: Facts, most: int) -> tuple[Prompt, ...]:
    """The prompts in a decoded `value`; none of them is empty."""
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif isinstance(value[0], int):
        prompts = (_token_ids(value, param, facts),)
    elif len(value) > most:
        raise BadRequestError(f"{param} has {len(value)} entries; at most {most} are allowed", param)
    else:
        prompts = tuple(
            item if isinstance(item, str) else _token_ids(item, f"{param}[{index}]", facts)
            for index, item in enumerate(value)
        )
    for index, prompt in enumerate(prompts):
        if not prompt:
            name = param if len(prompts) == 1 else f"{param}[{index}]"
            raise BadRequestError(f"{name} is empty", name)
    return prompts


def _token_ids(items: Any, param: str, facts: Facts) -> tuple[int, ...]:
    for index, item in enumerate(items):
        if item >= facts.n_vocab:
            raise BadRequestError(
                f"{param}[{index}] is not a token of this model: ids are whole numbers from 0 to {facts.n_vocab - 1}",
                f"{param}[{index}]",
            )
    return tuple(items)


def _not_together(param: str, other: str) -> BadRequestError:
    return BadRequestError(
        f"{param} cannot be combined with {other}; remove one of them", param, code=Code.UNSUPPORTED_PARAMETER
    )


def _limit(max_tokens: int | None, param: str) -> int | None:
    """A length of the answer, the value of `param`; -1 is no limit."""
    if max_tokens is not None and max_tokens > MAX_TOKENS:
        raise BadRequestError(f"{param} must be at most {MAX_TOKENS}", param)
    return None if max_tokens == -1 else max_tokens


def _check_min_tokens(common: GenerateRequest, max_tokens: int | None, max_tokens_param: str) -> None:
    least = common.sampling.min_tokens
    if max_tokens is not None and least > max_tokens:
        raise BadRequestError(
            f"min_tokens is {least} and {max_tokens_param} is {max_tokens}; min_tokens cannot be larger", "min_tokens"
        )


def _check_ignore_eos(common: GenerateRequest, forced: str) -> None:
    """An answer with a required form ends with the form, so end tokens cannot be suppressed."""
    if forced and common.sampling.ignore_eos:
        raise _not_together("ignore_eos", forced)


def _answer_so_far(given: ChatBody | CompletionRequest, form_param: str) -> AnswerSoFar | None:
    """The beginning of the answer. Only one answer without a required form can be continued."""
    so_far = given.answer_so_far
    if so_far is None:
        return None
    if form_param or given.n not in (None, 1):
        raise _not_together(SO_FAR, form_param or "n")
    return so_far


def _check_resumed(given: CompletionRequest, prompts: Sequence[Prompt], so_far: AnswerSoFar) -> None:
    """A completion that is continued is one text after one prompt."""
    if so_far.reasoning_content:
        raise BadRequestError(
            f"{SO_FAR}.reasoning_content is for chats only; remove it", SO_FAR, code=Code.UNSUPPORTED_PARAMETER
        )
    if len(prompts) > 1:
        raise BadRequestError(
            f"{SO_FAR} cannot be combined with several prompts; send one prompt",
            SO_FAR,
            code=Code.UNSUPPORTED_PARAMETER,
        )
    for name in ("logprobs", "echo", "suffix"):
        if getattr(given, name) not in (None, False, ""):
            raise _not_together(SO_FAR, name)


def _common(given: ChatBody | CompletionRequest, facts: Facts) -> GenerateRequest:
    """The fields that chats and completions share."""
    options = given.stream_options or StreamOptions()
    if options != StreamOptions() and not given.stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")
    refuse_extra(options, "stream_options")
    choices = given.n or 1
    if choices > MAX_CHOICES:
        raise BadRequestError(
            f"n is {choices}; at most {MAX_CHOICES} choices per request are supported",
            "n",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    return GenerateRequest(
        "chat",
        sampling=sampling_of(given, facts),
        stops=stops_of(given.stops),
        n=choices,
        shares_cache=given.cache_prompt is not False,
        stream=bool(given.stream),
        include_usage=bool(options.include_usage),
        prompt_usage=bool(options.prompt_usage),
    )
