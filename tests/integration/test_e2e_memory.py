"""A model that cannot fit is refused with numbers before any allocation, and its breaker opens."""

from __future__ import annotations

import json
import urllib.error
from pathlib import Path

import pytest
from openai import OpenAI

from tests.rigs.processes import of_models, wait_until
from tests.rigs.stack import Stack, chat_body

MODELS = """
models:
  demo:
    path: bundled:demo
    context_length: 4096
    parallel: 64
  demo-mini:
    path: bundled:demo-mini
    context_length: 512
    parallel: 1
"""
ROUTES = """
routes:
  demo: {chain: [local/demo, local/demo-mini], fit_check: false}
  "*": {chain: ["local/*"]}
breaker: {failures: 5, open: 30s, probes: 1, window: 60s, failure_ratio: 0.9, min_requests: 20}
"""


def test_refusals_have_numbers_and_five_open_the_breaker(tmp_path: Path) -> None:
    stack = Stack(tmp_path, models=MODELS, gateway=ROUTES, inference_env={"INFERENCE_MEMORY_LIMIT_GB": "0.1"})
    stack.start()
    try:
        with pytest.raises(urllib.error.HTTPError) as caught:
            stack.ask("/v1/chat/completions", chat_body("Hello!"), direct=True)
        with caught.value as refused:
            error = json.load(refused)["error"]
        assert caught.value.code == 503
        assert error["code"] == "memory_limit_exceeded"
        assert "MiB" in error["message"]
        assert error["headgate"]
        wait_until("no process remains", lambda: not of_models(stack.inference.pid))

        def refusals() -> int:
            text = _metrics(stack)
            return sum(
                int(float(line.rpartition(" ")[2]))
                for line in text.splitlines()
                if line.startswith("inference_placement_total{") and "cant_accommodate" in line.lower()
            )

        before = refusals()
        for _ in range(5):
            answer = stack.ask("/v1/chat/completions", chat_body("Hello!"))
            assert answer["model"] == "demo-mini"
        assert refusals() - before == 5
        opened = [entry for entry in stack.breakers() if entry["name"] == "local/demo"]
        assert [entry["state"] for entry in opened] == ["open"]
        for _ in range(3):
            assert stack.ask("/v1/chat/completions", chat_body("Hello!"))["model"] == "demo-mini"
        assert refusals() - before == 5
    finally:
        stack.kill()


def test_smaller_model_answers_for_one_that_does_not_fit(tmp_path: Path) -> None:
    """The shipped route makes no attempt at the larger model; the other route makes one. Headers and explain record
    name the model that answered.
    """
    shipped = (Path(__file__).parents[2] / "config" / "gateway.yaml").read_text(encoding="utf-8")
    star = next(line for line in shipped.splitlines() if line.startswith('  "*":'))
    routes = f"routes:\n{star}\n  demo: {{chain: [local/demo, local/smaller], fit_check: false}}\n"
    models = MODELS + "  huge: {path: bundled:demo, context_length: 4096, parallel: 64}\n"
    stack = Stack(tmp_path, models=models, gateway=routes, inference_env={"INFERENCE_MEMORY_LIMIT_GB": "0.1"})
    stack.start()
    client = OpenAI(base_url=stack.base_url, api_key=stack.key, max_retries=0)
    try:
        wait_until("huge was measured", lambda: stack.ask("/v1/models/huge")["headgate"]["fits"] is False)
        for model, attempts in (("demo", ["local/demo", "local/demo-mini"]), ("huge", ["local/demo-mini"])):
            raw = client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": "Hello!"}], max_tokens=4
            )
            headers = raw.headers
            assert raw.parse().model == "demo-mini"
            assert headers["x-headgate-model"] == "local/demo-mini"
            assert headers["x-headgate-tier"] == "local-fallback"
            record = stack.ask(f"/admin/requests/{headers['x-request-id']}")
            assert record["chosen"] == {"local/smaller": "local/demo-mini"}
            assert [attempt["name"] for attempt in record["attempts"]] == attempts
            assert record["reason"] == ("memory_limit_exceeded" if len(attempts) == 2 else "cannot_fit")
    finally:
        client.close()
        stack.kill()


def _metrics(stack: Stack) -> str:
    import urllib.request

    with urllib.request.urlopen(stack.inference.url + "/metrics", timeout=5) as answer:
        return str(answer.read().decode())
