"""`headgate pull`: downloads models from a hub into INFERENCE_MODELS_DIR on this machine or on a node."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.client import ANSWER_SECONDS, Api
from headgate.cli.command import Session, UsageError, on_nodes
from headgate.cli.nodes import Nodes, label
from headgate.shared.errors import ConfigError, Exit, HeadgateError, Problem

if TYPE_CHECKING:
    from inference.models_dir import HubSource, ModelFile

STOPPED = "stopped; the same command continues the download"


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "sources",
        metavar="SOURCE",
        nargs="*",
        help="hf:ORGANIZATION/REPOSITORY:QUANTIZATION or hf:ORGANIZATION/REPOSITORY/FILE.gguf (default: those of "
        "models.yaml that are missing here)",
    )


def pull(session: Session) -> int:
    """Downloads, then lets a running service reload. With `--node`, the service of the node does both."""
    if session.args.node is not None:
        return _pull_on_node(session, Nodes.of(session).one(), parsed(session.args.sources))
    from headgate.cli.first_steps import running_service
    from inference import settings

    target = running_service.Target.of(session)
    models_dir = models_directory(target.environ)
    sources = parsed(session.args.sources) or missing_sources(target.config_dir, target.environ, models_dir)
    found = download(session, sources, target.environ, models_dir) if sources else []
    if not sources:
        session.terminal.say("every `hf:` source of models.yaml is here")
    try:
        models = settings.load(target.config_dir, target.environ, {}).models
    except ConfigError as error:
        session.terminal.say(f"the configuration has mistakes, so no service was reloaded:\n{error}")
        models = {}
    ids = {os.path.realpath(spec.path): spec.id for spec in reversed(list(models.values()))}
    files = []
    for source, file in zip(sources, found, strict=True):
        model = ids.get(os.path.realpath(file.path))
        plan = None
        if model is not None and (api := running_service.reload(session, target, model)):
            plan = running_service.first_plan(session, api, model)
            running_service.say_how_to_ask(session, model)
        elif model is not None:
            session.terminal.say(f"{source} is the model {model!r}; start the services with: headgate up")
        files.append({"source": str(source), "path": str(file.path), "model": model, "plan": plan})
    session.prints_json(files)
    return Exit.OK


def _pull_on_node(session: Session, api: Api, sources: list[HubSource]) -> int:
    from headgate.cli.first_steps import running_service

    if not sources:
        raise UsageError("name what to download on the node: headgate pull SOURCE --node NODE")
    files = []
    for source in sources:
        try:
            found = _followed(session, api, source)
        except KeyboardInterrupt:
            session.terminal.say(STOPPED)
            raise
        model, plan = found["model"], None
        if model is None:
            session.terminal.say(f"{source} is in {found['path']}, but the service did not accept it; its log says why")
        else:
            plan = running_service.first_plan(session, api, model)
            running_service.say_how_to_ask(session, model)
        files.append(
            {"node": session.args.node, "source": str(source), "path": found["path"], "model": model, "plan": plan}
        )
    session.prints_json(files)
    return Exit.OK


def _followed(session: Session, api: Api, source: HubSource) -> dict[str, Any]:
    """The last event of a download by the service at `api`, with the progress shown. Raises HeadgateError."""
    from headgate.cli.first_steps.hub import Progress

    node = label(session.args.node)
    with api.open("POST", "/models/pull", {"source": str(source)}, ANSWER_SECONDS) as answer:
        for frame in answer.frames():
            if frame.data is None:  # a comment while there is no progress
                continue
            event: dict[str, Any] = json.loads(frame.data)
            if frame.event == b"progress":
                session.terminal.status(f"{node}{Progress(**event)}")
            elif frame.event == b"message":
                session.terminal.say(f"{node}{event['text']}")
            elif frame.event == b"error":
                raise HeadgateError(f"{node}{event['message']}")
            elif frame.event == b"done":
                return event
    raise HeadgateError(f"{node}the connection ended before the download was complete; the same command continues it")


def parsed(texts: list[str]) -> list[HubSource]:
    """The sources in arguments. Raises UsageError."""
    from inference.models_dir import HubSource

    try:
        return [HubSource.parse(text) for text in texts]
    except ValueError as error:
        raise UsageError(str(error)) from None


def models_directory(environ: Mapping[str, str]) -> Path:
    """INFERENCE_MODELS_DIR as an absolute path. Raises ConfigError if any setting of the service is invalid."""
    from inference import environment_settings

    problems: list[Problem] = []
    found = environment_settings.read(environ, {}, problems).models_dir
    if problems:
        raise ConfigError(problems)
    return found.absolute()


def missing_sources(directory: Path, environ: Mapping[str, str], models_dir: Path) -> list[HubSource]:
    """The `hf:` sources of models and draft models in models.yaml without a complete download.

    Raises ConfigError for an invalid file. Skips invalid sources.
    """
    from headgate.shared import configfile
    from inference.models_dir import HUB, HubSource
    from inference.settings import NO_MODELS, ModelsFile

    path = directory / "models.yaml"
    data, lines = configfile.read_yaml(path, environ, nothing=NO_MODELS)
    if data.get("models") is None:
        return []
    missing = {}
    entries = configfile.validated(data, lines, path, ModelsFile).models.values()
    for text in (text for entry in entries for text in (entry.path, entry.draft)):
        if text is not None and text.startswith(HUB):
            with contextlib.suppress(ValueError):  # reported by the check of the configuration
                source = HubSource.parse(text)
                if not _is_here(source, models_dir):
                    missing[text] = source
    return list(missing.values())


def fetch_missing(session: Session, directory: Path, environ: Mapping[str, str]) -> None:
    """Downloads the `hf:` sources of models.yaml that are missing. Raises HeadgateError."""
    models_dir = models_directory(environ)
    if sources := missing_sources(directory, environ, models_dir):
        download(session, sources, environ, models_dir)


def _is_here(source: HubSource, models_dir: Path) -> bool:
    try:
        source.downloaded(models_dir)
    except ValueError:
        return False
    return True


def download(
    session: Session, sources: list[HubSource], environ: Mapping[str, str], models_dir: Path
) -> list[ModelFile]:
    """Downloads what is missing of each source, and returns the files. Raises HeadgateError."""
    from headgate.cli.first_steps.hub import Hub

    found = []
    terminal = session.terminal
    with contextlib.closing(Hub(environ, say=terminal.say, status=lambda at: terminal.status(str(at)))) as hub:
        for source in sources:
            terminal.status(f"looking up {source} ...")
            plan = hub.plan(source, models_dir)
            if not plan.missing():
                terminal.say(f"{source}: complete in {plan.folder}")
            try:
                found.append(hub.fetch(plan))
            except KeyboardInterrupt:
                terminal.say(STOPPED)
                raise
    return found


COMMANDS = {"pull": on_nodes(_arguments, pull)}
