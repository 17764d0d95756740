"""The inference service behind the gateway is that of the integration tests, where a module has none of its own."""

from __future__ import annotations

from tests.integration.conftest import fake

__all__ = ["fake"]
