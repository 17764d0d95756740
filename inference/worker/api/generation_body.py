"""Turns an OpenAI body into a frozen request once, or says which parameter is wrong; never tokenizes or computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headgate.shared.parameters import BY_NAME
from inference.protocol import PROMPT_USAGE, Code
from inference.worker.api import body_fields, format_fields, sampling_fields, tool_fields
from inference.worker.dialects.effort import LEVELS, effort_variables
from inference.worker.prompt.message_images import ImageParts
from inference.worker.prompt.template_messages import messages_of
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import EmbeddingRequest, Facts, GenerateRequest, Prompt, Said, Sampling

MAX_CHOICES = 16
MAX_SEQUENCES = 128
MAX_TOP_LOGPROBS = 20
MAX_INPUTS = 2048

COMPLETION_TOKENS = 16
"""OpenAI's default for the length of a completion."""

SO_FAR = "answer_so_far"
"""How the answer begins already: another worker gave so much of it and broke off."""

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
"""Fields that clients commonly send and that have no effect on a local model; they are checked for nothing."""

_OF_CHATS = frozenset(["max_completion_tokens", "enable_thinking"])
_COMMON = (
    _IGNORED
    | sampling_fields.SAMPLED
    | format_fields.EXTENSIONS
    | (frozenset(BY_NAME) - _OF_CHATS)
    | frozenset(["stop", "n", "stream", "stream_options", "logprobs", SO_FAR])
)
_CHAT = (
    _COMMON
    | tool_fields.NAMES
    | _OF_CHATS
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
    "audio": "this model does not speak; leave audio out",
    "moderation": "nothing is moderated here; leave moderation out",
    "prediction": "predicted outputs are not supported; leave prediction out",
    "web_search_options": "this model cannot search the web; leave web_search_options out",
}

_SERVES = {
    "chat": ("does not chat", "/v1/chat/completions"),
    "completions": ("does not complete texts", "/v1/completions"),
    "embeddings": ("gives no embeddings", "/v1/embeddings"),
    "rerank": ("does not rerank", "/v1/rerank"),
}
"""What a model without the capability says, and where one with it is asked."""

_RENDERERS_OWN: Mapping[str, str] = {
    "messages": "use messages",
    "tools": "use tools",
    "add_generation_prompt": "use continue_final_message",
    "bos_token": "it is the model's own; leave it out",
    "eos_token": "it is the model's own; leave it out",
}
"""Variables of every template that are not the caller's to set, and what to do instead."""


def chat(body: Any, facts: Facts) -> GenerateRequest:
    """The request in a /v1/chat/completions body; raises BadRequestError with `param`."""
    given = body_fields.known(body, _CHAT)
    need_capability(facts, "chat")
    _refuse_unsupported(given)
    if (modalities := given.get("modalities")) not in (None, [], ["text"]):
        raise BadRequestError(
            f'this model only writes text: modalities must be ["text"], not {str(modalities)[:60]}', "modalities"
        )
    images = ImageParts(facts.image_marker) if facts.image_marker else None
    messages = messages_of(given.get("messages"), images)
    continue_final = continues(given, messages)
    tools, choice = tool_fields.tools_of(given, facts)
    common = _common(given, facts)
    forced = common["form_param"] or ("tool_choice" if choice.mode in ("required", "named") else "")
    if forced and continue_final:
        raise _not_together("continue_final_message", forced)
    if forced:
        _check_ending(given, forced)
    said = _said(given, common)
    n_probs = body_fields.parameter(given, BY_NAME["n_probs"], 0)
    names_logprobs = body_fields.boolean(given, "logprobs", False)
    wants_logprobs = names_logprobs or n_probs > 0
    if said is not None and (continue_final or tools or wants_logprobs):
        raise _not_together(SO_FAR, "continue_final_message" if continue_final else "tools" if tools else "logprobs")
    top = body_fields.integer(given, "top_logprobs", None, 0, MAX_TOP_LOGPROBS)
    if top is not None and not names_logprobs:
        raise BadRequestError("top_logprobs needs logprobs to be true", "top_logprobs")
    newer = body_fields.parameter(given, BY_NAME["max_completion_tokens"])
    older = body_fields.parameter(given, BY_NAME["max_tokens"])
    most, most_param = (older, "max_tokens") if newer is None else (newer, "max_completion_tokens")
    _check_least(common["sampling"], most, most_param)
    return GenerateRequest(
        kind="chat",
        messages=messages,
        logprobs=((top or 0) if names_logprobs else n_probs) if wants_logprobs else None,
        max_tokens=most,
        max_tokens_param=most_param,
        template_arguments=variables(given, facts),
        continue_final=continue_final,
        tools=tools,
        choice=choice,
        images=() if images is None else tuple(images.found),
        said=said,
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
            "best_of is not supported; leave it out or make it equal to n", "best_of", code=Code.UNSUPPORTED_PARAMETER
        )
    if len(prompts) * common["n"] > MAX_SEQUENCES:
        raise BadRequestError(
            f"at most {MAX_SEQUENCES} answers per request: prompts times n is more",
            "n",
            code=Code.UNSUPPORTED_PARAMETER,
        )
    n_probs = body_fields.parameter(given, BY_NAME["n_probs"], 0)
    logprobs = body_fields.integer(given, "logprobs", n_probs or None, 0, MAX_TOP_LOGPROBS)
    echo = body_fields.boolean(given, "echo", False)
    limit = replace(BY_NAME["max_tokens"], low=0)
    most = body_fields.parameter(given, limit, COMPLETION_TOKENS if "max_tokens" not in given else None)
    _check_least(common["sampling"], most, "max_tokens")
    if most == 0 and not echo:
        raise BadRequestError("max_tokens may only be 0 where echo shows the prompt", "max_tokens")
    suffix = body_fields.text(given, "suffix")
    if suffix and echo:
        raise _not_together("suffix", "echo")
    said = _said(given, common)
    if said is not None:
        _check_resumed(given, prompts, said)
    if common["form_param"]:
        _check_ending(given, common["form_param"])
    return GenerateRequest(
        kind="completion",
        prompts=prompts,
        logprobs=logprobs,
        echo=echo,
        max_tokens=most,
        suffix=suffix or None,
        said=said,
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
    """Raises BadRequestError, `unsupported_parameter`, with where the model is asked, unless it has the capability."""
    if name in facts.capabilities:
        return
    places = " and ".join(place for other, (_, place) in _SERVES.items() if other in facts.capabilities)
    hint = f"it answers {places}" if places else "ask another one"
    raise BadRequestError(
        f"model {facts.model_id!r} {_SERVES[name][0]}; {hint}", "model", code=Code.UNSUPPORTED_PARAMETER
    )


def continues(given: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the answer goes on with the last message; raises BadRequestError where that is no text of the
    assistant's.
    """
    found = body_fields.boolean(given, "continue_final_message", False)
    if found and messages[-1]["role"] != "assistant":
        raise BadRequestError(
            "continue_final_message needs an assistant message at the end of messages", "continue_final_message"
        )
    if found and "tool_calls" in messages[-1]:
        raise BadRequestError(
            "continue_final_message goes on with text, and the last message ends in calls; send their results",
            "continue_final_message",
        )
    if "add_generation_prompt" in given and body_fields.boolean(given, "add_generation_prompt", True) is found:
        raise BadRequestError(
            "add_generation_prompt must be the opposite of continue_final_message", "add_generation_prompt"
        )
    return found


def variables(given: Mapping[str, Any], facts: Facts) -> Mapping[str, Any]:
    """What the caller sets of the chat template's variables; raises BadRequestError for one that is the renderer's."""
    thinks = body_fields.parameter(given, BY_NAME["enable_thinking"])
    return {
        **_effort(given, facts),
        **({} if thinks is None else {"enable_thinking": thinks}),
        **_arguments(given),
    }


def _arguments(given: Mapping[str, Any]) -> Mapping[str, Any]:
    said = body_fields.mapping(given, "chat_template_kwargs")
    for name, instead in _RENDERERS_OWN.items():
        if name in said:
            raise BadRequestError(f"chat_template_kwargs cannot set {name}; {instead}", f"chat_template_kwargs.{name}")
    return said


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
                f"{param}[{index}] is no token of this model: ids are whole numbers from 0 to {facts.n_vocab - 1}",
                f"{param}[{index}]",
            )
    return tuple(items)


def _refuse_unsupported(given: Mapping[str, Any]) -> None:
    for name, reason in _UNSUPPORTED.items():
        if name in given:
            raise BadRequestError(reason, name, code=Code.UNSUPPORTED_PARAMETER)


def _not_together(param: str, other: str) -> BadRequestError:
    return BadRequestError(
        f"{param} cannot be combined with {other}; leave one of them out", param, code=Code.UNSUPPORTED_PARAMETER
    )


def _check_least(sampling: Sampling, most: int | None, most_param: str) -> None:
    if most is not None and sampling.min_tokens > most:
        raise BadRequestError(
            f"min_tokens is {sampling.min_tokens} and {most_param} {most}; ask for at least as many tokens",
            "min_tokens",
        )


def _check_ending(given: Mapping[str, Any], forced: str) -> None:
    """An answer of a given shape is over when the shape is; nothing may follow."""
    if body_fields.boolean(given, "ignore_eos", False):
        raise _not_together("ignore_eos", forced)


def _effort(given: Mapping[str, Any], facts: Facts) -> dict[str, Any]:
    effort = body_fields.text(given, "reasoning_effort")
    if effort is None:
        return {}
    if effort not in LEVELS:
        raise BadRequestError(f"reasoning_effort must be one of {', '.join(LEVELS)}", "reasoning_effort")
    return effort_variables(effort, facts.family)


def _said(given: Mapping[str, Any], common: Mapping[str, Any]) -> Said | None:
    """How the answer begins already; only one answer, of any text, can be gone on with."""
    if SO_FAR not in given:
        return None
    said = body_fields.known(body_fields.mapping(given, SO_FAR), ("content", "reasoning_content"))
    if common["form_param"] or common["n"] != 1:
        raise _not_together(SO_FAR, common["form_param"] or "n")
    return Said(body_fields.text(said, "content") or "", body_fields.text(said, "reasoning_content") or "")


def _check_resumed(given: Mapping[str, Any], prompts: Sequence[Prompt], said: Said) -> None:
    """A completion that goes on is one text behind one prompt."""
    if len(prompts) > 1 or said.reasoning:
        raise _not_together(SO_FAR, "reasoning_content" if said.reasoning else "several prompts")
    for name in ("logprobs", "echo", "suffix"):
        if given.get(name) not in (None, False, ""):
            raise _not_together(SO_FAR, name)


def _choices(given: Mapping[str, Any]) -> int:
    choices = body_fields.integer(given, "n", 1, 1)
    if choices > MAX_CHOICES:
        raise BadRequestError(
            f"n is {choices}; this model gives at most {MAX_CHOICES} choices per request",
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
    for name in ("skip_special_tokens", "timings_per_token"):  # without effect, but not whatever they hold
        body_fields.parameter(given, BY_NAME[name])
    form, form_param = format_fields.form_of(given)
    return {
        "form": form,
        "form_param": form_param,
        "sampling": sampling_fields.sampling_of(given, facts),
        "stops": sampling_fields.stops_of(given.get("stop")),
        "n": _choices(given),
        "reuses": body_fields.parameter(given, BY_NAME["cache_prompt"], True),
        "stream": stream,
        "include_usage": body_fields.boolean(options, "include_usage", False, prefix="stream_options."),
        "prompt_usage": body_fields.boolean(options, PROMPT_USAGE, False, prefix="stream_options."),
    }
