"""`headgate usage`: sums of requests, tokens and cost from the usage file of the gateway on this machine."""

from __future__ import annotations

import argparse
import sqlite3
import time
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

from gateway.usage.usage_file import NAME, UsageFile, advice
from gateway.usage.usage_query import GROUPS, csv_text, usage_query
from headgate.cli.command import Command, Session, UsageError
from headgate.shared.errors import Exit, HeadgateError, NotRunningError
from headgate.shared.state_directory import StateDir


def arguments(parser: argparse.ArgumentParser) -> None:
    """Options for the groups, the time and the format."""
    parser.add_argument(
        "--by", metavar="GROUPS", default="model", help=f"separated by commas: {', '.join(GROUPS)} (default: model)"
    )
    parser.add_argument(
        "--since", metavar="TIME", default="30d", help="start: 7d (ago), 2026-11-01 (UTC) or Unix time (default: 30d)"
    )
    parser.add_argument("--until", metavar="TIME", default="", help="end, exclusive (default: now)")
    parser.add_argument("--csv", action="store_true", help="print comma-separated values")


@contextmanager
def usage_file(state: StateDir) -> Iterator[UsageFile]:
    """Opens the usage file, which is possible while the gateway runs. Creates it. Raises HeadgateError."""
    try:
        with closing(UsageFile(state.root)) as file:
            yield file
    except (sqlite3.Error, OSError) as error:
        raise HeadgateError(f"{state.root / NAME} cannot be used: {advice(error)}") from error


def run(session: Session) -> int:
    """Prints sums of the stored requests."""
    args = session.args
    try:
        query = usage_query(args.by, args.since, args.until, time.time())
    except ValueError as error:
        raise UsageError(str(error)) from error
    if not (session.state.root / NAME).exists():
        raise NotRunningError(
            f"no usage is stored in {session.state.root}; the gateway stores it from its first request on, unless "
            "gateway.yaml has `usage: {store: false}`"
        )
    with usage_file(session.state) as file:
        rows = file.sums(*query)
    if session.prints_json({"by": query.by, "rows": rows}):
        return Exit.OK
    if args.csv:
        session.terminal.data(csv_text(query.by, rows), end="")
        return Exit.OK
    headers = [*(name.upper() for name in query.by), "REQUESTS", "ERRORS", "PROMPT", "CACHED", "ANSWER", "TTFT", "COST"]
    session.terminal.table(
        headers,
        [_cells(query.by, row) for row in rows],
        right=headers[len(query.by) :],
        none="no requests in this time",
    )
    if unpriced := sum(row["unpriced"] for row in rows):
        session.terminal.say(f"requests without a known price, not in COST: {unpriced}; set `prices` in gateway.yaml")
    return Exit.OK


def _cells(by: tuple[str, ...], row: Mapping[str, Any]) -> list[str]:
    ttft = row["ttft_seconds"]
    return [
        *(str(row[name]) or "-" for name in by),
        *(str(row[name]) for name in ("requests", "errors", "prompt_tokens", "cached_tokens", "completion_tokens")),
        "-" if ttft is None else f"{ttft:.2f} s",
        f"${row['dollars']:.4f}",
    ]


COMMANDS = {"usage": Command(arguments, run)}
