"""The page before both services, with simulated devices: one test, because services take seconds to start."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.dashboard_pages import Watched, sign_in
from tests.rigs.processes import private_env
from tests.rigs.stack import Stack

LOADED_MS = 30_000
IDLE_BYTES = 120_000_000
DEMO = Path(__file__).resolve().parents[2] / "inference" / "demo" / "models" / "demo-mini.gguf"


def test_open_page_acts_answers_and_outlives_both_services(watched: Watched, tmp_path: Path) -> None:
    stack = Stack(tmp_path, inference_env={"INFERENCE_DEVICES": "sim:2x600MiB"}).start()
    try:
        pages = [sign_in(watched.page(), stack.gateway_url + "/ui/", key=stack.key, view="models") for _ in range(2)]
        page = pages[0]
        assert _rss_bytes(stack.front.pid) < IDLE_BYTES, "with two pages open"
        _performs_every_action(page)
        _recovers_a_device(page, stack)
        _answers_in_the_playground(page)
        _answers_with_an_added_file(page, stack)
        _shows_the_death_of_the_inference_service(page, stack)
        _asks_for_the_key_after_a_restart_of_the_gateway(page, stack)
    finally:
        stack.kill()


def _rss_bytes(pid: int) -> int:
    """Resident memory of a process (Linux)."""
    status = Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1]
    return int(status.split()[0]) * 1024


def _answers_with_an_added_file(page: Any, stack: Stack) -> None:
    """`make serve` runs; `headgate add FILE` and the key lead to a streamed answer."""
    file = stack.root / "of-my-own.gguf"
    shutil.copy(DEMO, file)
    words = [sys.executable, "-m", "headgate", "add", str(file), "--config-dir", str(stack.config_dir)]
    port = stack.inference.url.rpartition(":")[2]
    added = subprocess.run(
        words, env=private_env(stack.root, {"INFERENCE_PORT": port}), capture_output=True, text=True, timeout=60
    )
    assert added.returncode == 0, added.stderr
    assert "of-my-own fits" in added.stderr
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("row", name="of-my-own cold").wait_for()
    page.locator('nav a[href="#/playground"]').click()
    page.get_by_role("button", name="New conversation").click()
    page.get_by_label("Model").select_option("of-my-own")
    page.get_by_label("Message", exact=True).fill("What is Headgate?")
    page.keyboard.press("Enter")
    page.get_by_text("The answer is complete.").wait_for(timeout=LOADED_MS)
    assert "local/of-my-own" in page.get_by_role("region", name="Response headers").inner_text()


def _performs_every_action(page: Any) -> None:
    page.get_by_role("button", name="Load … demo", exact=True).click()
    dialog = page.get_by_role("dialog", name="demo", exact=True)
    dialog.get_by_role("listitem").filter(has_text="gpu-0").first.wait_for()
    dialog.get_by_role("button", name="Load demo").click()
    dialog.get_by_text("Load: done.").wait_for(timeout=LOADED_MS)
    dialog.get_by_text("Move", exact=True).click()
    dialog.get_by_role("listitem").filter(has_text="gpu-1").first.wait_for()
    dialog.get_by_role("button", name="Move demo").click()
    dialog.get_by_text("Move: done.").wait_for(timeout=LOADED_MS)
    page.keyboard.press("Escape")
    row = page.get_by_role("row", name="demo ready").filter(has_text="gpu-1")
    row.wait_for()
    assert "MiB" in row.inner_text()
    page.locator('nav a[href="#/memory"]').click()
    page.get_by_role("img", name="gpu-1").locator(".part.weights").wait_for()
    assert page.get_by_role("img", name="gpu-1").locator(".tick").count() == 4
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("button", name="More … about demo", exact=True).click()
    for action in ("Restart", "Offload", "Load", "Unload"):
        dialog.get_by_text(action, exact=True).click()
        dialog.get_by_role("button", name=f"{action} demo").click()
        dialog.get_by_text(f"{action}: done.").wait_for(timeout=LOADED_MS)
    page.keyboard.press("Escape")
    page.get_by_role("row", name="demo cold").wait_for()


def _recovers_a_device(page: Any, stack: Stack) -> None:
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        page.locator('nav a[href="#/memory"]').click()
        rig.send("cut", device="gpu-0")
        page.get_by_role("button", name="Recover …").click(timeout=LOADED_MS)
        rig.send("return", device="gpu-0")
        page.get_by_role("dialog").get_by_text("gpu-0 is").wait_for()
        page.get_by_role("dialog").get_by_role("button", name="Recover gpu-0").click()
        page.get_by_role("dialog").get_by_text("Done.").wait_for(timeout=LOADED_MS)
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Recover …").wait_for(state="hidden", timeout=LOADED_MS)
        page.locator('nav a[href="#/timeline"]').click()
        page.get_by_role("table", name="Timeline").get_by_text("gpu-0 is healthy").wait_for()


def _answers_in_the_playground(page: Any) -> None:
    page.locator('nav a[href="#/playground"]').click()
    page.get_by_label("Model").select_option("demo")
    page.get_by_label("Message", exact=True).fill("What is Headgate?")
    page.keyboard.press("Enter")
    page.get_by_text("The answer is complete.").wait_for(timeout=LOADED_MS)
    headers = page.get_by_role("region", name="Response headers")
    assert "local/demo" in headers.inner_text()
    headers.get_by_role("link").click()
    page.get_by_role("dialog").get_by_text("local/demo (local: the first choice").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("table", name="Finished requests").get_by_text("200 success").wait_for()
    page.locator('nav a[href="#/keys"]').click()
    usage = page.get_by_role("table", name="Usage by key")
    for _ in range(20):  # rows are stored once a second
        if usage.get_by_text("generated").count():
            break
        page.get_by_role("button", name="Read again").last.click()
        page.wait_for_timeout(200)
    usage.get_by_text("generated").wait_for()


def _shows_the_death_of_the_inference_service(page: Any, stack: Stack) -> None:
    stack.inference.signal(signal.SIGKILL)
    page.get_by_text("The inference service does not answer").wait_for()
    stack.inference.kill()
    stack.inference.start(wait_for="/readyz")
    page.get_by_text("The inference service does not answer").wait_for(state="hidden", timeout=LOADED_MS)
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("row", name="demo cold").wait_for()


def _asks_for_the_key_after_a_restart_of_the_gateway(page: Any, stack: Stack) -> None:
    stack.front.kill()
    page.get_by_text("Not connected, since").wait_for()
    stack.front.start(wait_for="/readyz")
    page.get_by_text("The session has ended. Sign in again.").wait_for(timeout=LOADED_MS)
    sign_in(page, stack.gateway_url + "/ui/", key=stack.key, view="models")
    page.get_by_role("row", name="demo cold").wait_for()
