"""The page under load, without a connection, by keyboard, on a phone, in the dark, and for screen readers."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.rigs import page_records
from tests.rigs.dashboard_pages import Watched, sign_in
from tests.rigs.fake_dashboard import FakeDashboard

VIEWS = ("overview", "memory", "models", "breakers", "requests", "timeline", "playground", "keys")
AXE = Path(__file__).resolve().parents[1] / "rigs" / "axe" / "axe.min.js"
PHONE = {"width": 360, "height": 740}
MODELS = 200
EVENTS = 10_000


def go(page: Any, view: str) -> None:
    page.evaluate("view => { location.hash = `#/${view}`; }", view)
    page.locator(f'nav a[href="#/{view}"][aria-current="page"]').wait_for()


# --- connection ----------------------------------------------------------------------------------------------------
def test_lost_connection_is_shown_with_its_age_and_a_new_snapshot_replaces_everything(
    page: Any, gateway: FakeDashboard
) -> None:
    go(page, "models")
    gateway.is_down = True
    gateway.cut()
    page.get_by_text(re.compile(r"Not connected, since \d\d:\d\d:\d\d \([1-9] s\)")).wait_for()
    assert page.get_by_role("row", name="demo busy").is_visible()
    gateway.snapshot = page_records.snapshot(time.time(), models=[page_records.model("other")])
    gateway.is_down = False
    page.get_by_role("row", name="other cold").wait_for()
    page.get_by_text("Not connected, since").wait_for(state="hidden")
    assert page.get_by_role("row", name="demo busy").count() == 0


def test_ended_session_leads_to_the_sign_in(page: Any, gateway: FakeDashboard) -> None:
    gateway.sign_out_all()
    gateway.cut()
    page.get_by_text("The session has ended. Sign in again.").wait_for()
    assert page.get_by_label("API key").is_visible()


def test_unreachable_inference_service_is_shown(page: Any, gateway: FakeDashboard) -> None:
    gateway.push("inference", {"reachable": False, "since": time.time() - 5})
    page.get_by_text("The inference service does not answer").wait_for()
    gateway.push("inference", {"reachable": True, "since": time.time()})
    page.get_by_text("The inference service does not answer").wait_for(state="hidden")


def test_texts_of_the_stream_are_not_rendered_as_markup(page: Any, gateway: FakeDashboard) -> None:
    text = "<img src=x onerror=alert(1)><b>bold</b>"
    gateway.push("timeline", {"entry": page_records.entry(time.time(), "crash", text, text, "error")})
    go(page, "timeline")
    page.get_by_text(text).first.wait_for()
    assert page.locator("main img, main b").count() == 0


# --- load ----------------------------------------------------------------------------------------------------------
def _events(count: int, start: int) -> list[tuple[str, Any]]:
    """What a busy gateway sends: mostly requests and models, and some of everything else."""
    now = time.time()
    events: list[tuple[str, Any]] = []
    for n in range(start, start + count):
        model = f"model-{n % MODELS:03}"
        kind = n % 10
        if kind < 4:
            done = kind == 3
            one = page_records.request(
                f"req-{n - kind}", now, "done" if done else "prefill", done=kind, total=3, model=model
            )
            events.append(("request", {"request": one}))
        elif kind < 7:
            state = ("ready", "busy")[n // MODELS % 2]
            events.append(("model", {"model": page_records.model(model, state, in_flight=n % 5)}))
        elif kind == 7:
            events.append(("minute", {"minute": page_records.minute(now + 60 * (n // 500), by_tier={"local": n % 50})}))
        else:
            events.append(("timeline", {"entry": page_records.entry(now, "state", model, f"event {n}")}))
    return events


def _settled_heap(page: Any, session: Any) -> dict[str, float]:
    """Heap, nodes and listeners after garbage collections, and times of the main thread so far."""
    for _ in range(3):
        session.send("HeapProfiler.collectGarbage")
        page.wait_for_timeout(30)
    metrics = session.send("Performance.getMetrics")["metrics"]
    return {metric["name"]: metric["value"] for metric in metrics}


def test_200_models_and_10000_events_cost_little_time_and_no_memory(watched: Watched, gateway: FakeDashboard) -> None:
    """Half of the events fill all arrays to their limits; the other half must leave heap and nodes as they were."""
    models = [page_records.model(f"model-{n:03}", "ready") for n in range(MODELS)]
    gateway.snapshot = page_records.snapshot(time.time(), models=models)
    page = sign_in(watched.page(), gateway.url)
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})  # CPU time, so that a busy machine counts less

    def play(start: int) -> dict[str, float]:
        go(page, "models")
        gateway.push_paced(_events(EVENTS // 4, start))
        last = f"last of {start}"
        gateway.push("model", {"model": page_records.model("model-000", "failed", reason=last)})
        page.get_by_text(last).wait_for()
        go(page, "timeline")
        gateway.push_paced(_events(EVENTS // 4, start + EVENTS // 4))
        gateway.push("timeline", {"entry": page_records.entry(time.time(), "state", "end", last)})
        page.get_by_text(last).wait_for()
        return _settled_heap(page, session)

    for view in ("models", "timeline") * 2:  # a view that was shown before costs some memory once
        go(page, view)
    before = play(0)
    after = play(EVENTS)
    assert after["JSHeapUsedSize"] - before["JSHeapUsedSize"] < 1_500_000
    assert after["JSHeapUsedSize"] < 40_000_000
    assert abs(after["Nodes"] - before["Nodes"]) < 1000
    assert abs(after["JSEventListeners"] - before["JSEventListeners"]) < 100
    busy = after["TaskDuration"] - before["TaskDuration"]
    assert busy < 8.0, f"5,000 events took {busy:.1f} s of the main thread"
    assert page.get_by_role("table", name="Timeline").get_by_role("row").count() == 501
    go(page, "requests")
    assert page.get_by_role("table", name="Finished").get_by_role("row").count() == 201


# --- keyboard, phone, dark, screen readers ---------------------------------------------------------------------------
def _tab_to(page: Any, text: str) -> None:
    """Presses Tab until an element with this text or label has the focus, and checks that the focus is visible."""
    for _ in range(60):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "(() => { const e = document.activeElement; return [e.textContent || e.getAttribute('aria-label') || '',"
            " e.matches(':focus-visible')]; })()"
        )
        if focused[0].strip().startswith(text):
            assert focused[1], f"{text}: the focus is not visible"
            return
    raise AssertionError(f"Tab does not reach {text!r}")


def test_keyboard_alone_leads_from_the_sign_in_to_a_loaded_model(watched: Watched, gateway: FakeDashboard) -> None:
    page = watched.page()
    page.goto(gateway.url)
    page.get_by_label("API key").wait_for()
    page.keyboard.type("admin-key")
    page.keyboard.press("Enter")
    page.get_by_text("live", exact=True).wait_for()
    _tab_to(page, "Skip to the content")
    _tab_to(page, "Models")
    page.keyboard.press("Enter")
    page.get_by_role("table", name="Models").wait_for()
    assert page.evaluate("document.activeElement.tagName") == "H1"
    _tab_to(page, "Load … qwen-7b")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="qwen-7b")
    dialog.get_by_text("Would load qwen-7b.").wait_for()
    _tab_to(page, "Load qwen-7b")
    page.keyboard.press("Enter")
    dialog.get_by_text("Load: done.").wait_for()
    page.keyboard.press("Escape")
    dialog.wait_for(state="hidden")
    page.get_by_role("row", name="qwen-7b ready").wait_for()
    assert page.evaluate("document.activeElement.innerText").startswith(("Load", "Unload"))


def test_skip_link_leads_past_the_navigation(page: Any, gateway: FakeDashboard) -> None:
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


def test_phone_needs_no_horizontal_scrolling(watched: Watched, gateway: FakeDashboard) -> None:
    page = sign_in(watched.page(viewport=PHONE, has_touch=True), gateway.url)
    for view in VIEWS:
        go(page, view)
        page.wait_for_timeout(50)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], view
        beyond = page.evaluate(
            "[...document.querySelectorAll('main .scroll')].filter(e => e.scrollWidth > e.clientWidth + 1).length"
        )
        assert beyond == 0, view
    go(page, "models")
    page.get_by_role("button", name="More … about demo", exact=True).click()
    assert page.get_by_role("dialog").bounding_box()["width"] <= PHONE["width"]


def _background(page: Any) -> int:
    """The brightness of the page, 0 to 255."""
    return int(page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0]"))


def test_theme_follows_the_system_and_the_choice_of_the_switch_is_kept(
    watched: Watched, gateway: FakeDashboard
) -> None:
    page = sign_in(watched.page(color_scheme="dark"), gateway.url)
    assert _background(page) < 60
    page.get_by_role("button", name="Theme: system").click()
    assert _background(page) > 200
    page.reload()
    page.get_by_role("button", name="Theme: light").click()
    assert _background(page) < 60


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation_above_minor(watched: Watched, gateway: FakeDashboard, scheme: str) -> None:
    """All rules on the light page; on the dark one only the contrast can differ."""
    page = watched.page(color_scheme=scheme, bypass_csp=True)
    rules = ["color-contrast"] if scheme == "dark" else None
    page.goto(gateway.url)
    page.get_by_label("API key").wait_for()
    page.add_script_tag(path=AXE)
    found = _findings(page, "sign-in", rules)
    sign_in(page, gateway.url)
    page.add_script_tag(path=AXE)
    for view in VIEWS:
        go(page, view)
        found += _findings(page, view, rules)
    go(page, "models")
    page.get_by_role("button", name="More … about demo", exact=True).click()
    page.get_by_role("dialog").get_by_text("Load", exact=True).click()
    page.get_by_text("Would load demo.").wait_for()
    found += _findings(page, "dialog", rules)
    assert found == []


def _findings(page: Any, where: str, rules: list[str] | None) -> list[str]:
    page.wait_for_timeout(50)
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    result = page.evaluate("options => axe.run(document, options)", options)
    bad = [one for one in result["violations"] if one["impact"] in ("serious", "critical", "moderate")]
    return [f"{where}: {one['id']}: {one['nodes'][0]['html'][:200]}, {one['help']}" for one in bad]
