"""Pages of the dashboard in a headless Chromium, watched for errors and for requests to other hosts."""

from __future__ import annotations

import shutil
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""The browser of this machine, or None."""
ARGUMENTS = ["--no-sandbox", "--enable-precise-memory-info", "--js-flags=--expose-gc"]
PATIENCE_MS = 20_000
WIDE = {"width": 1280, "height": 800}


class Watched:
    """Pages whose requests and errors are recorded."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self.pages: list[Any] = []
        self.requests: list[str] = []
        self.errors: list[str] = []

    def page(self, **options: Any) -> Any:
        """A page in a context of its own; `options` are those of `Browser.new_context`."""
        context = self._browser.new_context(**({"viewport": WIDE} | options))
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        self.pages.append(page)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._note)
        return page

    def _note(self, message: Any) -> None:
        # the browser logs every answer with an error status; tests expect those that they cause
        if message.type in ("error", "warning") and not message.text.startswith("Failed to load resource"):
            self.errors.append(message.text)

    def check(self) -> None:
        """Fails after an error in the console, an exception, or a request to another host."""
        assert self.errors == []
        urls = [url for url in self.requests if not url.startswith(("data:", "blob:", "about:"))]
        assert {url.split("/")[2].rsplit(":", 1)[0] for url in urls} <= {"127.0.0.1"}

    def forget(self) -> None:
        """Forgets requests and errors, for the next test."""
        self.requests.clear()
        self.errors.clear()

    def close(self) -> None:
        """Closes all pages."""
        for page in self.pages:
            page.context.close()


def sign_in(page: Any, url: str, key: str = "admin-key", view: str = "overview") -> Any:
    """Opens a view, and signs in unless a session lasts; returns the page when the first snapshot is shown."""
    page.goto(f"{url}#/{view}")
    form, live = page.get_by_label("API key"), page.get_by_text("live", exact=True)
    form.or_(live).first.wait_for()
    if form.is_visible():
        form.fill(key)
        page.get_by_role("button", name="Sign in").click()
        live.wait_for()
    return page
