"""The page before both services, with simulated devices."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.rigs.dashboard_pages import Watched, sign_in
from tests.rigs.stack import Stack

LOADED_MS = 30_000


def test_load_answer_and_kill_of_the_inference_service_under_an_open_page(watched: Watched, tmp_path: Path) -> None:
    stack = Stack(tmp_path, inference_env={"INFERENCE_DEVICES": "sim:2x600MiB"}).start()
    try:
        page = sign_in(watched.page(), stack.gateway_url + "/ui/", key=stack.key, view="models")
        page.get_by_role("button", name="Load … demo", exact=True).click()
        dialog = page.get_by_role("dialog", name="demo", exact=True)
        dialog.get_by_role("button", name="Load demo").click()
        dialog.get_by_text("Load: done.").wait_for(timeout=LOADED_MS)
        page.keyboard.press("Escape")
        row = page.get_by_role("row", name="demo ready")
        row.wait_for()
        assert "gpu-0" in row.inner_text() and "MiB" in row.inner_text()

        page.goto(stack.gateway_url + "/ui/#/memory")
        page.get_by_role("img", name="gpu-0").locator(".part.weights").wait_for()

        page.goto(stack.gateway_url + "/ui/#/playground")
        page.get_by_label("Model").select_option("demo")
        page.get_by_label("Message", exact=True).fill("What is Headgate?")
        page.keyboard.press("Enter")
        page.get_by_text("The answer is complete.").wait_for(timeout=LOADED_MS)
        headers = page.get_by_role("region", name="Response headers")
        assert "local/demo" in headers.inner_text()
        headers.get_by_role("link").click()
        record = page.get_by_role("dialog")
        record.get_by_text("local/demo (local: the first choice").wait_for()
        page.keyboard.press("Escape")
        page.get_by_role("table", name="Finished requests").get_by_text("200 success").wait_for()

        stack.inference.signal(signal.SIGKILL)
        page.get_by_text("The inference service does not answer").wait_for()
        stack.inference.kill()
        stack.inference.start(wait_for="/readyz")
        page.get_by_text("The inference service does not answer").wait_for(state="hidden", timeout=LOADED_MS)
        page.goto(stack.gateway_url + "/ui/#/models")
        page.get_by_role("row", name="demo cold").wait_for()
    finally:
        stack.kill()
