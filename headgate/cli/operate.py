"""Verbs for operators: devices, breakers and the quarantine."""

from __future__ import annotations

from typing import Any

from headgate.cli import addresses
from headgate.cli.client import segment
from headgate.cli.command import Command, Session, UsageError, list_or_act
from headgate.cli.terminal import bytes_cell, seconds_cell
from headgate.shared.errors import Exit
from headgate.shared.units import format_duration

ALL = "all"
ACCOUNTS = ("capacity", "free", "foreign", "reserved", "resident", "releasing")
"""The accounts of the ledger: the first is the sum of the others."""

RECOVER_SECONDS = 120.0
"""A reading and a trial of the device, each of which takes up to 30 s."""


def devices(session: Session) -> int:
    """Lists the devices with health, pressure and ledger accounts, or recovers one."""
    if session.args.action == "recover":
        return _recover(session)
    answer = addresses.inference(session).get("/devices")
    if session.prints_json(answer):
        return Exit.OK
    rows = []
    for device in answer["devices"]:
        accounts = device.get("ledger") or device
        rows.append(
            [
                str(device["id"]),
                str(device.get("name", "-")),
                str(device.get("state", "-")),
                str(device.get("pressure_level", "-")),
                *(bytes_cell(accounts.get(f"{name}_bytes", accounts.get(name))) for name in ACCOUNTS),
                str(device.get("uuid") or "-"),
            ]
        )
    accounts = [name.upper() for name in ACCOUNTS]
    headers = ["DEVICE", "NAME", "STATE", "PRESSURE", *accounts, "UUID"]
    session.terminal.table(headers, rows, accounts, "the inference service has no device")
    for device in answer["devices"]:
        if device.get("note"):
            session.terminal.say(f"{device['id']}: {device['note']}")
    return Exit.OK


def _recover(session: Session) -> int:
    name = _named(session, "`headgate devices` lists them")
    answer = addresses.inference(session).post(f"/devices/{name}/recover", seconds=RECOVER_SECONDS)
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
        name = _named(session, "`headgate breakers` lists their names")
        answer = api.post(f"/admin/breakers/{name}/reset")
        if not session.prints_json(answer):
            session.terminal.say(f"{session.args.name}: closed")
        return Exit.OK
    answer = api.get("/admin/breakers")
    if session.prints_json(answer):
        return Exit.OK
    rows = [
        [
            str(entry["name"]),
            str(entry["state"]),
            str(entry.get("failures", 0)),
            seconds_cell(entry.get("retry_after")),
            str(entry.get("last_failure") or "-"),
        ]
        for entry in answer["breakers"]
    ]
    session.terminal.table(
        ["BREAKER", "STATE", "FAILURES", "NEXT PROBE", "LAST FAILURE"], rows, ["FAILURES", "NEXT PROBE"],
        "no breaker exists yet; the first request to a provider creates one",
    )  # fmt: skip
    return Exit.OK


def quarantine(session: Session) -> int:
    """Lists the requests that are suspected or refused, or clears one of them or all."""
    api = addresses.inference(session)
    if session.args.action == "clear":
        name = _named(session, f"`headgate quarantine` lists their keys; `{ALL}` means every one")
        answer = api.delete("/quarantine" if name == ALL else f"/quarantine/{name}")
        if session.prints_json(answer):
            return Exit.OK
        for entry in answer["cleared"]:
            session.terminal.say(f"{entry['key']}: a request to {entry['model']} is allowed again")
        return Exit.OK
    answer = api.get("/quarantine")
    if session.prints_json(answer):
        return Exit.OK
    headers = ["KEY", "MODEL", "STANDING", "CRASHES", "SINCE", "ENDS IN", "MESSAGE"]
    rows = [_quarantine_row(entry) for entry in answer["requests"]]
    session.terminal.table(headers, rows, ["CRASHES", "SINCE", "ENDS IN"], "no request is suspected of ending a worker")
    return Exit.OK


def _quarantine_row(entry: dict[str, Any]) -> list[str]:
    return [
        str(entry["key"]),
        str(entry["model"]),
        str(entry["standing"]),
        str(entry["crashes"]),
        format_duration(float(entry["age_seconds"])),
        format_duration(float(entry["seconds_left"])),
        str(entry["message"]),
    ]


COMMANDS = {
    "devices": Command(
        list_or_act(
            "recover",
            "read a device again and test it",
            "DEVICE",
            "the device to recover, such as gpu-0",
        ),
        devices,
    ),
    "breakers": Command(
        list_or_act("reset", "close a breaker by hand", "NAME", "the breaker to reset, as the list names it"), breakers
    ),
    "quarantine": Command(
        list_or_act("clear", "allow one again", "KEY", f"the request, as the list names it, or `{ALL}`"), quarantine
    ),
}
