"""Verbs for the memory of the inference service: its records, operations that release memory, and `preload`."""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

from headgate.cli.client import from_envelope
from headgate.cli.command import Session, UsageError, at_least_one, no_arguments, on_nodes, zero_or_more
from headgate.cli.models import CHANGE_SECONDS
from headgate.cli.nodes import Nodes
from headgate.cli.terminal import bytes_cell
from headgate.shared.errors import Exit
from headgate.shared.units import MIB, format_duration, parse_duration

GC_SECONDS = 120.0
"""Timeout: workers have to end and to return unused heap."""
MAX_EVICTIONS = 1000
MAX_TYPES = 100
PRIORITIES = ("high", "normal", "low")


def _mb(value: float | None) -> str:
    """A number of MiB for a table; `-` for None."""
    return "-" if value is None else bytes_cell(round(value * MIB))


def _clock(timestamp: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(timestamp))


def _limit(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--limit", metavar="N", type=_one_to(MAX_EVICTIONS), default=20, help="only the newest N (20; at most 1000)"
    )


def _one_to(most: int) -> Any:
    """The type of an option with a count of 1 to `most`."""

    def count(text: str) -> int:
        if (number := at_least_one(text)) > most:
            raise argparse.ArgumentTypeError(f"{text} is too large; use at most {most}")
        return number

    return count


def evictions(session: Session) -> int:
    """Lists the last departures of models from their devices, oldest first."""
    answers = Nodes.of(session).get(f"/memory/evictions?limit={session.args.limit}")
    if answers.prints_json(session):
        return Exit.OK
    found = [(node, record) for node, answer in answers for record in answer["evictions"]]
    newest = sorted(found, key=lambda item: item[1]["timestamp"])[-session.args.limit :]
    rows = [
        (
            node,
            [
                _clock(record["timestamp"]),
                str(record["model_name"]),
                str(record["action"]),
                str(record["reason"]),
                _mb(record["memory_freed_mb"]),
                "; ".join(record["explanation"]) or "-",
            ],
        )
        for node, record in newest
    ]
    headers = ["TIME", "MODEL", "ACTION", "REASON", "FREED", "EXPLANATION"]
    answers.table(session.terminal, headers, rows, ["FREED"], "no model has left its device since the service started")
    if (total := sum(answer["total"] for _, answer in answers)) > len(rows):
        session.terminal.say(f"{len(rows)} of {total} since the service started")
    return Exit.OK


def _history_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--last", metavar="TIME", type=_past, default=3600.0, help="how far back, such as 30m or 2h (1h)"
    )


def _past(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if not 0 < seconds <= 600_000:
        raise argparse.ArgumentTypeError(f"{text} is out of range; use a duration of at most 166h")
    return seconds


def history(session: Session) -> int:
    """Lists the samples of the memory checks, oldest first, with one line for each device of a sample."""
    answers = Nodes.of(session).get(f"/memory/history?minutes={session.args.last / 60:g}")
    if answers.prints_json(session):
        return Exit.OK
    found = [(node, sample) for node, answer in answers for sample in answer["samples"]]
    rows = [
        (
            node,
            [
                _clock(sample["timestamp"]),
                name,
                str(device["pressure_level"]),
                *(_mb(device[f"{figure}_mb"]) for figure in ("used", "free", "foreign", "ours")),
                str(sample["active_requests"]),
                str(sample["queued_requests"]),
                str(sample["models_loaded"]),
                str(sample["models_warm"]),
            ],
        )
        for node, sample in sorted(found, key=lambda item: item[1]["timestamp"])
        for name, device in sample["devices"].items()
    ]
    right = ["USED", "FREE", "FOREIGN", "OURS", "ACTIVE", "QUEUED", "LOADED", "WARM"]
    none = f"no memory check in the last {format_duration(session.args.last)}"
    answers.table(session.terminal, ["TIME", "DEVICE", "PRESSURE", *right], rows, right, none)
    return Exit.OK


def gc(session: Session) -> int:
    """Unloads idle models and returns unused heap to the system."""
    session.terminal.status("releasing memory ...")
    answer = Nodes.of(session).one().post("/memory/gc", seconds=GC_SECONDS)
    if session.prints_json(answer):
        return Exit.OK
    unloaded = f"unloaded: {', '.join(answer['models'])}" if answer["models"] else "no model was idle"
    session.terminal.say(f"{_mb(answer['freed_mb'])} freed, {_mb(answer['trimmed_mb'])} of it from heaps; {unloaded}")
    return Exit.OK


def defragment(session: Session) -> int:
    """Moves idle models and releases cached cells, so that the largest room on one device grows."""
    session.terminal.status("moving models ...")
    answer = Nodes.of(session).one().post("/memory/defragment", seconds=CHANGE_SECONDS)
    if session.prints_json(answer):
        return Exit.OK
    for move in answer["moved"]:
        session.terminal.say(f"{move['model_name']}: moved from {move['source']} to {move['target']}")
    for move in answer["refused"]:
        session.terminal.say(
            f"{move['model_name']}: not moved from {move['source']} to {move['target']}: {move['reason']}"
        )
    room = answer["largest_room_mb"]
    session.terminal.say(
        f"largest room on one device: {_mb(room['after'])} ({_mb(room['before'])} before); "
        f"{answer['cells_released']} cached cells dropped, {_mb(answer['trimmed_mb'])} of host memory returned"
    )
    return Exit.OK


def _dump_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", metavar="compare", nargs="?", choices=["compare"],
        help="show what differs between two dumps; without it a dump is made",
    )  # fmt: skip
    parser.add_argument("ids", metavar="ID", nargs="*", help="the earlier and the later dump, such as dump-1 dump-2")
    parser.add_argument(
        "--objects",
        metavar="N",
        type=_one_to(MAX_TYPES),
        help="also list the N types of Python objects that use most memory",
    )


def dump(session: Session) -> int:
    """Makes a dump of all memory records, or compares two."""
    if session.args.action == "compare":
        return _compare(session)
    body = {} if session.args.objects is None else {"large_objects": session.args.objects}
    answer = Nodes.of(session).one().post("/memory/dump", body, seconds=GC_SECONDS)
    if session.prints_json(answer):
        return Exit.OK
    rows = [[path, _value(value)] for path, value in _flat(answer) if path != "id"]
    session.terminal.table(["FIGURE", "VALUE"], rows)
    session.terminal.say(f"{answer['id']}: compare it later with `headgate dump compare {answer['id']} LATER`")
    return Exit.OK


def _flat(values: Mapping[str, Any], path: str = "") -> Sequence[tuple[str, Any]]:
    """Every value with its path, in the form that `dump compare` prints."""
    found: list[tuple[str, Any]] = []
    for name, value in values.items():
        here = f"{path}/{name}" if path else str(name)
        found += _flat(value, here) if isinstance(value, Mapping) and value else [(here, value)]
    return found


def _value(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value)) or "-"
    return "-" if value is None or value == {} else str(value)


def _compare(session: Session) -> int:
    if len(session.args.ids) != 2:
        raise UsageError("name two dumps, such as `headgate dump compare dump-1 dump-2`; `headgate dump` makes one")
    before, after = session.args.ids
    answer = Nodes.of(session).one().post("/memory/dump/compare", {"before": before, "after": after})
    if session.prints_json(answer):
        return Exit.OK
    rows = [
        [path, _value(change["before"]), _value(change["after"]), _value(change.get("difference"))]
        for path, change in answer["changed"].items()
    ]
    right = ["BEFORE", "AFTER", "DIFFERENCE"]
    session.terminal.table(["FIGURE", *right], rows, right, "the dumps are equal")
    session.terminal.say(f"{format_duration(answer['seconds'])} between {before} and {after}")
    return Exit.OK


def _preload_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", metavar="NAME", nargs="+", help="names or aliases of models")
    parser.add_argument("--priority", metavar="PRIORITY", choices=PRIORITIES, help="high, normal or low (normal)")
    parser.add_argument("--timeout", metavar="SECONDS", type=zero_or_more, help="longest wait for each model")


def preload(session: Session) -> int:
    """Loads several models. The exit code is that of the first error."""
    args = session.args
    body = {"models": args.models, "priority": args.priority, "seconds": args.timeout}
    session.terminal.status(f"loading {', '.join(args.models)} ...")
    answer = (
        Nodes.of(session)
        .one()
        .post(
            "/memory/preload",
            {name: value for name, value in body.items() if value is not None},
            seconds=max(CHANGE_SECONDS, (args.timeout or 0.0) + GC_SECONDS),
        )
    )
    results = answer["results"]
    if not session.prints_json(answer):
        for result in results:
            if result["loaded"]:
                devices = ", ".join(result["devices"])
                line = f"{result['state']} on {devices} after {format_duration(result['seconds'])}"
            else:
                line = result["error"]["message"]
            session.terminal.say(f"{result['model']}: {line}")
    errors = [result["error"] for result in results if not result["loaded"]]
    return from_envelope(errors[0], None, None).exit_code if errors else Exit.OK


COMMANDS = {
    "evictions": on_nodes(_limit, evictions),
    "history": on_nodes(_history_arguments, history),
    "gc": on_nodes(no_arguments, gc),
    "defragment": on_nodes(no_arguments, defragment),
    "dump": on_nodes(_dump_arguments, dump),
    "preload": on_nodes(_preload_arguments, preload),
}
