"""A closed or full stdout was a traceback, a reader that left was told as a broken gateway, bytes as 'unexpected'."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headgate.cli.main import main
from inference.protocol import ModelState, ModelStatus
from tests.rigs.canned_http import Canned, CannedService, canned_service
from tests.rigs.processes import forget_own

STATUS = ModelStatus(id="demo", state=ModelState.READY)
WORD = json.dumps({"choices": [{"index": 0, "delta": {"content": "word " * 4000}, "finish_reason": None}]})


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[CannedService]:
    answers = {
        "GET /v1/models": Canned({"object": "list", "data": [STATUS.to_json()]}),
        "POST /v1/chat/completions": Canned(frames=[f"data: {WORD}\n\n".encode()] * 200 + [b"data: [DONE]\n\n"]),
    }
    with canned_service(answers) as canned:
        forget_own(monkeypatch)
        port = canned.url.rpartition(":")[2]
        for name in "GATEWAY_PORT", "INFERENCE_PORT":
            monkeypatch.setenv(name, port)
        monkeypatch.setenv("GATEWAY_API_KEY", "key")
        monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
        monkeypatch.setenv("LC_ALL", "C.UTF-8")
        monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
        monkeypatch.chdir(tmp_path)
        yield canned


def _shell(line: str) -> subprocess.CompletedProcess[str]:
    """Runs bash with `headgate` as the program under test, and the exit status of a pipe's first command."""
    script = f'headgate() {{ "{sys.executable}" -m headgate "$@"; }}\n{line}\nexit ${{PIPESTATUS[0]}}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=30)


FULL = "headgate: cannot write to stdout: No space left on device\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", ["ps", "ps --json", "run demo hi", "--help", "--version", "ps --help"])
def test_a_full_stdout_is_one_sentence(service: CannedService, words: str) -> None:
    said = _shell(f"headgate {words} > /dev/full")
    assert (said.returncode, said.stderr) == (1, FULL)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_a_closed_stream_is_the_null_device(service: CannedService, closed: str) -> None:
    said = _shell(f"headgate ps {closed}")
    assert (said.returncode, said.stderr) == (0, "")
    assert ("demo" in said.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_what_is_opened_next_does_not_get_the_number_of_a_closed_stream() -> None:
    script = (
        "from headgate.cli.terminal import open_missing_streams; import os, sys; open_missing_streams();"
        "fd = os.open(os.devnull, os.O_RDONLY); os.write(3, str(fd).encode()); sys.stdout.write('gone')"
    )
    line = f'exec 3>&1; "{sys.executable}" -c "{script}" >&-'
    assert _shell(line).stdout == "4"


@pytest.mark.parametrize("redirected", ["2> /dev/full", "2>&1 >&- 2>&-"])
def test_a_stderr_that_takes_nothing_changes_no_status(service: CannedService, redirected: str) -> None:
    assert _shell(f"headgate nonsense {redirected}").returncode == 2


@pytest.mark.parametrize("words", ["run demo hi", "ps", "--help", "config schema"])
def test_a_reader_that_leaves_ends_it_quietly(service: CannedService, words: str) -> None:
    said = _shell(f"headgate {words} | head -c 1")
    assert (said.returncode, said.stderr) == (0, "")
    assert len(said.stdout) == 1


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (r"headgate run demo $'a\xff'", "headgate run: PROMPT is not UTF-8 text"),
        (r"headgate run demo hi --system $'a\xff'", "headgate run: SYSTEM is not UTF-8 text"),
        (r"headgate show $'a\xff'", "headgate show: MODEL is not UTF-8 text"),
        (r"headgate run demo < <(printf 'a\xff')", "headgate: stdin is not UTF-8 text"),
        (r"headgate chat demo < <(printf 'a\xff')", "headgate: stdin is not UTF-8 text"),
        (r"headgate $'\xff'", r"headgate: unknown verb '\udcff'; `headgate --help` lists the verbs"),
    ],
)
def test_bytes_that_are_no_text_are_a_usage_error(service: CannedService, line: str, told: str) -> None:
    said = _shell(line)
    assert (said.returncode, said.stderr) == (2, told + "\n")
    assert not service.asked


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("run demo hi --temperature nan", "nan is not an amount"),
        ("run demo hi --temperature=-1", "-1 is not an amount"),
        ("run demo hi --temperature inf", "inf is not an amount"),
        ("run demo hi --max-tokens 0", "0 is too small"),
        ("plan demo --ctx=-5", "-5 is too small"),
        ("plan demo --ctx many", "'many' is not a whole number"),
        ("run demo hi --temperature warm", "warm is not an amount"),
        ("health http://127.0.0.1:1/ --timeout nan", "nan is not an amount"),
    ],
)
def test_numbers_that_are_no_amounts_are_usage_errors(
    service: CannedService, words: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert told in capsys.readouterr().err
    assert not service.asked


def test_a_token_that_no_header_takes_is_told(
    service: CannedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERENCE_TOKEN", "schlüssel\nx")
    assert main(["ps"]) == 1
    assert "the key for the inference service contains characters" in capsys.readouterr().err


def test_a_disk_that_takes_no_more_at_the_first_start_is_told_with_its_place(
    service: CannedService, tmp_path: Path
) -> None:
    for name in "GATEWAY_PORT", "INFERENCE_PORT", "GATEWAY_API_KEY":
        os.environ.pop(name)  # monkeypatch puts them back
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("models: {m: {path: bundled:demo}}\n")
    (tmp_path / "config" / "gateway.yaml").write_text("port: 18999\ninference: {url: 'http://127.0.0.1:18998'}\n")
    said = _shell("ulimit -f 0; INFERENCE_PORT=18998 headgate up")
    assert said.returncode == 1
    assert str(tmp_path / "state") in said.stderr
    assert "unexpected" not in said.stderr
    assert "Traceback" not in said.stderr
