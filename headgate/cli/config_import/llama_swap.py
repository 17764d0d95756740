"""Translates llama-swap's config.yaml: models with commands of llama-server, macros, peers, keys."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any

from headgate.cli.config_import.imported import Imported, as_list, as_mapping
from headgate.cli.config_import.llama_server_args import defaults_of, entry_of, options_of

_MACRO = re.compile(r"\$\{([\w.-]+)\}")
_DEPTH = 10
"""How deep macros in macros are inserted."""

_KNOWN = ("models", "macros", "apiKeys", "peers", "globalTTL", "hooks", "groups", "matrix", "healthCheckTimeout")
_NEEDLESS = (
    "logLevel", "logTimeFormat", "logToStdout", "metricsMaxInMemory", "captureBuffer", "startPort", "sendLoadingState",
    "includeAliasesInList", "logRequests",
)  # fmt: skip
_MODEL_NEEDLESS = (
    "cmdStop", "proxy", "checkEndpoint", "useModelName", "macros", "sendLoadingState", "timeouts", "name",
    "description", "metadata", "unlisted", "concurrencyLimit",
)  # fmt: skip
_MODEL_KNOWN = ("cmd", "ttl", "aliases", "env", "filters")


def read(data: Mapping[str, Any]) -> Imported:
    """The models, peers and keys of a parsed config.yaml."""
    found = Imported("llama-swap")
    macros = as_mapping(data.get("macros"))
    for name, settings in as_mapping(data.get("models")).items():
        _model(found, name, as_mapping(settings), macros, data.get("globalTTL", 0))
    for name, peer in as_mapping(data.get("peers")).items():
        _peer(found, name, as_mapping(peer), macros)
    for number, secret in enumerate(as_list(data.get("apiKeys")), 1):
        text = _filled(str(secret), macros, {})
        if "${env:" in text:
            found.leave(f"apiKeys: {secret}", "set GATEWAY_API_KEY to its value")
        else:
            found.key(f"llama-swap-{number}", text)
    if "groups" in data or "matrix" in data:
        found.leave("groups, matrix", "memory decides which models are loaded together; `pinned: true` keeps one")
    if preload := as_list(as_mapping(as_mapping(data.get("hooks")).get("on_startup")).get("preload")):
        found.leave(
            f"hooks.on_startup.preload: {', '.join(map(str, preload))}", "run `headgate preload` after the start"
        )
    if "healthCheckTimeout" in data:
        found.leave("healthCheckTimeout", "set INFERENCE_LOAD_TIMEOUT_SECONDS (default: 1800)")
    found.leave_unknown("", data, (*_KNOWN, *_NEEDLESS))
    return found


def _model(found: Imported, name: str, settings: Mapping[str, Any], common: Mapping[str, Any], ttl: Any) -> None:
    macros = {**common, **as_mapping(settings.get("macros"))}
    lines = _filled(str(settings.get("cmd") or ""), macros, {"MODEL_ID": name, "PORT": "0"}).splitlines()
    command = " ".join(line.rstrip().removesuffix("\\") for line in lines if not line.strip().startswith("#"))
    try:
        words = shlex.split(command)
    except ValueError as error:
        found.leave(f"{name}: cmd", f"it cannot be read ({error}); add the model by hand")
        return
    server, mounts = _server(words)
    if server is None:
        found.leave(f"{name}: {words[0] if words else 'no cmd'}", "only llama-server's models are imported; another "
                    "server can be a provider of kind openai with a base_url")  # fmt: skip
        return
    options: dict[str, list[str]] = {}
    for option, value in options_of(server):
        options.setdefault(option, []).append(value)
    entry = entry_of(options, name, found, lambda path: _on_host(path, mounts))
    if entry is None:
        return
    own = settings.get("ttl", -1)
    seconds = ttl if own == -1 else own
    if isinstance(seconds, int | float) and not isinstance(seconds, bool):
        entry["idle_timeout"] = f"{seconds:g}s" if seconds > 0 else "never"
    names = [as_mapping(alias).get("id", alias) for alias in as_list(settings.get("aliases"))]
    if aliases := list(dict.fromkeys([*entry.pop("aliases", []), *map(str, names)])):
        entry["aliases"] = [alias for alias in aliases if alias != name]
    for variable in as_list(settings.get("env")):
        key, _, value = str(variable).partition("=")
        if key == "CUDA_VISIBLE_DEVICES" and value.isdecimal():
            entry["gpu_index"] = int(value)
        else:
            found.leave(f"{name}: env {variable}", "set it for the whole service, or use gpu_index")
    found.leave_unknown(f"{name}: ", settings, (*_MODEL_KNOWN, *_MODEL_NEEDLESS))
    found.models[name] = entry
    parameters = {"defaults": defaults_of(options, name, found), **_filters(found, name, settings)}
    found.local_parameters(name, (name, *entry.get("aliases", ())), parameters)


def _filters(found: Imported, where: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """`filters` as parameters of a route."""
    filters = as_mapping(settings.get("filters"))
    where = f"{where}: filters."
    found.leave_unknown(where, filters, ("stripParams", "strip_params", "setParams"))
    stripped = str(filters.get("stripParams") or filters.get("strip_params") or "")
    names = [name.strip() for name in stripped.split(",") if name.strip()]
    return {
        "remove": found.accepted_names(f"{where}stripParams ", names),
        "overrides": found.accepted(f"{where}setParams ", as_mapping(filters.get("setParams"))),
    }


def _filled(text: str, macros: Mapping[str, Any], fixed: Mapping[str, str]) -> str:
    """`text` with macros inserted: `fixed` ones first, then `macros`; unknown ones stay.

    `${env.NAME}` becomes Headgate's `${env:NAME}`.
    """

    def value(match: re.Match[str]) -> str:
        name = match[1]
        if name.startswith("env."):
            return f"${{env:{name.removeprefix('env.')}}}"
        return str(fixed.get(name, macros.get(name, match[0])))

    for _ in range(_DEPTH):
        filled = _MACRO.sub(value, text)
        if filled == text:
            break
        text = filled
    return text


def _server(words: Sequence[str]) -> tuple[Sequence[str] | None, dict[str, str]]:
    """The arguments of llama-server in a command, None for another program; and the mounts of its container, each as
    {path inside: path outside}.
    """
    for at, word in enumerate(words):
        program = PurePosixPath(word).name
        if "llama-server" in program or ("llama.cpp" in word and ":" in program):
            return words[at + 1 :], _mounts(words[:at])
    return None, {}


def _mounts(words: Sequence[str]) -> dict[str, str]:
    found = {}
    for at, word in enumerate(words):
        value = words[at + 1] if word in ("-v", "--volume") and at + 1 < len(words) else word.partition("=")[2]
        if (word in ("-v", "--volume") or word.startswith("--volume=")) and len(parts := value.split(":")) > 1:
            found[parts[1].rstrip("/")] = parts[0]
    return found


def _on_host(path: str, mounts: Mapping[str, str]) -> str:
    for inside, outside in sorted(mounts.items(), key=lambda item: len(item[0]), reverse=True):
        if path == inside or path.startswith(f"{inside}/"):
            return outside + path[len(inside) :]
    return path


def _peer(found: Imported, name: str, peer: Mapping[str, Any], macros: Mapping[str, Any]) -> None:
    address = str(peer.get("proxy") or "").rstrip("/")
    if not address:
        found.leave(f"peers.{name}", "it has no address (proxy)")
        return
    base = address if address.endswith("/v1") else f"{address}/v1"
    key = _filled(str(peer.get("apiKey") or "none"), macros, {})
    if key != "none" and "${env:" not in key:
        variable = f"{re.sub(r'[^A-Z0-9]', '_', name.upper())}_API_KEY"
        found.leave(f"peers.{name}.apiKey", f"secrets are not copied; set {variable}")
        key = f"${{env:{variable}}}"
    provider = found.provider(name, {"kind": "openai", "api_key": key, "base_url": base})
    parameters = _filters(found, f"peers.{name}", peer)
    local = {*found.models, *(alias for entry in found.models.values() for alias in entry.get("aliases", ()))}
    for model in map(str, as_list(peer.get("models"))):
        where = f"peers.{name}.models: {model}"
        if model in local:
            found.leave(where, "a local model has this name and is used")
            continue
        found.route(model, f"{provider}/{model}")
        found.parameters(where, model, parameters)
