"""Decodes the bodies of chats, completions and embeddings into validated requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headgate.shared.parameters import BY_NAME, Sampling
from inference.protocol import PROMPT_USAGE, Code
from inference.worker.api import body_fields
from inference.worker.api.generation_fields import FORM_FIELDS, TOOL_FIELDS, form_of, sampling_of, stops_of, tools_of
from inference.worker.dialects.effort import LEVELS, effort_variables
from inference.worker.prompt.message_images import ImageParts
from inference.worker.prompt.template_messages import messages_of
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import AnswerSoFar, EmbeddingRequest, Facts, GenerateRequest, Prompt

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_TOP_LOGPROBS = 20
MAX_INPUTS = 2048

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""

SO_FAR = "answer_so_far"
"""The beginning of an answer that another worker started and did not finish."""

_IGNORED = frozenset(
    [
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_options",
        "safety_identifier",
        "prompt_cache_retention",
        "verbosity",
    ]
)
"""Fields of OpenAI's API without effect on a local model. Their values are not checked."""

_CHAT_PARAMETERS = frozenset(["max_completion_tokens", "enable_thinking"])
_COMMON = (
    _IGNORED
    | (FORM_FIELDS - {"response_format"})
    | (frozenset(BY_NAME) - _CHAT_PARAMETERS)
    | frozenset(["logit_bias", "stop", "n", "stream", "stream_options", "logprobs", SO_FAR])
)
_CHAT = (
    _COMMON
    | TOOL_FIELDS
    | _CHAT_PARAMETERS
    | frozenset(
        [
            "messages",
            "top_logprobs",
            "response_format",
            "reasoning_effort",
            "modalities",
            "moderation",
            "audio",
            "prediction",
            "web_search_options",
            "chat_template_kwargs",
            "continue_final_message",
            "add_generation_prompt",
        ]
    )
)
_COMPLETION = _COMMON | frozenset(["prompt", "echo", "suffix", "best_of"])
_EMBEDDING = frozenset(["model", "input", "encoding_format", "dimensions", "user"])

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


def chat(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/chat/completions body; raises BadRequestError with `param`."""
    given = body_fields.known(body, _CHAT)
    need_capability(facts, "chat")
    _refuse_unsupported(given)
    if (modalities := given.get("modalities")) not in (None, [], ["text"]):
        raise BadRequestError(
            f'this model only generates text: modalities must be ["text"], not {str(modalities)[:60]}', "modalities"
        )
    images = ImageParts(facts.image_marker) if facts.image_marker else None
    messages = messages_of(given.get("messages"), images)
    continue_final = continues(given, messages)
    tools, choice = tools_of(given, facts)
    common = _common(given, facts)
    forced = common["form_param"] or ("tool_choice" if choice.mode in ("required", "named") else "")
    if forced and continue_final:
        raise _not_together("continue_final_message", forced)
    if forced:
        _refuse_ignore_eos(given, forced)
    so_far = _answer_so_far(given, common)
    n_probs = body_fields.parameter(given, BY_NAME["n_probs"], 0)
    names_logprobs = body_fields.boolean(given, "logprobs", False)
    wants_logprobs = names_logprobs or n_probs > 0
    if so_far is not None and (continue_final or tools or wants_logprobs):
        raise _not_together(SO_FAR, "continue_final_message" if continue_final else "tools" if tools else "logprobs")
    top = body_fields.integer(given, "top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top is not None and not names_logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    newer = body_fields.parameter(given, BY_NAME["max_completion_tokens"])
    older = body_fields.parameter(given, BY_NAME["max_tokens"])
    max_tokens, max_tokens_param = (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    _check_min_tokens(common["sampling"], max_tokens, max_tokens_param)
    return GenerateRequest(
        kind="chat",
        messages=messages,
        logprobs=((top or 0) if names_logprobs else n_probs) if wants_logprobs else None,
        max_tokens=max_tokens,
        max_tokens_param=max_tokens_param,
        template_arguments=variables(given, facts),
        continue_final=continue_final,
        tools=tools,
        choice=choice,
        images=() if images is None else tuple(images.found),
        answer_so_far=so_far,
        **common,
    )


def completion(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/completions body; raises BadRequestError with `param`."""
    given = body_fields.known(body, _COMPLETION)
    need_capability(facts, "completions")
    _refuse_unsupported(given)
    prompts = prompts_of(given.get("prompt"), "prompt", facts, MAX_SEQUENCES)
    common = _common(given, facts)
    if (best_of := body_fields.integer(given, "best_of", None, 1)) is not None and best_of != common["n"]:
        raise BadRequestError(
            "best_of is not supported; remove it or set it to n",
            "best_of",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    if len(prompts) * common["n"] > MAX_SEQUENCES:
        raise BadRequestError(
            f"a request can have at most {MAX_SEQUENCES} answers; the number of prompts times n is larger",
            "n",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    n_probs = body_fields.parameter(given, BY_NAME["n_probs"], 0)
    logprobs = body_fields.integer(given, "logprobs", n_probs or None, 0, MAX_TOP_LOGPROBS)
    echo = body_fields.boolean(given, "echo", False)
    limit = replace(BY_NAME["max_tokens"], low=0)
    max_tokens = body_fields.parameter(given, limit, COMPLETION_TOKENS if "max_tokens" not in given else None)
    _check_min_tokens(common["sampling"], max_tokens, "max_tokens")
    if max_tokens == 0 and not echo:
        raise BadRequestError("max_tokens may only be 0 together with echo", "max_tokens")
    suffix = body_fields.text(given, "suffix")
    if suffix and echo:
        raise _not_together("suffix", "echo")
    so_far = _answer_so_far(given, common)
    if so_far is not None:
        _check_resumed(given, prompts, so_far)
    if common["form_param"]:
        _refuse_ignore_eos(given, common["form_param"])
    return GenerateRequest(
        kind="completion",
        prompts=prompts,
        logprobs=logprobs,
        echo=echo,
        max_tokens=max_tokens,
        suffix=suffix or None,
        answer_so_far=so_far,
        **common,
    )


def embedding(body: Any, facts: Facts) -> EmbeddingRequest:
    """The request in a /v1/embeddings body; raises BadRequestError with `param`."""
    given = body_fields.known(body, _EMBEDDING)
    need_capability(facts, "embeddings")
    inputs = prompts_of(given.get("input"), "input", facts, MAX_INPUTS)
    style = given.get("encoding_format", "float")
    if style not in ("float", "base64"):
        raise BadRequestError('encoding_format must be "float" or "base64"', "encoding_format")
    return EmbeddingRequest(inputs, style == "base64", body_fields.integer(given, "dimensions", None, 1, facts.n_embd))


def need_capability(facts: Facts, name: str) -> None:
    """Raises BadRequestError, `unsupported_parameter`, with the model's own endpoints, unless it has the capability."""
    if name in facts.capabilities:
        return
    places = " and ".join(place for other, (_, place) in _SERVES.items() if other in facts.capabilities)
    hint = f"it supports {places}" if places else "use another model"
    raise BadRequestError(
        f"model {facts.model_id!r} {_SERVES[name][0]}; {hint}", "model", code=Code.UNSUPPORTED_PARAMETER
    )


def continues(given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer continues the last message; raises BadRequestError unless that is text of the assistant."""
    found = body_fields.boolean(given, "continue_final_message", False)
    if found and messages[-1]["role"] != "assistant":
        raise BadRequestError(
            "continue_final_message needs an assistant message at the end of messages", "continue_final_message"
        )
    if found and "tool_calls" in messages[-1]:
        raise BadRequestError(
            "continue_final_message needs text to continue, and the last message ends in calls; send their results",
            "continue_final_message",
        )
    if "add_generation_prompt" in given and body_fields.boolean(given, "add_generation_prompt", True) is found:
        raise BadRequestError(
            "add_generation_prompt must be the opposite of continue_final_message", "add_generation_prompt"
        )
    return found


def variables(given: Mapping[str, Any], facts: Facts) -> Mapping[str, Any]:
    """The chat template's variables that the request sets; raises BadRequestError for a reserved one."""
    thinks = body_fields.parameter(given, BY_NAME["enable_thinking"])
    return {
        **_effort(given, facts),
        **({} if thinks is None else {"enable_thinking": thinks}),
        **_arguments(given),
    }


def _arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    arguments = body_fields.mapping(given, "chat_template_kwargs")
    for name, instead in _RESERVED_VARIABLES.items():
        if name in arguments:
            raise BadRequestError(f"chat_template_kwargs cannot set {name}; {instead}", f"chat_template_kwargs.{name}")
    return arguments


def prompts_of(value: Any, param: str, facts: Facts, most: int) -> tuple[Prompt, ...]:
    """A string, a list of strings, a list of token ids, or a list of such lists; never empty."""
    if value is None:
        raise BadRequestError(f"{param} is required", param)
    if isinstance(value, str):
        prompts: tuple[Prompt, ...] = (value,)
    elif not isinstance(value, list) or not value:
        raise BadRequestError(f"{param} must be a string, or a non-empty list of strings or of token ids", param)
    elif all(isinstance(item, int) and not isinstance(item, bool) for item in value):
        prompts = (_token_ids(value, param, facts),)
    elif len(value) > most:
        raise BadRequestError(f"{param} has {len(value)} entries; at most {most} are allowed", param)
    else:
        prompts = tuple(_prompt(item, f"{param}[{index}]", facts) for index, item in enumerate(value))
    for index, prompt in enumerate(prompts):
        if not prompt:
            raise BadRequestError(f"{param} is empty", param if len(prompts) == 1 else f"{param}[{index}]")
    return prompts


def _prompt(item: Any, param: str, facts: Facts) -> Prompt:
    if isinstance(item, str):
        return item
    if isinstance(item, list):
        return _token_ids(item, param, facts)
    raise BadRequestError(f"{param} must be a string or a list of token ids", param)


def _token_ids(items: list[Any], param: str, facts: Facts) -> tuple[int, ...]:
    for index, item in enumerate(items):
        if isinstance(item, bool) or not isinstance(item, int) or not 0 <= item < facts.n_vocab:
            raise BadRequestError(
                f"{param}[{index}] is not a token of this model: ids are whole numbers from 0 to {facts.n_vocab - 1}",
                f"{param}[{index}]",
            )
    return tuple(items)


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, reason in _UNSUPPORTED.items():
        if name in given:
            raise BadRequestError(reason, name, code=Code.UNSUPPORTED_PARAMETER)


def _not_together(param: str, other: str) -> BadRequestError:
    return BadRequestError(
        f"{param} cannot be combined with {other}; remove one of them", param, code=Code.UNSUPPORTED_PARAMETER
    )


def _check_min_tokens(sampling: Sampling, max_tokens: int | None, max_tokens_param: str) -> None:
    if max_tokens is not None and sampling.min_tokens > max_tokens:
        raise BadRequestError(
            f"min_tokens is {sampling.min_tokens} and {max_tokens_param} is {max_tokens}; min_tokens cannot be larger",
            "min_tokens",
        )


def _refuse_ignore_eos(given: Mapping[str, Any], forced: str) -> None:
    """An answer with a required form ends with the form, so end tokens cannot be suppressed."""
    if body_fields.boolean(given, "ignore_eos", False):
        raise _not_together("ignore_eos", forced)


def _effort(given: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    effort = body_fields.text(given, "reasoning_effort")
    if effort is None:
        return {}
    if effort not in LEVELS:
        raise BadRequestError(f"reasoning_effort must be one of {', '.join(LEVELS)}", "reasoning_effort")
    return effort_variables(effort, facts.family)


def _answer_so_far(given: Mapping[str, Any], common: Mapping[str, Any]) -> AnswerSoFar | None:
    """The beginning of the answer. Only one answer without a required form can be continued."""
    if SO_FAR not in given:
        return None
    fields = body_fields.known(body_fields.mapping(given, SO_FAR), ("content", "reasoning_content"))
    if common["form_param"] or common["n"] != 1:
        raise _not_together(SO_FAR, common["form_param"] or "n")
    return AnswerSoFar(body_fields.text(fields, "content") or "", body_fields.text(fields, "reasoning_content") or "")


def _check_resumed(given: Mapping[str, Any], prompts: Sequence[Prompt], so_far: AnswerSoFar) -> None:
    """A completion that is continued is one text after one prompt."""
    if len(prompts) > 1 or so_far.reasoning:
        raise _not_together(SO_FAR, "reasoning_content" if so_far.reasoning else "several prompts")
    for name in ("logprobs", "echo", "suffix"):
        if given.get(name) not in (None, False, ""):
            raise _not_together(SO_FAR, name)


def _choices(given: Mapping[str, Any]) -> int:
    choices = body_fields.integer(given, "n", 1, 1)
    if choices > MAX_CHOICES:
        raise BadRequestError(
            f"n is {choices}; at most {MAX_CHOICES} choices per request are supported",
            "n",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    return choices


def _common(given: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    stream = body_fields.boolean(given, "stream", False)
    options = body_fields.mapping(given, "stream_options")
    if options and not stream:
        raise BadRequestError("stream_options needs stream to be true", "stream_options")
    for name in options:
        if name not in ("include_usage", "include_obfuscation", PROMPT_USAGE):
            raise BadRequestError(f"unknown field {name[:80]!r}", f"stream_options.{name[:80]}")
    for name in ("skip_special_tokens", "timings_per_token"):  # without effect, but checked
        body_fields.parameter(given, BY_NAME[name])
    form, form_param = form_of(given)
    return {
        "form": form,
        "form_param": form_param,
        "sampling": sampling_of(given, facts),
        "stops": stops_of(given.get("stop")),
        "n": _choices(given),
        "shares_cache": body_fields.parameter(given, BY_NAME["cache_prompt"], True),
        "stream": stream,
        "include_usage": body_fields.boolean(options, "include_usage", False, prefix="stream_options."),
        "prompt_usage": body_fields.boolean(options, PROMPT_USAGE, False, prefix="stream_options."),
    }
