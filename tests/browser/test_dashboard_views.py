"""Every view of the dashboard shows what the stream has, and says what to do without data."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.rigs import page_records
from tests.rigs.dashboard_pages import Watched, sign_in
from tests.rigs.fake_dashboard import FakeDashboard

VIEWS = ("overview", "memory", "models", "breakers", "requests", "timeline", "playground", "keys")
EMPTY = {
    "models": [],
    "devices": [],
    "breakers": [],
    "requests": [],
    "minutes": [],
    "timeline": [],
    "log": [],
}


def show(page: Any, view: str) -> str:
    """Opens a view by its link; returns the text of the page."""
    page.locator(f'nav a[href="#/{view}"]').click()
    page.locator(f'nav a[href="#/{view}"][aria-current="page"]').wait_for()
    return str(page.locator("main").inner_text())


def test_overview_counts_answers_by_tier_errors_and_fallbacks(page: Any) -> None:
    text = show(page, "overview")
    cells = page.get_by_role("table", name="Answers by tier").get_by_role("row", name="local-fallback").inner_text()
    assert {"10", "8"} & set(cells.split()), "a minute may have passed since the snapshot"
    assert "queue_full" in text and "cannot_fit" in text and "the model could not be loaded" in text


def test_memory_map_is_to_scale_and_has_a_table(page: Any) -> None:
    show(page, "memory")
    bar = page.get_by_role("img", name="gpu-0,")
    assert "demo 318 MiB" in bar.get_attribute("aria-label")
    block = bar.locator(".block").first
    share = block.bounding_box()["width"] / bar.locator(".bar").bounding_box()["width"]
    assert share == pytest.approx(318 / 600, abs=0.01)
    assert "models up to 540 MiB" in bar.inner_text() and "moderate pressure" in bar.inner_text()
    gpu = page.get_by_role("region", name="gpu-0 NVIDIA L4")
    gpu.get_by_text("As a table").click()
    assert (
        "60 MiB"
        in page.get_by_role("table", name="Memory of gpu-0").get_by_role("row", name="other programs").inner_text()
    )
    assert page.get_by_role("img", name="cpu,").locator(".part.warm").count() == 1
    assert page.get_by_role("img", name="gpu-1,").locator(".part.reserved").count() == 1


def test_models_show_states_and_figures_and_can_be_filtered_and_sorted(page: Any) -> None:
    show(page, "models")
    table = page.get_by_role("table", name="Models")
    row = table.get_by_role("row", name="demo busy").inner_text()
    for value in ("310 MiB", "318 MiB", "42.5", "182 ms", "1.31 s", "63 %", "311 / 42 / 7"):
        assert value in row
    header = table.get_by_role("columnheader", name="Prefix hits")
    assert header.get_attribute("title") == "share of prompts that continued computed tokens"
    assert "loading 40 %" in table.get_by_role("row", name="demo-mini").inner_text()
    table.get_by_role("button", name="Predicted").click()
    assert table.get_by_role("columnheader", name="Predicted").get_attribute("aria-sort") == "ascending"
    table.get_by_role("button", name="Predicted").click()
    assert "qwen-7b" in table.get_by_role("row").nth(1).inner_text()
    page.get_by_label("Filter").fill("warm")
    page.get_by_text("1 of 5").wait_for()
    page.get_by_label("Filter").fill("no such")
    page.get_by_text("No model matches the filter.").wait_for()


def test_breakers_show_countdown_and_last_failure(page: Any) -> None:
    text = show(page, "breakers")
    assert "connection refused" in text and re.search(r"in \d+ s\b", text) and "5 of 17 failed" in text


def test_requests_change_phase_and_finished_ones_have_their_record(page: Any, gateway: FakeDashboard) -> None:
    show(page, "requests")
    running = page.get_by_role("table", name="Running requests")
    running.get_by_text("prefill 512 of 2,048").wait_for()
    running.get_by_text("queued, place 3").wait_for()
    started = time.time() - 2
    gateway.push("request", {"request": page_records.request("req-live-1", started, "decoding")})
    running.get_by_text("decoding").wait_for()
    gateway.push("request", {"request": page_records.request("req-live-1", started)})
    page.get_by_role("link", name="Explain request req-live-1").click()
    dialog = page.get_by_role("dialog", name="Request req-live-1")
    dialog.get_by_text("cannot_fit: the model could not be loaded").wait_for()
    dialog.get_by_text("64 tokens from ram").wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    page.wait_for_url("**#/requests")


def test_page_explains_that_only_the_last_1000_records_are_kept(page: Any, gateway: FakeDashboard) -> None:
    page.goto(gateway.url + "#/requests/other")
    page.get_by_role("dialog").get_by_text("only the last 1000 requests are kept").wait_for()


def test_timeline_can_be_filtered_and_log_lines_are_shown(page: Any, gateway: FakeDashboard) -> None:
    assert "SIGSEGV" in show(page, "timeline")
    gateway.push("timeline", {"entry": page_records.entry(time.time(), "device", "gpu-1", "lost: Xid 79", "error")})
    gateway.push("log", {"line": page_records.line(time.time(), "device gpu-1 is lost", "error")})
    page.get_by_role("table", name="Log lines").get_by_text("device gpu-1 is lost").wait_for()
    table = page.get_by_role("table", name="Timeline")
    assert "lost: Xid 79" in table.get_by_role("row").nth(1).inner_text()
    page.get_by_text("device", exact=True).first.click()
    page.get_by_text("4 of 5").wait_for()


def test_keys_are_shown_with_limits_models_budgets_and_usage(page: Any, gateway: FakeDashboard) -> None:
    show(page, "keys")
    page.get_by_text("This gateway does not store usage.").wait_for()
    keys = page.get_by_role("table", name="Keys").inner_text()
    for text in ("requests per minute 60; concurrent 4", "demo, gpt-*", "dollars 20", "dollars 1.250; tokens 3,456"):
        assert text in keys
    gateway.usage = {"by": ["key"], "rows": [{"key": "ops", "requests": 7, "completion_tokens": 1234567}]}
    page.get_by_role("button", name="Read again").last.click()
    page.get_by_role("table", name="Usage by key").get_by_text("1,234,567").wait_for()


def test_views_without_data_say_what_to_do(watched: Watched, gateway: FakeDashboard) -> None:
    gateway.snapshot = page_records.snapshot(time.time(), **EMPTY)
    page = sign_in(watched.page(), gateway.url)
    assert 'headgate run demo "What is Headgate?"' in show(page, "overview")
    assert "headgate up" in show(page, "memory")
    assert "headgate add FILE.gguf" in show(page, "models")
    assert "headgate run demo" in show(page, "breakers")
    assert "headgate run demo" in show(page, "requests")
    assert "Nothing happened yet" in show(page, "timeline")


def test_a_use_key_sees_the_page_read_only(watched: Watched, gateway: FakeDashboard) -> None:
    page = sign_in(watched.page(), gateway.url, key="use-key")
    for view in ("models", "breakers", "requests", "timeline", "keys"):
        assert "no scope “admin”" in show(page, view)
    show(page, "models")
    assert page.get_by_role("button", name="Load").count() == 0
    page.get_by_role("button", name="Details of demo", exact=True).click()
    dialog = page.get_by_role("dialog", name="demo")
    assert "read-only" in dialog.inner_text() and dialog.get_by_role("radio").count() == 0


def test_wrong_key_is_refused_with_a_remedy_and_sign_out_ends_the_session(
    watched: Watched, gateway: FakeDashboard
) -> None:
    page = watched.page()
    page.goto(gateway.url)
    page.get_by_label("API key").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    page.get_by_text("headgate key show` prints one").wait_for()
    sign_in(page, gateway.url)
    page.reload()
    page.get_by_text("live", exact=True).wait_for()
    page.get_by_role("button", name="Sign out").click()
    page.get_by_label("API key").wait_for()
    page.reload()
    page.get_by_label("API key").wait_for()
