"""Reads how tokens are drawn and where an answer ends out of a body; never draws one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headgate.shared.parameters import BY_NAME, PARAMETERS
from inference.worker.api import body_fields
from inference.worker.worker_errors import BadRequestError
from inference.worker.worker_requests import Facts, Sampling

MAX_STOPS = 16
MAX_STOP_LENGTH = 1024
MAX_BIASES = 1024

SAMPLED = frozenset(row.name for row in PARAMETERS if row.samples) | {"repetition_penalty", "logit_bias"}
"""The fields that `sampling_of` reads."""


def sampling_of(given: Mapping[str, Any], facts: Facts) -> Sampling:
    """The table's defaults, the GGUF's own recommendations before them."""
    defaults = {row.name: row.default for row in PARAMETERS if row.samples}
    defaults |= {name: int(value) if name == "top_k" else value for name, value in facts.sampling_defaults.items()}
    values = {name: body_fields.parameter(given, BY_NAME[name], default) for name, default in defaults.items()}
    values["repeat_penalty"] = body_fields.parameter(given, BY_NAME["repetition_penalty"], values["repeat_penalty"])
    values["top_k"] = min(values["top_k"], facts.n_vocab)
    return Sampling(**values, logit_bias=_biases(given, facts))


def _biases(given: Mapping[str, Any], facts: Facts) -> tuple[tuple[int, float], ...]:
    found = []
    values = body_fields.mapping(given, "logit_bias")
    if len(values) > MAX_BIASES:
        raise BadRequestError(f"logit_bias has {len(values)} entries; at most {MAX_BIASES} are allowed", "logit_bias")
    for key in values:
        if not (key.isascii() and key.isdigit() and len(key) < 10 and int(key) < facts.n_vocab):
            raise BadRequestError(
                f"logit_bias names {key[:40]!r}, which is no token id from 0 to {facts.n_vocab - 1}", "logit_bias"
            )
        found.append((int(key), body_fields.number(values, key, 0.0, -100.0, 100.0, prefix="logit_bias.")))
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
