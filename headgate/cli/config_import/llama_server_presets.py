"""Presets of llama-server (`--models-preset FILE.ini`): one section per model, `[*]` for all of them."""

from __future__ import annotations

import re

from headgate.cli.config_import.imported import Imported
from headgate.cli.config_import.llama_server_args import defaults_of, entry_of, long_name

ALL = "*"
OFF = ("false", "off", "0", "")
VALUES = ("flash-attn", "ctx-size", "n-gpu-layers")
"""Options that stay with a value of OFF, because it differs from their default."""
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+(:[\w.-]+)?", re.ASCII)
_SECTION = re.compile(r"\[([^\]]+)\]\s*")
_PAIR = re.compile(r"([^=\s][^=]*?)\s*=\s*(.*)")


def read(text: str) -> Imported:
    """The models of an INI file. Raises ValueError for a line that is neither a section nor a setting."""
    found = Imported("llama-server presets")
    sections: dict[str, dict[str, list[str]]] = {}
    name = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip()
        if not line or line[0] in ";#":
            continue
        if section := _SECTION.fullmatch(line):
            name = section[1].strip()
            sections.setdefault(name, {})
        elif pair := _PAIR.fullmatch(line):
            key, value = pair[1], pair[2]
            if name:
                sections[name][long_name(key.lstrip("-"))] = [_unquoted(value)]
            elif key != "version":
                found.leave(f"line {number}: {key}", "it is in no section")
        else:
            raise ValueError(f"line {number} is neither [SECTION] nor KEY = VALUE")
    common = sections.pop(ALL, {})
    for model, own in sections.items():
        options = {key: value for key, value in {**common, **own}.items() if key in VALUES or value[0] not in OFF}
        if "model" not in options and "hf-repo" not in options and _REPOSITORY.fullmatch(model):
            options["hf-repo"] = [model]  # llama-server names the section of a downloaded model after its repository
        if entry := entry_of(options, f"[{model}]", found):
            found.models[model] = entry
            names = (model, *entry.get("aliases", ()))
            found.local_parameters(f"[{model}]", names, {"defaults": defaults_of(options, f"[{model}]", found)})
    return found


def _unquoted(value: str) -> str:
    return value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'" else value
