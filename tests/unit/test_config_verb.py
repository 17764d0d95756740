"""`headgate config`: problems with their lines, the current configuration without secrets, JSON schemas."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import TypeAdapter

from headgate.cli.config import FILES, GATEWAY, MASK, plain, render
from headgate.cli.main import main
from headgate.shared.configfile import Bytes, Duration
from tests.rigs.processes import forget_own

ROOT = Path(__file__).resolve().parents[2]
MODELS = """\
models:
  mine:
    path: {path}
    idle_timeout: never
"""
ROUTES = """\
providers:
  openai: {kind: openai, api_key: "${env:OPENAI_API_KEY}"}
  absent: {kind: openai, api_key: "${env:NO_SUCH_KEY}"}
keys:
  - {name: team, hash: "sha256:aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"}
routes:
  mine: {chain: [local/mine, openai/gpt]}
"""


@pytest.fixture(autouse=True)
def directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with a correct configuration."""
    forget_own(monkeypatch)
    monkeypatch.setenv("OPENAI_API_KEY", "sk-very-secret")
    monkeypatch.setenv("HEADGATE_CONFIG_DIR", str(tmp_path))
    (tmp_path / "mine.gguf").write_bytes(b"GGUF")
    (tmp_path / "models.yaml").write_text(MODELS.format(path=tmp_path / "mine.gguf"))
    (tmp_path / "gateway.yaml").write_text(ROUTES)
    return tmp_path


def test_correct_configuration_has_no_problems(capsys: Any, directory: Path) -> None:
    assert main(["config", "check"]) == 0
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err == f"{directory}: no problems\n"


def test_check_names_each_mistake_with_its_line(capsys: Any, directory: Path) -> None:
    with (directory / "models.yaml").open("a") as out:
        out.write("    paralel: 2\n")
    (directory / "gateway.yaml").write_text(ROUTES.replace("openai/gpt", "opnai/gpt"))
    assert main(["config", "check"]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert lines[0].startswith(f"{directory / 'models.yaml'}:5: models.mine.paralel")
    assert "did you mean 'parallel'?" in lines[0]
    assert lines[1].startswith(f"{directory / 'gateway.yaml'}:7: ")
    assert main(["config", "check", "--json"]) == 2
    assert [entry["line"] for entry in json.loads(capsys.readouterr().out)] == [5, 7]


def test_unknown_local_model_in_a_chain_is_a_warning(capsys: Any, directory: Path) -> None:
    """The inference service may read another file. Aliases are known names."""
    (directory / "models.yaml").write_text("models: {mine: {path: 'bundled:demo', aliases: [our/s]}}")
    (directory / "gateway.yaml").write_text("routes: {a: {chain: [local/mien, local/our/s, 'local/*']}}")
    assert main(["config", "check"]) == 0
    output = capsys.readouterr().err.splitlines()
    assert output[0].startswith(f"{directory / 'gateway.yaml'}: routes.a.chain: models.yaml has no model 'mien'")
    assert "did you mean local/mine?" in output[0]
    assert output[1:] == [f"{directory}: no problems"]


def test_smaller_in_a_chain_is_no_model_name(capsys: Any, directory: Path) -> None:
    """A misspelled rule is a warning like every unknown model; a model of that name could not be named."""
    (directory / "models.yaml").write_text("models: {smaller: {path: 'bundled:demo'}, mine: {path: 'bundled:demo'}}")
    (directory / "gateway.yaml").write_text("routes: {a: {chain: [local/mine, local/smaller]}}")
    assert main(["config", "check"]) == 0
    assert "not the model 'smaller' of models.yaml" in capsys.readouterr().err
    (directory / "models.yaml").write_text("models: {mine: {path: 'bundled:demo'}}")
    assert main(["config", "check"]) == 0
    assert capsys.readouterr().err == f"{directory}: no problems\n"
    (directory / "gateway.yaml").write_text("routes: {a: {chain: [local/mine, local/smallest]}}")
    assert main(["config", "check"]) == 0
    warning = "routes.a.chain: models.yaml has no model 'smallest'; did you mean local/smaller?"
    assert warning in capsys.readouterr().err


def test_files_and_packages_that_the_gateway_needs_and_that_are_missing_are_warnings(
    capsys: Any, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (directory / "gateway.yaml").write_text(
        "inference: {nodes: 'ray:', tls: {ca: /missing/ca.pem}}\nstate: redis://127.0.0.1\n"
        "routes: {a: {chain: [local/demo]}}\n"
    )
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["config", "check", "--config-dir", str(directory)]) == 0
    shown = capsys.readouterr().err
    assert (
        "inference.tls in gateway.yaml cannot be used: [Errno 2] No such file or directory: '/missing/ca.pem'" in shown
    )
    assert "state: the package redis is not installed here; run: pip install 'headgate[redis]'" in shown
    assert "inference.nodes: the package ray is not installed here; run: pip install 'headgate[ray]'" in shown


def test_message_of_a_missing_file_names_an_example(capsys: Any, directory: Path) -> None:
    (directory / "gateway.yaml").unlink()
    assert main(["config", "check"]) == 2
    assert "no such file; start from " in capsys.readouterr().out


def test_show_prints_the_current_configuration_without_secrets(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GATEWAY_BREAKER__FAILURES", "3")
    monkeypatch.setenv("INFERENCE_PARALLEL", "7")
    monkeypatch.setenv("INFERENCE_TOKEN", "token-very-secret")
    assert main(["config", "show"]) == 0
    output = capsys.readouterr().out
    assert "very-secret" not in output
    shown = yaml.safe_load(output)
    assert shown["gateway"]["breaker"]["failures"] == 3
    assert shown["models"]["mine"]["parallel"] == 7
    assert shown["models"]["mine"]["idle_timeout"] == "never"
    assert shown["inference"]["INFERENCE_TOKEN"] == MASK
    assert shown["gateway"]["providers"]["openai"]["api_key"] == MASK
    assert shown["gateway"]["providers"]["absent"]["api_key"] == "${env:NO_SUCH_KEY}"
    assert shown["gateway"]["keys"][0]["hash"] == MASK
    assert main(["config", "show", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == shown


def test_output_of_show_is_a_valid_configuration(capsys: Any, directory: Path) -> None:
    """Also `never`, durations in seconds and unset variables; only secrets are masked."""
    routes = "routes: {x: {chain: [local/x], load_wait: never}}"
    (directory / "gateway.yaml").write_text(ROUTES.partition("keys:")[0] + routes)
    assert main(["config", "show"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)["gateway"]
    (directory / "gateway.yaml").write_text(yaml.safe_dump(shown))
    before = plain(GATEWAY.load(directory, {"OPENAI_API_KEY": "x"}, {}))
    assert before == shown


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_schema_files_are_current_and_named_by_the_configuration(file: Any) -> None:
    """`make schema` writes them."""
    assert (ROOT / "config" / f"{file.name}.schema.json").read_text(encoding="utf-8") == render(file)
    text = (ROOT / "config" / f"{file.name}.yaml").read_text(encoding="utf-8")
    assert f"# yaml-language-server: $schema={file.name}.schema.json" in text


def test_schemas_accept_durations_and_sizes_with_units() -> None:
    """An editor does not underline `30s`."""
    assert {"type": "number"} in TypeAdapter(Duration).json_schema()["anyOf"]
    pattern = next(kind["pattern"] for kind in TypeAdapter(Duration).json_schema()["anyOf"] if "pattern" in kind)
    for text in ("30s", "250ms", "5m", "1h", "never", "1.5h"):
        assert re.match(pattern, text)
    assert not re.match(pattern, "soon")
    assert any("pattern" in kind for kind in TypeAdapter(Bytes).json_schema()["anyOf"])


def test_schema_prints_one_or_both_and_writes_files(capsys: Any, tmp_path: Path) -> None:
    assert main(["config", "schema", "gateway"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "gateway.yaml of Headgate"
    assert main(["config", "schema"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"models", "gateway"}
    assert main(["config", "schema", "--write", str(tmp_path)]) == 0
    assert {path.name for path in tmp_path.glob("*.schema.json")} == {"models.schema.json", "gateway.schema.json"}
