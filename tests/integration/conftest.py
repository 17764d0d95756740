"""Fixtures of the integration tests; a module may define its own."""

from __future__ import annotations

from tests.rigs.service_fixtures import cloud, fake, server, start

__all__ = ["cloud", "fake", "server", "start"]
