"""`headgate add` and `headgate pull`: what they write, what they refuse, downloads that break off."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
import yaml

from headgate.cli.first_steps import hub as hub_module
from headgate.cli.first_steps import models_file, pull, pull_job, running_service
from headgate.cli.main import main
from headgate.shared.errors import HeadgateError
from tests.rigs import tiny_gguf
from tests.rigs.canned_http import Canned, canned_service
from tests.rigs.processes import forget_own, free_port
from tests.rigs.small_hub import SmallHub, small_hub

pytestmark = pytest.mark.unmeasured

SHIPPED = Path(__file__).resolve().parents[2] / "config"
ENTRY = "  new:\n    path: new.gguf\n    context_length: 512\n"
FIELDS = {"path": "new.gguf", "context_length": 512}
REPOSITORY = "org/tiny-GGUF"


@pytest.fixture(autouse=True)
def place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A directory with the shipped configuration and an empty models directory; no running service."""
    forget_own(monkeypatch)
    (tmp_path / "config").mkdir()
    for file in SHIPPED.glob("*.yaml"):
        shutil.copy(file, tmp_path / "config")
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("HEADGATE_LOCK_DIR", str(tmp_path))
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[SmallHub]:
    data = tiny_gguf.generative().read_bytes()
    files = {
        "tiny-Q8_0.gguf": data,
        "tiny-Q4_K_M.gguf": data + b"4",
        "tiny-F16-00001-of-00002.gguf": b"first part",
        "tiny-F16-00002-of-00002.gguf": b"second part",
        "mmproj-F32.gguf": b"f32",
        "mmproj-F16.gguf": b"f16",
    }
    monkeypatch.setattr(hub_module, "RETRY_SECONDS", 0.0)
    with small_hub({REPOSITORY: files, "org/plain": {"plain-Q8_0.gguf": data}}) as found:
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        yield found


def models(place: Path) -> dict[str, Any]:
    return dict(yaml.safe_load((place / "config" / "models.yaml").read_text())["models"])


# --- the text of models.yaml ------------------------------------------------------------------------------------------
DEEP = "    new:\n      path: new.gguf\n      context_length: 512\n"
LORA = "models:\n  a:\n    path: x\n    lora:\n    - l.gguf\n"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("#\nmodels:\n  a: {path: x}  # why\n# tail\n", f"#\nmodels:\n  a: {{path: x}}  # why\n{ENTRY}# tail\n"),
        ("models:\n  a: {path: x}\n\n  b:\n    path: y", f"models:\n  a: {{path: x}}\n\n  b:\n    path: y\n\n{ENTRY}"),
        ("models: {}  # none\n", f"models:\n{ENTRY.rstrip()}  # none\n"),
        ("models:\n", f"models:\n{ENTRY}"),
        ("models: null # nothing\n", f"models: # nothing\n{ENTRY}"),
        ("# nothing\n", f"# nothing\nmodels:\n{ENTRY}"),
        ("", f"models:\n{ENTRY}"),
        ("models: {a: {path: x}}\n", "models: {a: {path: x}, new: {context_length: 512, path: new.gguf}}\n"),
        ("models:\n    a:\n        path: x\n", f"models:\n    a:\n        path: x\n{DEEP}"),
        ("models:\r\n  a: {path: x}\r\n", "models:\r\n  a: {path: x}\r\n" + ENTRY.replace("\n", "\r\n")),
        (LORA, LORA + ENTRY),
        ("models:\n  a:\n    path: |\n      x\n", f"models:\n  a:\n    path: |\n      x\n{ENTRY}"),
        ("models: &m\n  a: &e {path: x}\n  b: *e\n", f"models: &m\n  a: &e {{path: x}}\n{ENTRY}  b: *e\n"),
    ],
)
def test_entry_is_added_and_nothing_else_changes(before: str, after: str) -> None:
    try:
        found = models_file.with_entry(before, "new", FIELDS)
    except ValueError:
        pytest.fail("refused")
    assert found == after
    assert yaml.safe_load(found)["models"]["new"] == FIELDS


def test_shipped_file_keeps_every_line() -> None:
    text = (SHIPPED / "models.yaml").read_text()
    found = models_file.with_entry(text, "org/new: 1", FIELDS)
    kept = iter(found.splitlines())
    assert all(line in kept for line in text.splitlines())
    assert yaml.safe_load(found)["models"]["org/new: 1"] == FIELDS


@pytest.mark.parametrize(
    "text", ["models: {a: {path: x},}\n", "- a\n", "models: [1]\n", "models:\n  a: *nothing\n", "a: b: c"]
)
def test_layout_that_cannot_be_changed_safely_is_refused_with_the_lines(text: str) -> None:
    with pytest.raises(ValueError, match="add this under `models:`") as caught:
        models_file.with_entry(text, "new", FIELDS)
    assert ENTRY.rstrip() in str(caught.value)


# --- add --------------------------------------------------------------------------------------------------------------
def test_add_writes_the_entry_and_keeps_comments_mode_and_link(place: Path, capsys: Any) -> None:
    (place / "models").mkdir()
    shutil.copy(tiny_gguf.generative(context=256), place / "models" / "mine-Q8.gguf")
    real = place / "elsewhere.yaml"
    (place / "config" / "models.yaml").rename(real)
    real.chmod(0o640)
    (place / "config" / "models.yaml").symlink_to(real)
    assert main(["add", "models/mine-Q8.gguf", "--set", "parallel=2", "--set", "aliases=[gpt]"]) == 0
    output = capsys.readouterr()
    assert "added 'mine-Q8'" in output.err
    assert "start the services with: headgate up" in output.err
    assert models(place)["mine-Q8"] == {
        "path": "mine-Q8.gguf",
        "context_length": 256,
        "parallel": 2,
        "aliases": ["gpt"],
    }
    assert "# The models of this machine." in real.read_text()
    assert (place / "config" / "models.yaml").is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    before = real.read_bytes()
    assert main(["add", "mine-Q8.gguf"]) == 0
    assert "already has this file as 'mine-Q8'" in capsys.readouterr().err
    assert real.read_bytes() == before


def test_add_without_own_configuration_copies_the_packaged_one(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    package = place / "headgate"
    (package / "cli").mkdir(parents=True)
    (place / "config").rename(package / "defaults")
    for name in ("headgate.cli.first_steps.add", "headgate.shared.state_directory"):
        monkeypatch.setattr(f"{name}.packaged_defaults", lambda: package / "defaults")
    shutil.copy(tiny_gguf.generative(), place / "mine.gguf")
    assert main(["add", "mine.gguf", "--json"]) == 0
    output = capsys.readouterr()
    answer = json.loads(output.out)
    assert (answer["model"], answer["reloaded"]) == ("mine", False)
    assert "copied the packaged configuration" in output.err
    assert "start the services with: headgate up" in output.err
    assert "the running services" not in output.err
    assert models(place)["mine"]["path"] == str(place / "mine.gguf")
    assert "mine" not in (package / "defaults" / "models.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (["none.gguf"], "a model on a hub is written hf:ORGANIZATION/REPOSITORY:QUANTIZATION"),
        (["."], "has no GGUF file. Name one GGUF file"),
        (["text.gguf"], "is not a usable model: it begins with b'text'"),
        (["model.safetensors"], "convert_hf_to_gguf.py"),
        (["good.gguf", "--name", "demo"], "choose another name: --name NAME"),
        (["good.gguf", "--set", "contxt_length=9"], "did you mean 'context_length'?"),
        (["good.gguf", "--set", "parallel=many"], "models.good.parallel"),
        (["good.gguf", "--set", "parallel"], "is not KEY=VALUE"),
        (["good.gguf", "--set", "parallel=[1"], "is not valid YAML"),
        (["good.gguf", "--name", "/x/"], "is not a valid model id"),
        (["hf:good"], "write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"),
    ],
)
def test_add_refuses_and_leaves_the_file(place: Path, words: list[str], advice: str, capsys: Any) -> None:
    before = (place / "config" / "models.yaml").read_bytes()
    (place / "text.gguf").write_text("text")
    (place / "model.safetensors").write_text("text")
    shutil.copy(tiny_gguf.generative(), place / "good.gguf")
    if words == ["."]:
        for file in place.glob("*.gguf"):
            file.unlink()
    assert main(["add", *words]) == 2
    assert advice in capsys.readouterr().err
    assert (place / "config" / "models.yaml").read_bytes() == before


def test_two_commands_do_not_change_the_file_at_once(place: Path, capsys: Any) -> None:
    shutil.copy(tiny_gguf.generative(), place / "good.gguf")
    with models_file.locked(place / "config"):
        assert main(["add", "good.gguf"]) == 75
    assert "another command is changing config; try again" in capsys.readouterr().err
    assert main(["add", "good.gguf"]) == 0


def test_add_reports_mistakes_that_the_file_already_has(place: Path, capsys: Any) -> None:
    shutil.copy(tiny_gguf.generative(), place / "good.gguf")
    with (place / "config" / "models.yaml").open("a") as out:
        out.write("  bad: {path: x.txt}\n")
    assert main(["add", "good.gguf"]) == 2
    line = len((place / "config" / "models.yaml").read_text().splitlines())
    assert f"config/models.yaml:{line}: models.bad.path" in capsys.readouterr().err


def test_running_service_reloads_and_plans(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    shutil.copy(tiny_gguf.generative(), place / "good.gguf")
    plan = {"result": "FREE", "need_bytes": {"cpu": 2**20}, "trace": ["long"]}
    with canned_service({"GET /v1/models/good": Canned({"id": "good"}), "POST /memory/plan": Canned(plan)}) as service:
        monkeypatch.setenv("INFERENCE_PORT", service.url.rpartition(":")[2])
        monkeypatch.setattr(running_service, "_lock_holder", lambda _environ: 2**22 + 1)
        signals: list[int] = []
        monkeypatch.setattr("os.kill", lambda pid, number: signals.append(pid))
        assert main(["add", "good.gguf"]) == 0
    assert signals == [2**22 + 1]
    output = capsys.readouterr().err
    assert "good fits: 1.0 MiB on cpu" in output
    assert 'to use it: headgate run good "Hello", or in a browser: http://127.0.0.1:8080/ui/' in output


# --- pull -------------------------------------------------------------------------------------------------------------
def test_pull_downloads_verifies_and_names_the_model(place: Path, hub: SmallHub, capsys: Any) -> None:
    assert main(["pull", f"hf:{REPOSITORY}:Q8_0", "--json"]) == 0
    output = capsys.readouterr()
    folder = place / "models" / "org" / "tiny-GGUF"
    assert (folder / "tiny-Q8_0.gguf").read_bytes() == tiny_gguf.generative().read_bytes()
    assert sorted(path.name for path in folder.iterdir()) == ["mmproj-F16.gguf", "tiny-Q8_0.gguf"]
    assert json.loads(output.out)[0]["model"] == "tiny-Q8_0"
    assert "SHA-256 verified" in output.err
    assert main(["pull", f"hf:{REPOSITORY}:Q8_0"]) == 0
    assert f"complete in {folder}" in capsys.readouterr().err


def test_download_for_a_service_writes_events_as_lines(place: Path, hub: SmallHub, capsys: Any) -> None:
    assert pull_job.main(["hf:org/plain:Q8_0", str(place / "models")]) == 0
    *begun, progress, complete, done = map(json.loads, capsys.readouterr().out.splitlines())
    size = len(tiny_gguf.generative().read_bytes())
    assert (begun[0]["event"], complete["event"]) == ("message", "message")
    assert (progress["event"], progress["done_bytes"], progress["total_bytes"]) == ("progress", size, size)
    path = str(place / "models/org/plain/plain-Q8_0.gguf")
    assert done == {"event": "done", "path": path, "bytes": size}
    assert pull_job.main(["hf:org/plain:Q8_0", str(place / "models")]) == 0
    assert "complete in" in json.loads(capsys.readouterr().out.splitlines()[0])["text"]
    assert pull_job.main(["hf:org/none:Q8_0", str(place / "models")]) == 1
    assert "refuses org/none" in json.loads(capsys.readouterr().out)["message"]


def test_split_model_is_downloaded_with_all_parts(place: Path, hub: SmallHub) -> None:
    assert main(["pull", f"hf:{REPOSITORY}:F16"]) == 0
    assert {path.name for path in (place / "models/org/tiny-GGUF").iterdir()} == {
        "tiny-F16-00001-of-00002.gguf", "tiny-F16-00002-of-00002.gguf", "mmproj-F16.gguf",
    }  # fmt: skip


def test_download_continues_where_the_connection_broke(place: Path, hub: SmallHub, capsys: Any) -> None:
    hub.cut_after[:] = [1000, 500]
    assert main(["pull", "hf:org/plain:Q8_0"]) == 0
    assert hub.ranges == ["bytes=1000-", "bytes=1500-"]
    data = (place / "models/org/plain/plain-Q8_0.gguf").read_bytes()
    assert hashlib.sha256(data).digest() == hashlib.sha256(tiny_gguf.generative().read_bytes()).digest()
    assert "continuing at" in capsys.readouterr().err


def test_later_command_continues_a_download_that_failed(place: Path, hub: SmallHub, capsys: Any) -> None:
    hub.cut_after[:] = [1000, *[0] * hub_module.TRIES]
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    assert "the same command continues at 1000 B" in capsys.readouterr().err
    assert not (place / "models/org/plain/plain-Q8_0.gguf").exists()
    assert main(["pull", "hf:org/plain:Q8_0"]) == 0
    assert hub.ranges[-1] == "bytes=1000-"


def test_download_restarts_if_the_server_ignores_ranges(place: Path, hub: SmallHub) -> None:
    hub.ignores_ranges = True
    hub.cut_after[:] = [1000]
    assert main(["pull", "hf:org/plain:Q8_0"]) == 0
    assert (place / "models/org/plain/plain-Q8_0.gguf").read_bytes() == tiny_gguf.generative().read_bytes()


def test_download_restarts_if_the_partial_file_is_of_another_version(place: Path, hub: SmallHub) -> None:
    folder = place / "models/org/plain"
    folder.mkdir(parents=True)
    (folder / ".plain-Q8_0.gguf.part").write_bytes(bytes(10**7))
    (folder / "plain-Q8_0.gguf").write_bytes(b"older")
    assert main(["pull", "hf:org/plain:Q8_0"]) == 0
    assert (folder / "plain-Q8_0.gguf").read_bytes() == tiny_gguf.generative().read_bytes()


def test_damaged_download_is_removed(place: Path, hub: SmallHub, capsys: Any) -> None:
    hub.wrong_sums = True
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    assert "arrived damaged" in capsys.readouterr().err
    assert list((place / "models/org/plain").iterdir()) == []


def test_file_without_a_known_size_is_not_downloaded(place: Path, hub: SmallHub, capsys: Any) -> None:
    """Its download could end early without notice. It became an empty file."""
    hub.lists_sizes = False
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    assert "lists plain-Q8_0.gguf without its size" in capsys.readouterr().err
    assert not (place / "models").exists()


def test_disk_is_checked_before_the_download(place: Path, hub: SmallHub, monkeypatch: Any, capsys: Any) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10**9, 10**9, 10**6))
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    assert "976.6 KiB free" in capsys.readouterr().err
    assert not (place / "models").exists()


def test_full_disk_during_the_download_is_explained(place: Path, hub: SmallHub, monkeypatch: Any, capsys: Any) -> None:
    def fail(_handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", fail)
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    assert "the disk is full; the same command continues the download" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("hf:org/none:Q8_0", ["refuses org/none (401)", "HF_TOKEN"]),
        ("hf:org/tiny-GGUF:Q2_K", ["no quantization Q2_K", "tiny-Q8_0.gguf"]),
        ("hf:org/tiny-GGUF/none.gguf", ["has no model none.gguf"]),
        ("hf:tiny", ["write hf:ORGANIZATION/REPOSITORY:QUANTIZATION"]),
    ],
)
def test_pull_refuses_with_advice(hub: SmallHub, source: str, words: list[str], capsys: Any) -> None:
    assert main(["pull", source]) in (1, 2)
    output = capsys.readouterr().err
    assert all(word in output for word in words)


def test_gated_repository_needs_the_token(hub: SmallHub, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    hub.gated = frozenset({"org/plain"})
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert main(["pull", "hf:org/plain:Q8_0"]) == 0
    assert "Bearer hf_secret" in hub.tokens
    assert "hf_secret" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "advice"),
    [
        ("http://127.0.0.1:9", "cannot be reached"),
        ("no address", "cannot be reached"),
        ("ftp://x", "cannot be reached"),
        ("http://ann:pass-word@127.0.0.1:9", "http://127.0.0.1:9 cannot be reached"),
    ],
)
def test_unreachable_hub_is_explained(monkeypatch: pytest.MonkeyPatch, endpoint: str, advice: str, capsys: Any) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert main(["pull", "hf:org/plain:Q8_0"]) == 1
    output = capsys.readouterr().err
    assert advice in output
    assert "HF_ENDPOINT" in output
    assert "pass-word" not in output


def test_server_that_is_not_a_hub_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    path = "/api/models/org/plain?blobs=true"
    answers = (
        (Canned(status=302, headers={"location": path}), "cannot be reached (Exceeded maximum allowed redirects.)"),
        (Canned(frames=[b"[" * 100_000]), "is not a hub: its answer is not JSON"),
    )
    for answer, advice in answers:
        with canned_service({f"GET {path}": answer}) as service:
            monkeypatch.setenv("HF_ENDPOINT", service.url)
            assert main(["pull", "hf:org/plain:Q8_0"]) == 1
            assert advice in capsys.readouterr().err


def test_interrupted_download_says_how_it_continues(hub: SmallHub, monkeypatch: Any, capsys: Any) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(hub_module.Hub, "_fetch", interrupt)
    assert main(["pull", "hf:org/plain:Q8_0"]) == 130
    assert "the same command continues the download" in capsys.readouterr().err


def test_hub_source_in_the_file_is_pulled_without_arguments(place: Path, hub: SmallHub, capsys: Any) -> None:
    with (place / "config" / "models.yaml").open("a") as out:
        out.write(f"  mine: {{path: 'hf:{REPOSITORY}:Q8_0'}}\n")
    assert main(["config", "check"]) == 2
    assert f"headgate pull hf:{REPOSITORY}:Q8_0" in capsys.readouterr().out
    assert main(["pull"]) == 0
    assert main(["config", "check"]) == 0
    assert main(["pull"]) == 0
    assert "every `hf:` source of models.yaml is here" in capsys.readouterr().err


def test_up_downloads_what_the_file_names_before_it_starts(
    place: Path, hub: SmallHub, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with (place / "config" / "models.yaml").open("a") as out:
        out.write("  mine: {path: 'bundled:demo', draft: 'hf:org/plain:Q8_0'}\n")
    monkeypatch.setattr("headgate.cli.up._supervise", started := AsyncMock(return_value=0))
    for name in ("GATEWAY_PORT", "INFERENCE_PORT"):
        monkeypatch.setenv(name, str(free_port()))
    assert main(["up"]) == 0
    assert (place / "models/org/plain/plain-Q8_0.gguf").is_file()
    shutil.rmtree(place / "models")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert main(["up"]) == 1
    assert "cannot be reached" in capsys.readouterr().err
    assert started.await_count == 1


def test_add_of_a_hub_source_downloads_it(place: Path, hub: SmallHub) -> None:
    assert main(["add", "hf:org/plain:Q8_0", "--name", "mine"]) == 0
    assert models(place)["mine"] == {"path": "hf:org/plain:Q8_0"}
    assert main(["config", "check"]) == 0


def test_second_download_of_a_file_is_refused(place: Path, hub: SmallHub) -> None:
    part = place / ".x.gguf.part"
    message = "another process is downloading x"
    with hub_module._locked(part), pytest.raises(HeadgateError, match=message), hub_module._locked(part):
        pass
    assert pull.models_directory({"INFERENCE_MODELS_DIR": str(place)}) == place
