"""`headgate config` reads the configuration in the same way as the services.

It writes files only with `--write`: schemas and imported configurations.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any

from headgate.cli.command import Command, Session
from headgate.shared.errors import ConfigError, Exit, HeadgateError, Problem, did_you_mean
from headgate.shared.state_directory import SECRET_NAMES
from headgate.shared.state_files import write_atomic

MASK = "********"


@dataclass(frozen=True)
class File:
    """One configuration file: its name without `.yaml`, the module that loads it, and the class of its content."""

    name: str
    module: str
    model: str

    def load(self, directory: Path, environ: Mapping[str, str], overrides: Mapping[str, Any]) -> Any:
        """The effective settings. Raises ConfigError."""
        return importlib.import_module(self.module).load(directory, environ, overrides)

    def schema(self) -> dict[str, Any]:
        """The JSON schema of the file."""
        model = getattr(importlib.import_module(self.module), self.model)
        return {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            **model.model_json_schema(),
            "title": f"{self.name}.yaml of Headgate",
        }


MODELS = File("models", "inference.settings", "ModelsFile")
GATEWAY = File("gateway", "gateway.settings_loading", "GatewayConfig")
FILES = (MODELS, GATEWAY)


def arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of the verb."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for name, summary in {
        "check": "list all mistakes with file and line",
        "show": "print the effective settings, secrets masked",
        "schema": "print or write JSON schemas",
        "import": "translate the configuration of LiteLLM, llama-swap, llama-server or Ollama",
    }.items():
        actions.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
    schema = actions.choices["schema"]
    names = [file.name for file in FILES]
    schema.add_argument("file", metavar="FILE", nargs="?", choices=names, help="models or gateway (default: both)")
    schema.add_argument("--write", metavar="DIR", help="write DIR/FILE.schema.json instead of printing it")
    foreign = actions.choices["import"]
    foreign.add_argument(
        "file",
        metavar="FILE",
        help="LiteLLM's or llama-swap's config.yaml, presets of llama-server (.ini), the output of `ollama list` or of "
        "Ollama's /api/tags; `-` reads stdin",
    )
    foreign.add_argument(
        "--write", metavar="DIR", help="write DIR/models.yaml and DIR/gateway.yaml, instead of printing them"
    )


def run(session: Session) -> int:
    """Runs the chosen action."""
    action = {"check": check, "show": show, "schema": schema, "import": import_foreign}[session.args.action]
    return action(session)


def import_foreign(session: Session) -> int:
    """Translates the configuration of another program."""
    return int(importlib.import_module("headgate.cli.config_import.importing").run(session))


def check(session: Session) -> int:
    """Prints the problems of both files to stdout. Exit code 2 when there is one.

    Without a problem it prints warnings to stderr, except with `--json`.
    """
    directory, terminal = session.config_dir, session.terminal
    problems: list[Problem] = []
    loaded: list[Any] = []
    for file in FILES:
        try:
            loaded.append(file.load(directory, session.environ, {}))
        except ConfigError as error:
            problems += (
                problem for problem in error.problems if problem not in problems
            )  # the loaders of both files report an invalid INFERENCE_TOKEN
    rows = [
        {"file": str(p.file) if p.file else None, "line": p.line, "key": p.key, "message": p.message} for p in problems
    ]
    if session.prints_json(rows):
        return Exit.USAGE if problems else Exit.OK
    for problem in problems:
        terminal.data(str(problem))
    if not problems:
        for warning in (*unknown_models(*loaded), *unmet_needs(loaded[1])):
            terminal.say(f"{directory / 'gateway.yaml'}: {warning}")
        terminal.say(f"{directory}: no problems")
    return Exit.USAGE if problems else Exit.OK


def unknown_models(inference: Any, gateway: Any) -> Iterator[str]:
    """Warnings about local models in chains that models.yaml lacks, and about a model called `smaller`.

    They are no errors, because the inference service may use another models.yaml.
    """
    from gateway.routing.chain import SMALLER

    for name, route in gateway.routes.items():
        for entry in route.chain:
            provider, _, model = entry.partition("/")
            if provider == "local" and model == SMALLER and model in inference.names:
                yield (
                    f"routes.{name}.chain: `{entry}` chooses a model for each request, not the model {model!r} of "
                    f"models.yaml; give that model another name"
                )
            elif provider == "local" and model not in ("*", SMALLER) and model not in inference.names:
                advice = did_you_mean(model, [*inference.names, SMALLER], shown=lambda near: f"local/{near}")
                yield f"routes.{name}.chain: models.yaml has no model {model!r}{advice}"


def unmet_needs(gateway: Any) -> Iterator[str]:
    """Warnings about files and packages that this machine lacks. They are no errors: the gateway may run elsewhere."""
    from gateway.nodes.node_tls import read_tls

    try:
        read_tls(gateway.inference.tls)
    except HeadgateError as error:
        yield str(error)
    needs = {
        "redis": gateway.state is not None,
        "ray": any(node.startswith("ray:") for node in gateway.inference.nodes),
    }
    for extra, is_needed in needs.items():
        if is_needed and importlib.util.find_spec(extra) is None:
            key = "state" if extra == "redis" else "inference.nodes"
            yield f"{key}: the package {extra} is not installed here; run: pip install 'headgate[{extra}]'"


def show(session: Session) -> int:
    """Prints the effective settings, including defaults and variables."""
    directory = session.config_dir
    inference = MODELS.load(directory, session.environ, {})
    gateway = GATEWAY.load(directory, session.environ, {})
    effective = {
        "inference": {f"INFERENCE_{name.upper()}": value for name, value in plain(inference.settings).items()},
        "models": {name: _without(plain(spec), "id") for name, spec in inference.models.items()},
        "gateway": plain(gateway),
    }
    if session.prints_json(effective):
        return Exit.OK
    import yaml

    session.terminal.say(f"from {directory}, the environment and the defaults; secrets are masked")
    session.terminal.data(yaml.safe_dump(effective, sort_keys=False, allow_unicode=True, width=120), end="")
    return Exit.OK


def _without(values: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in values.items() if key != name}


def plain(value: Any, name: str = "") -> Any:
    """`value` as the configuration file accepts it: `never` for infinity, `${env:NAME}` for a variable that is not set.

    A secret, recognized by the `name` of its setting, is masked.
    """
    from headgate.shared.configfile import unset_name  # imports pydantic, which `--help` does not need

    if hasattr(value, "model_dump"):
        value = value.model_dump(mode="python")
    elif is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner, str(key)) for key, inner in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(inner, name) for inner in value]
    if isinstance(value, float):
        return "never" if math.isinf(value) else int(value) if value.is_integer() else value
    if value is None or isinstance(value, (bool, int)):
        return value
    text = str(value)
    if unset := unset_name(text):
        return f"${{env:{unset}}}"
    return MASK if text and name.lower().endswith(tuple(SECRET_NAMES)) else text


def schema(session: Session) -> int:
    """Prints the schema of each file, or of the chosen one, or writes them to files."""
    chosen = [file for file in FILES if session.args.file in (None, file.name)]
    if session.args.write:
        for file in chosen:
            path = Path(session.args.write) / f"{file.name}.schema.json"
            write_atomic(path, render(file).encode())
            path.chmod(0o644)
            session.terminal.say(f"wrote {path}")
    elif session.args.file:
        session.terminal.data(render(chosen[0]), end="")
    else:
        session.terminal.json({file.name: file.schema() for file in chosen})
    return Exit.OK


def render(file: File) -> str:
    """The text of a schema file."""
    return json.dumps(file.schema(), indent=2, ensure_ascii=False) + "\n"


COMMANDS = {"config": Command(arguments, run)}
