"""A request that came while the inference service was still finding its devices was never looked at again."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from headgate.shared.state import INFERENCE_TOKEN
from tests.rigs.processes import wait_until
from tests.rigs.stack import Stack, chat_body


def test_a_request_in_the_first_moment_is_answered(tmp_path: Path) -> None:
    """It is sent as soon as the port takes connections, which is before the service has read its devices."""
    stack = Stack(tmp_path)
    token = stack.state.secret(INFERENCE_TOKEN)
    url = f"{stack.inference.url}/v1/chat/completions"
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    body = json.dumps(chat_body("Hello!", "demo-mini", max_tokens=2)).encode()

    def ask() -> Any:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=30) as answer:
                return json.load(answer)
        except urllib.error.HTTPError:
            raise
        except urllib.error.URLError:
            return None  # nobody listens yet

    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(wait_until("an answer", ask, seconds=60)), daemon=True)
    asking.start()
    try:
        stack.inference.start(wait_for="/livez")
        asking.join(60)
        assert answers, stack.inference.log
        assert answers[0]["choices"][0]["message"]["content"]
    finally:
        stack.kill()
