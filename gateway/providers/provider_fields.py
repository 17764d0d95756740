"""Which request fields each cloud accepts, which are dropped, and which make the tier unsuitable, with reasons.

Sampling parameters of particular models are dropped. Fields whose absence changes the answer noticeably (its shape, its
number of choices, its determinism) make the tier unsuitable, so that the chain skips it. Unknown fields are not sent,
because clouds reject them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gateway.apis.openai.generation_request import AnyRequest
from gateway.errors import UpstreamError, UpstreamKind
from headgate.shared.bodies.body_decoder import as_json
from headgate.shared.bodies.openai_bodies import CompletionRequest, GenerationFields
from headgate.shared.parameters import PARAMETERS
from inference.protocol import Code


def _given(value: Any) -> bool:
    return value is not None


def _truthy(value: Any) -> bool:
    return bool(value)


def _above_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _is_false(value: Any) -> bool:
    return value is False


def _not_only_text(value: Any) -> bool:
    return bool(value) and value != ["text"]


ALL_TAKEN: Mapping[str, str] = {}
"""No field makes the tier unsuitable."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a field makes a tier unsuitable, and for which values (`when`)."""

    reason: str
    when: Callable[[Any], bool] = _given

    def refuses(self, value: Any) -> bool:
        """Whether `value` makes the tier unsuitable; null does not."""
        return value is not None and self.when(value)


@dataclass(frozen=True, slots=True)
class Profile:
    """How one provider treats the fields of one endpoint. A field in none of the three is dropped as unknown."""

    takes: frozenset[str]
    refuses: Mapping[str, Refusal]
    drops: Mapping[str, str]

    def refused(self, body: AnyRequest) -> tuple[str, ...]:
        """The fields of `body` that make this provider unsuitable."""
        return tuple(name for name in self.refuses if self.refuses[name].refuses(getattr(body, name, None)))

    def shortcomings(self, body: AnyRequest) -> dict[str, str]:
        """The message for each field of `body` that makes this provider unsuitable."""
        return {name: unsupported(name, self.refuses[name].reason).message for name in self.refused(body)}

    def check(self, body: AnyRequest) -> None:
        """Raises UpstreamError for a field that makes this provider unsuitable."""
        if refused := self.refused(body):
            raise unsupported(refused[0], self.refuses[refused[0]].reason)

    def kept(self, body: AnyRequest) -> dict[str, Any]:
        """The JSON fields of `body` that the provider accepts."""
        return {name: value for name, value in as_json(body).items() if name in self.takes}


def unsupported(param: str, reason: str) -> UpstreamError:
    """The error of a request that this provider cannot serve."""
    return UpstreamError(
        UpstreamKind.STATUS,
        f"{param} is not supported by this provider: {reason}",
        status=400,
        code=Code.UNSUPPORTED_PARAMETER,
        type="invalid_request_error",
        param=param,
    )


_SHAPE = Refusal("it constrains the shape of the answer, which only local models enforce")
_VOCABULARY = Refusal("its token ids belong to one model's vocabulary")

# Fields of local models that OpenAI's API does not have. They are sent only to clouds that list them in `takes` below.
EXTENSIONS_REFUSED: Mapping[str, Refusal] = {
    "grammar": _SHAPE,
    "regex": _SHAPE,
    "guided_json": _SHAPE,
    "guided_regex": _SHAPE,
    "guided_grammar": _SHAPE,
    "guided_choice": _SHAPE,
    "structured_outputs": _SHAPE,
    "json_schema": _SHAPE,
    **{row.name: Refusal(row.because, _truthy) for row in PARAMETERS if row.clouds == "tier skipped"},
}
EXTENSIONS_DROPPED: Mapping[str, str] = {
    **{row.name: row.because for row in PARAMETERS if row.clouds in ("left out", "renamed")},
    "chat_template_kwargs": "belongs to a local model's chat template",
    "add_generation_prompt": "belongs to a local model's chat template",
}

_HOSTING = "a hosting feature of another provider, without effect on the answer"
_ONE_CHOICE = Refusal("it returns one choice per request", _above_one)

OPENAI_CHAT = Profile(
    takes=frozenset((
        "messages", "model", "stream", "stream_options", "audio", "frequency_penalty", "function_call", "functions",
        "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "metadata", "modalities", "moderation", "n",
        "parallel_tool_calls", "prediction", "presence_penalty", "prompt_cache_key", "prompt_cache_options",
        "prompt_cache_retention", "reasoning_effort", "response_format", "safety_identifier", "seed", "service_tier",
        "stop", "store", "temperature", "tool_choice", "tools", "top_logprobs", "top_p", "user", "verbosity",
        "web_search_options",
    )),
    refuses={**EXTENSIONS_REFUSED, "continue_final_message": Refusal("it always begins a new message", _truthy)},
    drops=EXTENSIONS_DROPPED,
)  # fmt: skip

OPENAI_COMPLETIONS = Profile(
    takes=frozenset((
        "model", "prompt", "stream", "stream_options", "echo", "frequency_penalty", "logit_bias", "logprobs",
        "max_tokens", "n", "presence_penalty", "seed", "stop", "suffix", "temperature", "top_p", "user",
    )),
    refuses={
        **EXTENSIONS_REFUSED,
        "best_of": Refusal("best_of cannot be streamed", _above_one),
        "max_tokens": Refusal("it requires a limit for completions", lambda value: value == -1),
    },
    drops=EXTENSIONS_DROPPED,
)  # fmt: skip

OPENAI_EMBEDDINGS = Profile(
    takes=frozenset(("model", "input", "dimensions", "encoding_format", "user")), refuses={}, drops=EXTENSIONS_DROPPED
)

# Google answers 400 ("Unknown name ...: Cannot find field") to every unknown field.
GOOGLE_CHAT = Profile(
    takes=frozenset((
        "messages", "model", "stream", "stream_options", "max_completion_tokens", "max_tokens", "n",
        "reasoning_effort", "response_format", "stop", "temperature", "tool_choice", "tools", "top_p",
    )),
    refuses={
        **EXTENSIONS_REFUSED,
        "audio": Refusal("its OpenAI-compatible API has no audio output"),
        "continue_final_message": Refusal("it always begins a new message", _truthy),
        "frequency_penalty": Refusal("its OpenAI-compatible API has no penalties", _truthy),
        "function_call": Refusal("it supports only `tool_choice`"),
        "functions": Refusal("it supports only `tools`", _truthy),
        "logit_bias": Refusal(_VOCABULARY.reason, _truthy),
        "logprobs": Refusal("its OpenAI-compatible API has no log probabilities", _truthy),
        "modalities": Refusal("its OpenAI-compatible API supports only text output", _not_only_text),
        "moderation": Refusal("it does not support OpenAI's moderation field"),
        "parallel_tool_calls": Refusal("it has no option to call one tool at a time", _is_false),
        "presence_penalty": Refusal("its OpenAI-compatible API has no penalties", _truthy),
        "seed": Refusal("its OpenAI-compatible API has no seed"),
        "top_logprobs": Refusal("its OpenAI-compatible API has no log probabilities", _truthy),
        "web_search_options": Refusal("its OpenAI-compatible API does not search the web"),
    },
    drops={
        **EXTENSIONS_DROPPED,
        **dict.fromkeys(
            (
                "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
                "safety_identifier", "service_tier", "store", "user", "verbosity",
            ),
            _HOSTING,
        ),
    },
)  # fmt: skip

ANTHROPIC_CHAT = Profile(
    takes=frozenset((
        "messages", "model", "continue_final_message", "max_completion_tokens", "max_tokens", "parallel_tool_calls",
        "reasoning_effort", "response_format", "stop", "stream", "stream_options", "temperature", "tool_choice",
        "tools", "top_k", "top_p", "user",
    )),
    refuses={
        **EXTENSIONS_REFUSED,
        "audio": Refusal("it supports only text output"),
        "frequency_penalty": Refusal("it has no penalties", _truthy),
        "function_call": Refusal("it supports only `tool_choice`"),
        "functions": Refusal("it supports only `tools`", _truthy),
        "logit_bias": Refusal(_VOCABULARY.reason, _truthy),
        "logprobs": Refusal("it returns no log probabilities", _truthy),
        "modalities": Refusal("it supports only text output", _not_only_text),
        "moderation": Refusal("it does not support OpenAI's moderation field"),
        "n": _ONE_CHOICE,
        "presence_penalty": Refusal("it has no penalties", _truthy),
        "seed": Refusal("it has no seed"),
        "top_logprobs": Refusal("it returns no log probabilities", _truthy),
        "web_search_options": Refusal("its web search is a tool with another format"),
    },
    drops={
        **{name: why for name, why in EXTENSIONS_DROPPED.items() if name != "top_k"},
        **dict.fromkeys(
            (
                "metadata", "prediction", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention",
                "safety_identifier", "service_tier", "store", "verbosity",
            ),
            _HOSTING,
        ),
    },
)  # fmt: skip

# Fields that no local model supports. The worker rejects them as well, but only after the model is loaded.
LOCAL_MOST_CHOICES = 16
_LOCAL_REFUSES: Mapping[str, Refusal] = {
    "audio": Refusal("local models support only text output"),
    "functions": Refusal("superseded by `tools`", _truthy),
    "modalities": Refusal("local models support only text output", _not_only_text),
    "moderation": Refusal("local models have no moderation"),
    "n": Refusal(
        f"a local model returns at most {LOCAL_MOST_CHOICES} choices per request",
        lambda value: isinstance(value, int) and value > LOCAL_MOST_CHOICES,
    ),
    "prediction": Refusal("local models do not support predicted outputs"),
    "web_search_options": Refusal("local models do not search the web"),
}


def refused_by_local(body: AnyRequest) -> Mapping[str, str]:
    """Why no local model can serve `body`, by field."""
    given = [(name, value) for name in _LOCAL_REFUSES if (value := getattr(body, name, None)) is not None]
    if not given:
        return ALL_TAKEN
    refused = (name for name, value in given if _LOCAL_REFUSES[name].when(value))
    return {name: unsupported(name, _LOCAL_REFUSES[name].reason).message for name in refused}


def token_ids_in(body: AnyRequest) -> str | None:
    """The field of `body` that contains token ids, which are valid for one vocabulary only; None without one."""
    if isinstance(body, GenerationFields) and body.logit_bias:
        return "logit_bias"
    prompt = body.prompt if isinstance(body, CompletionRequest) else None
    return "prompt" if isinstance(prompt, list) and not isinstance(prompt[0], str) else None
