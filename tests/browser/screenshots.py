"""Takes the screenshots of the README: `python -m tests.browser.screenshots`. It needs `chromium` and `playwright`.

The gateway behind the page is the fake one, with a machine of two GPUs under ordinary load.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from tests.rigs import page_records
from tests.rigs.dashboard_pages import ARGUMENTS, CHROMIUM, Watched, sign_in
from tests.rigs.fake_dashboard import FakeDashboard
from tests.rigs.page_records import GIB, MIB

IMAGES = Path(__file__).resolve().parents[2] / "docs" / "images"
SIZES = {"memory": {"width": 1240, "height": 610}, "models": {"width": 1240, "height": 540}}


def machine(now: float) -> dict[str, Any]:
    """A snapshot of a machine with two GPUs and seven models."""
    at_work = {"qwen-14b": 15 * GIB, "embed": 1200 * MIB}
    sharing = {"llama-8b": 9 * GIB, "coder-7b": 6 * GIB}
    loading = {"resident": 0, "reserved": 5 * GIB, "weights": 0, "kv": 0, "compute": 0, "other": 0}
    devices = [
        page_records.device("gpu-0", 24 * GIB, at_work, accounts={"foreign": 500 * MIB}, pressure="moderate"),
        page_records.device(
            "gpu-1",
            24 * GIB,
            sharing,
            accounts={"reserved": 5 * GIB},
            by_model={"vision-4b": loading},
            pressure="high",
        ),
        page_records.device(
            "cpu",
            96 * GIB,
            {"phi-4": 9 * GIB, "qwen-14b": 2 * GIB},
            accounts={"foreign": 14 * GIB, "cached": 16 * GIB},
            warm={"phi-4": 9 * GIB},
        ),
    ]

    def loaded(id: str, state: str, size: int, device: str, **changes: Any) -> dict[str, Any]:
        sizes = {"predicted_bytes": size - 90 * MIB, "actual_bytes": size, "devices": [device]}
        return page_records.model(id, state, **(sizes | changes))

    models = [
        loaded("qwen-14b", "busy", 17 * GIB, "gpu-0", in_flight=3, queued=1, figures={"tokens_per_second": 86.4}),
        loaded("llama-8b", "busy", 9 * GIB, "gpu-1", in_flight=2, figures={"tokens_per_second": 61.2}),
        loaded("coder-7b", "ready", 6 * GIB, "gpu-1"),
        loaded("embed", "ready", 1200 * MIB, "gpu-0", figures={"kv": None, "idle_deadline_seconds": None}),
        page_records.model("vision-4b", "loading", progress=0.6, devices=["gpu-1"], predicted_bytes=5 * GIB),
        page_records.model("phi-4", "warm", predicted_bytes=9 * GIB),
        page_records.model(
            "llama-70b",
            "cold",
            predicted_bytes=43 * GIB,
            fits=False,
            reason="needs 43.0 GiB, 20.1 GiB can be freed",
        ),
    ]
    return page_records.snapshot(now, devices=devices, models=models)


def main() -> None:
    """Writes `docs/images/dashboard-*.png`."""
    from playwright.sync_api import sync_playwright

    IMAGES.mkdir(exist_ok=True)
    gateway = FakeDashboard().start()
    gateway.snapshot = machine(time.time())
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        pages = Watched(browser)
        for view, scheme in (("memory", "light"), ("models", "dark")):
            page = sign_in(pages.page(viewport=SIZES[view], color_scheme=scheme), gateway.url, view=view)
            page.get_by_text("qwen-14b").first.wait_for()
            page.mouse.move(0, 0)
            page.wait_for_timeout(500)
            page.screenshot(path=IMAGES / f"dashboard-{view}.png")
        pages.close()
        browser.close()
    gateway.stop()


if __name__ == "__main__":
    main()
