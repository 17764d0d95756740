"""The verb `quarantine`: requests that may have ended a worker; asks the inference service and prints what it says."""

from __future__ import annotations

from typing import Any

from headgate.cli import addresses
from headgate.cli.client import segment
from headgate.cli.command import Command, Session, one_by_hand
from headgate.shared.amounts import format_duration
from headgate.shared.errors import Exit

ALL = "all"


def quarantine(session: Session) -> int:
    """Lists the requests that are suspected or refused, or lets one go, or all."""
    api = addresses.inference(session)
    if session.args.action == "clear":
        if not session.args.name:
            session.terminal.say(
                f"headgate: which one? `headgate quarantine` lists their keys; `{ALL}` means every one"
            )
            return Exit.USAGE
        answer = api.delete("/quarantine" if session.args.name == ALL else f"/quarantine/{segment(session.args.name)}")
        if session.json:
            session.terminal.json(answer)
            return Exit.OK
        for entry in answer["cleared"]:
            session.terminal.say(f"{entry['key']}: a request to {entry['model']} is allowed again")
        return Exit.OK
    answer = api.get("/quarantine")
    if session.json:
        session.terminal.json(answer)
        return Exit.OK
    headers = ["KEY", "MODEL", "STANDING", "CRASHES", "SINCE", "ENDS IN", "MESSAGE"]
    rows = [_row(entry) for entry in answer["requests"]]
    session.terminal.table(headers, rows, ["CRASHES", "SINCE", "ENDS IN"], "no request is suspected of ending a worker")
    return Exit.OK


def _row(entry: dict[str, Any]) -> list[str]:
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
    "quarantine": Command(
        one_by_hand("clear", "allow one again", "KEY", f"the request, as the list names it, or `{ALL}`"), quarantine
    )
}
