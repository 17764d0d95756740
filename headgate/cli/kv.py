"""`headgate kv`: lists, removes and keeps the stored sequences of loaded models."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from headgate.cli import addresses
from headgate.cli.command import Command, Session, UsageError
from headgate.cli.terminal import bytes_cell, seconds_cell
from headgate.shared.errors import Exit
from headgate.shared.units import format_duration, parse_duration

_HEADERS = ("MODEL", "ID", "TIERS", "TOKENS", "SIZE", "IDLE", "HITS", "PINNED", "TENANT")


def arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser(
        "list",
        help="list sequences with their tiers, never their text",
        description="List sequences in slots (hot), in host memory (ram) and on disk, the last used first.",
    )
    actions.add_parser(
        "clear",
        help="remove sequences from all tiers",
        description="Remove the sequences that no request uses from all tiers, pinned ones too.",
    )
    pin = actions.add_parser("pin", help="keep sequences for a time", description="Keep sequences for a time.")
    for each in actions.choices.values():
        each.add_argument("--model", metavar="MODEL", help="sequences of this model (default: all loaded models)")
        each.add_argument("--tenant", metavar="TENANT", help="sequences of this tenant, as the list names it")
    pin.add_argument("ids", metavar="ID", nargs="*", help="a sequence, as the list names it")
    pin.add_argument(
        "--for", dest="seconds", metavar="TIME", type=_duration, default=3600.0,
        help="how long, such as 90s, 30m or 2d (1h); 0s ends a pin",
    )  # fmt: skip


def _duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if math.isinf(seconds):
        raise argparse.ArgumentTypeError("a pin ends; use a time such as 2d")
    return seconds


def run(session: Session) -> int:
    """Runs an action."""
    return {"list": _list, "clear": _clear, "pin": _pin}[session.args.action](session)


def _list(session: Session) -> int:
    query = urlencode(_selected(session))
    answer = addresses.inference(session).get("/memory/kv/sequences" + (f"?{query}" if query else ""))
    if session.prints_json(answer):
        return Exit.OK
    rows = [_row(sequence) for sequence in answer["sequences"]]
    right = ("TOKENS", "SIZE", "IDLE", "HITS", "PINNED")
    session.terminal.table(_HEADERS, rows, right, "no loaded model has stored sequences")
    return _remarks(session, answer)


def _row(sequence: Mapping[str, Any]) -> list[str]:
    until = sequence["pinned_until"]
    return [
        str(sequence["model_name"]),
        str(sequence["id"]),
        "+".join(sequence["tiers"]),
        str(sequence["tokens"]),
        bytes_cell(sequence["bytes"]),
        seconds_cell(sequence["idle_seconds"]),
        str(sequence["hits"]),
        "-" if until is None else format_duration(max(0.0, until - time.time())),
        str(sequence["tenant"] or "-"),
    ]


def _clear(session: Session) -> int:
    answer = addresses.inference(session).post("/memory/kv/clear", _selected(session))
    return _counted(session, answer, "cleared", "removed")


def _pin(session: Session) -> int:
    args = session.args
    if not args.ids and args.tenant is None:
        raise UsageError("which sequences? name their ids or --tenant; `headgate kv list` shows both")
    body = {"seconds": args.seconds, "ids": args.ids, **_selected(session)}
    answer = addresses.inference(session).post("/memory/kv/pin", body)
    if args.seconds:
        return _counted(session, answer, "pinned", f"kept for {format_duration(args.seconds)}")
    return _counted(session, answer, "pinned", "no longer pinned")


def _selected(session: Session) -> dict[str, str]:
    names = {"model": session.args.model, "tenant": session.args.tenant}
    return {name: value for name, value in names.items() if value is not None}


def _counted(session: Session, answer: Mapping[str, Any], name: str, done: str) -> int:
    """Prints the number of sequences of each model."""
    if session.prints_json(answer):
        return Exit.OK
    for model in answer["models"]:
        session.terminal.say(f"{model['model_name']}: {_plural(model[name])} {done}")
    return _remarks(session, answer)


def _plural(count: int) -> str:
    return f"{count} sequence" + ("" if count == 1 else "s")


def _remarks(session: Session, answer: Mapping[str, Any]) -> int:
    """Prints what is missing in the answer; a failure if a worker did not answer."""
    errors: Sequence[Mapping[str, Any]] = answer["errors"]
    for error in errors:
        session.terminal.say(f"{error['model_name']}: {error['message']}")
    if answer["not_loaded"]:
        session.terminal.say(f"not loaded, so left out: {', '.join(answer['not_loaded'])}")
    return Exit.FAILURE if errors else Exit.OK


COMMANDS = {"kv": Command(arguments, run)}
