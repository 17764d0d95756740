"""`headgate key create`, `list`, `revoke`, and `headgate usage`."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import time
from pathlib import Path
from typing import Any

import pytest

from gateway.usage.usage_file import UsageFile, UsageRow
from gateway.usage.usage_service import accepted
from headgate.cli.main import main
from tests.rigs.processes import forget_own


@pytest.fixture(autouse=True)
def private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget_own(monkeypatch)
    monkeypatch.setenv("HEADGATE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.chdir(tmp_path)


def stored(tmp_path: Path) -> dict[str, Any]:
    """The accepted keys by name."""
    file = UsageFile(tmp_path / "state")
    try:
        return {key.name: key for key in accepted(file.stored_keys())}
    finally:
        file.close()


def test_created_key_is_stored_as_a_hash_until_it_is_revoked(capsys: Any, tmp_path: Path) -> None:
    options = ["--models", "demo, gpt-*", "--dollars", "5", "--tokens", "1000", "--requests-per-minute", "60"]
    assert main(["key", "create", "ann", *options]) == 0
    output = capsys.readouterr()
    key = output.out.strip()
    assert key not in output.err
    found = stored(tmp_path)["ann"]
    assert found.hash == "sha256:" + hashlib.sha256(key.encode()).hexdigest()
    assert (found.models, found.scopes) == (("demo", "gpt-*"), ("use",))
    assert (found.budget.dollars_per_month, found.budget.tokens_per_month) == (5.0, 1000)
    assert found.limits.requests_per_minute == 60
    assert main(["key", "list"]) == 0
    listed = capsys.readouterr().out
    assert "ann   active  use     demo,gpt-*  $5 and 1000 tokens" in listed
    assert main(["key", "create", "ann", "--admin", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["replaced"] is True
    assert stored(tmp_path)["ann"].scopes == ("use", "admin")
    assert main(["key", "revoke", "ann"]) == 0
    assert stored(tmp_path) == {}
    capsys.readouterr()
    assert main(["key", "revoke", "ann"]) == 1
    assert "active keys: none" in capsys.readouterr().err
    assert main(["key", "list", "--json"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)["keys"]
    assert entry["revoked"] is not None
    assert "hash" not in entry


@pytest.mark.parametrize(
    ("config", "words", "status", "message"),
    [
        ("", ["ann", "--tokens", "-3"], 2, "budget.tokens_per_month"),
        ("", ["ann", "--models", "*x"], 2, "neither a model name nor PREFIX*"),
        ("", ["ann", "--models", ""], 2, "leave it out for a key that may use all models"),
        ("", ["ann", "--models", " ,"], 2, "leave it out for a key that may use all models"),
        ("usage: {store: false}", ["ann"], 1, "does not read created keys"),
        (f"keys: [{{name: ann, hash: 'sha256:{'0' * 64}'}}]", ["ann"], 2, "has a key 'ann', which would be used"),
    ],
)
def test_key_that_would_not_work_is_not_created(
    capsys: Any, tmp_path: Path, config: str, words: list[str], status: int, message: str
) -> None:
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "gateway.yaml").write_text(f"admission: {{queue: 1}}\n{config}\n")
    assert main(["key", "create", *words]) == status
    output = capsys.readouterr()
    assert message in output.err
    assert output.out == ""


def test_usage_prints_sums_as_a_table_csv_and_json(capsys: Any, tmp_path: Path) -> None:
    assert main(["usage"]) == 3
    assert "no usage is stored" in capsys.readouterr().err
    file = UsageFile(tmp_path / "state")
    fields = ("/v1/chat/completions", "demo", "cloud", "openai/gpt", "demo", 100, 40, 10, 0.5, 2.0, "success", "none")
    file.add([UsageRow(time.time(), "r", key, *fields, dollars) for key, dollars in (("ann", 0.25), ("bob", None))])
    file.close()
    assert main(["usage", "--by", "key"]) == 0
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "KEY  REQUESTS  ERRORS  PROMPT  CACHED  ANSWER    TTFT     COST",
        "ann         1       0     100      40      10  0.50 s  $0.2500",
        "bob         1       0     100      40      10  0.50 s  $0.0000",
    ]
    assert "requests without a known price, not in COST: 1;" in output.err
    assert main(["usage", "--by", "key,model", "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [(row["key"], row["model"], row["prompt_tokens"]) for row in rows] == [
        ("ann", "openai/gpt", "100"), ("bob", "openai/gpt", "100"),
    ]  # fmt: skip
    assert main(["usage", "--by", "", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"][0]["requests"] == 2
    assert main(["usage", "--since", "2030-01-01"]) == 0
    assert capsys.readouterr().out == "no requests in this time\n"
    assert main(["usage", "--by", "color"]) == 2
