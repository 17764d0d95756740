"""Adapters of all providers to one interface in OpenAI's format, `gateway.providers.provider`."""
