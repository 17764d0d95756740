"""The inference service with real processes: loads, requests, ends of workers, refusals, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from inference.protocol import Progress
from inference.workers.orphans import FAMILY_ENV
from tests.rigs import tiny_gguf
from tests.rigs.processes import Service, descendants_of, http_status, inference_service, is_alive, wait_until
from tests.rigs.slowdisk import slow_disk_env

TOKEN = "test-token"


class Rig:
    """A service with tiny models, with shortcuts for requests."""

    def __init__(
        self, root: Path, models: Mapping[str, Mapping[str, Any]], env: Mapping[str, str] | None = None
    ) -> None:
        self.root = root
        self.config = root / "config"
        self.config.mkdir()
        self.write(models)
        self.service: Service = inference_service(root, self.config, {"INFERENCE_TOKEN": TOKEN, **(env or {})})

    def write(self, models: Mapping[str, Mapping[str, Any]]) -> None:
        (self.config / "models.yaml").write_text(json.dumps({"models": models}))

    def start(self) -> Rig:
        self.service.start(wait_for="/readyz")
        return self

    @property
    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {TOKEN}", "content-type": "application/json"}

    def ask(
        self, path: str, body: Any = None, *, method: str | None = None, headers: Mapping[str, str] | None = None,
        seconds: float = 30.0,
    ) -> tuple[int, Any, Mapping[str, str]]:  # fmt: skip
        request = urllib.request.Request(
            self.service.url + path,
            data=body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode(),
            headers={**self.headers, **(headers or {})},
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                return answer.status, json.load(answer), answer.headers
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error), error.headers

    def chat(self, model: str = "a", **more: Any) -> tuple[int, Any, Mapping[str, str]]:
        return self.ask("/v1/chat/completions", chat(model, **more))

    def status(self, model: str = "a") -> dict[str, Any]:
        return dict(self.ask(f"/v1/models/{model}")[1]["headgate"])

    def allocated(self) -> float:
        return float(self.ask("/memory/stats")[1]["allocated_mb"])


def chat(model: str = "a", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more}


def tiny(seed: int = 1, **more: Any) -> dict[str, Any]:
    return {"path": str(tiny_gguf.generative(seed=seed)), "context_length": 256, "parallel": 4, **more}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Rig]:
    """A service for tests that end it or change its models."""
    rig = Rig(tmp_path, {"a": tiny(1, aliases=["org/alias"]), "b": tiny(2)}).start()
    yield rig
    rig.service.kill()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    """A service that the other tests share."""
    rig = Rig(tmp_path_factory.mktemp("shared"), {"a": tiny(1, aliases=["org/alias"]), "b": tiny(2)}).start()
    yield rig
    rig.service.kill()


@pytest.fixture
def rig(shared: Rig) -> Rig:
    """The shared service with cold models."""
    for name in ("a", "b"):
        assert shared.ask(f"/models/{name}/unload", method="POST")[1]["headgate"]["state"] == "cold"
    return shared


def test_model_is_loaded_by_its_first_request_and_unloaded_by_command(rig: Rig) -> None:
    before = rig.status()
    assert before["state"] == "cold"
    status, answer, headers = rig.chat("org/alias")
    assert (status, answer["model"]) == (200, "a")
    assert headers["x-request-id"]
    there = rig.status("org/alias")
    assert there["state"] == "ready"
    assert there["loads"] == before["loads"] + 1
    assert there["devices"] == ["cpu"]
    assert there["actual_bytes"] == pytest.approx(there["predicted_bytes"], rel=0.05)
    assert rig.allocated() > 0
    status, answer, _ = rig.ask("/models/org/alias/unload", method="POST")
    assert (status, answer["headgate"]["state"], answer["headgate"]["pid"]) == (200, "cold", None)
    assert rig.allocated() == 0
    assert not is_alive(there["pid"])
    status, answer, _ = rig.ask("/models/a/load", method="POST")
    assert answer["headgate"]["state"] == "ready"


def test_exit_of_an_idle_worker_is_noticed_at_once_and_the_next_request_reloads(rig: Rig) -> None:
    rig.chat("a")
    rig.chat("b")
    both, neighbor = rig.allocated(), rig.status("b")["pid"]
    victim = rig.status("a")["pid"]
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()
    wait_until("the exit is noticed", lambda: rig.status("a")["pid"] is None, every=0.01)
    assert time.monotonic() - began < 2.0, "a missing heartbeat would be noticed later"
    assert rig.allocated() == pytest.approx(both / 2, rel=0.2)
    assert rig.chat("a")[0] == 200
    assert rig.status("b")["pid"] == neighbor
    crash = rig.ask("/models/a/crashes")[1]["crashes"][0]
    assert (crash["cause"], crash["pid"], crash["requests"]) == ("killed", victim, [])


async def test_exit_of_a_busy_worker_fails_only_its_own_requests(rig: Rig) -> None:
    await asyncio.to_thread(rig.chat, "a")
    await asyncio.to_thread(rig.chat, "b")
    victim = rig.status("a")["pid"]
    async with aiohttp.ClientSession(rig.service.url, headers=rig.headers) as session:
        os.kill(victim, signal.SIGSTOP)
        waiting = [
            asyncio.create_task(_post(session, chat("a", stream=stream, max_tokens=200))) for stream in (False, True)
        ]
        await asyncio.to_thread(wait_until, "both are in flight", lambda: rig.status("a")["in_flight"] == 2)
        os.kill(victim, signal.SIGKILL)
        for status, body in await asyncio.gather(*waiting):
            assert status == 503
            error = json.loads(body)["error"]
            assert error["code"] == "model_failed"
            assert error["headgate"]["cause"] == "killed"
        assert (await _post(session, chat("b")))[0] == 200
        assert (await _post(session, chat("a")))[0] == 200
    record = rig.ask("/models/a/crashes")[1]["crashes"][0]
    assert len(record["requests"]) == 2


async def test_stream_ends_in_an_error_frame_if_its_worker_ends_after_the_first_token(tmp_path: Path) -> None:
    """The model is slow enough not to end before."""
    rig = Rig(tmp_path, {"a": {"path": str(tiny_gguf.slow()), "context_length": 1024, "parallel": 1}}).start()
    try:
        await asyncio.to_thread(rig.chat, "a")
        victim = rig.status("a")["pid"]
        seen = b""
        long = chat("a", stream=True, max_tokens=900, ignore_eos=True)
        async with (
            aiohttp.ClientSession(rig.service.url, headers=rig.headers) as session,
            session.post("/v1/chat/completions", json=long) as answer,
        ):
            async for piece in answer.content.iter_any():
                if not seen:
                    os.kill(victim, signal.SIGKILL)
                seen += piece
        last = [frame for frame in seen.split(b"\n\n") if frame.startswith(b"data: ")][-1]
        assert json.loads(last[6:])["error"]["code"] == "model_failed"
    finally:
        rig.service.kill()


async def test_unload_command_fails_no_request(rig: Rig) -> None:
    async with aiohttp.ClientSession(rig.service.url, headers=rig.headers) as session:
        pending = []
        for number in range(12):
            pending.append(asyncio.create_task(_post(session, chat("a", stream=number % 2 == 0))))
            if number % 4 == 3:
                async with session.post("/models/a/unload") as answer:
                    assert answer.status == 200
        answers = await asyncio.gather(*pending)
    assert [status for status, _ in answers] == [200] * 12
    assert all(b"error" not in body for _, body in answers)
    assert (rig.status()["queued"], rig.status()["in_flight"]) == (0, 0)


async def test_thirty_two_requests_share_one_load_and_disconnects_do_not_delay_it(tmp_path: Path) -> None:
    size = tiny_gguf.generative(seed=1).stat().st_size
    rig = Rig(tmp_path, {"a": tiny(1)}, slow_disk_env(tmp_path, size // 6))
    await asyncio.to_thread(rig.start)
    try:
        async with aiohttp.ClientSession(rig.service.url, headers=rig.headers) as session:
            stay = [asyncio.create_task(_post(session, chat("a", stream=number % 2 == 0))) for number in range(32)]
            leave = [asyncio.create_task(_post(session, chat("a", stream=number % 2 == 0))) for number in range(8)]
            await _until("40 wait", lambda: rig.status()["queued"] == 40)
            for task in leave:
                task.cancel()
            await _until("32 wait", lambda: rig.status()["queued"] == 32)
            answers = await asyncio.gather(*stay)
        assert {status for status, _ in answers} == {200}
        streams = [body for number, (_, body) in enumerate(answers) if number % 2 == 0]
        for body in streams:
            assert body.endswith(b"data: [DONE]\n\n")
            comments = [Progress.parse(frame) for frame in body.split(b"\n\n") if frame.startswith(b":")]
            assert any(comment is not None and comment.stage == "loading" for comment in comments)
        status = rig.status()
        assert (status["loads"], status["in_flight"], status["queued"]) == (1, 0, 0)
    finally:
        rig.service.kill()


def test_deadline_during_a_load_is_answered_with_model_loading_and_retry_after(tmp_path: Path) -> None:
    size = tiny_gguf.generative(seed=1).stat().st_size
    rig = Rig(tmp_path, {"a": tiny(1)}, slow_disk_env(tmp_path, size // 5)).start()
    try:
        wait_until("measured", lambda: rig.status()["predicted_bytes"])
        status, answer, headers = rig.ask("/v1/chat/completions", chat("a"), headers={"x-headgate-deadline-ms": "1500"})
        assert (status, answer["error"]["code"]) == (503, "model_loading")
        assert 1 <= int(headers["retry-after"]) <= 60
        assert rig.ask("/v1/chat/completions", chat("a"), headers={"x-headgate-probe": "1"})[1] == {
            "headgate": {"probe": "loading"}
        }
        assert rig.chat("a")[0] == 200
    finally:
        rig.service.kill()


def test_second_service_on_a_machine_ends_and_names_the_first(rig: Rig) -> None:
    argv = [*rig.service.argv[:-1], str(rig.service.port + 1)]
    done = subprocess.run(argv, env=dict(rig.service.env), capture_output=True, text=True, timeout=20, cwd=rig.root)
    assert done.returncode == 1
    assert str(rig.service.pid) in done.stderr
    assert "Traceback" not in done.stderr


def test_port_in_use_is_reported_with_its_owner(rig: Rig, tmp_path: Path) -> None:
    env = {**rig.service.env, "HEADGATE_LOCK_DIR": str(tmp_path)}
    done = subprocess.run(list(rig.service.argv), env=env, capture_output=True, text=True, timeout=20, cwd=rig.root)
    assert done.returncode == 1
    assert f"pid {rig.service.pid}" in done.stderr


def test_workers_end_within_five_seconds_after_the_service_was_killed(own: Rig) -> None:
    own.chat("a")
    family = descendants_of(own.service.pid)
    (record,) = json.loads((own.root / "state" / "family.json").read_text())
    mark = f"{FAMILY_ENV}={record['token']}".encode()
    assert family
    assert all(mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") for pid in family)
    stray = subprocess.Popen(["sleep", "600"], env={FAMILY_ENV: record["token"], "PATH": os.environ["PATH"]})
    own.service.signal(signal.SIGKILL)
    wait_until("all processes ended", lambda: not [pid for pid in family if is_alive(pid)], seconds=5)
    own.service.wait()
    assert stray.poll() is None, "it represents a process whose link was cut"
    own.service.start(wait_for="/readyz")
    assert stray.wait(10) == -signal.SIGKILL
    assert own.chat("a")[0] == 200
    assert len(list((own.root / "state").rglob("*.sock"))) <= 1, "the socket of the old worker is removed"


async def test_sigterm_drains_streams_with_readiness_503_and_ends_with_0(own: Rig) -> None:
    await asyncio.to_thread(own.chat, "a")
    async with (
        aiohttp.ClientSession(own.service.url, headers=own.headers) as session,
        session.post("/v1/chat/completions", json=chat("a", stream=True, max_tokens=200)) as answer,
    ):
        first = await answer.content.readany()
        own.service.signal(signal.SIGTERM)
        await _until("not ready", lambda: http_status(own.service.url + "/readyz") == 503)
        assert http_status(own.service.url + "/livez") == 200
        rest = first + await answer.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    family = descendants_of(own.service.pid)
    assert await asyncio.to_thread(own.service.wait, 20) == 0
    assert not [pid for pid in family if is_alive(pid)]
    assert not list(own.root.rglob("*.sock"))
    assert "Traceback" not in own.service.log


def test_sigint_during_a_load_ends_with_0(tmp_path: Path) -> None:
    size = tiny_gguf.generative(seed=1).stat().st_size
    rig = Rig(tmp_path, {"a": tiny(1)}, {**slow_disk_env(tmp_path, size // 60), "INFERENCE_DRAIN_SECONDS": "1"}).start()
    try:
        pending = threading.Thread(target=_ignore_errors, args=(rig.chat,), daemon=True)
        pending.start()
        wait_until("the model loads", lambda: rig.status()["state"] == "loading", seconds=30)
        family = descendants_of(rig.service.pid)
        rig.service.signal(signal.SIGINT)
        assert rig.service.wait(20) == 0
        assert not [pid for pid in family if is_alive(pid)]
        pending.join(5)
        assert "Traceback" not in rig.service.log
    finally:
        rig.service.kill()


def test_reload_adds_changes_and_removes_models_and_keeps_the_old_ones_on_errors(own: Rig) -> None:
    own.chat("a")
    own.chat("b")
    kept = own.status("b")["pid"]
    (own.config / "models.yaml").write_text("models: {a: {pth: x}}")
    own.service.signal(signal.SIGHUP)
    wait_until("the mistake is logged", lambda: "did you mean 'path'" in own.service.log)
    assert own.status("a")["state"] == "ready"
    own.write({"b": tiny(2, idle_timeout="900s"), "c": tiny(3)})
    own.service.signal(signal.SIGHUP)
    wait_until("a is removed", lambda: own.ask("/v1/models/a")[0] == 404)
    assert own.status("b")["pid"] == kept
    assert own.chat("c")[0] == 200
    assert "model a removed" in own.service.log
    own.write({"b": tiny(2, context_length=512), "c": tiny(3)})
    own.service.signal(signal.SIGHUP)
    wait_until("b is unloaded", lambda: own.status("b")["pid"] is None)
    assert own.chat("b")[0] == 200
    assert own.status("b")["context_length"] == 512


def test_invalid_gguf_is_reported_by_name_and_the_service_continues(tmp_path: Path) -> None:
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"GGUX" + bytes(100))
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(tiny_gguf.generative().read_bytes()[:-5000])
    rig = Rig(tmp_path, {"bad": {"path": str(bad)}, "cut": {"path": str(cut)}, "a": tiny(1)}).start()
    try:
        for name, path, word in (("bad", bad, "instead of GGUF"), ("cut", cut, "cut short")):
            status, answer, _ = rig.chat(name)
            assert (status, answer["error"]["code"]) == (503, "model_failed")
            assert str(path) in answer["error"]["message"]
            assert word in answer["error"]["message"]
        assert rig.chat("a")[0] == 200
    finally:
        rig.service.kill()


BAD = [
    ("broken JSON", b"{", 400, "invalid_json", None),
    ("NaN", b'{"model": "a", "temperature": NaN}', 400, "invalid_json", None),
    ("no object", b"[]", 400, "invalid_request", None),
    ("no model", b"{}", 400, "invalid_request", "model"),
    ("a wrong type", b'{"model": 7}', 400, "invalid_request", "model"),
    ("stream of a wrong type", b'{"model": "a", "stream": "yes"}', 400, "invalid_request", "stream"),
    ("an unknown model", b'{"model": "nope"}', 404, "model_not_found", "model"),
    ("50 MB", b'{"model": "' + b"x" * 50_000_000 + b'"}', 413, "body_too_large", None),
    ("endless nesting", b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 400, "invalid_json", None),
]


@pytest.mark.parametrize(("body", "status", "code", "param"), [case[1:] for case in BAD], ids=[case[0] for case in BAD])
def test_invalid_input_gets_the_error_envelope(
    shared: Rig, body: bytes, status: int, code: str, param: str | None
) -> None:
    got, answer, headers = shared.ask("/v1/chat/completions", body)
    assert (got, answer["error"]["code"], answer["error"]["param"]) == (status, code, param)
    assert headers["x-request-id"]
    assert headers["x-should-retry"] == "false" or status == 413


@pytest.mark.parametrize(
    ("path", "method", "headers", "status", "code"),
    [
        ("/nope", "GET", {}, 404, "not_found"),
        ("/v1/chat/completions", "GET", {}, 405, "method_not_allowed"),
        ("/v1/models", "GET", {"authorization": "Bearer wrong"}, 401, "invalid_api_key"),
        ("/memory/plan", "POST", {}, 400, "invalid_request"),
        ("/models/nope/load", "POST", {}, 404, "model_not_found"),
    ],
)
def test_every_error_has_the_envelope(
    shared: Rig, path: str, method: str, headers: dict[str, str], status: int, code: str
) -> None:
    got, answer, _ = shared.ask(path, b"" if method == "POST" else None, method=method, headers=headers)
    assert (got, answer["error"]["code"]) == (status, code)
    assert set(answer["error"]) >= {"message", "type", "param", "code"}


def test_invalid_headers_are_refused(shared: Rig) -> None:
    for name, value in (
        ("x-headgate-priority", "urgent"),
        ("x-headgate-deadline-ms", "soon"),
        ("x-headgate-kv", "pin"),
        ("x-headgate-prefix", "not-a-hash"),
    ):
        status, answer, _ = shared.ask("/v1/chat/completions", chat(), headers={name: value})
        assert (status, answer["error"]["param"]) == (400, name)


def test_token_count_is_the_same_with_a_cold_and_a_loaded_model(rig: Rig) -> None:
    """A cold model uses only its vocabulary; errors are the same."""
    loads = rig.status()["loads"]
    tokens = rig.ask("/tokenize", {"model": "a", "content": "hello world"})[1]["tokens"]
    tool = {"type": "function", "function": {"name": "add"}}
    questions = [
        ("/tokenize", {"content": "hello world"}, 200),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello"}]}, 200),
        ("/detokenize", {"tokens": tokens}, 200),
        ("/tokenize", {"content": 5}, 400),
        ("/tokenize", {"content": "x", "contend": "y"}, 400),
        ("/tokenize", {"messages": [{"role": "user", "content": "hello"}], "tools": [tool]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
    ]
    cold = [rig.ask(path, {"model": "a", **body})[:2] for path, body, _ in questions]
    assert [status for status, _ in cold] == [status for _, _, status in questions]
    assert cold[0][1]["tokens"] == tokens
    assert (rig.status()["state"], rig.status()["loads"]) == ("cold", loads)
    rig.chat("a")
    assert [rig.ask(path, {"model": "a", **body})[:2] for path, body, _ in questions] == cold


SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("generative", {"context_length": 256, "parallel": 4}),
    "q8_0": ("generative", {"context_length": 4096, "parallel": 2, "kv_type": "q8_0"}),
    "no-flash": ("generative", {"context_length": 1024, "parallel": 1, "ubatch": 128, "flash_attention": False}),
    "embedding": ("embedding", {"context_length": 512, "parallel": 2}),
    "demo-mini": ("demo-mini", {"context_length": 2048, "parallel": 4}),
}


def test_estimate_equals_the_allocated_bytes(tmp_path: Path) -> None:
    """Each kind is compared with the buffers that llama.cpp reports after a real load."""
    models = {}
    for name, (kind, shape) in SHAPES.items():
        path = "bundled:demo-mini" if kind == "demo-mini" else str(getattr(tiny_gguf, kind)(width=256))
        models[name] = {"path": path, **shape}
    rig = Rig(tmp_path, models).start()
    try:
        for name in models:
            wait_until(f"{name} is measured", lambda name=name: rig.status(name)["predicted_bytes"])
            can = rig.status(name)["capabilities"]
            assert rig.ask(f"/models/{name}/load", method="POST")[0] == 200
            assert rig.status(name)["capabilities"] == can
        loaded = {model["model_name"]: model for model in rig.ask("/memory/models")[1]["models"]}
    finally:
        rig.service.kill()
    assert loaded.keys() == models.keys()
    for name, model in loaded.items():
        parts = model["estimate"]["devices"]["cpu"]
        assert model["estimate"]["source"] == "llama.cpp", name
        allocated = {buffer["kind"]: buffer["bytes"] for buffer in model["buffers"]}
        for part, kind in (("weights_bytes", "weights"), ("kv_bytes", "kv"), ("compute_bytes", "compute")):
            assert allocated[kind] == pytest.approx(parts[part], abs=2**16), (name, kind)


def _ignore_errors(call: Any) -> None:
    with contextlib.suppress(OSError, ValueError):  # the service ends during the answer
        call()


async def _post(session: aiohttp.ClientSession, body: Any) -> tuple[int, bytes]:
    async with session.post("/v1/chat/completions", json=body) as answer:
        return answer.status, await answer.read()


async def _until(what: str, probe: Any, seconds: float = 20.0) -> None:
    await asyncio.to_thread(wait_until, what, probe, seconds=seconds)


def test_pipes_instead_of_state_files_do_not_block_the_start(tmp_path: Path) -> None:
    """The service becomes ready, serves, and names each of them in the log."""
    state = tmp_path / "state"
    state.mkdir(mode=0o700)
    names = ("estimates.json", "overheads.json", "headroom.json", "family.json")
    for name in names:
        os.mkfifo(state / name)
    rig = Rig(tmp_path, {"a": tiny(1)}).start()
    try:
        assert rig.chat("a")[0] == 200
        for name in names:
            assert f"{state / name} is a pipe instead of a file and is ignored" in rig.service.log
    finally:
        rig.service.kill()
