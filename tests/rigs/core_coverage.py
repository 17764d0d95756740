"""A pytest plugin that limits the measuring of coverage to the tests that must cover the pure modules.

Python 3.11 runs traced code at half speed, and most tests are about other packages or other processes. Coverage is
therefore measured in unit, property and contract tests, except those marked `unmeasured`, which are slow and reach
no additional lines; and while the process that starts the tests imports the pure modules. Neither the collection of
tests nor the distribution of their results is measured.

    pytest -p tests.rigs.core_coverage --cov ...
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest
from coverage import Coverage

from tests.rigs import pure_modules

PROVING = ("unit", "property", "contract")
"""The folders below `tests/` that must cover the pure modules."""


class CoreCoverage:
    """Pauses coverage during everything else; has no effect without coverage."""

    def __init__(self, *, imports: bool) -> None:
        self._imports = imports
        self._held: list[Coverage] = []

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection(self) -> Iterator[None]:
        """Imports the pure modules in one process; then pauses until the first test that is measured."""
        if self._imports and Coverage.current() is not None:
            for name in pure_modules.importable():
                importlib.import_module(name)
        self._hold()
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtestloop(self) -> Iterator[None]:
        """Continues after the last test, because pytest-cov stops what runs."""
        try:
            return (yield)
        finally:
            self._go_on()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """Pauses or continues before the setup of a test."""
        folders = item.config.rootpath / "tests"
        proving = any(item.path.is_relative_to(folders / name) for name in PROVING)
        if proving and item.get_closest_marker("unmeasured") is None:
            self._go_on()
        else:
            self._hold()
        return (yield)

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
    config.pluginmanager.register(CoreCoverage(imports=not hasattr(config, "workerinput")), "core_coverage")
