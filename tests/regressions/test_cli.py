"""The command line with closed streams, odd arguments and a running system."""

from __future__ import annotations

import argparse
import fcntl
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headgate.cli.addresses import LOCK, Record
from headgate.cli.command import Session
from headgate.cli.main import main
from headgate.cli.terminal import Terminal
from headgate.cli.up import UpPlan, banner
from headgate.shared.errors import AlreadyRunningError
from headgate.shared.state_directory import StateDir
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
    """Runs bash with `headgate` as the program under test; the exit status is that of the first command of a pipe."""
    script = f'headgate() {{ "{sys.executable}" -m headgate "$@"; }}\n{line}\nexit ${{PIPESTATUS[0]}}'
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False, timeout=30)


FULL = "headgate: cannot write to stdout: No space left on device\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
@pytest.mark.parametrize("words", ["ps", "ps --json", "run demo hi", "--help", "--version", "ps --help"])
def test_full_stdout_is_reported_in_one_line(service: CannedService, words: str) -> None:
    done = _shell(f"headgate {words} > /dev/full")
    assert (done.returncode, done.stderr) == (1, FULL)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
def test_closed_streams_are_replaced_by_the_null_device(service: CannedService, closed: str) -> None:
    done = _shell(f"headgate ps {closed}")
    assert (done.returncode, done.stderr) == (0, "")
    assert ("demo" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_descriptors_of_closed_streams_are_not_reused() -> None:
    script = (
        "from headgate.cli.terminal import open_missing_streams; import os, sys; open_missing_streams();"
        "fd = os.open(os.devnull, os.O_RDONLY); os.write(3, str(fd).encode()); sys.stdout.write('gone')"
    )
    line = f'exec 3>&1; "{sys.executable}" -c "{script}" >&-'
    assert _shell(line).stdout == "4"


@pytest.mark.parametrize("redirected", ["2> /dev/full", "2>&1 >&- 2>&-"])
def test_unusable_stderr_does_not_change_the_exit_status(service: CannedService, redirected: str) -> None:
    assert _shell(f"headgate nonsense {redirected}").returncode == 2


@pytest.mark.parametrize("words", ["run demo hi", "ps", "--help", "config schema"])
def test_reader_that_closes_the_pipe_ends_the_command_without_an_error(service: CannedService, words: str) -> None:
    done = _shell(f"headgate {words} | head -c 1")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r"headgate run demo $'a\xff'", "headgate run: PROMPT is not UTF-8 text"),
        (r"headgate run demo hi --system $'a\xff'", "headgate run: SYSTEM is not UTF-8 text"),
        (r"headgate show $'a\xff'", "headgate show: MODEL is not UTF-8 text"),
        (r"headgate run demo < <(printf 'a\xff')", "headgate: stdin is not UTF-8 text"),
        (r"headgate chat demo < <(printf 'a\xff')", "headgate: stdin is not UTF-8 text"),
        (r"headgate $'\xff'", r"headgate: unknown verb '\udcff'; `headgate --help` lists the verbs"),
    ],
)
def test_bytes_that_are_not_utf8_are_a_usage_error(service: CannedService, line: str, message: str) -> None:
    done = _shell(line)
    assert (done.returncode, done.stderr) == (2, message + "\n")
    assert not service.requests


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run demo hi --temperature nan", "nan is not an amount"),
        ("run demo hi --temperature=-1", "-1 is not an amount"),
        ("run demo hi --temperature inf", "inf is not an amount"),
        ("run demo hi --max-tokens 0", "0 is too small"),
        ("plan demo --ctx=-5", "-5 is too small"),
        ("plan demo --ctx many", "'many' is not a whole number"),
        ("run demo hi --temperature warm", "warm is not an amount"),
        ("health http://127.0.0.1:1/ --timeout nan", "nan is not an amount"),
        ("health http://127.0.0.1:1/ --timeout 0", "0 is out of range; use more than 0 and at most 3600 seconds"),
        ("health http://127.0.0.1:1/ --timeout 1e10", "1e10 is out of range"),
    ],
)
def test_invalid_numbers_are_usage_errors(
    service: CannedService, words: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert message in capsys.readouterr().err
    assert not service.requests


def test_token_that_is_no_header_value_is_reported(
    service: CannedService, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("INFERENCE_TOKEN", "schlüssel\nx")
    assert main(["ps"]) == 1
    assert "the key for the inference service contains characters" in capsys.readouterr().err


def test_full_disk_at_the_first_start_is_reported_with_its_path(service: CannedService, tmp_path: Path) -> None:
    for name in "GATEWAY_PORT", "INFERENCE_PORT", "GATEWAY_API_KEY":
        os.environ.pop(name)  # monkeypatch puts them back
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "models.yaml").write_text("models: {m: {path: bundled:demo}}\n")
    (tmp_path / "config" / "gateway.yaml").write_text("port: 18999\ninference: {url: 'http://127.0.0.1:18998'}\n")
    done = _shell("ulimit -f 0; INFERENCE_PORT=18998 headgate up")
    assert done.returncode == 1
    assert str(tmp_path / "state") in done.stderr
    assert "unexpected" not in done.stderr
    assert "Traceback" not in done.stderr


def test_commands_that_up_prints_use_the_same_variable_for_a_configured_key(
    service: CannedService, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GATEWAY_API_KEY")
    at = ("127.0.0.1", int(service.url.rpartition(":")[2]))
    plan = UpPlan(*at, *at, 40.0, 40.0, "demo", has_keys=True, config_dir=tmp_path, models_dir=tmp_path)
    session = Session(argparse.Namespace(), os.environ, Terminal(io.StringIO(), io.StringIO()))
    lines = banner(session, plan, key=None)
    assert any('-H "Authorization: Bearer $HEADGATE_KEY"' in line for line in lines)
    (run,) = (line for line in lines if " run demo " in line)
    done = _shell(f"export HEADGATE_KEY=of-a-team\n{run}")
    assert (done.returncode, service.requests[0].headers["authorization"]) == (0, "Bearer of-a-team"), done.stderr


MINE = Record(1, "http://127.0.0.1:1", "http://127.0.0.1:2")


def test_reading_the_record_does_not_prevent_a_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if `headgate ps` read the record at the moment of each lock."""
    state, flock = StateDir(tmp_path), fcntl.flock

    def read_during_lock(handle: Any, operation: int) -> None:
        if operation == fcntl.LOCK_EX | fcntl.LOCK_NB and (record := state.file("up.json")).exists():
            with record.open("rb") as reader:
                flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
                flock(handle, operation)
        else:  # a blocking lock is taken after that moment
            flock(handle, operation)

    monkeypatch.setattr(fcntl, "flock", read_during_lock)
    state.file("up.json").write_bytes(b"left by a killed process")
    with MINE.published(state):
        assert Record.read(state) == MINE
    assert Record.read(state) is None


def test_second_of_two_simultaneous_starts_writes_no_record(tmp_path: Path) -> None:
    state = StateDir(tmp_path)
    with state.file(LOCK).open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(AlreadyRunningError, match="already runs with the state directory"), MINE.published(state):
            pass
        assert not state.file("up.json").exists()
    with MINE.published(state):
        assert Record.read(state) == MINE
