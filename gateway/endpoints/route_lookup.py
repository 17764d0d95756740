"""Finds the route of a requested model; refreshes the list of local models before it rejects a name."""

from __future__ import annotations

import difflib
import time

from gateway.breaker.outcome import LOCAL
from gateway.errors import RequestError
from gateway.http.http_exchange import Exchange
from gateway.routing.chain import RouteMatch, find_route
from gateway.runtime import Runtime
from inference.protocol import Code


def known(runtime: Runtime, model: str) -> RouteMatch | None:
    """The route of `model` in the current configuration; None when `find` must refresh the local models."""
    found = find_route(model, runtime.config.routes, runtime.view.aliases)
    return None if found is None or _seems_unknown(runtime, found) else found


async def find(runtime: Runtime, model: str, exchange: Exchange) -> RouteMatch:
    """The route of `model`; raises RequestError (404) for an unknown model.

    A reload may remove the route after the next await of the caller.
    """
    if (found := known(runtime, model)) is None:
        began = time.monotonic()
        await runtime.view.refresh()  # the model may be new
        exchange.waited_seconds += time.monotonic() - began
        if (found := known(runtime, model)) is None:
            raise _unknown(runtime, model)
    return found


def _unknown(runtime: Runtime, model: str) -> RequestError:
    """The error, with a similar name when there is one."""
    known = sorted({*(route for route in runtime.config.routes if route != "*"), *runtime.view.models})
    near = difflib.get_close_matches(model, known, n=1)
    advice = f"did you mean {near[0]!r}?" if near else f"known models: {', '.join(known[:20]) or 'none'}"
    return RequestError(Code.MODEL_NOT_FOUND, f"unknown model {model[:100]!r}; {advice}", param="model")


def _seems_unknown(runtime: Runtime, found: RouteMatch) -> bool:
    """Whether only the inference service could serve the name, and its list lacks it."""
    view = runtime.view
    if found.route != "*" or found.model in view.models or not view.is_fresh:
        return False
    return all(entry.startswith(f"{LOCAL}/") for entry in runtime.config.routes["*"].chain)
