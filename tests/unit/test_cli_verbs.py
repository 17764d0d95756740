"""Every verb against canned services: requests, output, and exit codes."""

from __future__ import annotations

import hashlib
import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gateway import settings_loading
from gateway.access.authentication import Keys
from headgate.cli.addresses import Record
from headgate.cli.main import main
from headgate.shared.errors import AlreadyRunningError
from headgate.shared.state_directory import StateDir
from inference.protocol import ModelState, ModelStatus, ReplicaStatus
from tests.rigs.canned_http import Canned, CannedService, canned_service
from tests.rigs.processes import forget_own, free_port

pytestmark = pytest.mark.unmeasured

READY = ModelStatus(
    id="demo",
    state=ModelState.READY,
    aliases=("default",),
    context_length=4096,
    parallel=4,
    devices=("cpu",),
    predicted_bytes=50 * 2**20,
    actual_bytes=48 * 2**20,
    in_flight=1,
    idle_seconds=3.0,
    pid=4711,
)
COLD = ModelStatus(id="org/big", state=ModelState.COLD, predicted_bytes=2**40, fits=False, reason="1 TiB is a lot")
TOO_BIG = {
    "error": {
        "message": "org/big needs 1.0 TiB and 4.0 GiB are free on cpu",
        "type": "service_unavailable_error",
        "param": None,
        "code": "memory_limit_exceeded",
        "headgate": {"need_bytes": 2**40, "free_bytes": 2**32},
    }
}


def _chunk(text: str | None, finish: str | None = None) -> bytes:
    delta = {} if text is None else {"content": text}
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'id': 'x', 'model': 'local/demo', 'choices': [choice]})}\n\n".encode()


DONE = b"data: [DONE]\n\n"
STREAM = (b": headgate loading 40/100\n\n", _chunk(""), _chunk("Hel"), _chunk("lo."), _chunk(None, "stop"), DONE)
UNARY = {"model": "local/demo", "choices": [{"index": 0, "message": {"role": "assistant", "content": "Hello."}}]}


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide configuration, keys and running services of the developer."""
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Mapping[str, Canned]], CannedService]]:
    """Start a canned service that stands for both services, and point the command line at it."""
    from contextlib import ExitStack

    with ExitStack() as stack:

        def start(answers: Mapping[str, Canned]) -> CannedService:
            service = stack.enter_context(canned_service(answers))
            port = service.url.rpartition(":")[2]
            for name in ("GATEWAY_PORT", "INFERENCE_PORT"):
                monkeypatch.setenv(name, port)
            monkeypatch.setenv("GATEWAY_API_KEY", "key-of-a-test")
            monkeypatch.setenv("INFERENCE_TOKEN", "token-of-a-test")
            return service

        yield start


@pytest.fixture
def piped(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def pipe(text: str) -> None:
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return pipe


def test_ps_shows_loaded_models_and_list_shows_all(serve: Any, capsys: Any) -> None:
    service = serve({"GET /v1/models": Canned({"object": "list", "data": [READY.to_json(), COLD.to_json()]})})
    assert main(["ps"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"MODEL +STATE +DEVICE +PREDICTED +ACTUAL", lines[0])
    assert re.match(r"demo +ready +cpu +50\.0 MiB +48\.0 MiB +4096 +1/4 +0 +3s +4711$", lines[1])
    assert len(lines) == 2
    assert main(["ps", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [READY.to_json()]
    assert main(["list"]) == 0
    output = capsys.readouterr()
    assert "org/big" in output.out
    assert "org/big: 1 TiB is a lot" in output.err
    assert "\x1b" not in output.out  # NO_COLOR
    assert service.requests[0].headers["authorization"] == "Bearer token-of-a-test"


def test_ps_watch_repeats_until_ctrl_c_and_waits_for_a_service_that_restarts(
    serve: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve({"GET /v1/models": Canned({"object": "list", "data": [READY.to_json()]})})
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        answer = service.answers["GET /v1/models"]
        answer.status = 500 if len(pauses) == 1 else 200
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("headgate.cli.models.time.sleep", sleep)
    assert main(["ps", "--watch", "0.5"]) == 0
    output = capsys.readouterr()
    assert pauses == [0.5, 0.5, 0.5]
    assert output.out.count("MODEL") == 2
    assert "every 500ms" in output.out
    assert "answered 500" in output.err
    pauses.clear()
    assert main(["ps", "--watch", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [json.loads(line)[0]["id"] for line in lines] == ["demo", "demo"]
    assert pauses[0] == 2.0
    assert main(["ps", "--watch", "0"]) == 2


def test_ps_and_show_list_the_replicas_of_a_model(serve: Any, capsys: Any) -> None:
    first = ReplicaStatus("demo", ModelState.BUSY, ("gpu-0",), 2**20, 3, 0, 4, None, 11)
    second = ReplicaStatus("demo@2", ModelState.LOADING, ("gpu-1",), parallel=4, pid=12)
    third = ReplicaStatus("demo@3", ModelState.COLD, reason="every device has one")
    status = replace(READY, replicas=(first, second, third)).to_json()
    serve({"GET /v1/models": Canned({"data": [status]}), "GET /v1/models/demo": Canned(status),
           "GET /models/demo/crashes": Canned({"crashes": []})})  # fmt: skip
    assert main(["ps"]) == 0
    captured = capsys.readouterr()
    rows = [line.split()[:3] for line in captured.out.splitlines()[1:]]
    assert rows == [["demo", "busy", "gpu-0"], ["demo@2", "loading", "gpu-1"]]
    assert "3/4" in captured.out
    assert "demo@3: every device has one" in captured.out + captured.err
    assert main(["show", "demo"]) == 0
    assert "demo@2: loading on gpu-1, 0 in flight" in capsys.readouterr().out


def test_ps_says_that_no_model_is_loaded(serve: Any, capsys: Any) -> None:
    serve({"GET /v1/models": Canned({"object": "list", "data": []})})
    assert main(["ps"]) == 0
    assert "no model is loaded" in capsys.readouterr().out


def test_show_prints_a_model_with_a_slash_in_its_id_and_its_crashes(serve: Any, capsys: Any) -> None:
    crash = {
        "time": 1_700_000_000.0,
        "message": "the worker ended with signal SIGABRT (assert): GGML_ASSERT(n > 0) failed",
        "requests": [{"path": "/v1/chat/completions", "messages": 2, "alone": True}],
        "last_lines": [f"line {number}" for number in range(9)],
    }
    answers = {"GET /v1/models/org/big": Canned(COLD.to_json()), "GET /models/org/big/crashes": Canned({"crashes": []})}
    service = serve(answers)
    assert main(["show", "org/big"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^fits now +no$", output, re.MULTILINE)
    assert re.search(r"^reason +1 TiB is a lot$", output, re.MULTILINE)
    assert "crashes" not in output
    service.answers["GET /models/org/big/crashes"] = Canned({"crashes": [crash, crash]})
    assert main(["show", "org/big"]) == 0
    output = capsys.readouterr().out
    assert re.search(r"^crashes +2, the last at 2023-11-1\d .*GGML_ASSERT\(n > 0\) failed$", output, re.MULTILINE)
    assert re.search(r"^requests +path /v1/chat/completions, messages 2, alone True$", output, re.MULTILINE)
    assert "line 8" in output
    assert "line 3" not in output
    assert main(["show", "org/big", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["crashes"] == [crash, crash]


def test_quarantined_requests_are_listed_and_cleared(serve: Any, capsys: Any) -> None:
    entry = {
        "key": "00ff", "model": "demo", "suspicion": "confirmed", "crashes": 2, "cause": "assert",
        "message": "it aborted", "age_seconds": 60.0, "seconds_left": 3540.0,
    }  # fmt: skip
    service = serve(
        {
            "GET /quarantine": Canned({"requests": [entry]}),
            "DELETE /quarantine/00ff": Canned({"cleared": [entry]}),
            "DELETE /quarantine": Canned({"cleared": []}),
        }
    )
    assert main(["quarantine"]) == 0
    assert re.search(r"^00ff +demo +confirmed +2 +60s +59m +it aborted$", capsys.readouterr().out, re.MULTILINE)
    assert main(["quarantine", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"requests": [entry]}
    assert main(["quarantine", "clear", "00ff"]) == 0
    assert capsys.readouterr().err == "00ff: a request to demo is allowed again\n"
    assert main(["quarantine", "clear", "all", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"cleared": []}
    assert main(["quarantine", "clear"]) == 2
    assert main(["quarantine", "clear", "1234"]) == 1
    assert service.requests[-1].path == "/quarantine/1234"


def test_stored_sequences_are_listed(serve: Any, capsys: Any) -> None:
    sequence = {
        "model_name": "demo", "id": "00ff", "tiers": ["ram", "disk"], "tokens": 4096, "bytes": 2**20, "tenant": "team",
        "idle_seconds": 7.0, "hits": 3, "pinned_until": None,
    }  # fmt: skip
    hot = {**sequence, "id": "aa", "tiers": ["hot"], "tenant": "", "pinned_until": time.time() + 60.4}
    answer = {"sequences": [hot, sequence], "not_loaded": ["org/big"], "errors": []}
    service = serve({"GET /memory/kv/sequences": Canned(answer)})
    assert main(["kv", "list"]) == 0
    output = capsys.readouterr()
    assert re.search(r"^demo +aa +hot +4096 +1\.0 MiB +7s +3 +60s +-$", output.out, re.MULTILINE)
    assert re.search(r"^demo +00ff +ram\+disk +4096 +1\.0 MiB +7s +3 +- +team$", output.out, re.MULTILINE)
    assert output.err == "not loaded, so left out: org/big\n"
    assert main(["kv", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == answer
    empty = {"sequences": [], "not_loaded": [], "errors": [{"model_name": "demo", "message": "it is busy"}]}
    service.answers["GET /memory/kv/sequences?model=org/big&tenant=team"] = Canned(empty)
    assert main(["kv", "list", "--model", "org/big", "--tenant", "team"]) == 1
    output = capsys.readouterr()
    assert (output.out, output.err) == ("no loaded model has sequences\n", "demo: it is busy\n")


def test_stored_sequences_are_cleared_and_pinned(serve: Any, capsys: Any) -> None:
    def counted(name: str, count: int) -> Canned:
        models = [{"model_name": "demo", name: count}]
        return Canned({name: count, "models": models, "not_loaded": [], "errors": []})

    service = serve({"POST /memory/kv/clear": counted("cleared", 2), "POST /memory/kv/pin": counted("pinned", 1)})
    assert main(["kv", "clear"]) == 0
    assert capsys.readouterr().err == "demo: 2 sequences removed\n"
    assert main(["kv", "clear", "--model", "demo", "--tenant", "team", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cleared"] == 2
    assert main(["kv", "pin", "--for", "2h", "00ff", "aa"]) == 0
    assert capsys.readouterr().err == "demo: 1 sequence kept for 2h 0m\n"
    assert main(["kv", "pin", "--tenant", "team", "--for", "0s"]) == 0
    assert capsys.readouterr().err == "demo: 1 sequence no longer pinned\n"
    assert [request.body for request in service.requests] == [
        {},
        {"model": "demo", "tenant": "team"},
        {"seconds": 7200.0, "ids": ["00ff", "aa"]},
        {"seconds": 0.0, "ids": [], "tenant": "team"},
    ]
    assert main(["kv", "pin"]) == 2
    assert "no sequence is chosen" in capsys.readouterr().err
    assert main(["kv", "pin", "aa", "--for", "never"]) == 2
    assert main(["kv"]) == 2


def test_commands_about_a_model_print_its_new_state(serve: Any, capsys: Any) -> None:
    ready, cold = Canned(READY.to_json()), Canned(ModelStatus("demo", ModelState.COLD).to_json())
    service = serve(
        {
            "POST /models/demo/load": ready,
            "POST /models/demo/unload": cold,
            "POST /models/demo/offload": Canned(ModelStatus("demo", ModelState.WARM).to_json()),
            "POST /models/org/big/restart": ready,
            "POST /models/org/big/unload?now=true": cold,
            "POST /models/org/big/move": Canned(replace(READY, devices=("gpu-1",)).to_json()),
        }
    )
    commands = "load demo", "offload demo", "unload demo", "restart org/big", "stop org/big", "move org/big gpu-1"
    for command in commands:
        assert main(command.split()) == 0
    output = capsys.readouterr()
    assert output.out == ""
    loaded = "demo: ready on cpu, 48.0 MiB"
    lines = output.err.splitlines()
    assert lines[:5] == [loaded, "demo: warm", "demo: cold", loaded, "demo: cold"]
    assert lines[-1] == "demo: ready on gpu-1, 48.0 MiB"
    assert {request.method for request in service.requests} == {"POST"}
    assert service.requests[-1].body == {"device": "gpu-1"}


@pytest.mark.parametrize(
    ("command", "endpoint"),
    [
        ("load org/big", "POST /models/org/big/load"),
        ("move org/big gpu-1", "POST /models/org/big/move"),
        ("bench org/big", "POST /v1/chat/completions"),
    ],
)
def test_model_that_does_not_fit_gives_exit_code_4_and_the_numbers(
    serve: Any, capsys: Any, command: str, endpoint: str
) -> None:
    service = serve({endpoint: Canned(TOO_BIG, 503, {"Retry-After": "30"})})
    assert main(command.split()) == 4
    output = capsys.readouterr()
    assert output.out == ""
    assert "needs 1.0 TiB and 4.0 GiB are free" in output.err
    assert len(service.requests) == 1


@pytest.mark.parametrize(
    ("status", "code", "headers", "expected"),
    [
        (429, "queue_full", {"Retry-After": "2"}, 75),
        (503, "model_failed", {"Retry-After": "2"}, 75),
        (503, "model_loading", {}, 75),
        (503, "model_failed", {}, 1),
        (404, "model_not_found", {}, 1),
        (401, "invalid_api_key", {}, 1),
    ],
)
def test_each_rejection_has_its_exit_code(
    serve: Any, capsys: Any, status: int, code: str, headers: Mapping[str, str], expected: int
) -> None:
    error = {"error": {"message": "the reason", "type": "t", "param": None, "code": code}}
    serve({"POST /models/demo/unload": Canned(error, status, headers)})
    assert main(["unload", "demo"]) == expected
    assert "the reason" in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["load", "restart"])
def test_load_is_waited_for_beyond_the_longest_wait_of_the_service(
    serve: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """A load that goes on is not an error."""
    monkeypatch.setattr("headgate.cli.models.RETRY_SECONDS", 0.01)
    error = {"error": {"message": "it is loading (40 %)", "type": "t", "param": None, "code": "model_loading"}}
    service = serve({})

    def finish(_: int) -> None:
        service.answers["POST /models/demo/load"] = Canned(READY.to_json())

    service.answers[f"POST /models/demo/{verb}"] = Canned(
        status=503, headers={"Retry-After": "60"}, frames=(json.dumps(error).encode(),), gate=finish
    )
    assert main([verb, "demo"]) == 0
    assert capsys.readouterr().err == "demo: ready on cpu, 48.0 MiB\n"
    assert [request.path for request in service.requests] == [f"/models/demo/{verb}", "/models/demo/load"]


def test_ctrl_c_ends_the_wait_for_a_load(serve: Any) -> None:
    """Exit status 130, no traceback."""
    began, held = threading.Event(), threading.Event()

    def gate(_: int) -> None:
        began.set()
        held.wait(20)

    serve({"POST /models/demo/load": Canned(frames=(b"{}",), gate=gate)})
    argv = [sys.executable, "-m", "headgate", "load", "demo"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert began.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    held.set()
    assert (process.returncode, out) == (130, b"")
    assert b"Traceback" not in err


def test_answer_of_another_program_is_reported_with_its_status(serve: Any, capsys: Any) -> None:
    serve({"GET /v1/models": Canned("<html>", 502)})
    assert main(["ps"]) == 1
    assert "answered 502" in capsys.readouterr().err


def test_show_has_the_reason_why_the_chat_template_is_not_used(serve: Any, capsys: Any) -> None:
    status = replace(READY, template_problem="the chat template does not compile: line 1")
    crashes = Canned({"id": "demo", "crashes": []})
    serve({"GET /v1/models/demo": Canned(status.to_json()), "GET /models/demo/crashes": crashes})
    assert main(["show", "demo"]) == 0
    assert re.search(r"chat template +not used: the chat template does not compile: line 1", capsys.readouterr().out)


ABSENT = "ps", "list", "show x", "load x", "unload x", "offload x", "move x gpu-0", "restart x", "stop x"


@pytest.mark.parametrize("line", [*ABSENT, "devices", "breakers", "plan x"])
def test_absent_service_gives_exit_code_3_and_its_address_with_advice(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    port = str(free_port())
    monkeypatch.setenv("GATEWAY_PORT", port)
    monkeypatch.setenv("INFERENCE_PORT", port)
    assert main(line.split()) == 3
    output = capsys.readouterr().err
    assert f"http://127.0.0.1:{port}" in output
    assert "headgate up" in output
    assert len(output.splitlines()) == 1


@pytest.mark.parametrize("port", ["0", "65536", "x", "²"])
def test_invalid_inference_port_is_one_line_that_quotes_it(
    port: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("INFERENCE_PORT", port)
    assert main(["devices"]) != 0
    assert f"'{port}' is not a port; use a number from 1 to 65535" in capsys.readouterr().err


def test_run_prints_only_the_answer(serve: Any, capsys: Any) -> None:
    service = serve({"POST /v1/chat/completions": Canned(frames=STREAM, headers={"x-headgate-tier": "local"})})
    options = ["--temperature", "0", "--max-tokens", "5", "--system", "Be brief."]
    assert main(["run", "demo", "say", "hello", *options]) == 0
    output = capsys.readouterr()
    assert (output.out, output.err) == ("Hello.\n", "")
    request = service.requests[0]
    assert request.headers["authorization"] == "Bearer key-of-a-test"
    assert request.body == {
        "model": "demo",
        "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "say hello"}],
        "stream": True,
        "max_tokens": 5,
        "temperature": 0.0,
    }


def test_run_reads_the_prompt_from_a_pipe(serve: Any, piped: Any, capsys: Any) -> None:
    service = serve({"POST /v1/chat/completions": Canned(frames=STREAM)})
    piped("from the pipe\n")
    assert main(["run", "demo", "--local-only"]) == 0
    assert capsys.readouterr().out == "Hello.\n"
    assert service.requests[0].body["messages"] == [{"role": "user", "content": "from the pipe"}]
    assert service.requests[0].headers["x-headgate-policy"] == "local-only"


def test_run_without_a_prompt_is_a_usage_error(serve: Any, piped: Any) -> None:
    serve({})
    piped("")
    assert main(["run", "demo"]) == 2


def test_run_names_the_model_of_a_fallback(serve: Any, capsys: Any) -> None:
    headers = {
        "x-headgate-tier": "local-fallback",
        "x-headgate-model": "local/demo-mini",
        "x-headgate-reason": "memory_limit_exceeded",
    }
    serve({"POST /v1/chat/completions": Canned(frames=STREAM, headers=headers)})
    assert main(["run", "demo", "hi"]) == 0
    assert capsys.readouterr().err == "answered by local/demo-mini (local-fallback): memory_limit_exceeded\n"


def test_error_frame_within_an_answer_gives_exit_code_1(serve: Any, capsys: Any) -> None:
    error = {"error": {"message": "the worker died", "type": "server_error", "param": None, "code": "model_failed"}}
    frames = (_chunk("Half an"), f"data: {json.dumps(error)}\n\n".encode())
    serve({"POST /v1/chat/completions": Canned(frames=frames)})
    assert main(["run", "demo", "hi"]) == 1
    output = capsys.readouterr()
    assert output.out == "Half an\n"
    assert "the worker died" in output.err


def test_interrupted_stream_gives_exit_code_1(serve: Any, capsys: Any) -> None:
    serve({"POST /v1/chat/completions": Canned(frames=(_chunk("Half an"),))})
    assert main(["run", "demo", "hi"]) == 1
    assert "answer is incomplete" in capsys.readouterr().err


def test_ctrl_c_ends_the_answer_and_closes_the_connection(serve: Any) -> None:
    """Exit status 130, the output so far, no traceback."""
    held, left = threading.Event(), threading.Event()

    def gate(at: int) -> None:
        if at == 1:
            held.wait(20)
        elif at > 1:
            time.sleep(0.01)  # a peer's reset takes a write or two to be seen

    serve({"POST /v1/chat/completions": Canned(frames=(_chunk("Hel"), *[_chunk("x")] * 500), gate=gate, left=left)})
    argv = [sys.executable, "-m", "headgate", "run", "demo", "hi"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.read(3) == b"Hel"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    held.set()
    assert process.returncode == 130
    assert out == b""
    assert b"Traceback" not in err
    assert left.wait(10)


def test_run_as_json_prints_the_complete_answer(serve: Any, capsys: Any) -> None:
    service = serve({"POST /v1/chat/completions": Canned(UNARY)})
    assert main(["run", "demo", "hi", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == UNARY
    assert service.requests[0].body["stream"] is False


def test_run_without_a_key_names_the_command_that_creates_one(capsys: Any) -> None:
    assert main(["run", "demo", "hi"]) == 1
    assert "headgate up" in capsys.readouterr().err


USAGE = {"id": "x", "choices": [], "usage": {"prompt_tokens": 90, "completion_tokens": 2, "total_tokens": 92}}
COUNTED = (*STREAM[:-1], f"data: {json.dumps(USAGE)}\n\n".encode(), DONE)


def test_bench_counts_requests_and_tokens(serve: Any, capsys: Any) -> None:
    """The request that loads the model is not counted. All prompts are different."""
    service = serve({"POST /v1/chat/completions": Canned(frames=COUNTED)})
    assert main(["bench", "demo", "--streams", "2", "--duration", "50ms", "--prompt-tokens", "30", "--json"]) == 0
    output = json.loads(capsys.readouterr().out)
    counted = len(service.requests) - 1
    assert output["requests"] == counted >= 2
    assert (output["failed"], output["prompt_tokens"], output["answer_tokens"]) == (0, 90 * counted, 2 * counted)
    assert output["tokens_per_second"] > 0
    assert 0 < output["ttft_seconds"]["p50"] <= output["ttft_seconds"]["p99"] <= output["request_seconds"]["p99"]
    first, *others = (request.body for request in service.requests)
    assert first["max_tokens"] == 1
    assert {body["max_tokens"] for body in others} == {64}
    texts = [body["messages"][0]["content"] for body in (first, *others)]
    assert {len(text.split()) for text in texts} == {30}
    assert len(set(texts)) == len(texts)
    assert {request.headers["x-headgate-policy"] for request in service.requests} == {"local-only"}


def test_bench_shows_a_table_and_counts_fallbacks(serve: Any, capsys: Any) -> None:
    serve({"POST /v1/chat/completions": Canned(frames=COUNTED, headers={"x-headgate-tier": "local-fallback"})})
    assert main(["bench", "demo", "--streams", "1", "--duration", "1ms"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("demo, 1 stream, ")
    assert re.search(r"^time to first token +\d+\.\d +\d+\.\d +\d+\.\d$", output.out, re.MULTILINE)
    assert re.search(r"(\d+) of \1 answers are from another model than demo", output.err)


def test_bench_reports_failures_and_ends_failed_streams(serve: Any, capsys: Any) -> None:
    """Answers after the first one are interrupted: each stream fails once and ends, and no rate is computed."""
    canned = Canned(frames=COUNTED)
    service = serve({"POST /v1/chat/completions": canned})

    def cut(at: int) -> None:
        if at == len(COUNTED) - 1:
            canned.frames = STREAM[:3]

    canned.gate = cut
    assert main(["bench", "demo", "--streams", "3", "--duration", "1m", "--json"]) == 1
    output = capsys.readouterr()
    figures = json.loads(output.out)
    assert (figures["requests"], figures["failed"], len(service.requests)) == (0, 3, 4)
    assert figures["tokens_per_second"] is None
    assert figures["ttft_seconds"] == {"p50": None, "p90": None, "p99": None}
    assert "3 of 3 requests failed: the answer is incomplete" in output.err


@pytest.mark.parametrize(
    "data",
    [b"{", b"[]", b"\xff", b'{"choices": [1]}', b'{"error": {"code": 1}}', b'{"usage": {"prompt_tokens": "x"}}'],
)
def test_bench_counts_invalid_answers_as_failures(serve: Any, capsys: Any, data: bytes) -> None:
    canned = Canned(frames=COUNTED)
    serve({"POST /v1/chat/completions": canned})

    def spoil(at: int) -> None:
        if at == len(COUNTED) - 1:
            canned.frames = (b"data: " + data + b"\n\n", DONE)

    canned.gate = spoil
    assert main(["bench", "demo", "--streams", "2", "--duration", "10s", "--json"]) == 1
    output = capsys.readouterr()
    assert json.loads(output.out)["failed"] == 2
    assert "2 of 2 requests failed: the gateway at" in output.err


@pytest.mark.parametrize("words", ["--streams 0", "--streams 257", "--duration 0", "--duration never", "--duration x"])
def test_bench_rejects_options_out_of_range(words: str, capsys: Any) -> None:
    assert main(["bench", "demo", *words.split()]) == 2
    assert words.split()[0] in capsys.readouterr().err


def test_ctrl_c_in_a_bench_prints_the_figures_so_far(serve: Any) -> None:
    """Exit status 130, the connection is closed, no traceback."""
    third, held, left = threading.Event(), threading.Event(), threading.Event()
    canned = Canned(frames=COUNTED, left=left)
    service = serve({"POST /v1/chat/completions": canned})

    def gate(at: int) -> None:
        if len(service.requests) == 3 and at == 1:
            third.set()
            held.wait(20)
        elif len(service.requests) == 3 and at > 1:
            time.sleep(0.01)  # a peer's reset takes a write or two to be seen
        elif len(service.requests) == 2 and at == len(COUNTED) - 1:
            canned.frames = (_chunk("Hel"), *[_chunk("x")] * 500)

    canned.gate = gate
    argv = [sys.executable, "-m", "headgate", "bench", "demo", "--streams", "1", "--duration", "1m", "--json"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert third.wait(20)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    held.set()
    assert process.returncode == 130
    assert json.loads(out)["requests"] == 1
    assert b"Traceback" not in err
    assert left.wait(10)


def test_chat_sends_its_history_until_it_is_cleared(serve: Any, piped: Any, capsys: Any) -> None:
    service = serve({"POST /v1/chat/completions": Canned(frames=STREAM)})
    piped("one\n\ntwo\n/clear\nthree\n/bye\nnever\n")
    assert main(["chat", "demo"]) == 0
    assert capsys.readouterr().out == "Hello.\n" * 3
    contents = [[message["content"] for message in request.body["messages"]] for request in service.requests]
    assert contents == [["one"], ["one", "Hello.", "two"], ["three"]]


def test_chat_as_json_prints_one_line_per_answer(serve: Any, piped: Any, capsys: Any) -> None:
    serve({"POST /v1/chat/completions": Canned(UNARY)})
    piped("one\ntwo\n")
    assert main(["chat", "demo", "--json"]) == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == [UNARY, UNARY]


def test_breakers_are_listed_and_reset(serve: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "local/demo", "state": "open", "failures": 5, "retry_after": 12.0, "last_failure": "model_failed"}
    service = serve(
        {
            "GET /admin/breakers": Canned({"breakers": [entry]}),
            "POST /admin/breakers/local/demo/reset": Canned({**entry, "state": "closed"}),
        }
    )
    monkeypatch.setenv("GATEWAY_ADMIN_KEY", "key-of-an-operator")
    assert main(["breakers"]) == 0
    assert re.search(r"^local/demo +open +5 +12s +model_failed$", capsys.readouterr().out, re.MULTILINE)
    assert main(["breakers", "reset", "local/demo"]) == 0
    assert capsys.readouterr().err == "local/demo: closed\n"
    assert main(["breakers", "reset"]) == 2
    assert service.requests[0].headers["authorization"] == "Bearer key-of-an-operator"


FITS = {
    "model": "demo",
    "result": "FULL",
    "trace": ["cpu: fits, 11.5 GiB would be left"],
    "allocation": "FRACTIONAL",
    "device": "cpu",
    "need_bytes": {"cpu": 100 * 2**20},
    "evict": ["other"],
    "estimate": {"devices": {"cpu": {"weights_bytes": 2**20, "kv_bytes": 99 * 2**20}}, "total_bytes": 100 * 2**20},
}
LACKS = {
    "model": "big",
    "result": "CANT_ACCOMMODATE",
    "trace": [],
    "reason": "too big",
    "waits_for": [],
    "fix": {"context_length": 2048},
    "short": [
        {"device": "gpu-0", "need_bytes": 3 * 2**30, "free_bytes": 2**30, "short_bytes": 2**31, "bound": "free memory"}
    ],
}


def test_plan_prints_the_dry_run(serve: Any, capsys: Any) -> None:
    service = serve({"POST /memory/plan": Canned(FITS)})
    assert main(["plan", "demo", "--ctx", "8192"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "demo fits after evictions: 100.0 MiB on cpu",
        "  would evict: other",
        "  estimate for cpu: weights 1.0 MiB, kv 99.0 MiB",
        "  cpu: fits, 11.5 GiB would be left",
    ]
    assert service.requests[0].body == {"model": "demo", "context_length": 8192}


def test_plan_prints_changes_and_the_expected_speed(serve: Any, capsys: Any) -> None:
    reads = {"gpu-0": 2**30, "cpu": 2**29}
    speed = {"tokens_per_second": 21.5, "read_bytes": reads, "bytes_per_second": {"gpu-0": 9e11, "cpu": 1e10}}
    unknown = {**speed, "tokens_per_second": None, "bytes_per_second": {"cpu": 1e10}}
    answer = {**FITS, "evict": [], "estimate": None, "trace": [], "changes": {"experts": 7}}
    step = {"step": "experts", "settings": {"experts": 7}, "saved_bytes": {"gpu-0": 2**20, "cpu": -(2**20)}}
    options = "--kv-type q8_0 --gpu-layers -1 --experts auto --ubatch 256 --parallel 2 --kv-cells 999"
    options += " --split-mode tensor --fit auto --min-context 512"
    for expected, begin, at in ((speed, "21.5", "900 GB/s"), (unknown, "unknown", "an unknown rate")):
        text = f"{begin} tokens per second; each token reads 1.0 GiB on gpu-0 at {at}, 512.0 MiB on cpu at 10 GB/s"
        answer["steps"] = [{**step, "tokens_per_second": expected["tokens_per_second"]}]
        then = ", then 21.5 tokens/s" if expected is speed else ""
        service = serve({"POST /memory/plan": Canned({**answer, "expected": expected})})
        assert main(["plan", "demo", *options.split()]) == 0
        assert capsys.readouterr().out.splitlines() == [
            "demo fits after evictions: 100.0 MiB on cpu",
            "  does not fit as configured; would be loaded with experts: 7",
            f"  step experts: experts: 7, saves about 1.0 MiB on gpu-0, takes about 1.0 MiB on cpu{then}",
            f"  expected: {text}",
        ]
        assert service.requests[0].body == {
            "model": "demo", "kv_type": "q8_0", "gpu_layers": -1, "experts": "auto", "ubatch": 256, "parallel": 2,
            "kv_cells": 999, "split_mode": "tensor", "fit": "auto", "min_context": 512,
        }  # fmt: skip
    assert main(["plan", "demo", "--gpu-layers", "-2"]) == 2
    assert "-2 is too small; use -1 (all layers), 0 (none) or more" in capsys.readouterr().err
    assert main(["plan", "demo", "--fit", "contxt"]) == 2
    assert "invalid choice: 'contxt'" in capsys.readouterr().err


def test_plan_that_does_not_fit_gives_exit_code_4_and_the_numbers(serve: Any, capsys: Any) -> None:
    serve({"POST /memory/plan": Canned(LACKS)})
    assert main(["plan", "big"]) == 4
    assert capsys.readouterr().out.splitlines() == [
        "big does not fit",
        "  gpu-0: needs 3.0 GiB, 1.0 GiB available, 2.0 GiB short (free memory)",
        "  would fit with context_length: 2048",
    ]
    assert main(["plan", "big", "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == LACKS


def test_devices_show_the_accounts_of_the_ledger(serve: Any, capsys: Any) -> None:
    names = ("capacity", "free", "foreign", "reserved", "resident", "releasing", "cached")
    accounts = dict(zip(names, (15, 4, 3, 2, 1, 0, 5), strict=True))
    ledger = {f"{name}_bytes": count * 2**30 for name, count in accounts.items()}
    device = {"id": "gpu-0", "name": "A GPU", "state": "healthy", "uuid": "GPU-1", "note": "slow", "ledger": ledger}
    device["pressure_level"] = "high"
    serve({"GET /devices": Canned({"devices": [device]})})
    assert main(["devices"]) == 0
    output = capsys.readouterr()
    sizes = r" +".join(rf"{count}\.0 GiB" if count else "0 B" for count in accounts.values())
    assert re.match(rf"gpu-0 +A GPU +healthy +high +{sizes} +GPU-1$", output.out.splitlines()[1])
    assert output.err == "gpu-0: slow\n"


def test_evictions_and_history_are_listed(serve: Any, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    record = {
        "model_name": "demo", "reason": "memory wanted", "action": "offload", "memory_freed_mb": 1536.0,
        "timestamp": 1_700_000_000.5, "explanation": ["room for big", "idle for 9 s"],
    }  # fmt: skip
    device = {"used_mb": 900.0, "free_mb": 124.0, "foreign_mb": 0.0, "ours_mb": 900.0, "pressure_level": "high"}
    sample = {
        "timestamp": 1_700_000_000.5, "devices": {"gpu-0": device}, "active_requests": 2, "queued_requests": 1,
        "pool_utilization": 0.5, "models_loaded": 3, "models_warm": 4,
    }  # fmt: skip
    serve(
        {
            "GET /memory/evictions?limit=20": Canned({"total": 7, "evictions": [record]}),
            "GET /memory/evictions?limit=1": Canned({"total": 0, "evictions": []}),
            "GET /memory/history?minutes=60": Canned({"minutes": 60, "samples": [sample]}),
            "GET /memory/history?minutes=0.5": Canned({"minutes": 0.5, "samples": []}),
        }
    )
    assert main(["evictions"]) == 0
    output = capsys.readouterr()
    words = "2023-11-14 22:13:20  demo   offload  memory wanted  1.5 GiB  room for big; idle for 9 s"
    assert output.out.splitlines()[1] == words
    assert output.err == "1 of 7 since the service started\n"
    assert main(["evictions", "--limit", "1"]) == 0
    assert "no model has left its device" in capsys.readouterr().out
    assert main(["history"]) == 0
    line = capsys.readouterr().out.splitlines()[1]
    assert line.split() == [
        "2023-11-14", "22:13:20", "gpu-0", "high", "900.0", "MiB", "124.0", "MiB", "0", "B", "900.0", "MiB",
        "2", "1", "3", "4",
    ]  # fmt: skip
    assert main(["history", "--last", "30s"]) == 0
    assert capsys.readouterr().out == "no memory check in the last 30s\n"
    assert main(["history", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == [sample]
    for wrong in (["evictions", "--limit", "1001"], ["history", "--last", "0s"], ["history", "--last", "never"]):
        assert main(wrong) == 2


def test_memory_is_released_by_command(serve: Any, capsys: Any) -> None:
    move = {"model_name": "demo", "source": "gpu-0", "target": "gpu-1"}
    serve(
        {
            "POST /memory/gc": Canned(
                {"freed_mb": 2048.0, "models_unloaded": 1, "models": ["demo"], "trimmed_mb": 1.5}
            ),
            "POST /memory/defragment": Canned(
                {
                    "cells_released": 512,
                    "trimmed_mb": 2.0,
                    "reclaimed_mb": 0.0,
                    "moved": [move],
                    "refused": [{**move, "model_name": "big", "reason": "it is in use"}],
                    "largest_room_mb": {"before": 1024.0, "after": 2048.0},
                }
            ),
        }
    )
    assert main(["gc"]) == 0
    assert capsys.readouterr().err == "2.0 GiB freed, 1.5 MiB of it from heaps; unloaded: demo\n"
    assert main(["defragment"]) == 0
    assert capsys.readouterr().err.splitlines() == [
        "demo: moved from gpu-0 to gpu-1",
        "big: not moved from gpu-0 to gpu-1: it is in use",
        (
            "largest room on one device: 2.0 GiB (1.0 GiB before); "
            "512 cached cells dropped, 2.0 MiB of host memory returned"
        ),
    ]


def test_dumps_are_made_and_compared(serve: Any, capsys: Any) -> None:
    changed = {
        "models/demo/state": {"before": "cold", "after": "ready"},
        "python/tasks": {"before": 4, "after": 6, "difference": 2},
    }
    service = serve(
        {
            "POST /memory/dump": Canned({"id": "dump-2", "models": {"demo": {"state": "ready"}}, "recovery": {}}),
            "POST /memory/dump/compare": Canned(
                {"before": "dump-1", "after": "dump-2", "seconds": 90.0, "changed": changed}
            ),
        }
    )
    assert main(["dump", "--objects", "5"]) == 0
    assert service.requests[-1].body == {"large_objects": 5}
    output = capsys.readouterr()
    assert [line.split() for line in output.out.splitlines()[1:]] == [["models/demo/state", "ready"], ["recovery", "-"]]
    assert "headgate dump compare dump-2 LATER" in output.err
    assert main(["dump", "compare", "dump-1", "dump-2"]) == 0
    assert service.requests[-1].body == {"before": "dump-1", "after": "dump-2"}
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert lines == [["models/demo/state", "cold", "ready", "-"], ["python/tasks", "4", "6", "2"]]
    assert main(["dump", "compare", "dump-1"]) == 2
    assert "name two dumps" in capsys.readouterr().err
    assert main(["dump", "comapre"]) == 2


def test_models_are_preloaded_and_the_first_error_is_the_exit_code(serve: Any, capsys: Any) -> None:
    loaded = {"model": "demo", "loaded": True, "state": "ready", "devices": ["cpu"], "seconds": 2.0, "error": None}
    error = TOO_BIG["error"]
    refused = {"model": "org/big", "loaded": False, "state": "cold", "devices": [], "seconds": 0.1, "error": error}
    service = serve({"POST /memory/preload": Canned({"results": [loaded]})})
    assert main(["preload", "demo"]) == 0
    assert service.requests[-1].body == {"models": ["demo"]}
    assert capsys.readouterr().err == "demo: ready on cpu after 2s\n"
    service.answers["POST /memory/preload"] = Canned({"results": [loaded, refused]})
    assert main(["preload", "demo", "org/big", "--priority", "low", "--timeout", "5"]) == 4
    assert service.requests[-1].body == {"models": ["demo", "org/big"], "priority": "low", "seconds": 5.0}
    assert capsys.readouterr().err.splitlines()[1] == f"org/big: {error['message']}"


@pytest.mark.parametrize(
    ("state", "note", "code", "words"),
    [
        ("healthy", "", 0, "gpu-0: healthy\n"),
        ("suspect", "NVML is silent", 0, "gpu-0: suspect, NVML is silent\n"),
        ("lost", "its connections were cut", 1, "gpu-0: lost, its connections were cut\n"),
    ],
)
def test_device_is_recovered_by_command(serve: Any, capsys: Any, state: str, note: str, code: int, words: str) -> None:
    serve({"POST /devices/gpu-0/recover": Canned({"device": {"id": "gpu-0", "state": state, "note": note}})})
    assert main(["devices", "recover", "gpu-0"]) == code
    assert capsys.readouterr().err == words
    assert main(["devices", "recover", "gpu-0", "--json"]) == code
    assert json.loads(capsys.readouterr().out)["device"]["state"] == state
    assert main(["devices", "recover"]) == 2


def test_key_show_prints_only_the_key_to_stdout(capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(["key", "show"]) == 3
    capsys.readouterr()
    file = tmp_path / "state" / "gateway.key"
    file.write_text("generated\n")
    file.chmod(0o600)
    assert main(["key", "show"]) == 0
    output = capsys.readouterr()
    assert output.out == "generated\n"
    assert str(file) in output.err
    monkeypatch.setenv("GATEWAY_API_KEY", "chosen")
    assert main(["key", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"key": "chosen", "source": "the variable GATEWAY_API_KEY"}


@pytest.mark.parametrize("admin", [False, True])
def test_key_new_prints_a_key_and_its_configuration(capsys: Any, tmp_path: Path, admin: bool) -> None:
    assert main(["key", "new", 'team "a"', *(["--admin"] if admin else [])]) == 0
    output = capsys.readouterr()
    key = output.out.strip()
    assert key.startswith("hg-")
    assert key not in output.err
    (tmp_path / "new").mkdir(mode=0o700)
    (tmp_path / "new" / "gateway.yaml").write_text("keys:\n" + output.err.partition("reload:\n")[2])
    keys = Keys.load(settings_loading.load(tmp_path / "new", {}).keys, {}, StateDir(tmp_path / "new"))
    found = keys.identify({"x-api-key": key})
    assert found is not None
    assert (found[0].name, "admin" in found[0].scopes) == ('team "a"', admin)
    assert main(["key", "new", "b", "--json"]) == 0
    other = json.loads(capsys.readouterr().out)
    assert other["key"] != key
    assert other["entry"]["hash"] == "sha256:" + hashlib.sha256(other["key"].encode()).hexdigest()


def test_key_show_hides_a_generated_key_that_is_not_in_use(capsys: Any, tmp_path: Path) -> None:
    """A generated key is invalid as soon as the configuration has keys."""
    (tmp_path / "state").mkdir(mode=0o700)
    file = tmp_path / "state" / "gateway.key"
    file.write_text("left over\n")
    file.chmod(0o600)
    (tmp_path / "config").mkdir()
    hashed = "sha256:" + "a" * 64
    (tmp_path / "config" / "gateway.yaml").write_text(f"keys: [{{name: team, hash: {hashed!r}}}]")
    assert main(["key", "show"]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "as hashes, which cannot be shown" in output.err


def test_verbs_use_the_addresses_of_a_running_supervisor(tmp_path: Path, capsys: Any) -> None:
    """The record of a supervisor that has ended is ignored, also after a crash."""
    state = StateDir(tmp_path / "state")
    state.directory()
    (tmp_path / "config").mkdir()  # a service at the default port is not found
    (tmp_path / "config" / "gateway.yaml").write_text(f"inference: {{url: 'http://127.0.0.1:{free_port()}'}}\n")
    with canned_service({"GET /v1/models": Canned({"object": "list", "data": []})}) as service:
        with Record(1, service.url, service.url).published(state):
            assert main(["ps"]) == 0
            left = state.file("up.json").read_bytes()
        assert not state.file("up.json").exists()
        capsys.readouterr()
        state.file("up.json").write_bytes(left)
        assert main(["ps"]) == 3
        assert service.url not in capsys.readouterr().err


def test_up_rejects_one_port_for_both_services(capsys: Any) -> None:
    port = str(free_port())
    assert main(["up", "--port", port, "--inference-port", port]) == 1
    assert f"cannot both listen on port {port}; choose another with --port" in capsys.readouterr().err


def test_second_up_leaves_the_record_of_the_first(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "state")
    first = Record(1, "http://127.0.0.1:1", "http://127.0.0.1:2")
    with first.published(state):
        second = Record(2, "http://127.0.0.1:3", "http://127.0.0.1:4")
        with pytest.raises(AlreadyRunningError, match=r"pid 1, http://127\.0\.0\.1:1"), second.published(state):
            pass
        assert Record.read(state) == first
    with second.published(state):
        assert Record.read(state) == second
    assert Record.read(state) is None


def test_health_command_returns_its_result_as_the_exit_code(serve: Any, capsys: Any) -> None:
    service = serve({"GET /livez": Canned({}), "GET /readyz": Canned({}, 503)})
    assert main(["health", f"{service.url}/livez"]) == 0
    assert main(["health", f"{service.url}/readyz"]) == 1
    assert main(["health", f"http://127.0.0.1:{free_port()}/livez"]) == 3
    assert main(["health", "ftp://x"]) == 1
    assert "answered 503" in capsys.readouterr().err
