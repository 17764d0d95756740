"""`headgate add`: writes a model into models.yaml and lets a running service read it."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headgate.cli.command import Command, Session, UsageError
from headgate.shared.errors import ConfigError, Exit, HeadgateError, Problem
from headgate.shared.state_directory import packaged_defaults

if TYPE_CHECKING:
    from headgate.cli.first_steps.running_service import Target
    from inference.settings import InferenceConfig


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", metavar="FILE", help="a GGUF file, or the source of a model on a hub, as for `headgate pull`"
    )
    parser.add_argument(
        "--name", metavar="NAME", help="the model's id for clients (default: from the name of the file)"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="a setting of the model as in models.yaml, such as context_length=8192; may be repeated",
    )


def add(session: Session) -> int:
    """Adds one model. Leaves models.yaml unchanged if it has the file already or the result would not be valid."""
    from headgate.cli.first_steps import running_service

    target = running_service.Target.of(session)
    settings = _settings(session.args.set)
    name, fields = _from_hub(session, target) if session.args.source.startswith("hf:") else _from_file(session, target)
    fields |= settings
    path = _own_file(session, target)
    existing = _load(path.parent, path, target.environ)
    model = session.args.name or name
    if known := _known(session, path, existing, model, fields, settings):
        model = known
        session.terminal.say(f"{path} already has this file as {model!r}")
    else:
        _write(path, model, fields, target.environ)
        session.terminal.say(f"{path}: added {model!r}")
    answer: dict[str, Any] = {"model": model, "file": str(path), "reloaded": False, "plan": None}
    if target.pid is not None and path.parent.absolute() != target.config_dir.absolute():
        session.terminal.say(
            f"the running services use {target.config_dir}; stop them, then start them in this directory: headgate up"
        )
    elif api := running_service.reload(session, target, model):
        answer |= {"reloaded": True, "plan": running_service.first_plan(session, api, model)}
        _hints(session, path.parent, target, model)
    else:
        session.terminal.say("start the services with: headgate up")
    session.prints_json(answer)
    return Exit.OK


def _settings(texts: list[str]) -> dict[str, Any]:
    import yaml

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise UsageError(f"--set {text!r} is not KEY=VALUE; write for example --set context_length=8192")
        try:
            found[key.strip()] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--set {key}: {value!r} is not valid YAML") from None
    return found


def _from_hub(session: Session, target: Target) -> tuple[str, dict[str, Any]]:
    from headgate.cli.first_steps import pull
    from inference.models_dir import model_name

    source = pull.parsed([session.args.source])[0]
    models_dir = pull.models_directory(target.environ)
    try:
        file = source.downloaded(models_dir)
    except ValueError:
        file = pull.download(session, [source], target.environ, models_dir)[0]
    return model_name(file.path.name), {"path": str(source), **_for_short_context(file.path, target)}


def _from_file(session: Session, target: Target) -> tuple[str, dict[str, Any]]:
    from headgate.cli.first_steps import pull
    from inference.file_stamp import parts_of
    from inference.models_dir import is_projector, model_name

    given = session.args.source
    path = Path(given).expanduser().absolute()
    models_dir = pull.models_directory(target.environ)
    if not path.exists() and (models_dir / given).is_file():
        path = models_dir / given
    if path.is_dir():
        files = sorted(path.glob("*.gguf"))
        some = f"; it has {', '.join(file.name for file in files[:5])}" if files else " and has no GGUF file"
        raise UsageError(f"{path} is a directory{some}. Name one GGUF file")
    if not path.exists():
        raise UsageError(f"no file {path}; a model on a hub is written hf:ORGANIZATION/REPOSITORY:QUANTIZATION")
    if path.suffix != ".gguf":
        raise UsageError(
            f"{path.name} is not named .gguf. Models in other formats are converted with convert_hf_to_gguf.py of "
            f"llama.cpp, and many have a GGUF version on a hub: headgate pull hf:ORGANIZATION/REPOSITORY:QUANTIZATION"
        )
    first = parts_of(path)[0]
    fields = {"path": _shown(first, models_dir), **_for_short_context(first, target)}
    beside = [file for file in first.parent.glob("*.gguf") if is_projector(file.name)]
    if beside and "mmproj" not in _settings(session.args.set):
        shown = _shown(beside[0], models_dir)
        session.terminal.say(
            f"{beside[0].name} is in the same directory; if it belongs to this model, add `mmproj: {shown}` to its "
            f"entry in models.yaml for images"
        )
    return model_name(first.name), fields


def _shown(path: Path, models_dir: Path) -> str:
    """`path` for models.yaml: relative to `models_dir` if it is in it."""
    return str(path.relative_to(models_dir)) if path.is_relative_to(models_dir) else str(path)


def _for_short_context(path: Path, target: Target) -> dict[str, Any]:
    """The setting context_length for a model that was trained with less than the default, else nothing.

    Raises UsageError for a file that is not a usable model.
    """
    from inference import environment_settings
    from inference.estimate.gguf import BadGgufError, read_facts

    try:
        facts = read_facts(path)
    except BadGgufError as error:
        raise UsageError(f"{path} is not a usable model: {error}") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
    default = environment_settings.read(target.environ, {}, []).context_length
    return {"context_length": facts.context_trained} if facts.context_trained < default else {}


def _own_file(session: Session, target: Target) -> Path:
    """The models.yaml to change. If an installed package's configuration is in use, it is first copied to ./config."""
    directory = target.config_dir
    is_installed = (packaged_defaults().parent / "cli").is_dir()  # in a clone, its own config/ is changed
    if directory.absolute() == packaged_defaults().absolute() and is_installed:
        directory = Path("config")
        directory.mkdir(exist_ok=True)
        for name in ("models.yaml", "gateway.yaml"):
            if not (directory / name).exists():
                shutil.copyfile(packaged_defaults() / name, directory / name)
        session.terminal.say(f"copied the packaged configuration to {directory.absolute()}")
    return directory / "models.yaml"


def _load(directory: Path, shown: Path, environ: Mapping[str, str]) -> InferenceConfig:
    """The configuration in `directory`.

    Problems in a copy are reported for the original file `shown`, without line numbers.
    """
    from inference import settings

    try:
        return settings.load(directory, environ, {})
    except ConfigError as error:
        if directory == shown.parent:
            raise
        raise ConfigError([Problem(f"not added: {each.message}", each.key, shown) for each in error.problems]) from None


def _known(
    session: Session,
    path: Path,
    config: InferenceConfig,
    model: str,
    fields: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> str | None:
    """The id of the model that already has this file; None if an entry is to be added.

    `chosen` are the settings of `--set`. Raises UsageError if models.yaml has the name `model` for another file, or
    for this one although settings are chosen.
    """
    from inference import settings

    file, _ = settings.resolve_path(fields["path"], config.settings.models_dir)
    wanted = None if file is None else os.path.realpath(file.path)
    listed = {id: os.path.realpath(spec.path) for id, spec in config.models.items() if id not in config.found}
    same = [id for id, known in listed.items() if known == wanted]
    owner = config.names.get(model)
    if owner in listed:
        if owner in same and not chosen:
            return owner
        raise UsageError(
            f"{path} already has a model {model!r} ({config.models[owner].path}); change its settings there, or choose "
            f"another name: --name NAME"
        )
    return None if session.args.name or chosen else next(iter(same), None)


def _write(path: Path, model: str, fields: Mapping[str, Any], environ: Mapping[str, str]) -> None:
    """Adds the entry if the result is valid. Raises HeadgateError, ConfigError and leaves the file as it is."""
    from headgate.cli.first_steps import models_file

    with models_file.locked(path.parent):
        text = path.read_bytes().decode()
        try:
            changed = models_file.with_entry(text, model, fields)
        except ValueError as error:
            raise HeadgateError(f"{path}: {error}") from None
        with tempfile.TemporaryDirectory() as scratch:
            (Path(scratch) / path.name).write_bytes(changed.encode())
            _load(Path(scratch), path, environ)
        models_file.replace_text(path, changed)


def _hints(session: Session, directory: Path, target: Target, model: str) -> None:
    """Prints how to use the model, or which route gateway.yaml lacks for it."""
    from gateway import settings_loading
    from headgate.cli.first_steps.running_service import say_how_to_ask

    try:
        routes = settings_loading.load(directory, target.environ).routes
    except ConfigError:
        return
    if model not in routes and "*" not in routes:
        session.terminal.say(
            f"gateway.yaml has no route for {model}; add under `routes:`  {model}: {{chain: [local/{model}]}}"
        )
        return
    say_how_to_ask(session, model)


COMMANDS = {"add": Command(_arguments, add)}
