"""Models too large for one device run on several; a model that fits nowhere is refused before any allocation."""

from __future__ import annotations

import asyncio
import json
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.state_directory import INFERENCE_TOKEN
from inference.devices.simgpu.control import SOCKET_NAME, Control
from inference.workers.os_api import socket_directory
from tests.rigs.gateway_rig import ADMIN, Gateway
from tests.rigs.page_rig import Page
from tests.rigs.processes import of_models, wait_until
from tests.rigs.stack import Stack, chat_body
from tests.rigs.tiny_families import WINDOW_TOKENS, Form, path

MIB = 2**20
ALLOWED_BYTES = 16 * MIB
GREEDY = {"prompt": "The mill turns and the water runs. " * 30, "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Two devices of 160 MiB (144 usable); `tall` needs about 170, `taller` some 430."""
    file = path(Form("dense"))
    window = path(Form("window", layers=9, width=512, feed=2560))
    of_tall = {"path": str(file), "context_length": 24576, "parallel": 1, "ubatch": 128, "min_residency": 0}
    models = {
        "window": {"path": str(window), "context_length": 4096, "parallel": 2, "ubatch": 128, "min_residency": 0},
        "tall": of_tall,
        "tall-by-row": {**of_tall, "split_mode": "row"},
        "tall-by-tensor": {**of_tall, "split_mode": "tensor"},
        "taller": {"path": str(file), "context_length": 65536, "parallel": 1, "ubatch": 128, "min_residency": 0},
    }
    stack = Stack(
        tmp_path_factory.mktemp("divided"),
        models=json.dumps({"models": models}),
        inference_env={"INFERENCE_DEVICES": "sim:2x160MiB"},
    )
    try:
        stack.inference.start(wait_for="/readyz")
        yield stack
    finally:
        stack.kill()


def devices(stack: Stack) -> dict[str, dict[str, Any]]:
    with Control(socket_directory(stack.state) / SOCKET_NAME) as rig:
        return rig.send("status")


@pytest.mark.parametrize("split_mode", ["layer", "tensor"])
def test_model_too_large_for_one_device_runs_on_two(split_mode: str, stack: Stack) -> None:
    """The plan has the parts of each device, the devices count the planned bytes, and `tensor` restores sequences."""
    tall = "tall" if split_mode == "layer" else "tall-by-tensor"
    planned = stack.ask("/memory/plan", {"model": tall}, direct=True)
    assert planned["result"] == "FREE", planned
    assert planned["allocation"] == "SPLIT"
    assert planned["devices"] == ["gpu-0", "gpu-1"]
    assert sum(planned["tensor_split"]) == 7
    assert any(f"divided by {split_mode}" in line for line in planned["trace"]), planned["trace"]

    def text_and_cached_tokens() -> tuple[str, int]:
        answer = stack.ask("/v1/completions", {"model": tall, **GREEDY}, direct=True)
        return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    text, _ = text_and_cached_tokens()
    assert stack.model(tall)["devices"] == ["gpu-0", "gpu-1"]
    counted = devices(stack)
    for name in planned["devices"]:
        assert counted[name]["used_bytes"] > 0
        assert abs(counted[name]["used_bytes"] - planned["need_bytes"][name]) <= ALLOWED_BYTES

    if split_mode == "tensor":
        stack.ask(f"/models/{tall}/offload", {}, direct=True)
        again, cached_tokens = text_and_cached_tokens()
        assert again == text
        assert cached_tokens > 0
    stack.ask(f"/models/{tall}/unload", {}, direct=True)


def test_unsupported_split_mode_is_refused_with_the_backend_and_the_remedy(stack: Stack) -> None:
    """Where one device suffices, the mode makes no difference."""
    why = (
        "several devices cannot share it: split_mode row needs split buffers, and the backend RPC of this llama.cpp "
        "has none; set split_mode: layer"
    )
    with pytest.raises(urllib.error.HTTPError) as refused:
        stack.ask("/v1/chat/completions", chat_body("hello", "tall-by-row"), direct=True)
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["code"]) == (503, "memory_limit_exceeded")
    assert why in error["message"]
    planned = stack.ask("/memory/plan", {"model": "tall-by-row"}, direct=True)
    assert planned["result"] == "CANT_ACCOMMODATE"
    assert "set split_mode: layer" in planned["reason"]
    alone = stack.ask("/memory/plan", {"model": "tall-by-row", "context_length": 4096}, direct=True)
    assert (alone["result"], alone["allocation"]) == ("FREE", "FRACTIONAL")
    assert stack.ask("/memory/plan", {"model": "tall-by-row", "split_mode": "layer"}, direct=True)["result"] == "FREE"


def test_refused_load_allocates_nothing_and_its_suggestion_fits(stack: Stack) -> None:
    """No device counts an allocation and no process remains; with the suggested setting the model fits."""
    before = devices(stack)
    with pytest.raises(urllib.error.HTTPError) as refused:
        stack.ask("/v1/chat/completions", chat_body("hello", "taller"), direct=True)
    error = json.loads(refused.value.read())["error"]
    assert (refused.value.code, error["code"]) == (503, "memory_limit_exceeded")
    after = devices(stack)
    for name, device in after.items():
        for figure in ("allocations", "used_bytes"):
            assert device[figure] == before[name][figure]
    wait_until("no process remains", lambda: not of_models(stack.inference.pid))
    measured = stack.inference.log.count("estimate of taller")
    with pytest.raises(urllib.error.HTTPError) as again:
        stack.ask("/v1/chat/completions", chat_body("hello", "taller"), direct=True)
    assert json.loads(again.value.read())["error"] == error
    assert stack.inference.log.count("estimate of taller") == measured > 0, "known estimates are not measured again"
    fix = error["headgate"]["fix"]
    assert set(fix) == {"kv_type"} or set(fix) == {"context_length"}
    planned = stack.ask("/memory/plan", {"model": "taller", **fix}, direct=True)
    assert planned["result"] in ("FREE", "FULL"), planned


def test_divided_model_with_sliding_windows_is_kept_warm_and_restored_with_its_conversations(stack: Stack) -> None:
    """Also after an unload: the sequences stay in host memory. The answer is the same; the prompt is not computed."""
    story = "The mill turns and the water runs. " * 30
    body = {"model": "window", "prompt": story, "max_tokens": 8, "temperature": 0, "ignore_eos": True}

    def ask() -> tuple[str, int, int]:
        """The text, the prompt tokens, and how many of them were not computed."""
        answer = stack.ask("/v1/completions", body, direct=True)
        usage = answer["usage"]
        return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]

    planned = stack.ask("/memory/plan", {"model": "window"}, direct=True)
    assert (planned["result"], planned.get("allocation")) == ("FREE", "SPLIT"), planned
    text, prompt_tokens, _ = ask()
    assert prompt_tokens > WINDOW_TOKENS
    assert stack.model("window")["devices"] == ["gpu-0", "gpu-1"]
    hot = ask()
    assert hot[0] == text
    assert hot[2] > WINDOW_TOKENS

    stack.ask("/models/window/offload", {}, direct=True)
    wait_until("the devices are empty", lambda: not any(device["used_bytes"] for device in devices(stack).values()))
    (kept,) = stack.ask("/memory/offloaded", direct=True)["offloaded"]
    assert (kept["model_key"], kept["mechanism"], kept["sequences"]) == ("window", "resident", 1)
    again = ask()
    assert stack.model("window")["devices"] == ["gpu-0", "gpu-1"]
    assert again == hot

    stack.ask("/models/window/unload", {}, direct=True)
    assert ask() == hot
    stack.ask("/models/window/unload", {}, direct=True)


async def test_operator_loads_and_unloads_in_the_dashboard(stack: Stack, tmp_path: Path) -> None:
    """The forecast says what each action would do, and the page shows the changed devices."""
    await asyncio.to_thread(stack.ask, "/models/tall/unload", {}, direct=True)
    token = stack.state.read_secret(INFERENCE_TOKEN)
    assert token is not None
    async with (
        Gateway(tmp_path, stack.inference.url, environ={"INFERENCE_TOKEN": token}) as gateway,
        Page.signed_in(gateway.url, ADMIN) as page,
        page.listening(),
    ):
        await gateway.look()
        forecast = (await page.post("/ui/api/plan", {"model": "tall", "action": "load"})).json()
        assert forecast["allowed"], forecast
        assert forecast["plan"]["devices"] == ["gpu-0", "gpu-1"]
        assert [text for text in forecast["sentences"] if text.startswith("Loads tall on gpu-1: ")]
        loaded = await page.post("/ui/api/models/tall/load")
        assert loaded.status_code == 200, loaded.text
        assert loaded.json()["headgate"]["state"] in ("ready", "busy"), loaded.text
        shown = await page.next("devices", lambda data: _resident(data, "gpu-1", "tall"))
        row = _resident(shown, "gpu-0", "tall")
        assert sum(row[kind] for kind in ("weights", "kv", "compute", "other")) == row["resident"] > 0
        await page.next("timeline", lambda data: "tall is ready on gpu-0 and gpu-1" in data["entry"]["text"])
        moving = (await page.post("/ui/api/plan", {"model": "tall", "action": "move", "device": "gpu-0"})).json()
        assert moving["sentences"][0].startswith("Moves tall from gpu-0 and gpu-1 to gpu-0")
        unknown = await page.post("/ui/api/models/tall/move", {"device": "gpu-7"})
        assert unknown.status_code == 400
        assert "gpu-7" in unknown.json()["error"]["message"]
        assert (await page.post("/ui/api/models/tall/move")).json()["error"]["param"] == "device"
        refused = (await page.post("/ui/api/plan", {"model": "taller", "action": "load"})).json()
        assert not refused["allowed"]
        assert refused["sentences"][0].startswith("taller cannot be loaded now: ")
        unloaded = await page.post("/ui/api/models/tall/unload")
        assert unloaded.json()["headgate"]["state"] == "cold"
        await page.next("timeline", lambda data: data["entry"]["kind"] == "eviction")
        assert (await page.post("/ui/api/devices/gpu-7/recover")).json()["error"]["param"] == "device"
        assert (await page.post("/ui/api/devices/gpu-0/recover")).json()["device"]["state"] == "healthy"


def _resident(devices: dict[str, Any], device: str, model: str) -> dict[str, int]:
    """The bytes of a loaded model on a device; empty if it has none."""
    row = next(item["by_model"].get(model, {}) for item in devices["devices"] if item["id"] == device)
    return dict(row) if row.get("resident") else {}
