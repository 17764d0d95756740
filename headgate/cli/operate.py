"""Verbs for operators: nodes, devices, breakers, the quarantine and sequences."""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlencode

from headgate.cli import addresses
from headgate.cli.client import Api, segment
from headgate.cli.command import Session, UsageError, list_or_act, no_arguments, on_nodes
from headgate.cli.nodes import Nodes, Row, label
from headgate.cli.terminal import bytes_cell, seconds_cell
from headgate.shared.errors import Exit
from headgate.shared.units import format_duration, parse_duration
from inference.protocol import ModelState, ModelStatus

ALL = "all"
ACCOUNTS = ("capacity", "free", "foreign", "reserved", "resident", "releasing", "cached")
"""The accounts of the ledger. Those after `capacity` add up to it, or to more if memory is short."""

_KV_HEADERS = ("MODEL", "ID", "TIERS", "TOKENS", "SIZE", "IDLE", "HITS", "PINNED", "TENANT")

LOADED = (ModelState.READY, ModelState.BUSY, ModelState.DRAINING)

RECOVER_SECONDS = 120.0
"""Timeout of a recovery: a reading and a trial of the device take up to 30 s each."""


def nodes(session: Session) -> int:
    """Lists the inference services with their versions, loaded models and running requests."""

    def look(api: Api) -> dict[str, Any]:
        health = api.health()
        models = [ModelStatus.from_json(entry) for entry in api.get("/v1/models")["data"]]
        return {
            "url": api.url,
            "host": health.get("node"),
            "reachable": True,
            "epoch": health.get("epoch"),
            "version": health.get("version"),
            "models": len(models),
            "loaded": sum(model.state in LOADED for model in models),
            "in_flight": sum(model.in_flight for model in models),
        }

    found = Nodes.of(session)
    answers = found.each(look)
    if session.json:
        failed = [{"url": found.apis[each["node"]].url, "reachable": False, **each} for each in answers.failures()]
        session.terminal.json({"nodes": [*({"node": node, **value} for node, value in answers), *failed]})
        return Exit.OK
    headers = ["URL", "HOST", "EPOCH", "VERSION", "LOADED", "IN FLIGHT"]
    rows: list[Row] = []
    for node, value in answers:
        known = [str(value[name] or "-") for name in ("host", "epoch", "version")]
        counts = [f"{value['loaded']}/{value['models']}", str(value["in_flight"])]
        rows.append((node, [value["url"], *known, *counts]))
    answers.table(session.terminal, headers, rows, ["LOADED", "IN FLIGHT"])
    return Exit.OK


def devices(session: Session) -> int:
    """Lists the devices with health, pressure and ledger accounts, or recovers one.

    Exit code 1 when the recovered device is neither healthy nor suspect.
    """
    if session.args.action == "recover":
        return _recover(session)
    answers = Nodes.of(session).get("/devices")
    if answers.prints_json(session):
        return Exit.OK
    found = [(node, device) for node, answer in answers for device in answer["devices"]]
    rows = []
    for node, device in found:
        accounts = device.get("ledger") or device
        cells = [
            str(device["id"]),
            str(device.get("name", "-")),
            str(device.get("state", "-")),
            str(device.get("pressure_level", "-")),
            *(bytes_cell(accounts.get(f"{name}_bytes", accounts.get(name))) for name in ACCOUNTS),
            str(device.get("uuid") or "-"),
        ]
        rows.append((node, cells))
    right = [name.upper() for name in ACCOUNTS]
    headers = ["DEVICE", "NAME", "STATE", "PRESSURE", *right, "UUID"]
    answers.table(session.terminal, headers, rows, right, "the inference service has no device")
    for node, device in found:
        if device.get("note"):
            session.terminal.say(f"{label(node)}{device['id']}: {device['note']}")
    return Exit.OK


def _recover(session: Session) -> int:
    name = _named(session, "`headgate devices` lists them")
    answer = Nodes.of(session).one().post(f"/devices/{name}/recover", seconds=RECOVER_SECONDS)
    device = answer["device"]
    if not session.prints_json(answer):
        session.terminal.say(f"{device['id']}: {device['state']}" + (f", {device['note']}" if device["note"] else ""))
    return Exit.OK if device["state"] in ("healthy", "suspect") else Exit.FAILURE


def _named(session: Session, hint: str) -> str:
    """The name in the arguments, quoted for a path. Raises UsageError without one."""
    if not session.args.name:
        raise UsageError(f"the name is missing; {hint}")
    return segment(session.args.name)


def breakers(session: Session) -> int:
    """Lists the breakers, or resets one."""
    api = addresses.gateway(session, admin=True)
    if session.args.action == "reset":
        name = _breaker_name(session)
        answer = api.post(f"/admin/breakers/{segment(name)}/reset")
        if not session.prints_json(answer):
            session.terminal.say(f"{name}: closed")
        return Exit.OK
    answer, node = api.get("/admin/breakers"), session.args.node
    found = [entry for entry in answer["breakers"] if node is None or entry.get("node") == node]
    if session.prints_json({**answer, "breakers": found}):
        return Exit.OK
    headers = ["BREAKER", "STATE", "FAILURES", "NEXT PROBE", "LAST FAILURE"]
    rows = [
        [
            str(entry["name"]),
            str(entry["state"]),
            str(entry.get("failures", 0)),
            seconds_cell(entry.get("retry_after")),
            str(entry.get("last_failure") or "-"),
        ]
        for entry in found
    ]
    if any(entry.get("node") for entry in found):
        headers = ["NODE", *headers]
        rows = [[entry.get("node") or "-", *cells] for entry, cells in zip(found, rows, strict=True)]
    none = "no breaker exists yet; the first request to a provider creates one"
    if node is not None:
        none = f"the gateway has no breaker of a node {node}"
    session.terminal.table(headers, rows, ["FAILURES", "NEXT PROBE"], none)
    return Exit.OK


def _breaker_name(session: Session) -> str:
    """The breaker in the arguments: of the node `a`, `local/demo` is `local@a/demo`. Raises UsageError."""
    name, node = session.args.name, session.args.node
    if not name:
        raise UsageError("the name of the breaker is missing; `headgate breakers` lists the names")
    if node is None:
        return str(name)
    from gateway.breaker.outcome import LOCAL, provider_key

    provider, slash, model = name.partition("/")
    if provider != LOCAL:
        raise UsageError(f"--node chooses the node of `{LOCAL}` or `{LOCAL}/MODEL`; reset {name!r} without --node")
    return f"{provider_key(node)}{slash}{model}"


def quarantine(session: Session) -> int:
    """Lists the requests that are suspected or refused, or clears one of them or all of them."""
    services = Nodes.of(session)
    if session.args.action == "clear":
        name = _named(session, f"`headgate quarantine` lists their keys; `{ALL}` means every one")
        answer = services.one().delete("/quarantine" if name == ALL else f"/quarantine/{name}")
        if session.prints_json(answer):
            return Exit.OK
        for entry in answer["cleared"]:
            session.terminal.say(f"{entry['key']}: a request to {entry['model']} is allowed again")
        return Exit.OK
    answers = services.get("/quarantine")
    if answers.prints_json(session):
        return Exit.OK
    headers = ["KEY", "MODEL", "SUSPICION", "CRASHES", "SINCE", "ENDS IN", "MESSAGE"]
    rows = [(node, _quarantine_row(entry)) for node, answer in answers for entry in answer["requests"]]
    none = "no request is suspected of ending a worker"
    answers.table(session.terminal, headers, rows, ["CRASHES", "SINCE", "ENDS IN"], none)
    return Exit.OK


def _quarantine_row(entry: dict[str, Any]) -> list[str]:
    return [
        str(entry["key"]),
        str(entry["model"]),
        str(entry["suspicion"]),
        str(entry["crashes"]),
        format_duration(float(entry["age_seconds"])),
        format_duration(float(entry["seconds_left"])),
        str(entry["message"]),
    ]


def _kv_arguments(parser: argparse.ArgumentParser) -> None:
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
        description="Remove the sequences that no request uses, pinned ones too, from all tiers.",
    )
    pin = actions.add_parser("pin", help="keep sequences for a time", description="Keep sequences for a time.")
    for each in actions.choices.values():
        each.add_argument("--model", metavar="MODEL", help="sequences of this model (default: all loaded models)")
        each.add_argument("--tenant", metavar="TENANT", help="sequences of this tenant, as the list names it")
    pin.add_argument("ids", metavar="ID", nargs="*", help="a sequence, as the list names it")
    pin.add_argument(
        "--for", dest="seconds", metavar="TIME", type=_pin_duration, default=3600.0,
        help="how long, such as 90s, 30m or 2d (1h); 0s ends a pin",
    )  # fmt: skip


def _pin_duration(text: str) -> float:
    try:
        seconds = parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    if math.isinf(seconds):
        raise argparse.ArgumentTypeError("a pin needs an end; use a duration such as 2d")
    return seconds


def kv(session: Session) -> int:
    """Lists, removes or keeps the sequences of loaded models."""
    return {"list": _list_sequences, "clear": _clear_sequences, "pin": _pin_sequences}[session.args.action](session)


def _list_sequences(session: Session) -> int:
    query = urlencode(_selected(session))
    answers = Nodes.of(session).get("/memory/kv/sequences" + (f"?{query}" if query else ""))
    if answers.prints_json(session):
        return Exit.OK
    rows = [(node, _sequence_row(sequence)) for node, answer in answers for sequence in answer["sequences"]]
    right = ("TOKENS", "SIZE", "IDLE", "HITS", "PINNED")
    answers.table(session.terminal, _KV_HEADERS, rows, right, "no loaded model has sequences")
    return max(_remarks(session, answer, node) for node, answer in answers)


def _sequence_row(sequence: Mapping[str, Any]) -> list[str]:
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


def _clear_sequences(session: Session) -> int:
    answer = Nodes.of(session).one().post("/memory/kv/clear", _selected(session))
    return _counted(session, answer, "cleared", "removed")


def _pin_sequences(session: Session) -> int:
    args = session.args
    if not args.ids and args.tenant is None:
        raise UsageError("no sequence is chosen; name ids or --tenant; `headgate kv list` shows both")
    body = {"seconds": args.seconds, "ids": args.ids, **_selected(session)}
    answer = Nodes.of(session).one().post("/memory/kv/pin", body)
    if args.seconds:
        return _counted(session, answer, "pinned", f"kept for {format_duration(args.seconds)}")
    return _counted(session, answer, "pinned", "no longer pinned")


def _selected(session: Session) -> dict[str, str]:
    names = {"model": session.args.model, "tenant": session.args.tenant}
    return {name: value for name, value in names.items() if value is not None}


def _counted(session: Session, answer: Mapping[str, Any], name: str, done: str) -> int:
    """Prints the number `name` of sequences of each model, with what was `done`. Returns the exit code."""
    if session.prints_json(answer):
        return Exit.OK
    for model in answer["models"]:
        session.terminal.say(f"{model['model_name']}: {_plural(model[name])} {done}")
    return _remarks(session, answer)


def _plural(count: int) -> str:
    return f"{count} sequence" + ("" if count == 1 else "s")


def _remarks(session: Session, answer: Mapping[str, Any], node: str = "") -> int:
    """Prints models that are not loaded, and errors of workers. Returns the exit code: 1 if a worker had an error."""
    errors: Sequence[Mapping[str, Any]] = answer["errors"]
    for error in errors:
        session.terminal.say(f"{label(node)}{error['model_name']}: {error['message']}")
    if answer["not_loaded"]:
        session.terminal.say(f"{label(node)}not loaded, so left out: {', '.join(answer['not_loaded'])}")
    return Exit.FAILURE if errors else Exit.OK


COMMANDS = {
    "nodes": on_nodes(no_arguments, nodes),
    "devices": on_nodes(
        list_or_act(
            "recover",
            "read a device again and test it",
            "DEVICE",
            "the device to recover, such as gpu-0",
        ),
        devices,
    ),
    "breakers": on_nodes(
        list_or_act("reset", "close a breaker by hand", "NAME", "the breaker to reset, as the list names it"), breakers
    ),
    "kv": on_nodes(_kv_arguments, kv),
    "quarantine": on_nodes(
        list_or_act("clear", "allow a request again", "KEY", f"the request, as the list names it, or `{ALL}`"),
        quarantine,
    ),
}
