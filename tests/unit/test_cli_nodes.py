"""Commands with several inference services: columns, the choice of a node, and nodes that do not answer."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from gateway.runtime import Runtime, Source
from headgate.cli import nodes as nodes_module
from headgate.cli.client import ApiError
from headgate.cli.main import main
from headgate.cli.models import best_plan
from headgate.cli.nodes import Nodes
from headgate.shared.errors import HeadgateError, NotRunningError
from headgate.shared.state_directory import StateDir
from inference.protocol import ModelState, ModelStatus
from tests.rigs.canned_http import Canned, CannedService, canned_service
from tests.rigs.processes import forget_own, free_port

pytestmark = pytest.mark.unmeasured

READY = ModelStatus("demo", ModelState.READY, devices=("gpu-0",), in_flight=2, parallel=4)
COLD = ModelStatus("demo", ModelState.COLD)
OTHER = ModelStatus("other", ModelState.COLD)
FITS = {
    "model": "demo",
    "result": "FREE",
    "need_bytes": {"gpu-0": 2**20},
    "devices": ["gpu-0"],
    "evict": [],
    "trace": [],
}
EVICTS = {**FITS, "result": "FULL", "evict": ["other"]}
REFUSED = {"model": "demo", "result": "CANT_ACCOMMODATE", "reason": "no memory", "trace": []}


def _models(*statuses: ModelStatus) -> Canned:
    return Canned({"object": "list", "data": [status.to_json() for status in statuses]})


Fleet = dict[str, CannedService]


@pytest.fixture
def fleet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fleet]:
    """Nodes `a` and `b`, and `c` where nothing listens."""
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("INFERENCE_TOKEN", "token-of-a-test")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)
    with ExitStack() as stack:
        found = {name: stack.enter_context(canned_service({})) for name in ("a", "b")}
        urls = {**{name: service.url for name, service in found.items()}, "c": f"http://127.0.0.1:{free_port()}"}
        monkeypatch.setenv("GATEWAY_INFERENCE__NODES", json.dumps([f"{name}={url}" for name, url in urls.items()]))
        found["a"].answers |= {"GET /v1/models": _models(READY, OTHER), "GET /v1/models/demo": Canned(READY.to_json())}
        found["b"].answers |= {"GET /v1/models": _models(COLD), "GET /v1/models/demo": Canned(COLD.to_json())}
        found["a"].answers["GET /v1/models/other"] = Canned(OTHER.to_json())
        yield found


def test_list_shows_the_node_of_each_model_and_why_a_node_does_not_answer(fleet: Fleet, capsys: Any) -> None:
    assert main(["list"]) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert re.match(r"NODE +MODEL +STATE", lines[0])
    assert [line.split()[:3] for line in lines[1:4]] == [
        ["a", "demo", "ready"],
        ["a", "other", "cold"],
        ["b", "demo", "cold"],
    ]
    assert re.match(
        r"c +the inference service of c does not answer at http://127.0.0.1:\d+ \(Connection refused\)", lines[4]
    )
    assert "warning: 1 of 3 nodes gave no answer: c" in output.err
    assert fleet["b"].requests[0].headers["authorization"] == "Bearer token-of-a-test"
    assert main(["list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(entry["node"], entry.get("id")) for entry in found] == [
        ("a", "demo"),
        ("a", "other"),
        ("b", "demo"),
        ("c", None),
    ]
    assert "Connection refused" in found[3]["error"]


def test_node_option_selects_one_node_and_its_error_becomes_the_error_of_the_command(fleet: Fleet, capsys: Any) -> None:
    assert main(["ps", "--node", "a"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["NODE", "a"]
    assert main(["ps", "--node", "c"]) == 3
    assert "start it with `headgate inference`" in capsys.readouterr().err
    assert main(["ps", "--node", "d"]) == 2
    assert "unknown node 'd'; nodes: a, b, c" in capsys.readouterr().err


def test_exit_code_is_3_when_no_node_answers(fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    urls = [f"{name}=http://127.0.0.1:{free_port()}" for name in "xy"]
    monkeypatch.setenv("GATEWAY_INFERENCE__NODES", json.dumps(urls))
    assert main(["devices"]) == 3
    assert "none of 2 nodes could do it: x: " in capsys.readouterr().err


def test_action_requires_the_node_option_if_several_nodes_have_the_model(fleet: Fleet, capsys: Any) -> None:
    fleet["b"].answers["POST /models/demo/load"] = Canned(READY.to_json())
    assert main(["load", "demo"]) == 2
    assert "demo is on several nodes; choose one with --node: a (ready on gpu-0), b (cold)" in capsys.readouterr().err
    assert main(["load", "demo", "--node", "b"]) == 0
    assert "demo: ready" in capsys.readouterr().err


def test_action_finds_the_only_node_with_the_model(fleet: Fleet, capsys: Any) -> None:
    fleet["a"].answers["POST /models/other/unload"] = Canned(OTHER.to_json())
    assert main(["unload", "other"]) == 0
    assert fleet["a"].requests[-1].method == "POST"
    assert main(["unload", "nothing"]) == 1
    assert "a: no /v1/models/nothing; b: no /v1/models/nothing; c: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["gc"], ["kv", "clear"], ["devices", "recover", "gpu-0"], ["quarantine", "clear", "all"]]
)
def test_operation_on_a_whole_service_requires_the_node_option(fleet: Fleet, words: list[str], capsys: Any) -> None:
    assert main(words) == 2
    assert "which node? choose one with --node: a, b, c" in capsys.readouterr().err


def test_plan_asks_all_nodes_and_marks_the_best(fleet: Fleet, capsys: Any) -> None:
    fleet["a"].answers["POST /memory/plan"] = Canned(EVICTS)
    fleet["b"].answers["POST /memory/plan"] = Canned(FITS)
    assert main(["plan", "demo", "--ctx", "8192"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"a +FULL +1\.0 MiB on gpu-0 +other", lines[1])
    assert re.match(r"b +\* +FREE +1\.0 MiB on gpu-0 +-", lines[2])
    assert fleet["b"].requests[0].body == {"model": "demo", "context_length": 8192}
    assert main(["plan", "demo", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["best"], [entry["node"] for entry in found["nodes"]]) == ("b", ["a", "b", "c"])
    fleet["a"].answers["POST /memory/plan"] = fleet["b"].answers["POST /memory/plan"] = Canned(REFUSED)
    assert main(["plan", "demo"]) == 4
    assert "no memory" in capsys.readouterr().out
    assert main(["plan", "demo", "--node", "a"]) == 4
    assert "demo cannot be placed now: no memory" in capsys.readouterr().out


def test_best_plan_is_a_loaded_model_else_one_without_changes_and_evictions() -> None:
    loaded, smaller = {"result": "DEPLOYED"}, {**FITS, "changes": {"context_length": 2048}}
    fast = {**FITS, "expected": {"tokens_per_second": 90.0}}
    assert best_plan({"a": EVICTS, "b": FITS, "c": fast, "d": loaded, "e": REFUSED}) == "d"
    assert best_plan({"a": EVICTS, "b": FITS, "c": fast, "e": smaller}) == "c"
    assert best_plan({"a": EVICTS, "b": smaller}) == "b"
    assert best_plan({"a": REFUSED}) is None


def test_nodes_command_shows_the_state_of_each_node(fleet: Fleet, capsys: Any) -> None:
    health = {"healthy": False, "node": "gpu-1", "epoch": "e1", "version": "0.1.0"}
    fleet["a"].answers["GET /health"] = Canned(health, 503)  # a device is not usable, but the service answers
    fleet["b"].answers["GET /health"] = Canned({**health, "epoch": "e2"})
    assert main(["nodes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(r"a +http://127.0.0.1:\d+ +gpu-1 +e1 +0\.1\.0 +1/2 +2$", lines[1])
    assert re.match(r"b +http://127.0.0.1:\d+ +gpu-1 +e2 +0\.1\.0 +0/1 +0$", lines[2])
    assert lines[3].startswith("c ")
    assert main(["nodes", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["nodes"]
    assert [(node["node"], node["reachable"]) for node in found] == [("a", True), ("b", True), ("c", False)]


def test_lists_of_devices_evictions_and_sequences_are_merged(fleet: Fleet, capsys: Any) -> None:
    device = {"id": "gpu-0", "state": "healthy", "note": "hot"}
    eviction = {"model_name": "demo", "action": "unload", "reason": "idle", "memory_freed_mb": 1.0, "explanation": []}
    for name, time in (("a", 20.0), ("b", 10.0)):
        fleet[name].answers |= {
            "GET /devices": Canned({"devices": [device]}),
            "GET /memory/evictions?limit=1": Canned({"evictions": [{**eviction, "timestamp": time}], "total": 4}),
            "GET /memory/kv/sequences": Canned({"sequences": [], "errors": [], "not_loaded": ["demo"]}),
        }
    assert main(["devices"]) == 0
    output = capsys.readouterr()
    assert [line.split()[:2] for line in output.out.splitlines()[1:3]] == [["a", "gpu-0"], ["b", "gpu-0"]]
    assert "b: gpu-0: hot" in output.err
    assert main(["evictions", "--limit", "1"]) == 0
    output = capsys.readouterr()
    assert [line.split()[0] for line in output.out.splitlines()] == ["NODE", "a", "c"]  # the newest
    assert "1 of 8 since the service started" in output.err
    assert main(["kv", "list", "--json"]) == 0
    assert [entry["node"] for entry in json.loads(capsys.readouterr().out)["nodes"]] == ["a", "b", "c"]


def test_nodes_that_a_dns_name_lists_are_taken_from_the_gateway(
    fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = [{"name": name, "url": service.url} for name, service in fleet.items()]
    with canned_service({"GET /admin/nodes": Canned({"nodes": listed})}) as gateway:
        monkeypatch.setenv("GATEWAY_PORT", gateway.url.rpartition(":")[2])
        monkeypatch.setenv("GATEWAY_ADMIN_KEY", "admin-key")
        monkeypatch.setenv("GATEWAY_INFERENCE__NODES", "dns:headgate-inference:8085")
        assert main(["ps"]) == 0
        assert capsys.readouterr().out.splitlines()[1].split()[:2] == ["a", "demo"]
        assert gateway.requests[0].headers["authorization"] == "Bearer admin-key"
        gateway.answers["GET /admin/nodes"] = Canned({"nodes": []})
        assert main(["ps"]) == 3
        assert "the gateway knows no node yet" in capsys.readouterr().err


def test_breakers_verb_shows_a_node_column_and_accepts_the_node_option(
    fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = {"state": "closed", "failures": 0}
    entries = [{"name": "local@a", "node": "a", **closed}, {"name": "openai", "node": "", **closed}]
    with canned_service({"GET /admin/breakers": Canned({"breakers": entries})}) as gateway:
        monkeypatch.setenv("GATEWAY_PORT", gateway.url.rpartition(":")[2])
        assert main(["breakers"]) == 0
        assert [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:]] == [
            ["a", "local@a"],
            ["-", "openai"],
        ]
        assert main(["breakers", "--node", "a"]) == 0
        assert "openai" not in capsys.readouterr().out
        assert main(["breakers", "--node", "c"]) == 0
        assert capsys.readouterr().out == "the gateway has no breaker of a node c\n"


def test_reset_of_a_breaker_with_the_node_option_closes_that_of_the_node(
    fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("local@a", "local@a/demo")
    resets = {f"POST /admin/breakers/{name}/reset": Canned({"name": name}) for name in names}
    with canned_service(resets) as gateway:
        monkeypatch.setenv("GATEWAY_PORT", gateway.url.rpartition(":")[2])
        assert main(["breakers", "reset", "local", "--node", "a"]) == 0
        assert main(["breakers", "reset", "local/demo", "--node", "a"]) == 0
        assert main(["breakers", "reset", "local@a/demo"]) == 0
        assert capsys.readouterr().err == "local@a: closed\nlocal@a/demo: closed\nlocal@a/demo: closed\n"


@pytest.mark.parametrize("name", ["openai", "openai/local", "local@a/demo", "local@b"])
def test_reset_of_a_breaker_that_is_of_a_named_node_or_a_cloud_refuses_the_node_option(
    name: str, fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with canned_service({}) as gateway:
        monkeypatch.setenv("GATEWAY_PORT", gateway.url.rpartition(":")[2])
        assert main(["breakers", "reset", name, "--node", "a"]) == 2
        assert not gateway.requests
    assert f"--node chooses the node of `local` or `local/MODEL`; reset '{name}' without --node" in (
        capsys.readouterr().err
    )


def test_list_of_a_single_service_has_no_node_column_and_refuses_the_node_option(
    fleet: Fleet, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INFERENCE_PORT", fleet["a"].url.rpartition(":")[2])  # as on the machine of a node
    assert main(["list"]) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("MODEL")
    assert main(["list", "--node", "a"]) == 2
    assert "--node needs `inference.nodes`" in capsys.readouterr().err


def test_node_that_does_not_finish_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes_module, "CONNECT_SECONDS", 0.05)
    ended = threading.Event()

    def call(api: Any) -> str:
        if api == "slow":
            ended.wait(10)
        if api == "down":
            raise NotRunningError("no connection")
        return "fine"

    answers = Nodes({"a": "slow", "b": "down", "c": "quick"}).each(call, seconds=0.1)  # type: ignore[dict-item]
    ended.set()
    assert dict(answers) == {"c": "fine"}
    assert isinstance(answers.errors["a"], ApiError)
    assert list(answers.errors) == ["a", "b"]


def test_pull_on_a_node_shows_its_events_and_exits_with_its_error(fleet: Fleet, capsys: Any) -> None:
    begun = b'event: message\ndata: {"text": "downloading x.gguf"}\n\n: headgate downloading\n\n'
    done = b'event: done\ndata: {"path": "/m/x.gguf", "bytes": 3, "model": null}\n\n'
    failed = b'event: error\ndata: {"message": "the disk is full"}\n\n'
    words = ["pull", "hf:org/x:Q8_0", "--node", "b"]
    for frames, status, text in (
        ([begun, done], 0, "hf:org/x:Q8_0 is in /m/x.gguf, but the service did not accept it; its log says why"),
        ([begun, failed], 1, "b: the disk is full"),
        ([begun], 1, "b: the connection ended before the download was complete; the same command continues it"),
    ):
        fleet["b"].answers["POST /models/pull"] = Canned(frames=frames)
        assert main(words) == status
        output = capsys.readouterr().err
        assert "b: downloading x.gguf" in output
        assert text in output
    assert fleet["b"].requests[-1].body == {"source": "hf:org/x:Q8_0"}
    assert main(["pull", "--node", "b"]) == 2
    assert "name what to download on the node" in capsys.readouterr().err


def test_doctor_reports_each_node(fleet: Fleet, capsys: Any) -> None:
    fleet["b"].answers["GET /v1/models"] = Canned({"error": {"message": "no", "code": "invalid_api_key"}}, 401)
    assert main(["doctor"]) == 1
    lines = [line for line in capsys.readouterr().out.splitlines() if " node " in line]
    assert re.match(r"ok +node a: answers at http", lines[0])
    assert re.match(r"problem +node b: it refuses the token", lines[1])
    assert re.match(r"problem +node c: the inference service of c does not answer", lines[2])


def test_missing_certificate_file_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forget_own(monkeypatch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gateway.yaml").write_text("inference: {nodes: [https://127.0.0.1:1], tls: {ca: missing.pem}}")

    assert main(["nodes", "--config-dir", str(tmp_path)]) == 1
    assert "inference.tls in gateway.yaml cannot be used (missing.pem)" in capsys.readouterr().err

    source = Source(tmp_path, dict, {})
    with pytest.raises(HeadgateError, match=r"inference\.tls in gateway\.yaml cannot be used: .*missing\.pem"):
        Runtime(source, source.load(), StateDir(tmp_path))  # before the server starts, so without a traceback
