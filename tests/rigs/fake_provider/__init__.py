"""A cloud that answers as OpenAI, Google's OpenAI-compatible address and Anthropic do, and fails on demand.

In a process: `python -m tests.rigs.fake_provider --port N`. In a test: `async with FakeProvider() as fake`.
"""

from tests.rigs.fake_provider.faults import Fault
from tests.rigs.fake_provider.records import Record
from tests.rigs.fake_provider.server import FakeProvider

KEY = "fake-key-0123456789"
"""A key the fake accepts; it takes every key that begins with `fake-`."""

__all__ = ["KEY", "FakeProvider", "Fault", "Record"]
