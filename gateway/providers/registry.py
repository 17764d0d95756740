"""The providers in use. Clouds are created from the configuration, and a reload keeps unchanged ones."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from gateway.breaker.outcome import is_local
from gateway.providers.http_clients import make_cloud_http
from gateway.providers.local.local_provider import LocalProvider
from gateway.providers.provider import Provider
from gateway.settings import GatewayConfig, ProviderSettings
from headgate.shared.configfile import unset_name
from headgate.shared.errors import HeadgateError
from headgate.shared.log import quiet

log = logging.getLogger("gateway.providers")

_CLOUDS: Mapping[str, tuple[str, str]] = {
    "openai": ("gateway.providers.openai.openai_sdk", "OpenAIProvider"),
    "anthropic": ("gateway.providers.anthropic.anthropic_sdk", "AnthropicProvider"),
}
"""Module and class of each kind."""


@dataclass(frozen=True, slots=True)
class Registry:
    """The providers by key: clouds by name, inference services by `provider_key`; no clouds without an API key."""

    providers: Mapping[str, Provider]

    def with_nodes(self, nodes: Mapping[str, LocalProvider]) -> Registry:
        """The same clouds with these inference services."""
        clouds = {key: provider for key, provider in self.providers.items() if not is_local(key)}
        return Registry({**nodes, **clouds})

    def gone(self, newer: Registry) -> list[Provider]:
        """Providers of this registry that `newer` no longer uses."""
        kept = {id(provider) for provider in newer.providers.values()}
        return [provider for provider in self.providers.values() if id(provider) not in kept]


async def build(
    config: GatewayConfig, old: Registry | None = None, old_settings: Mapping[str, ProviderSettings] | None = None
) -> Registry:
    """The clouds of `config`; one without an API key or with an unusable proxy is left out with a log line.

    Clouds of `old` whose settings have not changed keep their connections. SDKs are imported in a thread, because that
    takes seconds.
    """
    providers: dict[str, Provider] = {}
    for name, settings in config.providers.items():
        if (variable := unset_name(settings.api_key)) is not None or not settings.api_key:
            reason = f"{variable} is not set" if variable else "its api_key is empty"
            log.info("provider %s is not available: %s; its entries in chains are skipped", name, reason)
            continue
        if old is not None and name in old.providers and (old_settings or {}).get(name) == settings:
            providers[name] = old.providers[name]
            continue
        try:
            providers[name] = await _build_cloud(name, settings)
        except HeadgateError as error:
            log.warning("provider %s is not available: %s; its entries in chains are skipped", name, error)
    return Registry(providers)


async def _build_cloud(name: str, settings: ProviderSettings) -> Provider:
    module_name, class_name = _CLOUDS[settings.kind]
    module = await asyncio.to_thread(importlib.import_module, module_name)
    quiet()  # a variable of the SDK (OPENAI_LOG) may have turned on logging of bodies
    provider: Provider = getattr(module, class_name)(
        name,
        api_key=settings.api_key,
        base_url=settings.base_url,
        http=make_cloud_http(settings.base_url or module.BASE_URL),
        **({} if settings.flavor is None else {"flavor": settings.flavor}),
    )
    return provider
