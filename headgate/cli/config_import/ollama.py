"""Translates Ollama's list of models (`ollama list`, or GET /api/tags), with the GGUF files in Ollama's directory."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headgate.cli.config_import.imported import Imported, as_list, as_mapping

REGISTRY = "registry.ollama.ai"
SYSTEM_DIRECTORIES = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/models")
_PREFIX = "application/vnd.ollama.image."
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_MAX_BYTES = 2**20
_DEFAULTS = {"num_predict": "max_tokens"}
_PARAMETERS = {"num_ctx": "context_length", "num_batch": "batch", "num_gpu": "gpu_layers"}


def names_in_table(text: str) -> list[str]:
    """The names in the output of `ollama list`."""
    lines = [line.split() for line in text.splitlines() if line.strip()]
    return [words[0] for words in lines[1:]]


def names_in_tags(data: Mapping[str, Any]) -> list[str]:
    """The names in the answer of /api/tags."""
    entries = [as_mapping(entry) for entry in as_list(data.get("models"))]
    return [
        str(entry.get("model") or entry.get("name")) for entry in entries if entry.get("model") or entry.get("name")
    ]


def directories(environ: Mapping[str, str], home: Path) -> list[Path]:
    """Where Ollama may keep its models: OLLAMA_MODELS, the directory of this user, those of the system service."""
    chosen = [Path(environ["OLLAMA_MODELS"])] if environ.get("OLLAMA_MODELS") else []
    return [*chosen, home / ".ollama" / "models", *map(Path, SYSTEM_DIRECTORIES)]


def read(names: list[str], places: list[Path]) -> Imported:
    """The models of these names, with their files in the first of `places` that has them."""
    found = Imported("Ollama")
    for name in names:
        if entry := _entry(found, name, places):
            model = name.removesuffix(":latest")
            defaults = entry.pop("defaults", {})
            found.models[model] = entry
            if model != name:
                entry["aliases"] = [name]
            found.local_parameters(name, (model, *entry.get("aliases", ())), {"defaults": defaults})
    return found


def _entry(found: Imported, name: str, places: list[Path]) -> dict[str, Any] | None:
    """The entry of models.yaml, with an additional `defaults` if the model has generation parameters.

    None, with a report, if its files are not found.
    """
    host, repository, tag = _parts(name)
    for place in places:
        manifest = place / "manifests" / host / repository / tag
        try:
            if manifest.is_file() and manifest.stat().st_size < _MAX_BYTES:
                layers = as_list(as_mapping(json.loads(manifest.read_bytes())).get("layers"))
                return _of_layers(found, name, place / "blobs", [as_mapping(layer) for layer in layers])
        except OSError as error:
            found.leave(name, f"{manifest} cannot be read ({error}); run this as a user that may read it")
            return None
        except ValueError as error:
            found.leave(name, f"{manifest} is damaged ({error}); download the model again: ollama pull {name}")
            return None
    if host in ("hf.co", "huggingface.co"):
        quantization = "" if tag == "latest" else f":{tag}"
        return {"path": f"hf:{repository}{quantization}"}
    found.leave(
        name,
        "its files are not on this machine (set OLLAMA_MODELS to their directory), or it is a cloud model; many models "
        "are on a hub, too: headgate pull hf:ORGANIZATION/REPOSITORY:QUANTIZATION",
    )
    return None


def _parts(name: str) -> tuple[str, str, str]:
    """(host, repository, tag) of a name such as `llama3.2:3b`, `user/model`, or `hf.co/org/repo:Q4_K_M`."""
    path, _, tag = name.partition(":")
    parts = [part for part in path.split("/") if part not in ("", ".", "..")]
    host = parts.pop(0) if len(parts) > 2 else REGISTRY
    if len(parts) == 1:
        parts.insert(0, "library")
    return host, "/".join(parts), tag if tag and "/" not in tag and tag not in (".", "..") else "latest"


def _of_layers(found: Imported, name: str, blobs: Path, layers: list[Mapping[str, Any]]) -> dict[str, Any] | None:
    entry: dict[str, Any] = {}
    for kind, path in _files(blobs, layers):
        if kind == "model" and "path" not in entry:
            entry["path"] = str(path)
        elif kind == "projector":
            entry["mmproj"] = str(path)
        elif kind == "adapter":
            entry.setdefault("lora", []).append(str(path))
        elif kind == "params":
            entry |= _parameters(found, name, path)
        elif kind == "system":
            found.leave(f"{name}: system prompt", "clients have to send it")
        elif kind == "template":
            found.leave(f"{name}: template", "the template in the GGUF file is used")
    if "path" not in entry:
        found.leave(name, "it has no GGUF file on this machine: it is a cloud model, or in another format")
        return None
    return {"path": entry.pop("path"), **entry}


def _files(blobs: Path, layers: list[Mapping[str, Any]]) -> Iterator[tuple[str, Path]]:
    for layer in layers:
        digest = _DIGEST.fullmatch(str(layer.get("digest")))
        kind = str(layer.get("mediaType") or "")
        if digest and kind.startswith(_PREFIX):
            yield kind.removeprefix(_PREFIX), blobs / f"sha256-{digest[1]}"


def _parameters(found: Imported, name: str, path: Path) -> dict[str, Any]:
    try:
        values = as_mapping(json.loads(path.read_bytes()[:_MAX_BYTES]))
    except (OSError, ValueError):
        return {}
    settings = {
        _PARAMETERS[key]: value for key, value in values.items() if key in _PARAMETERS and isinstance(value, int)
    }
    others = {_DEFAULTS.get(key, key): value for key, value in values.items() if key not in _PARAMETERS}
    unlimited = {key for key in ("seed", "max_tokens") if others.get(key) in (-1, -2)}
    defaults = found.accepted(f"{name}: ", {key: value for key, value in others.items() if key not in unlimited})
    return {**settings, **({"defaults": defaults} if defaults else {})}
