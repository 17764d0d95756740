"""`headgate key`: shows the key of the gateway, and creates, lists and revokes keys.

`show`, `create` and `new` print the key itself to stdout and other text to stderr. Created keys are stored as hashes in
the usage file; a running gateway accepts or refuses them within about a second.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import secrets
import time
from typing import Any

from pydantic import ValidationError

from gateway.settings import KeySettings
from gateway.settings_loading import load
from headgate.cli.accounts.usage_verb import usage_file
from headgate.cli.addresses import gateway_key, has_keys
from headgate.cli.command import Command, Session, UsageError
from headgate.shared.errors import Exit, HeadgateError, NotRunningError


def arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    actions.add_parser(
        "show",
        help="print the key of the gateway",
        description="Print the key of the gateway: GATEWAY_API_KEY, GATEWAY_ADMIN_KEY, or the generated one.",
    )
    create = actions.add_parser(
        "create",
        help="create a key, or replace it",
        description="Create a key and print it once. A created key of the same name and its settings are replaced.\n"
        "No restart is needed.",
    )
    _add_name_and_scope(create)
    create.add_argument("--models", metavar="NAMES", help="models that it may use: NAME,PREFIX*,... (all)")
    create.add_argument("--dollars", metavar="N", type=float, help="budget per month in US dollars")
    create.add_argument("--tokens", metavar="N", type=int, help="budget per month in tokens")
    create.add_argument("--requests-per-minute", metavar="N", type=int, help="limit of requests per minute")
    create.add_argument("--tokens-per-minute", metavar="N", type=int, help="limit of tokens per minute")
    create.add_argument("--concurrent", metavar="N", type=int, help="limit of requests at the same time")
    actions.add_parser("list", help="list created keys", description="List the keys that were created.")
    revoke = actions.add_parser("revoke", help="revoke a created key", description="Revoke a key that was created.")
    revoke.add_argument("name", metavar="NAME", help="its name")
    new = actions.add_parser(
        "new",
        help="generate a key for gateway.yaml",
        description="Generate a key and print it once. Its entry for gateway.yaml (a hash) goes to stderr.",
    )
    _add_name_and_scope(new)


def _add_name_and_scope(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the name of the key in logs and in usage")
    parser.add_argument("--admin", action="store_true", help="allow the endpoints below /admin, too")


def run(session: Session) -> int:
    """Performs the action."""
    actions = {"show": _show, "create": _create, "list": _list, "revoke": _revoke, "new": _new}
    return actions[session.args.action](session)


def _fresh() -> tuple[str, str]:
    """A new key, and its hash in the form of the configuration."""
    key = f"hg-{secrets.token_urlsafe(32)}"
    return key, f"sha256:{hashlib.sha256(key.encode()).hexdigest()}"


def _new(session: Session) -> int:
    fresh, digest = _fresh()
    scopes = ["use", "admin"] if session.args.admin else ["use"]
    if session.prints_json({"key": fresh, "entry": {"name": session.args.name, "hash": digest, "scopes": scopes}}):
        return Exit.OK
    name = json.dumps(session.args.name, ensure_ascii=False)
    entry = f'{{name: {name}, hash: "{digest}", scopes: [{", ".join(scopes)}]}}'
    session.terminal.data(fresh)
    session.terminal.say(f"add this under `keys:` in gateway.yaml, then reload:\n  - {entry}")
    return Exit.OK


def _create(session: Session) -> int:
    args = session.args
    fresh, digest = _fresh()
    scopes = ["use", "admin"] if args.admin else ["use"]
    settings: dict[str, Any] = {
        "name": args.name,
        "hash": digest,
        "scopes": scopes,
    }
    settings["models"] = [name.strip() for name in (args.models or "").split(",") if name.strip()]
    if args.models is not None and not settings["models"]:
        raise UsageError("--models names no model; leave it out for a key that may use all models")
    settings["budget"] = {"dollars_per_month": args.dollars, "tokens_per_month": args.tokens}
    limits = {name: getattr(args, name) for name in ("requests_per_minute", "tokens_per_minute", "concurrent")}
    if any(value is not None for value in limits.values()):
        settings["limits"] = limits
    try:
        KeySettings.model_validate(settings)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        raise UsageError(f"{'.'.join(map(str, found['loc']))}: {found['msg']}") from error
    config = load(session.config_dir, session.environ)
    if any(key.name == args.name for key in config.keys):
        raise UsageError(f"gateway.yaml has a key {args.name!r}, which would be used instead; choose another name")
    if not config.usage.store:
        raise HeadgateError("gateway.yaml has `usage: {store: false}`, so the gateway does not read created keys")
    with usage_file(session.state) as file:
        replaced = any(key.name == args.name and key.revoked is None for key in file.stored_keys())
        file.put_key(args.name, settings, time.time())
    if session.prints_json({"key": fresh, "name": args.name, "replaced": replaced}):
        return Exit.OK
    session.terminal.data(fresh)
    old = "; its old secret is no longer accepted" if replaced else ""
    session.terminal.say(f"key {args.name!r}; a running gateway accepts it within a second{old}")
    return Exit.OK


def _list(session: Session) -> int:
    with usage_file(session.state) as file:
        keys = file.stored_keys()
    shown = [
        {name: value for name, value in key.settings.items() if name != "hash"}
        | {"created": key.created, "revoked": key.revoked}
        for key in keys
    ]
    if session.prints_json({"keys": shown}):
        return Exit.OK
    session.terminal.table(
        ["NAME", "STATE", "SCOPES", "MODELS", "BUDGET", "CREATED"],
        [
            [
                str(key["name"]),
                "active" if key["revoked"] is None else "revoked",
                ",".join(key["scopes"]),
                ",".join(key.get("models") or ()) or "all",
                _budget(key.get("budget") or {}),
                time.strftime("%Y-%m-%d %H:%M", time.localtime(key["created"])),
            ]
            for key in shown
        ],
        none="no keys were created; `headgate key create NAME` creates one",
    )
    return Exit.OK


def _budget(budget: dict[str, Any]) -> str:
    dollars, tokens = budget.get("dollars_per_month"), budget.get("tokens_per_month")
    parts = [f"${dollars:g}"] if dollars is not None else []
    parts += [f"{tokens} tokens"] if tokens is not None else []
    return " and ".join(parts) or "-"


def _revoke(session: Session) -> int:
    name = session.args.name
    with usage_file(session.state) as file:
        done = file.revoke_key(name, time.time())
        known = [key.name for key in file.stored_keys() if key.revoked is None]
    if not done:
        raise HeadgateError(f"{name!r} is not a created, active key; active keys: {', '.join(known) or 'none'}")
    if not session.prints_json({"name": name, "revoked": True}):
        session.terminal.say(f"key {name!r} is revoked; a running gateway refuses it within a second")
    return Exit.OK


def _show(session: Session) -> int:
    found = gateway_key(session.environ, session.state)
    if (found is None or found.file) and has_keys(session):
        raise HeadgateError(
            f"{session.config_dir / 'gateway.yaml'} configures the keys (keys:) as hashes, which cannot be shown"
        )
    if found is None:
        raise NotRunningError(
            f"there is no generated key in {session.state.root}; the gateway generates one at its first start "
            f"(`headgate up`) unless its configuration has keys"
        )
    source = f"the variable {found.variable}" if found.variable else str(found.file)
    if session.prints_json({"key": found.value, "source": source}):
        return Exit.OK
    session.terminal.data(found.value)
    session.terminal.say(f"from {source}")
    return Exit.OK


COMMANDS = {"key": Command(arguments, run)}
