"""A pytest plugin that limits the measuring of coverage to the tests that must cover the pure modules.

Python 3.11 runs traced code at half speed, and most tests are about other packages or other processes. Coverage is
therefore measured in unit, property and contract tests, except those marked `unmeasured`, which are slow and reach
no additional lines.

    pytest -p tests.rigs.core_coverage --cov ...
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coverage import Coverage

PROVING = ("unit", "property", "contract")
"""The folders below `tests/` that must cover the pure modules."""


class CoreCoverage:
    """Pauses coverage during all other tests; has no effect without coverage."""

    def __init__(self) -> None:
        self._held: list[Coverage] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Pauses or continues before the setup of a test; continues after the last test."""
        folders = item.config.rootpath / "tests"
        proving = any(item.path.is_relative_to(folders / name) for name in PROVING)
        if proving and item.get_closest_marker("unmeasured") is None:
            self._go_on()
        else:
            self._hold()
        try:
            return (yield)
        finally:
            if nextitem is None:
                self._go_on()

    def _hold(self) -> None:
        # A process of pytest-xdist has two instances: when the upper one stops, the lower one continues. The marker
        # `no_cover` of pytest-cov does not pause both.
        while (running := Coverage.current()) is not None:
            running.stop()
            self._held.append(running)

    def _go_on(self) -> None:
        while self._held:
            self._held.pop().start()


def pytest_configure(config: pytest.Config) -> None:
    """Registers the plugin."""
    config.pluginmanager.register(CoreCoverage(), "core_coverage")
