"""`headgate doctor`: runs the checks and prints the findings."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any

from headgate.cli import addresses
from headgate.cli.command import Command, Session, UsageError
from headgate.shared.errors import Exit, HeadgateError


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--url",
        metavar="URL",
        help="also stream an answer through this address, such as a proxy's; sends HEADGATE_KEY, or else the key "
        "of `headgate key show`",
    )
    parser.add_argument("--model", metavar="MODEL", help="the model for --url (default: the first of models.yaml)")


_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "problem": "red"}


def doctor(session: Session) -> int:
    """Prints one line per finding, with advice below it. Exit code 1 when something does not work."""
    if session.args.model and not session.args.url:
        raise UsageError("--model needs --url")
    if session.args.url:
        _check_url(session.args.url)
    found: list[dict[str, Any]] = []
    for finding in _findings(session):
        found.append(asdict(finding))
        if session.json:
            continue
        mark = session.terminal.paint(finding.level.value.ljust(7), _STYLES[finding.level.value])
        session.terminal.data(f"{mark}  {finding.check}: {finding.message}")
        if finding.advice and finding.level != "ok":
            session.terminal.data(f"         -> {finding.advice}")
    session.prints_json(found)
    problems = sum(each["level"] == "problem" for each in found)
    if not session.json:
        session.terminal.say(f"{problems} problem{'' if problems == 1 else 's'}" if problems else "no problems")
    return Exit.FAILURE if problems else Exit.OK


def _findings(session: Session) -> Iterator[Any]:
    from headgate.cli.doctor import machine_checks, service_checks
    from headgate.cli.doctor.findings import problem
    from inference import environment_settings

    def guarded(name: str, check: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """The findings of `check`. A failing check does not end the others."""
        session.terminal.status(f"checking {name} ...")
        try:
            yield from check()
        except (HeadgateError, OSError) as error:
            yield problem(name, str(error), "")

    settings = environment_settings.read(
        session.environ, {}, []
    )  # mistakes are reported by the check of the configuration
    yield from guarded("llama.cpp", machine_checks.build)
    built = machine_checks.built_backends()
    yield from guarded("accelerators", lambda: machine_checks.accelerators(built, settings))
    yield from guarded("NVML", machine_checks.nvml)
    yield from guarded("devices", lambda: machine_checks.devices(settings))
    yield from guarded("memory", lambda: machine_checks.memory(settings))
    yield from guarded("limits", machine_checks.limits)
    yield from guarded("directories", lambda: service_checks.directories(session, settings.models_dir.absolute()))
    findings, loaded = service_checks.configuration(session)
    yield from findings
    if loaded:
        yield from guarded("services", lambda: service_checks.services(session, loaded))
        yield from guarded("nodes", lambda: service_checks.nodes(session))
        yield from guarded("keys", lambda: service_checks.keys(session, loaded[1]))
        yield from guarded("proxies", lambda: service_checks.proxies(session, loaded[1]))
    if session.args.url:
        yield from guarded("stream", lambda: _stream(session))


def _check_url(url: str) -> None:
    from headgate.cli.doctor.stream_check import base_of

    try:
        base_of(url)
    except ValueError as error:
        raise UsageError(str(error)) from None


def _stream(session: Session) -> Iterator[Any]:
    from headgate.cli.doctor import stream_check

    key = session.environ.get("HEADGATE_KEY")
    if key is None:
        found = addresses.gateway_key(session.environ, session.state)
        key = None if found is None else found.value
    model = session.args.model or _first_model(session)
    session.terminal.status(f"streaming an answer of {model} through {session.args.url} ...")
    yield from stream_check.check(session.args.url, key, model)


def _first_model(session: Session) -> str:
    from headgate.cli.config import MODELS

    names = MODELS.load(session.config_dir, session.environ, {}).model_ids
    if not names:
        raise UsageError("models.yaml has no model; name one of the gateway behind the address: --model NAME")
    return str(names[0])


COMMANDS = {"doctor": Command(_arguments, doctor)}
