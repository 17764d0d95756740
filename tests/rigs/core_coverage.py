"""Which tests the coverage of the pure packages is measured in, a plugin for pytest; never which of them run.

Python 3.11 runs traced code at half its speed, whosever code it is, and most tests are about other packages or about
processes that nobody traces. So the cores are measured where they are proven: in the unit, property and contract tests,
but for those that are marked `unmeasured`: they try much, and others reach every line of a core that they reach.

    pytest -p tests.rigs.core_coverage --cov=gateway/core ...
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from coverage import Coverage

PROVING = ("unit", "property", "contract")
"""The folders below `tests/` that must reach all of the cores by themselves."""


class CoreCoverage:
    """Holds coverage's measuring up during all other tests; does nothing where nothing is measured."""

    def __init__(self) -> None:
        self._held: list[Coverage] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        """Holds up or goes on before anything of the test is set up; goes on behind the last test, as it was found."""
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
        # A process of pytest-xdist has two, one above the other: when the upper one stops, the lower one goes on. So
        # pytest-cov's own `no_cover` holds nothing up there.
        while (running := Coverage.current()) is not None:
            running.stop()
            self._held.append(running)

    def _go_on(self) -> None:
        while self._held:
            self._held.pop().start()


def pytest_configure(config: pytest.Config) -> None:
    """Registers itself."""
    config.pluginmanager.register(CoreCoverage(), "core_coverage")
