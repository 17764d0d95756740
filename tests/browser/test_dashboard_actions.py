"""Actions show their plan before they are carried out; the playground talks to the gateway."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.rigs import page_records
from tests.rigs.fake_dashboard import FakeDashboard, chunk


def open_model(page: Any, name: str) -> Any:
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("button", name=f"More … about {name}", exact=True).click()
    return page.get_by_role("dialog", name=name, exact=True)


@pytest.mark.parametrize("action", ["load", "unload", "offload", "move", "restart"])
def test_action_shows_its_plan_and_then_runs(page: Any, gateway: FakeDashboard, action: str) -> None:
    dialog = open_model(page, "demo")
    assert gateway.planned == []
    dialog.get_by_text(action.capitalize(), exact=True).click()
    to = " on gpu-1" if action == "move" else ""
    dialog.get_by_text(f"Would {action} demo{to}.").wait_for()
    assert gateway.done == []
    dialog.get_by_role("button", name=f"{action.capitalize()} demo").click()
    dialog.get_by_text("done.").wait_for()
    assert gateway.done == [("demo", action, "gpu-1") if action == "move" else ("demo", action)]
    assert gateway.planned[-1]["action"] == action
    dialog.get_by_role("button", name="Close").click()
    assert page.evaluate("document.activeElement.innerText").startswith("More")


def test_plan_that_is_not_allowed_cannot_be_confirmed(page: Any, gateway: FakeDashboard) -> None:
    gateway.plans["load"] = {"allowed": False, "sentences": ["Needs 5.1 GiB; gpu-0 has 2.3 GiB free."]}
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("button", name="Load … qwen-7b").click()
    dialog = page.get_by_role("dialog", name="qwen-7b")
    dialog.get_by_text("Needs 5.1 GiB; gpu-0 has 2.3 GiB free.").wait_for()
    dialog.get_by_text("This cannot be done now.").wait_for()
    assert dialog.get_by_role("button", name="Load qwen-7b").count() == 0


def test_failed_action_shows_the_error_of_the_gateway(page: Any, gateway: FakeDashboard) -> None:
    gateway.failures["load"] = (503, "qwen-7b needs 5.1 GiB and 2.3 GiB are free on gpu-0")
    page.locator('nav a[href="#/models"]').click()
    page.get_by_role("button", name="Load … qwen-7b").click()
    page.get_by_role("button", name="Load qwen-7b", exact=True).click()
    page.get_by_role("dialog").get_by_text("qwen-7b needs 5.1 GiB and").wait_for()


def test_breaker_reset_and_device_recovery_are_explained_before_they_run(page: Any, gateway: FakeDashboard) -> None:
    page.locator('nav a[href="#/breakers"]').click()
    page.get_by_role("button", name="Reset … openai").click()
    dialog = page.get_by_role("dialog", name="Reset openai")
    dialog.get_by_text("openai is open; last failure: connection refused").wait_for()
    assert gateway.done == []
    dialog.get_by_role("button", name="Reset openai").click()
    dialog.get_by_text("Done.").wait_for()
    dialog.get_by_role("button", name="Close").click()
    lost = page_records.device("gpu-0", 2**30, {}, state="lost", reason="Xid 79: fell off the bus")
    gateway.push("devices", {"devices": [lost]})
    page.locator('nav a[href="#/memory"]').click()
    page.get_by_role("button", name="Recover …").click()
    page.get_by_role("dialog").get_by_text("gpu-0 is lost: Xid 79").wait_for()
    page.get_by_role("dialog").get_by_role("button", name="Recover gpu-0").click()
    page.get_by_role("dialog").get_by_text("Done.").wait_for()
    assert gateway.done == [("reset", "openai"), ("recover", "gpu-0")]


def ask(page: Any, text: str) -> None:
    page.locator('nav a[href="#/playground"]').click()
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def test_playground_streams_an_answer_and_shows_the_headers(page: Any, gateway: FakeDashboard) -> None:
    gateway.hold_chats()
    ask(page, "What is Headgate?")
    page.get_by_role("list", name="Messages").get_by_text("Headgate is", exact=True).wait_for()
    page.get_by_role("button", name="Stop").wait_for()
    gateway.release_chats()
    page.get_by_text("Headgate is a gateway.").wait_for()
    page.get_by_text("The answer is complete.").wait_for()
    assert "local/demo" in page.get_by_role("region", name="Response headers").inner_text()
    page.get_by_role("link", name="req-play-1").click()
    page.get_by_role("dialog", name="Request req-play-1").wait_for()
    page.keyboard.press("Escape")
    ask(page, "And then?")
    page.get_by_text("Headgate is a gateway.").nth(1).wait_for()
    roles = [message["role"] for message in gateway.chats[-1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_playground_stops_an_answer(page: Any, gateway: FakeDashboard) -> None:
    gateway.hold_chats()
    ask(page, "Tell me everything.")
    page.get_by_role("list", name="Messages").get_by_text("Headgate is", exact=True).wait_for()
    page.get_by_role("button", name="Stop").click()
    page.get_by_text("stopped").wait_for()
    page.get_by_role("button", name="Send").wait_for()
    deadline = time.monotonic() + 5
    while not gateway.left_chats and time.monotonic() < deadline:
        page.wait_for_timeout(20)
    assert gateway.left_chats == 1


def test_playground_calls_tools_and_sends_their_results(page: Any, gateway: FakeDashboard) -> None:
    call = {"index": 0, "id": "call-1", "function": {"name": "get_weather", "arguments": '{"city":'}}
    rest = {"index": 0, "function": {"arguments": ' "Oslo"}'}}
    gateway.chat = [chunk({"tool_calls": [call]}), chunk({"tool_calls": [rest]}), chunk({}, "tool_calls")]
    page.locator('nav a[href="#/playground"]').click()
    page.get_by_label("Tools (JSON array)").fill("{not json")
    ask(page, "Weather in Oslo?")
    page.get_by_text("The tools are not JSON").wait_for()
    assert gateway.chats == []
    page.get_by_role("button", name="Insert an example").click()
    ask(page, "Weather in Oslo?")
    page.get_by_text('get_weather({"city": "Oslo"})').wait_for()
    gateway.chat = []
    page.get_by_label("Result of get_weather").fill("7 degrees")
    page.get_by_role("button", name="Send results").click()
    page.get_by_text("Headgate is a gateway.").wait_for()
    assert gateway.chats[0]["tools"][0]["function"]["name"] == "get_weather"
    assert gateway.chats[1]["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "7 degrees"}


def test_playground_shows_an_answer_without_streaming(page: Any, gateway: FakeDashboard) -> None:
    page.locator('nav a[href="#/playground"]').click()
    page.get_by_label("Stream").uncheck()
    page.get_by_label("Max tokens").fill("12")
    ask(page, "Hello")
    page.get_by_text("A whole answer.").wait_for()
    assert gateway.chats[0]["max_tokens"] == 12 and gateway.chats[0]["stream"] is False
