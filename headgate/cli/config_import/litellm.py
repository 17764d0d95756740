"""LiteLLM's config.yaml: deployments as chains of providers, fallbacks, aliases, the master key."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from gateway.apis.openai.route_parameters import NAMES
from headgate.cli.config_import.imported import Imported, as_list, as_mapping

_ENVIRONMENT = "os.environ/"


@dataclass(frozen=True)
class Cloud:
    """The provider for a prefix of `litellm_params.model`: its kind, address (None: that of the kind) and the usual
    variable of its key (empty: no key).
    """

    kind: str
    base_url: str | None
    variable: str


CLOUDS: Mapping[str, Cloud] = {
    "openai": Cloud("openai", None, "OPENAI_API_KEY"),
    "anthropic": Cloud("anthropic", None, "ANTHROPIC_API_KEY"),
    "gemini": Cloud("openai", "https://generativelanguage.googleapis.com/v1beta/openai/", "GEMINI_API_KEY"),
    "groq": Cloud("openai", "https://api.groq.com/openai/v1", "GROQ_API_KEY"),
    "mistral": Cloud("openai", "https://api.mistral.ai/v1", "MISTRAL_API_KEY"),
    "deepseek": Cloud("openai", "https://api.deepseek.com/v1", "DEEPSEEK_API_KEY"),
    "openrouter": Cloud("openai", "https://openrouter.ai/api/v1", "OPENROUTER_API_KEY"),
    "together_ai": Cloud("openai", "https://api.together.xyz/v1", "TOGETHERAI_API_KEY"),
    "fireworks_ai": Cloud("openai", "https://api.fireworks.ai/inference/v1", "FIREWORKS_API_KEY"),
    "xai": Cloud("openai", "https://api.x.ai/v1", "XAI_API_KEY"),
    "perplexity": Cloud("openai", "https://api.perplexity.ai", "PERPLEXITYAI_API_KEY"),
}
"""Providers with an OpenAI-compatible or Anthropic API."""
SERVERS = (
    "hosted_vllm",
    "openai_like",
    "lm_studio",
    "llamafile",
    "custom_openai",
    "litellm_proxy",
    "ollama",
    "ollama_chat",
)
"""Prefixes of servers at an `api_base`."""
_OWN_HOSTS = {"openai": "api.openai.com", "anthropic": "api.anthropic.com"}
OLLAMA_BASE = "http://127.0.0.1:11434"

_PARAMS = ("model", "api_base", "base_url", "api_key", "api_version")
_SECTIONS = ("model_list", "litellm_settings", "router_settings", "general_settings", "environment_variables")
_FALLBACKS = ("fallbacks", "context_window_fallbacks", "content_policy_fallbacks")
_SETTINGS = (*_FALLBACKS, "default_fallbacks", "model_group_alias", "allowed_fails", "cooldown_time")
_ADVICE = {
    "num_retries": "`attempts.max` limits the attempts of a request",
    "request_timeout": "set `deadlines`",
    "timeout": "set `deadlines`",
    "stream_timeout": "set `deadlines`",
    "rpm": "limits apply to keys, not to providers",
    "tpm": "limits apply to keys, not to providers",
    "drop_params": "unsupported parameters are always adapted",
    "routing_strategy": "a chain is tried in its order",
    "redis_host": "`state: redis://HOST:PORT/0` shares breakers, limits and budgets between gateways",
    "database_url": "keys are in a file: headgate key create NAME",
    "telemetry": "Headgate has none",
    "cache": "answers are not cached",
    "success_callback": "read /metrics and /admin/requests/{id} instead",
    "failure_callback": "read /metrics and /admin/requests/{id} instead",
    "environment_variables": "set them in the environment or in .env",
}


def read(data: Mapping[str, Any]) -> Imported:
    """The routes, providers and keys of a parsed config.yaml."""
    found = Imported("LiteLLM")
    for number, deployment in enumerate(as_list(data.get("model_list")), 1):
        _deployment(found, number, as_mapping(deployment))
    if any(len(route["chain"]) > 1 for route in found.gateway.get("routes", {}).values()):
        found.leave(
            "several deployments of one model_name", "they are tried in their order; load is not spread over them"
        )
    settings = {**as_mapping(data.get("litellm_settings")), **as_mapping(data.get("router_settings"))}
    _fallbacks(found, settings)
    _breaker(found, settings)
    for alias, target in as_mapping(settings.get("model_group_alias")).items():
        name = str(as_mapping(target).get("model", target))
        if name in found.gateway.get("routes", {}):
            found.gateway["routes"][alias] = copy.deepcopy(found.gateway["routes"][name])
        else:
            found.leave(f"model_group_alias.{alias}", f"there is no model {name!r}")
    _master_key(found, as_mapping(data.get("general_settings")))
    for section, values in data.items():
        if section not in _SECTIONS:
            found.leave(section, _ADVICE.get(section, "has no counterpart"))
        elif section == "environment_variables":
            found.leave(section, _ADVICE[section])
        elif section != "model_list":
            for name in as_mapping(values):
                if name not in {*_SETTINGS, "master_key"}:
                    found.leave(f"{section}.{name}", _ADVICE.get(name, "has no counterpart"))
    return found


def _deployment(found: Imported, number: int, deployment: Mapping[str, Any]) -> None:
    name, params = str(deployment.get("model_name") or ""), as_mapping(deployment.get("litellm_params"))
    where = f"model_list[{number}] {name}"
    target = str(params.get("model") or "")
    if not name or not target:
        found.leave(where, "it has no model_name or no litellm_params.model")
        return
    if "*" in name and name != "*":
        found.leave(where, "a route is a full name, or `*` alone for all other names; list the models")
        return
    entry = _entry(found, where, target, params)
    if entry is None:
        return
    found.route(name, entry)
    defaults = found.accepted(f"{where}: ", {key: value for key, value in params.items() if key in NAMES})
    found.parameters(where, name, {"defaults": defaults})
    others = [key for key in params if key not in {*_PARAMS, *NAMES}]
    for key in [*others, *(key for key in deployment if key in {"rpm", "tpm"})]:
        found.leave(f"{where}: {key}", _ADVICE.get(key, "has no counterpart"))


def _entry(found: Imported, where: str, target: str, params: Mapping[str, Any]) -> str | None:
    """PROVIDER/MODEL of a deployment; None, with a report, for an unsupported provider or a missing address."""
    prefix, slash, model = target.partition("/")
    address = params.get("api_base") or params.get("base_url")
    base = None if address is None else _variable(str(address)).rstrip("/")
    if not slash:
        prefix, model = ("anthropic" if target.startswith("claude") else "openai"), target
    if prefix == "azure":
        if base is None or not model:
            found.leave(where, "an Azure deployment needs an api_base and a name")
            return None
        base = f"{base}/openai/v1"
        if "api_version" in params:
            found.leave(f"{where}: api_version", "Azure's /openai/v1 address needs none")
        cloud = Cloud("openai", base, "AZURE_API_KEY")
    elif prefix in SERVERS:
        base = base or (OLLAMA_BASE if prefix.startswith("ollama") else None)
        if base is None:
            found.leave(where, "it has no api_base")
            return None
        if prefix.startswith("ollama") and not base.endswith("/v1"):
            base = f"{base}/v1"
        cloud = Cloud("openai", base, "")
    elif prefix in CLOUDS:
        cloud = CLOUDS[prefix]
    elif base is not None:
        cloud, model = Cloud("openai", base, ""), target
        prefix = "compatible"
    else:
        found.leave(where, f"the provider {prefix!r} is not supported without an OpenAI-compatible api_base")
        return None
    host = urlsplit(base or "").hostname
    own_host = urlsplit(cloud.base_url or "").hostname or _OWN_HOSTS.get(prefix)
    if host and prefix != "azure" and host != own_host:
        prefix, cloud = host, Cloud(cloud.kind, base, "")  # the usual key must not be sent to another host
    elif base and base.startswith("${env:") and prefix in CLOUDS:
        prefix, cloud = base[6:-1].lower(), Cloud(cloud.kind, base, "")  # an unknown host, named after the variable
    settings: dict[str, Any] = {"kind": cloud.kind, "api_key": _key(found, where, host or prefix, cloud, params)}
    if base or cloud.base_url:
        settings["base_url"] = base or cloud.base_url
    return f"{found.provider(prefix, settings)}/{model}"


def _key(found: Imported, where: str, name: str, cloud: Cloud, params: Mapping[str, Any]) -> str:
    """The key as a variable, or `none` for a server without a key. A key that is written in the file is not copied."""
    text = str(params.get("api_key") or "")
    if text.startswith(_ENVIRONMENT):
        return _variable(text)
    if not text:
        return f"${{env:{cloud.variable}}}" if cloud.variable else "none"
    variable = cloud.variable or f"KEY_OF_{re.sub(r'[^A-Z0-9]', '_', name.upper())}"
    found.leave(f"{where}: api_key", f"secrets are not copied; set {variable}")
    return f"${{env:{variable}}}"


def _variable(text: str) -> str:
    """`os.environ/NAME` in Headgate's form; other text as it is."""
    return f"${{env:{text.removeprefix(_ENVIRONMENT)}}}" if text.startswith(_ENVIRONMENT) else text


def _pairs(value: Any) -> Iterator[tuple[str, list[str]]]:
    for entry in as_list(value):
        for name, others in as_mapping(entry).items():
            yield name, [str(other) for other in as_list(others)]


def _fallbacks(found: Imported, settings: Mapping[str, Any]) -> None:
    """Appends to the chain of each model the original chains of its fallbacks."""
    routes: dict[str, Any] = found.gateway.get("routes", {})
    before = {name: list(route["chain"]) for name, route in routes.items()}
    pairs = [pair for key in _FALLBACKS for pair in _pairs(settings.get(key))]
    pairs += [(name, [str(each) for each in as_list(settings.get("default_fallbacks"))]) for name in routes]
    for name, others in pairs:
        if name not in routes:
            found.leave(f"fallbacks of {name}", "there is no such model")
            continue
        for other in others:
            if other not in before:
                found.leave(f"fallbacks: {name} -> {other}", "there is no such model")
                continue
            chain = routes[name]["chain"]
            chain += [entry for entry in before[other] if entry not in chain]


def _breaker(found: Imported, settings: Mapping[str, Any]) -> None:
    breaker: dict[str, Any] = {}
    if isinstance(fails := settings.get("allowed_fails"), int) and not isinstance(fails, bool):
        breaker["failures"] = max(1, fails + 1)
    if isinstance(cooldown := settings.get("cooldown_time"), int | float) and cooldown > 0:
        breaker["open"] = f"{cooldown:g}s"
    if breaker:
        found.gateway["breaker"] = breaker


def _master_key(found: Imported, settings: Mapping[str, Any]) -> None:
    secret = settings.get("master_key")
    if secret is None:
        return
    if str(secret).startswith(_ENVIRONMENT):
        found.leave("general_settings.master_key", f"set GATEWAY_ADMIN_KEY to the value of {secret}")
    else:
        found.key("litellm-master", str(secret), ("use", "admin"))
