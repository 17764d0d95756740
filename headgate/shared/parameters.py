"""The generation parameters: names, accepted values, defaults, effects, and whether clouds get them.

Each annotated field of `Sampling` declares one sampling parameter; `REQUEST_PARAMETERS` declares the others. The
gateway and the worker validate with these declarations, and `docs/api.md` reproduces them
(`tests/unit/test_gateway_documented.py` compares them). A new sampling parameter is a field of `Sampling` and its use
in `inference.worker.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Annotated, Any, Literal, get_args, get_type_hints

MAX_BREAKERS = 16
MAX_BREAKER_BYTES = 40
"""Limits of `dry_sequence_breakers`. llama.cpp truncates longer texts."""
_INT32 = 2**31 - 1

Kind = Literal["integer", "number", "boolean", "strings"]
Clouds = Literal["sent", "renamed", "left out", "tier skipped"]
"""What a cloud gets. `sent`: the parameter, if the cloud's API has it. `renamed`: the equivalent parameter.
`left out`: nothing. `tier skipped`: the cloud is not tried, unless the value has no effect (false, 0)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `low` and `high` are the inclusive bounds of a number. `minus_one`: -1 is allowed, also below
    `low`, and counts as absent. `only` is the only accepted value of a boolean; None: both are. `samples`: it is a
    field of `Sampling`, which gives `name` and `default`. `because` is the reason for `clouds`.
    """

    kind: Kind
    effect: str
    low: float = -math.inf
    high: float = math.inf
    minus_one: bool = False
    only: bool | None = None
    clouds: Clouds = "sent"
    because: str = ""
    name: str = ""
    default: Any = None
    samples: bool = False

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, in words that follow the parameter's name; None when it is accepted."""
        match self.kind:
            case "boolean":
                return self._boolean_problem(value)
            case "strings":
                return _strings_problem(value)
        is_whole = self.kind == "integer"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"must be a {'whole ' if is_whole else ''}number, not {json_kind(value)}"
        if is_whole and not isinstance(value, int):
            return f"must be a whole number; it is {value}"
        if self.low <= value <= self.high or (self.minus_one and value == -1):
            return None
        return f"must be {self._bounds()}; it is {value if isinstance(value, int) else format(value, 'g')}"

    def _boolean_problem(self, value: Any) -> str | None:
        if not isinstance(value, bool):
            return f"must be true or false, not {json_kind(value)}"
        return None if self.only in (None, value) else f"must be {str(self.only).lower()}. {self.effect}"

    def _bounds(self) -> str:
        found = f"at least {self.low}" if math.isinf(self.high) else f"between {self.low} and {self.high}"
        return f"{found}, or -1" if self.minus_one and self.low > -1 else found

    def schema(self) -> dict[str, Any]:
        """The accepted values in JSON Schema, with the effect as the description."""
        if self.kind == "boolean":
            accepted: dict[str, Any] = {"type": "boolean"} if self.only is None else {"const": self.only}
        elif self.kind == "strings":
            accepted = {
                "type": "array",
                "maxItems": MAX_BREAKERS,
                "items": {"type": "string", "minLength": 1, "maxLength": MAX_BREAKER_BYTES},
            }
        else:
            bounds = (("minimum", self.low), ("maximum", self.high))
            accepted = {"type": self.kind, **{name: bound for name, bound in bounds if not math.isinf(bound)}}
            accepted = {"anyOf": [{"const": -1}, accepted]} if self.minus_one else accepted
        return {**accepted, "description": self.effect}


def _strings_problem(value: Any) -> str | None:
    if not isinstance(value, list) or len(value) > MAX_BREAKERS or not all(isinstance(item, str) for item in value):
        return f"must be a list of at most {MAX_BREAKERS} strings"
    for item in value:
        if not 0 < len(item.encode("utf-8", "replace")) <= MAX_BREAKER_BYTES or "\0" in item:
            return f"must hold texts of 1 to {MAX_BREAKER_BYTES} bytes without NUL; one is {item[:60]!r}"
    return None


def json_kind(value: Any) -> str:
    """The name of the JSON type of `value`, with its article (`a string`); `null` for other types."""
    kinds = {
        bool: "a boolean",
        str: "a string",
        int: "a number",
        float: "a number",
        list: "an array",
        dict: "an object",
    }
    return kinds.get(type(value), "null")


_TUNING = "it tunes the sampler of one local model; another model has its own distribution"


def _tuning(kind: Kind, low: float, high: float, effect: str) -> Parameter:
    """A parameter of llama.cpp's samplers that clouds do not get."""
    return Parameter(kind, effect, low, high, clouds="left out", because=_TUNING)


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. Each annotated field declares a parameter of requests with the field's name and default.

    `logit_bias` holds pairs of a token id and the number that is added to its logit; `top_k` of 0 or less is off.
    """

    temperature: Annotated[float, Parameter("number", "Divides the logits; 0 takes the likeliest token.", 0, 2)] = 1.0
    top_p: Annotated[
        float, Parameter("number", "Keeps the likeliest tokens up to this sum of probabilities.", 0, 1)
    ] = 1.0
    top_n_sigma: Annotated[
        float,
        _tuning(
            "number",
            -1,
            100,
            "Keeps tokens whose logit is at most this many standard deviations below the best one; 0 and less are off.",
        ),
    ] = -1.0
    top_k: Annotated[
        int, _tuning("integer", -1, _INT32, "Keeps this many of the likeliest tokens; 0 and -1 keep all.")
    ] = 40
    min_p: Annotated[
        float, _tuning("number", 0, 1, "Keeps tokens with at least this share of the best token's probability.")
    ] = 0.05
    typical_p: Annotated[float, _tuning("number", 0, 1, "Locally typical sampling; 1 is off.")] = 1.0
    xtc_probability: Annotated[
        float,
        _tuning(
            "number",
            0,
            1,
            "Chance at each token that XTC removes the tokens above `xtc_threshold` except the least likely; 0 is off.",
        ),
    ] = 0.0
    xtc_threshold: Annotated[
        float, _tuning("number", 0, 1, "Probability from which XTC removes tokens; above 0.5 XTC is off.")
    ] = 0.1
    mirostat: Annotated[
        int,
        _tuning(
            "integer",
            0,
            2,
            "1, 2: draws with that version of Mirostat, without the `top_*`, `min_p`, `typical_p` and XTC samplers; "
            "0 is off. No effect at temperature 0.",
        ),
    ] = 0
    mirostat_tau: Annotated[float, _tuning("number", 0, 100, "Mirostat's target surprise, in bits per token.")] = 5.0
    mirostat_eta: Annotated[float, _tuning("number", 0, 1, "Mirostat's learning rate.")] = 0.1
    repeat_penalty: Annotated[
        float,
        _tuning(
            "number",
            0.01,
            10,
            "Divides positive logits of tokens in the answer by this and multiplies negative ones by it; 1 is off.",
        ),
    ] = 1.0
    frequency_penalty: Annotated[
        float,
        Parameter(
            "number", "Subtracted from a token's logit once for each time that the token is in the answer.", -2, 2
        ),
    ] = 0.0
    presence_penalty: Annotated[
        float, Parameter("number", "Subtracted from the logits of all tokens in the answer.", -2, 2)
    ] = 0.0
    dry_multiplier: Annotated[
        float,
        _tuning(
            "number",
            0,
            100,
            "DRY subtracts `dry_multiplier * dry_base ^ (length - dry_allowed_length)` from the logit of a token that "
            "would extend a repetition in the answer; 0 is off.",
        ),
    ] = 0.0
    dry_base: Annotated[float, _tuning("number", 1, 100, "Base of DRY's penalty.")] = 1.75
    dry_allowed_length: Annotated[
        int, _tuning("integer", 0, _INT32, "Longest repetition without a penalty, in tokens.")
    ] = 2
    dry_penalty_last_n: Annotated[
        int,
        _tuning("integer", -1, _INT32, "Number of the answer's last tokens that DRY compares; -1: all, 0: off."),
    ] = -1
    dry_sequence_breakers: Annotated[
        tuple[str, ...],
        Parameter("strings", "Texts that a repetition cannot contain.", clouds="left out", because=_TUNING),
    ] = ("\n", ":", '"', "*")
    min_tokens: Annotated[
        int,
        Parameter(
            "integer",
            "Tokens that end the answer are not drawn before it has this many others, unless a format or a call "
            "allows nothing else. Stop strings end it at any time.",
            0,
            _INT32,
            clouds="tier skipped",
            because="no cloud can promise a minimum length",
        ),
    ] = 0
    ignore_eos: Annotated[
        bool,
        Parameter(
            "boolean",
            "Tokens that end the answer are not drawn.",
            clouds="tier skipped",
            because="no cloud continues past the end of an answer",
        ),
    ] = False
    seed: Annotated[
        int | None,
        Parameter(
            "integer",
            "Equal requests that run alone give equal answers; -1 or none: a new seed for each request.",
            -(2**63),
            2**63 - 1,
            minus_one=True,
        ),
    ] = None
    logit_bias: tuple[tuple[int, float], ...] = ()  # fmt: skip


def _sampling_parameters() -> tuple[Parameter, ...]:
    hints = get_type_hints(Sampling, include_extras=True)
    return tuple(
        replace(row, name=field.name, default=field.default, samples=True)
        for field in fields(Sampling)
        for row in get_args(hints[field.name])
        if isinstance(row, Parameter)
    )


SAMPLING_PARAMETERS = _sampling_parameters()

REQUEST_PARAMETERS: tuple[Parameter, ...] = (
    Parameter(
        "number", "Another name of `repeat_penalty`, which it overrides.", 0.01, 10,
        clouds="left out", because=_TUNING, name="repetition_penalty",
    ),
    Parameter(
        "integer", "Longest answer; -1: as long as the context allows.", 1, _INT32, minus_one=True, name="max_tokens",
    ),
    Parameter(
        "integer", "The newer name of `max_tokens` in chats.", 1, _INT32, minus_one=True, name="max_completion_tokens",
    ),
    Parameter(
        "integer",
        "llama.cpp's name for `logprobs` with this number of alternatives; `logprobs` takes precedence.",
        0, 20, clouds="renamed", because="it is sent as `logprobs`", name="n_probs", default=0,
    ),
    Parameter(
        "boolean", "The same as in `chat_template_kwargs`, which takes precedence.",
        clouds="left out", because="it belongs to a local model's chat template", name="enable_thinking",
    ),
    Parameter(
        "boolean",
        "`false`: nothing that was computed for other requests is used, and others use nothing of this one.",
        clouds="left out", because="prefix reuse is decided by the provider", name="cache_prompt", default=True,
    ),
    Parameter(
        "boolean", "Control tokens are never part of the text.",
        only=True, clouds="left out", because="every provider answers in this way", name="skip_special_tokens",
        default=True,
    ),
    Parameter(
        "boolean", "Accepted without effect: answers hold no timings.",
        clouds="left out", because="it concerns a local model's own figures", name="timings_per_token", default=False,
    ),
)  # fmt: skip

PARAMETERS: tuple[Parameter, ...] = (*SAMPLING_PARAMETERS, *REQUEST_PARAMETERS)
BY_NAME: Mapping[str, Parameter] = {parameter.name: parameter for parameter in PARAMETERS}
