"""The table of generation parameters: names, accepted values, defaults, effects, and what clouds do with them.

The gateway and the worker validate with it, and `docs/api.md` reproduces it (`tests/unit/test_parameters_documented.py`
compares them). A new sampling parameter is a row here, a field of `inference.worker.worker_requests.Sampling` with
the same name, and its place in `inference.worker.sampling.sampling`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

MAX_BREAKERS = 16
MAX_BREAKER_BYTES = 40
"""llama.cpp cuts longer ones."""
_INT32 = 2**31 - 1

Clouds = Literal["sent", "renamed", "left out", "tier skipped"]
"""`sent`: where the provider has the parameter. `renamed`: the gateway sends the other parameter that it stands for.
`tier skipped`: unless the value asks for nothing (false, 0)."""


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter. `low` and `high` bound a number, both allowed. `minus_one`: -1 is allowed below `low` and counts
    as absent. `only` is the only value of a boolean that is accepted. `samples`: it is a field of the worker's
    `Sampling`. `because` says why clouds do what they do.
    """

    name: str
    kind: Literal["integer", "number", "boolean", "strings"]
    effect: str
    default: Any = None
    low: float = -math.inf
    high: float = math.inf
    minus_one: bool = False
    only: bool | None = None
    samples: bool = True
    clouds: Clouds = "sent"
    because: str = ""

    def problem(self, value: Any) -> str | None:
        """What is wrong with `value`, in words that follow the parameter's name; None when it is accepted."""
        match self.kind:
            case "boolean":
                return self._boolean_problem(value)
            case "strings":
                return _strings_problem(value)
        is_whole = self.kind == "integer"
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"must be a {'whole ' if is_whole else ''}number, not {_json_kind(value)}"
        if is_whole and not isinstance(value, int):
            return f"must be a whole number; it is {value:g}"
        if self.low <= value <= self.high or (self.minus_one and value == -1):
            return None
        return f"must be {self._bounds()}; it is {value if is_whole else format(value, 'g')}"

    def _boolean_problem(self, value: Any) -> str | None:
        if not isinstance(value, bool):
            return f"must be true or false, not {_json_kind(value)}"
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

    def values(self) -> str:
        """The accepted values as the documentation writes them."""
        match self.kind:
            case "boolean":
                return "`true`, `false`" if self.only is None else f"`{str(self.only).lower()}`"
            case "strings":
                return f"up to {MAX_BREAKERS} texts of 1 to {MAX_BREAKER_BYTES} bytes"
        if self.low <= -(2**63):
            return "whole"
        unit = "whole, " if self.kind == "integer" else ""
        bounds = (
            f"from {self.low:g}" if math.isinf(self.high) or self.high >= _INT32 else f"{self.low:g} to {self.high:g}"
        )
        return unit + bounds + (", or -1" if self.minus_one else "")


def _strings_problem(value: Any) -> str | None:
    if not isinstance(value, list) or len(value) > MAX_BREAKERS or not all(isinstance(item, str) for item in value):
        return f"must be a list of at most {MAX_BREAKERS} strings"
    for item in value:
        if not 0 < len(item.encode("utf-8", "replace")) <= MAX_BREAKER_BYTES or "\0" in item:
            return f"must hold texts of 1 to {MAX_BREAKER_BYTES} bytes without NUL; one is {item[:60]!r}"
    return None


def _json_kind(value: Any) -> str:
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


def _tuning(
    name: str,
    kind: Literal["integer", "number"],
    default: float | None,
    low: float,
    high: float,
    effect: str,
    *,
    samples: bool = True,
) -> Parameter:
    """A parameter of llama.cpp's samplers that no other model understands."""
    return Parameter(name, kind, effect, default, low, high, samples=samples, clouds="left out", because=_TUNING)


PARAMETERS: tuple[Parameter, ...] = (
    Parameter("temperature", "number", "Divides the logits; 0 takes the likeliest token.", 1.0, 0, 2),
    Parameter("top_p", "number", "Keeps the likeliest tokens up to this sum of probabilities. A cut.", 1.0, 0, 1),
    _tuning("top_k", "integer", 40, -1, _INT32, "Keeps so many of the likeliest tokens; 0 and -1 keep all. A cut."),
    _tuning("min_p", "number", 0.05, 0, 1, "Keeps tokens with this share of the best token's probability. A cut."),
    _tuning("typical_p", "number", 1.0, 0, 1, "Locally typical sampling; 1 is off. A cut."),
    _tuning(
        "xtc_probability", "number", 0.0, 0, 1,
        "Chance at each token that XTC removes all but the last of the tokens above `xtc_threshold`; 0 is off. A cut.",
    ),
    _tuning("xtc_threshold", "number", 0.1, 0, 1, "Probability from which XTC removes tokens; above 0.5 XTC is off."),
    _tuning(
        "mirostat", "integer", 0, 0, 2,
        "1, 2: draws with that version of Mirostat, and cuts have no effect; 0 is off. No effect at temperature 0.",
    ),
    _tuning("mirostat_tau", "number", 5.0, 0, 100, "Mirostat's target surprise, in bits per token."),
    _tuning("mirostat_eta", "number", 0.1, 0, 1, "Mirostat's learning rate."),
    _tuning(
        "repeat_penalty", "number", 1.0, 0.01, 10,
        "Divides positive logits of tokens in the answer by this and multiplies negative ones; 1 is off.",
    ),
    _tuning(
        "repetition_penalty", "number", None, 0.01, 10,
        "Another name of `repeat_penalty`; it counts where both are there.", samples=False,
    ),
    Parameter(
        "frequency_penalty", "number", "Taken off a token's logit for each time that it is in the answer.", 0.0, -2, 2
    ),
    Parameter("presence_penalty", "number", "Taken off the logits of all tokens in the answer.", 0.0, -2, 2),
    _tuning(
        "dry_multiplier", "number", 0.0, 0, 100,
        "DRY takes `dry_multiplier * dry_base ^ (length - dry_allowed_length)` off the logit of a token that would "
        "extend a repetition in the answer; 0 is off.",
    ),
    _tuning("dry_base", "number", 1.75, 1, 100, "Base of DRY's penalty."),
    _tuning("dry_allowed_length", "integer", 2, 0, _INT32, "Longest repetition without a penalty, in tokens."),
    _tuning(
        "dry_penalty_last_n", "integer", -1, -1, _INT32,
        "How many of the answer's last tokens DRY compares; -1: all, 0: off.",
    ),
    Parameter(
        "dry_sequence_breakers", "strings", "Texts across which nothing counts as a repetition.",
        ("\n", ":", '"', "*"), clouds="left out", because=_TUNING,
    ),
    Parameter(
        "min_tokens", "integer",
        "Tokens that end the answer are not drawn before so many others, unless a format or a call allows nothing "
        "else. Stop strings end it at any time.",
        0, 0, _INT32, clouds="tier skipped", because="no cloud can promise a least length",
    ),
    Parameter(
        "ignore_eos", "boolean", "Tokens that end the answer are not drawn.", False,
        clouds="tier skipped", because="no cloud goes on past the end of an answer",
    ),
    Parameter(
        "seed", "integer", "The draws repeat, as described below; -1 or none: each request draws its own.",
        None, -(2**63), 2**63 - 1, minus_one=True,
    ),
    Parameter(
        "max_tokens", "integer", "Longest answer; -1: as long as the context allows.", None, 1, _INT32,
        minus_one=True, samples=False,
    ),
    Parameter(
        "max_completion_tokens", "integer", "The newer name of `max_tokens` in chats.", None, 1, _INT32,
        minus_one=True, samples=False,
    ),
    Parameter(
        "n_probs", "integer",
        "llama.cpp's name for `logprobs` with so many alternatives; `logprobs` counts where both are there.",
        0, 0, 20, samples=False, clouds="renamed", because="it is sent as `logprobs`",
    ),
    Parameter(
        "enable_thinking", "boolean", "`enable_thinking` of `chat_template_kwargs`, which counts where both are there.",
        samples=False, clouds="left out", because="it belongs to a local model's chat template",
    ),
    Parameter(
        "cache_prompt", "boolean",
        "`false`: nothing that was computed for other requests is used, and others use nothing of this one.", True,
        samples=False, clouds="left out", because="prefix reuse is the provider's own affair",
    ),
    Parameter(
        "skip_special_tokens", "boolean", "Control tokens are never part of the text.", True,
        only=True, samples=False, clouds="left out", because="it is how every provider answers",
    ),
    Parameter(
        "timings_per_token", "boolean", "Accepted without effect: answers hold no timings.", False,
        samples=False, clouds="left out", because="it asks for a local model's own figures",
    ),
)  # fmt: skip

BY_NAME: Mapping[str, Parameter] = {parameter.name: parameter for parameter in PARAMETERS}
