"""`headgate key`: shows the gateway's key, or makes a new one and its line for gateway.yaml; writes no file and no log.

The key goes to stdout, what is to be known about it to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets

from headgate.cli.addresses import gateway_key, has_keys
from headgate.cli.command import Command, Session
from headgate.shared.errors import Exit, HeadgateError, NotRunningError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The two things there are to do with a key."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("show", help="print the key", description="Print the key.")
    new = actions.add_parser(
        "new",
        help="make a key",
        description="Make a key and print it, this once. Its line for gateway.yaml (a hash) goes to stderr.",
    )
    new.add_argument("name", metavar="NAME", help="whose key it is; names tell keys apart in the log")
    new.add_argument("--admin", action="store_true", help="it may do what is below /admin, too")


def run(session: Session) -> int:
    """Prints the key the gateway accepts from this user, or a new one."""
    return _new(session) if session.args.action == "new" else _show(session)


def _new(session: Session) -> int:
    key = f"hg-{secrets.token_urlsafe(32)}"
    digest = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    scopes = ["use", "admin"] if session.args.admin else ["use"]
    if session.json:
        session.terminal.json({"key": key, "entry": {"name": session.args.name, "hash": digest, "scopes": scopes}})
        return Exit.OK
    name = json.dumps(session.args.name, ensure_ascii=False)
    entry = f'{{name: {name}, hash: "{digest}", scopes: [{", ".join(scopes)}]}}'
    session.terminal.data(key)
    session.terminal.say(f"under `keys:` in gateway.yaml, then reload:\n  - {entry}")
    return Exit.OK


def _show(session: Session) -> int:
    key = gateway_key(session.environ, session.state)
    if (key is None or key.file) and has_keys(session):
        raise HeadgateError(
            f"{session.config_dir / 'gateway.yaml'} names the keys (keys:), and keeps only their hashes"
        )
    if key is None:
        raise NotRunningError(
            f"no key has been generated in {session.state.root} yet; the gateway makes one at its first start "
            f"(`headgate up`) unless its configuration names keys of its own"
        )
    place = f"the variable {key.variable}" if key.variable else str(key.file)
    if session.json:
        session.terminal.json({"key": key.value, "source": place})
        return Exit.OK
    session.terminal.data(key.value)
    session.terminal.say(f"from {place}")
    return Exit.OK


COMMANDS = {"key": Command(arguments, run)}
