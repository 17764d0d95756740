"""Recognizes the format of a file, checks the result, and prints or writes it."""

from __future__ import annotations

import json
import re
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from headgate.cli.command import Session, UsageError
from headgate.cli.config_import import litellm, llama_server_presets, llama_swap, ollama
from headgate.cli.config_import.imported import Imported, as_list, as_mapping
from headgate.shared.errors import ConfigError, Exit

MAX_BYTES = 4 * 10**6
FORMATS = (
    "LiteLLM's config.yaml, llama-swap's config.yaml, presets of llama-server (.ini), the output of `ollama list`, or "
    "the answer of Ollama's /api/tags"
)
ALL_LOCAL = {"*": {"chain": ["local/*", "local/smaller"]}}


def run(session: Session) -> int:
    """Prints or writes both files, and reports what was not carried over. Mistakes do not change the exit code."""
    found = recognized(_read(session.args.file), session.environ)
    if not found.models and not found.gateway:
        found.leave(found.source, "nothing in it could be carried over")
    gateway = {**found.gateway, "routes": {**found.gateway.get("routes", {})}}
    if found.models or not gateway["routes"]:
        gateway["routes"] = {**gateway["routes"], **{k: v for k, v in ALL_LOCAL.items() if k not in gateway["routes"]}}
    texts = {
        "models.yaml": _text(found.source, {"models": found.models}),
        "gateway.yaml": _text(found.source, gateway),
    }
    mistakes = _mistakes(texts, session.environ)
    if session.args.write:
        _write(session, Path(session.args.write), texts)
    elif not session.json:
        for name, text in texts.items():
            session.terminal.data(f"# ---- {name} ----\n{text}")
    session.prints_json(
        {
            "models": found.models,
            "gateway": gateway,
            "left": [asdict(left) for left in found.left],
            "mistakes": mistakes,
        }
    )
    if session.json:
        return Exit.OK
    routes = len(found.gateway.get("routes", {}))
    session.terminal.say(f"from {found.source}: {len(found.models)} models, {routes} routes")
    if found.left:
        session.terminal.say(f"not carried over ({len(found.left)}):")
    for left in found.left:
        session.terminal.say(f"  {left.where}: {left.advice}")
    if mistakes:
        session.terminal.say("to correct before the start:")
    for mistake in mistakes:
        session.terminal.say(f"  {mistake}")
    return Exit.OK


def _read(name: str) -> str:
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_BYTES + 1)
        else:
            path = Path(name).expanduser()
            if path.exists() and not path.is_file():
                raise UsageError(f"{path} is not a file; `-` reads stdin")
            with path.open("rb") as file:
                raw = file.read(MAX_BYTES + 1)
        if len(raw) > MAX_BYTES:
            raise UsageError(f"{name} is larger than {MAX_BYTES // 10**6} MB; it is not one of: {FORMATS}")
        return raw.decode("utf-8-sig")
    except OSError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{name} is not text; it is not one of: {FORMATS}") from None


def recognized(text: str, environ: Mapping[str, str]) -> Imported:
    """The content of a file in one of FORMATS. Raises UsageError for anything else."""
    try:
        return _recognized(text, environ)
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(f"the file cannot be read ({reason}); it has to be {FORMATS}") from None


def _recognized(text: str, environ: Mapping[str, str]) -> Imported:
    places = ollama.directories(environ, Path.home())
    if re.match(r"\s*NAME\s+ID\s+SIZE", text):
        return ollama.read(ollama.names_in_table(text), places)
    if re.search(r"^\s*\[[^\]\n]+\]\s*$", text, re.MULTILINE) and not text.lstrip().startswith("{"):
        return llama_server_presets.read(text)
    data = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    if not isinstance(data, Mapping):
        raise ValueError("it has no settings")
    if "model_list" in data:
        return litellm.read(data)
    if any("cmd" in as_mapping(model) for model in as_mapping(data.get("models")).values()) or "peers" in data:
        return llama_swap.read(data)
    if isinstance(data.get("models"), list) and all(isinstance(each, Mapping) for each in as_list(data["models"])):
        return ollama.read(ollama.names_in_tags(data), places)
    raise ValueError("its keys are unknown")


def _text(source: str, content: Mapping[str, Any]) -> str:
    body = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=110)
    return f"# From {source}, by `headgate config import`. The packaged files explain every key.\n{body}"


def _mistakes(texts: Mapping[str, str], environ: Mapping[str, str]) -> list[str]:
    """The problems that `headgate config check` will report, such as missing files of models."""
    from gateway import settings_loading
    from inference import settings as inference_settings

    found: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in texts.items():
            (Path(scratch) / name).write_text(text, encoding="utf-8")
        for load in (
            lambda: inference_settings.load(Path(scratch), environ, {}),
            lambda: settings_loading.load(Path(scratch), environ),
        ):
            try:
                load()
            except ConfigError as error:
                found += [f"{problem.key}: {problem.message}" for problem in error.problems]
    return list(dict.fromkeys(found))


def _write(session: Session, directory: Path, texts: Mapping[str, str]) -> None:
    """Writes both files into `directory`. Raises UsageError if it already has one of them."""
    directory = directory.expanduser()
    if present := [name for name in texts if (directory / name).exists()]:
        raise UsageError(f"{directory} already has {' and '.join(present)}; write into an empty directory")
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (directory / name).write_text(text, encoding="utf-8")
    session.terminal.say(f"wrote {directory / 'models.yaml'} and gateway.yaml; use them with --config-dir {directory}")
