"""Fixtures of the regression tests; a module may define its own."""

from __future__ import annotations

from tests.rigs.service_fixtures import cloud, fake, start

__all__ = ["cloud", "fake", "start"]
