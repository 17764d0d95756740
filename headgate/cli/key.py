"""`headgate key show`: the gateway's key to stdout, where it lives to stderr; never makes the key a log line."""

from __future__ import annotations

import argparse

from headgate.cli.addresses import gateway_key, has_keys
from headgate.cli.command import Command, Session
from headgate.shared.errors import Exit, HeadgateError, NotRunningError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The one thing there is to do with a key."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser("show", help="print the key", description="Print the key.")


def run(session: Session) -> int:
    """Prints the key the gateway accepts from this user."""
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
