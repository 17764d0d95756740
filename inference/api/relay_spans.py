"""The spans of one request in the inference service: the request, its waits for a worker, loads, and the stages of its
answer in the worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headgate.shared.traces.trace_context import Span, SpanContext, parse
from inference.worker_link import Timings

_NO_FAILURE = ("success", "client_left")
_STAGES = ("prepare", "slot", "prefill", "decode")
"""The stages between the times of `Timings`."""

SHORTEST_WAIT_SECONDS = 0.001
"""Shorter waits (`queue`, `slot`) have no span."""

NewId = Callable[[], int]


@dataclass(slots=True)
class Wait:
    """A wait for a worker; times are seconds of the authority's clock.

    `ended_at` is None when no worker was given. A worker loaded its model from `load_began_at` to `load_ended_at`.
    """

    began_at: float
    ended_at: float | None = None
    load_began_at: float = 0.0
    load_ended_at: float = 0.0


@dataclass(slots=True)
class RelayTrace:
    """What is noted about a traced request; `began` is Unix time, `began_at` the same on the authority's clock."""

    span: SpanContext
    path: str
    began: float
    began_at: float
    model: str | None = None
    outcome: str = ""
    waits: list[Wait] = field(default_factory=list)

    def begin_wait(self, now: float) -> Wait:
        """A wait for a worker begins."""
        self.waits.append(wait := Wait(now))
        return wait


def relay_spans(trace: RelayTrace, now: float, new_id: NewId) -> Iterator[Span]:
    """The spans of a request that ends `now`, on the authority's clock."""
    offset = trace.began - trace.began_at
    number = trace.outcome.removeprefix("status_")
    status = 200 if trace.outcome == "success" else int(number) if number.isdigit() else None
    yield Span(
        f"POST {trace.path}",
        trace.span,
        trace.began,
        now + offset,
        "server",
        {
            "http.request.method": "POST",
            "url.path": trace.path,
            "http.response.status_code": status,
            "gen_ai.request.model": trace.model,
        },
        None if trace.outcome in _NO_FAILURE else trace.outcome,
    )
    for wait in trace.waits:
        ended_at = now if wait.ended_at is None else wait.ended_at
        if ended_at - wait.began_at < SHORTEST_WAIT_SECONDS:
            continue
        queue = trace.span.child(new_id())
        yield Span("queue", queue, wait.began_at + offset, ended_at + offset)
        load_began_at = max(wait.began_at, wait.load_began_at)
        if load_began_at < min(wait.load_ended_at, ended_at):
            yield Span("load", queue.child(new_id()), load_began_at + offset, wait.load_ended_at + offset)


def worker_spans(timings: Timings, new_id: NewId) -> Iterator[Span]:
    """The stages of an answer in its worker, up to the last one that began."""
    if (parent := parse(timings.traceparent)) is None:
        return
    times = [time for time in (timings.arrived, timings.queued, timings.begun, timings.prefilled) if time is not None]
    usage = {
        "prefill": {
            "gen_ai.usage.input_tokens": timings.prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": timings.cached_tokens,
        },
        "decode": {"gen_ai.usage.output_tokens": timings.completion_tokens},
    }
    for stage, began, ended in zip(_STAGES, times, [*times[1:], timings.ended], strict=False):
        if stage != "slot" or ended - began >= SHORTEST_WAIT_SECONDS:
            yield Span(stage, parent.child(new_id()), began, ended, attributes=usage.get(stage, {}))
