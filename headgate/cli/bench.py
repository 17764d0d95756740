"""`bench`: a small load on the running gateway and what it gave: rates, waiting times, errors; changes nothing."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from headgate.cli import addresses
from headgate.cli.command import Command, Session, at_least_one
from headgate.cli.load import Asked, Load, Plan, ask
from headgate.cli.talk import INTERRUPTED
from headgate.shared.amounts import parse_duration
from headgate.shared.errors import Exit, HeadgateError
from headgate.shared.percentiles import percentile
from inference.protocol import Tier

MOST_STREAMS = 256
MOST_SECONDS = 3600.0
GLANCE_SECONDS = 0.5


def _streams(text: str) -> int:
    count = at_least_one(text)
    if count > MOST_STREAMS:
        raise argparse.ArgumentTypeError(f"{text} is too many; at most {MOST_STREAMS} streams are opened")
    return count


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is no time for a benchmark; more than 0 and at most 1h")
    return seconds


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="a model or route of the gateway; only local models are asked")
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
        help="how long requests are begun, such as 30s or 2m (10s); those that run then are finished",
    )  # fmt: skip


def run(session: Session) -> int:
    """One request that loads the model and is not counted, then the load, then what it gave."""
    args, terminal = session.args, session.terminal
    plan = Plan(args.model, args.streams, args.prompt_tokens, args.answer_tokens, args.duration)
    api = addresses.gateway(session)
    if api.token is None:
        raise HeadgateError(
            "there is no key to talk to the gateway with; start it once with `headgate up`, or set GATEWAY_API_KEY"
        )
    terminal.status(f"waiting for {plan.model}")
    if (error := ask(api, plan.body(1)).error) is not None:
        raise error
    load = Load(api, plan)
    load.start()
    status: int = Exit.OK
    try:
        while not load.wait(GLANCE_SECONDS):
            terminal.status(f"{len(load.asked)} requests answered")
    except KeyboardInterrupt:
        load.stop()
        terminal.say("")
        status = INTERRUPTED
    asked = load.asked
    figures = summary(plan, asked, load.seconds)
    if session.json:
        terminal.json(figures)
    else:
        _show(session, figures)
    failed = [one.error for one in asked if one.error is not None]
    for reason, count in Counter(map(str, failed)).most_common():
        terminal.say(f"{terminal.paint_err('headgate:', 'red')} {count} of {len(asked)} requests failed: {reason}")
    if elsewhere := figures["other_tiers"]:
        terminal.say(f"headgate: {elsewhere} of {len(asked)} requests were answered by another model than {plan.model}")
    if status == Exit.OK and failed:
        first = failed[0]
        status = first.exit_code if len(failed) == len(asked) else Exit.FAILURE
    return int(status)


def summary(plan: Plan, asked: Sequence[Asked], seconds: float) -> dict[str, Any]:
    """What a load gave, times in seconds; a number that nothing was measured for is None."""
    well = [one for one in asked if one.error is None]
    answer_tokens = sum(one.answer_tokens for one in well)
    gaps = [after - before for one in well for before, after in zip(one.times, one.times[1:], strict=False)]
    return {
        "model": plan.model,
        "streams": plan.streams,
        "seconds": round(seconds, 3),
        "requests": len(well),
        "failed": len(asked) - len(well),
        "other_tiers": sum(one.tier != Tier.LOCAL for one in well),
        "prompt_tokens": sum(one.prompt_tokens for one in well),
        "answer_tokens": answer_tokens,
        "tokens_per_second": round(answer_tokens / seconds, 1) if seconds and well else None,
        "requests_per_second": round(len(well) / seconds, 2) if seconds and well else None,
        "ttft_seconds": _spread([one.times[0] for one in well if one.times]),
        "inter_token_seconds": _spread(gaps),
        "request_seconds": _spread([one.end for one in well]),
    }


def _spread(values: Sequence[float]) -> dict[str, float | None]:
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
