"""Requests that an unload ends get a status with a retry time."""

from __future__ import annotations

import json
import signal
import threading
from pathlib import Path

from inference import worker_link
from tests.rigs import tiny_gguf
from tests.rigs.processes import wait_until
from tests.rigs.worker_rig import WorkerRig, grant_for

CHAT = "/v1/chat/completions"
LONG = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 400, "ignore_eos": True}


def livez(rig: WorkerRig) -> bytes:
    with rig.connection() as connection:
        connection.request("GET", "/livez")
        return connection.getresponse().read()


def test_requests_ended_by_an_unload_get_model_loading_with_retry_after(tmp_path: Path) -> None:
    """As a status with a header and as an error frame, which has no headers."""
    answers: list[tuple[int, str | None, dict[str, object]]] = []

    def whole(rig: WorkerRig) -> None:
        with rig.connection() as connection:
            connection.request("POST", CHAT, json.dumps(LONG).encode())
            answer = connection.getresponse()
            answers.append((answer.status, answer.getheader("retry-after"), json.loads(answer.read())["error"]))

    with WorkerRig(tmp_path, grant_for(tiny_gguf.slow())) as rig:
        rig.ready()
        frames = rig.stream(CHAT, LONG)
        next(frames)
        thread = threading.Thread(target=whole, args=(rig,))
        thread.start()
        wait_until("both requests run", lambda: rig.fresh_beat().active == 2)
        rig.process.send_signal(signal.SIGTERM)
        wait_until("the worker drains", lambda: b"draining" in livez(rig))
        whole(rig)
        rig.send(worker_link.Stop())
        framed = json.loads(list(frames)[-1].removeprefix(b"data: "))["error"]
        thread.join(5)
        assert rig.wait(5) == 0
    assert len(answers) == 2
    assert {(status, retry) for status, retry, _error in answers} == {(503, "1")}
    for error in [framed, *(error for _status, _retry, error in answers)]:
        assert error["code"] == "model_loading"
        assert error["headgate"] == {"retry_after": 1.0}
        assert "unloaded" in str(error["message"])
