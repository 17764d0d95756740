"""`headgate bench`: sends a small load to the running gateway and prints its rates, latencies and errors."""

from __future__ import annotations

import argparse
import json
import math
import secrets
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headgate.cli import addresses
from headgate.cli.client import Api, ApiError, from_envelope
from headgate.cli.command import Command, Session, at_least_one
from headgate.cli.talk import INTERRUPTED, SILENCE_SECONDS
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.units import parse_duration
from inference.protocol import H_POLICY, H_TIER, Tier

WORDS = ("the", "of", "and", "to", "in", "is", "it", "was", "for", "on", "as", "with", "at", "be", "by", "not")
"""Words that are one token each in nearly every vocabulary."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The load. New requests start during `seconds`; those that run at its end are finished."""

    model: str
    streams: int
    prompt_tokens: int
    answer_tokens: int
    seconds: float

    def body(self, answer_tokens: int | None = None) -> dict[str, Any]:
        """A request with a random prompt, so that no cached prefix is used. `answer_tokens`: default as planned."""
        words = (secrets.choice(WORDS) for _ in range(self.prompt_tokens))
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": " ".join(words)}],
            "max_tokens": answer_tokens or self.answer_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of one request. `times` (of the pieces of text) and `end` are seconds since the request was sent.

    `error` is None for a complete answer. The token counts are those that the service reports, 0 after an error.
    """

    times: Sequence[float]
    end: float
    prompt_tokens: int = 0
    answer_tokens: int = 0
    tier: str = Tier.LOCAL
    error: HeadgateError | None = None


def send(api: Api, body: Mapping[str, Any]) -> BenchResult:
    """Sends one request and reads the whole answer. An error or an invalid answer becomes the `error` of the result."""
    start = time.perf_counter()
    times: list[float] = []
    usage: Mapping[str, Any] = {}
    tier = str(Tier.LOCAL)
    try:
        headers = {H_POLICY: "local-only"}
        with api.open("POST", "/v1/chat/completions", body, SILENCE_SECONDS, headers) as answer:
            tier = answer.headers.get(H_TIER, tier)
            for frame in answer.frames():
                if frame.data == b"[DONE]":
                    end = time.perf_counter() - start
                    tokens = int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0)
                    return BenchResult(times, end, *tokens, tier=tier)
                chunk = json.loads(frame.data or b"{}")
                if error := chunk.get("error"):
                    raise from_envelope(error, None, None)
                usage = chunk.get("usage") or usage
                for choice in chunk.get("choices", ()):
                    delta = choice.get("delta", {})
                    if delta.get("content") or delta.get("reasoning_content"):
                        times.append(time.perf_counter() - start)
        raise ApiError("the answer is incomplete: the stream ended without [DONE]", code="cut_off")
    except HeadgateError as error:
        failure = error
    except (ValueError, KeyError, TypeError, AttributeError):
        failure = ApiError(f"the {api.name} at {api.url} answered with a stream that is not one of chat completions")
    return BenchResult(times, time.perf_counter() - start, tier=tier, error=failure)


class Load:
    """The streams of a plan, one thread each. After an error a stream waits for its Retry-After, or ends."""

    def __init__(self, api: Api, plan: Plan) -> None:
        self.plan = plan
        self._api = api
        self._results: list[BenchResult] = []
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._stream, daemon=True) for _ in range(plan.streams)]
        self._began = self._ended = 0.0

    @property
    def results(self) -> list[BenchResult]:
        """The requests that have ended so far."""
        return list(self._results)

    @property
    def seconds(self) -> float:
        """From the start to the end of the last request that ended."""
        return max(0.0, self._ended - self._began)

    def start(self) -> None:
        """Starts all streams."""
        self._began = time.perf_counter()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Starts no further request. Does not wait for running ones: their threads end with the process."""
        self._stopped.set()

    def wait(self, seconds: float) -> bool:
        """Waits at most `seconds`. Returns whether every stream has ended."""
        deadline = time.perf_counter() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.perf_counter()))
        return not any(thread.is_alive() for thread in self._threads)

    def _stream(self) -> None:
        """Sends one request after the other, at least one, until the time is over."""
        end = self._began + self.plan.seconds
        while not self._stopped.is_set():
            result = send(self._api, self.plan.body())
            self._results.append(result)
            self._ended = time.perf_counter()
            left = end - self._ended
            if result.error is not None:
                pause = getattr(result.error, "retry_after", None)
                if pause is None or self._stopped.wait(min(pause, max(0.0, left))):
                    return
                left = end - time.perf_counter()
            if left <= 0:
                return


MAX_STREAMS = 256
MAX_SECONDS = 3600.0
STATUS_SECONDS = 0.5


def _streams(text: str) -> int:
    count = at_least_one(text)
    if count > MAX_STREAMS:
        raise argparse.ArgumentTypeError(f"{text} is too many; use at most {MAX_STREAMS} streams")
    return count


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use more than 0 and at most 1h")
    return seconds


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model or route of the gateway; only local models answer")
    parser.add_argument("--streams", metavar="N", type=_streams, default=4, help="concurrent requests (4)")
    parser.add_argument(
        "--prompt-tokens",
        metavar="N",
        type=at_least_one,
        default=80,
        help="words of each prompt, about a token each (80)",
    )
    parser.add_argument(
        "--answer-tokens", metavar="N", type=at_least_one, default=64, help="length of each answer, in tokens (64)"
    )
    parser.add_argument(
        "--duration", metavar="TIME", type=_duration, default=10.0,
        help="how long new requests are started, such as 30s or 2m (10s); running ones are finished",
    )  # fmt: skip


def run(session: Session) -> int:
    """Sends one request that loads the model and is not counted, then the load, and prints the result."""
    args, terminal = session.args, session.terminal
    plan = Plan(args.model, args.streams, args.prompt_tokens, args.answer_tokens, args.duration)
    api = addresses.gateway(session, needs_key=True)
    terminal.status(f"waiting for {plan.model}")
    if (error := send(api, plan.body(1)).error) is not None:
        raise error
    load = Load(api, plan)
    load.start()
    status: int = Exit.OK
    try:
        while not load.wait(STATUS_SECONDS):
            terminal.status(f"{len(load.results)} requests ended")
    except KeyboardInterrupt:
        load.stop()
        terminal.say("")
        status = INTERRUPTED
    results = load.results
    figures = summary(plan, results, load.seconds)
    if session.json:
        terminal.json(figures)
    else:
        _show(session, figures)
    failed = [result.error for result in results if result.error is not None]
    for reason, count in Counter(map(str, failed)).most_common():
        terminal.say(f"{terminal.paint_err('headgate:', 'red')} {count} of {len(results)} requests failed: {reason}")
    if other_tiers := figures["other_tiers"]:
        terminal.say(
            f"headgate: {other_tiers} of {figures['requests']} answers are from another model than {plan.model}"
        )
    if status == Exit.OK and failed:
        first = failed[0]
        status = first.exit_code if len(failed) == len(results) else Exit.FAILURE
    return int(status)


def summary(plan: Plan, results: Sequence[BenchResult], seconds: float) -> dict[str, Any]:
    """The figures of a load, times in seconds. A figure without measurements is None."""
    complete = [result for result in results if result.error is None]
    answer_tokens = sum(result.answer_tokens for result in complete)
    gaps = [
        after - before for result in complete for before, after in zip(result.times, result.times[1:], strict=False)
    ]
    return {
        "model": plan.model,
        "streams": plan.streams,
        "seconds": round(seconds, 3),
        "requests": len(complete),
        "failed": len(results) - len(complete),
        "other_tiers": sum(result.tier != Tier.LOCAL for result in complete),
        "prompt_tokens": sum(result.prompt_tokens for result in complete),
        "answer_tokens": answer_tokens,
        "tokens_per_second": round(answer_tokens / seconds, 1) if seconds and complete else None,
        "requests_per_second": round(len(complete) / seconds, 2) if seconds and complete else None,
        "ttft_seconds": _percentiles([result.times[0] for result in complete if result.times]),
        "inter_token_seconds": _percentiles(gaps),
        "request_seconds": _percentiles([result.end for result in complete]),
    }


def _percentiles(values: Sequence[float]) -> dict[str, float | None]:
    found = {"p50": percentile(values, 0.5), "p90": percentile(values, 0.9), "p99": percentile(values, 0.99)}
    return {name: None if math.isnan(value) else round(value, 6) for name, value in found.items()}


def _show(session: Session, figures: dict[str, Any]) -> None:
    count, seconds, streams = figures["requests"], figures["seconds"], figures["streams"]
    rate = "-" if figures["tokens_per_second"] is None else f"{figures['tokens_per_second']:.1f}"
    session.terminal.data(
        f"{figures['model']}, {streams} stream{'s' if streams > 1 else ''}, {seconds:.1f} s: "
        f"{count} requests answered, {figures['failed']} failed\n"
        f"{figures['prompt_tokens']} prompt tokens, {figures['answer_tokens']} answer tokens, {rate} tokens/s\n"
    )
    rows = [
        [title, *("-" if value is None else f"{value * 1000:.1f}" for value in figures[name].values())]
        for title, name in (
            ("time to first token", "ttft_seconds"),
            ("between pieces", "inter_token_seconds"),
            ("whole request", "request_seconds"),
        )
    ]
    headers = ["MILLISECONDS", "P50", "P90", "P99"]
    session.terminal.table(headers, rows, headers[1:])


COMMANDS = {"bench": Command(_arguments, run)}


def percentile(values: Sequence[float], share: float) -> float:
    """The percentile `share` (0 to 1) of `values`, linearly interpolated; NaN when `values` is empty."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return float(ordered[below] + (ordered[above] - ordered[below]) * (place - below))
