"""A headless Chromium and a fake gateway for the tests of the dashboard.

The tests are skipped where the package `playwright` or the program `chromium` is missing. Every page of a test is
watched: a request to another host, an error in the console, or an exception in a script fails the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.rigs.dashboard_pages import ARGUMENTS, CHROMIUM, Watched, sign_in
from tests.rigs.fake_dashboard import FakeDashboard


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    """The browser of the folder; each test has a context of its own.

    Playwright keeps an event loop running in this thread, and with it other tests of this process could not run theirs.
    """
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine (Debian and Ubuntu: apt-get install chromium)")
    api = pytest.importorskip("playwright.sync_api", reason="the package playwright is missing (make ready)")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield opened
        opened.close()


@pytest.fixture(scope="package")
def shared_gateway() -> Iterator[FakeDashboard]:
    """The gateway of all tests of the folder."""
    fake = FakeDashboard().start()
    yield fake
    fake.stop()


@pytest.fixture
def gateway(shared_gateway: FakeDashboard) -> FakeDashboard:
    """A gateway with a page, a stream and actions, as if it were new."""
    shared_gateway.reset()
    return shared_gateway


@pytest.fixture
def watched(browser: Any) -> Iterator[Watched]:
    """Makes pages; checks their requests and errors at the end."""
    pages = Watched(browser)
    yield pages
    pages.close()
    pages.check()


@pytest.fixture(scope="package")
def shared_pages(browser: Any) -> Iterator[Watched]:
    """The context of tests that need no other options: its files are cached and its session lasts."""
    pages = Watched(browser)
    pages.page()
    yield pages
    pages.close()


@pytest.fixture
def page(shared_pages: Watched, gateway: FakeDashboard) -> Iterator[Any]:
    """A page that is signed in as administrator."""
    page = shared_pages.pages[0]
    shared_pages.forget()
    yield sign_in(page, gateway.url)
    page.goto("about:blank")
    shared_pages.check()
