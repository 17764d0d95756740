"""What a request is once it was understood: frozen, validated, free of JSON; decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from inference.worker.dialects.answer_parts import Tool, ToolChoice
from inference.worker.dialects.forms import Form

NO_TOOLS = ToolChoice("none")

Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Facts:
    """What a request is validated against: the model this worker holds."""

    model_id: str
    context_length: int
    n_vocab: int
    n_embd: int
    capabilities: tuple[str, ...]
    sampling_defaults: Mapping[str, float] = field(default_factory=dict)
    image_marker: str = ""
    """What stands for an image in a message's text; nobody else can know it. Empty where images are not read."""
    family: str = ""
    """Of the chat template, as its dialect is called; empty without one."""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn: `headgate.shared.parameters` has the meaning and the range of each field. `top_k` 0 or less
    is off.
    """

    temperature: float = 1.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.05
    typical_p: float = 1.0
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    repeat_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = -1
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Said:
    """What an answer that broke off had said already, to be gone on with."""

    content: str
    reasoning: str = ""

    def message(self) -> dict[str, str]:
        """As an assistant's message."""
        return {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}


@dataclass(frozen=True, slots=True)
class Begun:
    """The beginning of an answer: how many tokens of the prompt's end it is, how many of these are no content, and its
    content's text. The tokens count as drawn.
    """

    tokens: int = 0
    reasoning: int = 0
    content: str = ""


NOTHING = Begun()


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """A validated chat or completion. `logprobs` is None or how many alternatives to name; `max_tokens` is the most
    that the caller wants, None as many as the context holds, 0 only with `echo`; `max_tokens_param` is the parameter
    that says so.

    `prompt_usage` is whether the first chunk of a stream carries the usage of the prompt.

    `form` is what the answer must look like and `form_param` the parameter that says so. `suffix` is what follows the
    gap that the answer fills. `reuses`: what other requests computed may be used, and they may use what this one does.
    `images` are files, in the order of their markers in the messages. `said` is how the
    answer begins, because another worker has given so much of it: limits, penalties, stop strings and usage are those
    of the whole answer.
    """

    kind: Literal["chat", "completion"]
    messages: tuple[Mapping[str, Any], ...] = ()
    prompts: tuple[Prompt, ...] = ()
    sampling: Sampling = Sampling()
    max_tokens: int | None = None
    max_tokens_param: str = "max_tokens"
    stops: tuple[str, ...] = ()
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    prompt_usage: bool = False
    logprobs: int | None = None
    echo: bool = False
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    continue_final: bool = False
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = NO_TOOLS
    form: Form | None = None
    form_param: str = ""
    suffix: str | None = None
    images: tuple[bytes, ...] = ()
    said: Said | None = None
    reuses: bool = True

    @property
    def score_prompt(self) -> bool:
        """Whether log probabilities of the echoed prompt are asked for."""
        return self.echo and self.logprobs is not None


@dataclass(frozen=True, slots=True)
class EmbeddingRequest:
    """Validated inputs for embeddings; `dimensions` None means all of them."""

    inputs: tuple[Prompt, ...]
    as_base64: bool = False
    dimensions: int | None = None
