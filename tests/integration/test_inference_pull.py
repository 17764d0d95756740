"""`headgate pull --node`: the service of a node downloads, serves the model, and stops when the client leaves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.client import Api, ApiError
from headgate.cli.main import main
from tests.rigs import tiny_gguf
from tests.rigs.processes import Service, command_of, descendants_of, forget_own, inference_service, wait_until
from tests.rigs.small_hub import SmallHub, small_hub

SOURCE = "hf:org/plain:Q8_0"


@pytest.fixture
def hub() -> Iterator[SmallHub]:
    with small_hub({"org/plain": {"plain-Q8_0.gguf": tiny_gguf.generative().read_bytes()}}) as found:
        yield found


@pytest.fixture
def node(tmp_path: Path, hub: SmallHub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """A service that is the node `a` of this command line."""
    (tmp_path / "models.yaml").write_text("models: {}")
    env = {
        "INFERENCE_TOKEN": "token",
        "INFERENCE_ADMIN_KEY": "admin",
        "INFERENCE_MODELS_DIR": str(tmp_path / "models"),
        "INFERENCE_FORCE_CPU_MODE": "true",
        "HF_ENDPOINT": hub.url,
        "NO_PROXY": "*",
    }
    service = inference_service(tmp_path / "a", tmp_path, env)
    forget_own(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "own"))
    monkeypatch.setenv("GATEWAY_INFERENCE__NODES", json.dumps([f"a={service.url}", "b=http://127.0.0.1:9"]))
    monkeypatch.setenv("INFERENCE_TOKEN", "token")
    try:
        service.start(wait_for="/readyz")
        yield service
    finally:
        service.kill()


def downloads(node: Service) -> list[int]:
    return [pid for pid in descendants_of(node.pid) if "pull_job" in command_of(pid)]


def test_download_of_a_node_stops_with_its_client_is_continued_and_its_model_is_served(
    tmp_path: Path, node: Service, hub: SmallHub, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    assert main(["pull", SOURCE, "--node", "a"]) == 1
    assert "needs the admin key of the inference service" in capsys.readouterr().err
    monkeypatch.setenv("INFERENCE_ADMIN_KEY", "admin")

    hub.flows.clear()
    part = tmp_path / "models/org/plain/.plain-Q8_0.gguf.part"
    api = Api("service", node.url, "admin", "headgate inference")
    with api.open("POST", "/models/pull", {"source": SOURCE}, 30) as answer:
        assert b"downloading plain-Q8_0.gguf" in (next(answer.frames()).data or b"")
        assert len(downloads(node)) == 1
        with pytest.raises(ApiError, match="is being downloaded already"):
            api.post("/models/pull", {"source": SOURCE})
    wait_until("the download has ended", lambda: not downloads(node))
    assert part.is_file()
    assert api.get("/v1/models")["data"] == []

    hub.flows.set()
    part.write_bytes(tiny_gguf.generative().read_bytes()[:5000])
    assert main(["pull", SOURCE, "--node", "a", "--json"]) == 0
    output = capsys.readouterr()
    (found,) = json.loads(output.out)
    assert (found["node"], found["model"], found["plan"]["result"]) == ("a", "plain-Q8_0", "FREE")
    assert Path(found["path"]).read_bytes() == tiny_gguf.generative().read_bytes()
    assert "a: plain-Q8_0.gguf: complete after" in output.err
    assert "bytes=5000-" in hub.ranges
    assert [model["id"] for model in api.get("/v1/models")["data"]] == ["plain-Q8_0"]

    assert main(["pull", "hf:org/none", "--node", "a"]) == 1
    assert re.search(r"a: .* refuses org/none \(401\)", capsys.readouterr().err)

    Path(found["path"]).unlink()
    hub.flows.clear()
    with api.open("POST", "/models/pull", {"source": SOURCE}, 30) as answer:
        frames = answer.frames()
        assert b"downloading plain-Q8_0.gguf" in (next(frames).data or b"")
        assert node.stop() == 0
        assert "shutting down" in json.loads([frame.data for frame in frames if frame.data][-1])["message"]
    hub.flows.set()
    assert part.is_file()
    assert "Traceback" not in node.log
