"""Parameters that a route adds to its requests, replaces or removes."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from gateway.apis.openai.generation_request import ChatRequest, InferenceRequest, changed, normalized, typed
from headgate.shared.bodies.body_decoder import InvalidBodyError
from headgate.shared.bodies.openai_bodies import GenerationFields, decode_chat
from headgate.shared.errors import did_you_mean
from headgate.shared.parameters import PARAMETERS

TEMPLATE_VARIABLES = "chat_template_kwargs"

_OTHER_NAMES: Mapping[str, str] = {"max_tokens": "max_completion_tokens", "repeat_penalty": "repetition_penalty"}
"""The second name of a parameter in requests. A route uses the first."""

_NOT_OF_ROUTES = frozenset(
    (*_OTHER_NAMES.values(), "n_probs", "enable_thinking", "skip_special_tokens", "timings_per_token")
)
NAMES = (
    *(row.name for row in PARAMETERS if row.name not in _NOT_OF_ROUTES),
    TEMPLATE_VARIABLES, "logit_bias", "reasoning_effort", "service_tier", "stop", "verbosity",
)  # fmt: skip
"""The parameters that a route can have."""


def problem_of_name(name: str) -> str | None:
    """Why a route cannot have a parameter of this name; None if it can."""
    if name in NAMES:
        return None
    first = next((one for one, other in _OTHER_NAMES.items() if other == name), name)
    advice = did_you_mean(first, NAMES, f"known parameters: {', '.join(sorted(NAMES))}", shown=str)
    return f"{name[:64]!r} is not a parameter that a route can set{advice}"


def problems_of_values(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The names of the parameters that are not valid, each with its problem."""
    for name, value in values.items():
        if (problem := problem_of_name(name)) is not None:
            yield name, problem
        elif value is None:
            yield name, "null is no value; list the parameter under `remove`"
        else:
            try:
                decode_chat({**_SMALLEST_CHAT, name: value}, ChatRequest, "a route")
            except InvalidBodyError as error:
                yield name, error.message


_SMALLEST_CHAT = {"model": "m", "messages": [{"role": "user", "content": "x"}]}


def with_route_parameters(
    request: InferenceRequest, *, defaults: Mapping[str, Any], overrides: Mapping[str, Any], remove: Collection[str]
) -> tuple[InferenceRequest, dict[str, Any]]:
    """The request with the parameters of its route, and the changed ones with the route's values (None: removed).

    First those of `remove` are removed, then absent ones get their `defaults`, then `overrides` replace. Template
    variables are merged. Parameters that the endpoint does not have are left out.
    """
    body = request.body
    if not isinstance(body, GenerationFields) or not (defaults or overrides or remove):
        return request, {}
    fields: dict[str, Any] = {}
    changes: dict[str, Any] = {}

    def current(name: str) -> Any:
        return fields[name] if name in fields else getattr(body, name, None)

    def is_absent(name: str) -> bool:
        return current(name) is None and current(_OTHER_NAMES.get(name, name)) is None

    def put(name: str, value: Any) -> None:
        fields[name] = value
        if (other := _OTHER_NAMES.get(name)) is not None and hasattr(body, other):
            fields[other] = None

    for name in remove:
        if not is_absent(name):
            put(name, None)
            changes[name] = None
    for name, value in defaults.items():
        if not hasattr(body, name):
            continue
        if name == TEMPLATE_VARIABLES and (own := current(name)) is not None:
            if missing := {key: one for key, one in value.items() if key not in own}:
                put(name, {**own, **missing})
                changes[name] = missing
        elif is_absent(name):
            put(name, value)
            changes[name] = value
    for name, value in overrides.items():
        if hasattr(body, name):
            put(name, {**(current(name) or {}), **value} if name == TEMPLATE_VARIABLES else value)
            changes[name] = value
    if not changes:
        return request, {}
    again = typed(request.endpoint, normalized(changed(body, **fields)), request.size_bytes)
    return again._replace(clamps_max_tokens=request.clamps_max_tokens), changes
