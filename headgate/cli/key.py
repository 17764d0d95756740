"""`headgate key`: prints the gateway's key, or generates one with its entry for gateway.yaml. Writes no file.

The key goes to stdout, everything else to stderr.
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
    """The actions of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("show", help="print the key", description="Print the key.")
    new = actions.add_parser(
        "new",
        help="generate a key",
        description="Generate a key and print it once. Its entry for gateway.yaml (a hash) goes to stderr.",
    )
    new.add_argument("name", metavar="NAME", help="the name of the key in the log")
    new.add_argument("--admin", action="store_true", help="allow the endpoints below /admin, too")


def run(session: Session) -> int:
    """Prints the gateway's key, or a new one."""
    return _new(session) if session.args.action == "new" else _show(session)


def _new(session: Session) -> int:
    key = f"hg-{secrets.token_urlsafe(32)}"
    digest = f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"
    scopes = ["use", "admin"] if session.args.admin else ["use"]
    if session.prints_json({"key": key, "entry": {"name": session.args.name, "hash": digest, "scopes": scopes}}):
        return Exit.OK
    name = json.dumps(session.args.name, ensure_ascii=False)
    entry = f'{{name: {name}, hash: "{digest}", scopes: [{", ".join(scopes)}]}}'
    session.terminal.data(key)
    session.terminal.say(f"add this under `keys:` in gateway.yaml, then reload:\n  - {entry}")
    return Exit.OK


def _show(session: Session) -> int:
    key = gateway_key(session.environ, session.state)
    if (key is None or key.file) and has_keys(session):
        raise HeadgateError(
            f"{session.config_dir / 'gateway.yaml'} configures the keys (keys:) as hashes, which cannot be shown"
        )
    if key is None:
        raise NotRunningError(
            f"there is no generated key in {session.state.root}; the gateway generates one at its first start "
            f"(`headgate up`) unless its configuration has keys"
        )
    source = f"the variable {key.variable}" if key.variable else str(key.file)
    if session.prints_json({"key": key.value, "source": source}):
        return Exit.OK
    session.terminal.data(key.value)
    session.terminal.say(f"from {source}")
    return Exit.OK


COMMANDS = {"key": Command(arguments, run)}
