"""Reads how tokens are drawn and where an answer ends out of a body; never draws one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inference.worker import fields
from inference.worker.errors import BadRequestError
from inference.worker.requests import Facts, Sampling

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024

SAMPLED = frozenset(
    [
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "typical_p",
        "repeat_penalty",
        "repetition_penalty",
        "frequency_penalty",
        "presence_penalty",
        "logit_bias",
        "seed",
        "ignore_eos",
    ]
)
"""The fields that `sampling_of` reads."""


def sampling_of(given: Mapping[str, Any], facts: Facts) -> Sampling:
    """OpenAI's defaults for what OpenAI names, llama.cpp's for the rest, the GGUF's own recommendations before both."""
    said = facts.sampling_defaults

    def default(name: str) -> float:
        return said.get(name, _DEFAULTS[name])

    repeat = "repetition_penalty" if "repetition_penalty" in given else "repeat_penalty"
    return Sampling(
        temperature=fields.number(given, "temperature", default("temperature"), 0.0, 2.0),
        top_k=fields.integer(given, "top_k", int(default("top_k")), -1, facts.n_vocab),
        top_p=fields.number(given, "top_p", default("top_p"), 0.0, 1.0),
        min_p=fields.number(given, "min_p", default("min_p"), 0.0, 1.0),
        typical_p=fields.number(given, "typical_p", 1.0, 0.0, 1.0),
        repeat_penalty=fields.number(given, repeat, default("repeat_penalty"), 0.01, 10.0),
        frequency_penalty=fields.number(given, "frequency_penalty", 0.0, -2.0, 2.0),
        presence_penalty=fields.number(given, "presence_penalty", 0.0, -2.0, 2.0),
        logit_bias=_biases(given, facts),
        seed=fields.integer(given, "seed", None, -(2**63), 2**64 - 1),
        ignore_eos=fields.boolean(given, "ignore_eos", False),
    )


def _biases(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[int, float], ...]:
    found = []
    values = fields.mapping(given, "logit_bias")
    if len(values) > MAX_BIASES:
        raise BadRequestError(f"logit_bias has {len(values)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < facts.n_vocab):
            raise BadRequestError(
                f"logit_bias names {key[:40]!r}, which is no token id from 0 to {facts.n_vocab - 1}", "logit_bias"
            )
        found.append((int(key), fields.number(values, key, 0.0, -100.0, 100.0, prefix="logit_bias.")))
    return tuple(found)


def stops_of(value: Any) -> tuple[str, ...]:
    """The texts at which an answer ends."""
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > MAX_STOPS:
        raise BadRequestError(f"stop must be a string or a list of at most {MAX_STOPS} strings", "stop")
    for stop in stops:
        if not isinstance(stop, str) or not 0 < len(stop) <= MAX_STOP_LENGTH:
            raise BadRequestError(f"every stop must be a string of 1 to {MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


_DEFAULTS: Mapping[str, float] = {
    name: getattr(Sampling(), name) for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty")
}
