"""The usage file and its writer."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gateway.access.budgets import Spent
from gateway.routing.explain_record import Record
from gateway.usage import usage_writer
from gateway.usage.capture import Captured
from gateway.usage.usage_file import NAME, StoredKey, UsageFile, UsageRow, advice
from gateway.usage.usage_service import usage_row
from gateway.usage.usage_writer import MAX_CAPTURES, Retention, UsageWriter
from headgate.shared.errors import HeadgateError
from tests.rigs.processes import wait_until

AT = 1_795_000_000.0  # 2026-11-18


def row(at: float = AT, key: str = "ann", model: str = "openai/gpt-4o", **more: Any) -> UsageRow:
    fields: dict[str, Any] = {
        "id": "r", "endpoint": "/v1/chat/completions", "route": "demo", "tier": "cloud", "requested": "demo",
        "prompt_tokens": 100, "cached_tokens": 40, "completion_tokens": 10, "ttft_seconds": 0.5, "seconds": 2.0,
        "outcome": "success", "reason": "none", "dollars": 0.25,
    }  # fmt: skip
    return UsageRow(at=at, key=key, model=model, **(fields | more))


@pytest.fixture
def file(tmp_path: Path) -> Any:
    opened = UsageFile(tmp_path)
    yield opened
    opened.close()


def test_sums_are_grouped_and_limited_to_a_time(file: UsageFile) -> None:
    file.add([row(), row(AT + 86400, outcome="broken", dollars=None, ttft_seconds=None), row(key="bob", dollars=1.0)])
    by_key = file.sums(["key"], 0, 2e9)
    assert [(found["key"], found["requests"], found["dollars"]) for found in by_key] == [
        ("bob", 1, 1.0),
        ("ann", 2, 0.25),
    ]
    assert by_key[1] | {"key": ""} == {
        "key": "", "requests": 2, "errors": 1, "prompt_tokens": 200, "cached_tokens": 80, "completion_tokens": 20,
        "ttft_seconds": 0.5, "seconds": 2.0, "dollars": 0.25, "unpriced": 1,
    }  # fmt: skip
    assert [found["day"] for found in file.sums(["day", "model"], 0, 2e9)] == ["2026-11-18", "2026-11-19"]
    assert [found["requests"] for found in file.sums([], AT, AT + 1)] == [2]
    assert file.sums([], AT + 1e6, 2e9) == []


def test_sums_of_a_month_survive_the_removal_of_its_requests(file: UsageFile) -> None:
    file.add([row(), row(AT + 10, key="bob")])
    assert file.drop_before(AT + 5) == 1
    assert [found["key"] for found in file.sums(["key"], 0, 2e9)] == ["bob"]
    assert file.spent("2026-11") == {"ann": Spent(0.25, 110), "bob": Spent(0.25, 110)}
    assert file.spent("2026-12") == {}


def test_file_shrinks_to_its_bound_by_removing_the_oldest(file: UsageFile, tmp_path: Path) -> None:
    file.add([row(AT + number, id="x" * 200) for number in range(5000)])
    assert file.data_bytes() > 2**20
    removed = file.shrink_to(2**20)
    assert 0 < removed < 5000
    assert file.data_bytes() <= 2**20
    assert min(found[0] for found in file._db.execute("SELECT at FROM requests")) == AT + removed
    assert file.shrink_to(0) == 5000 - removed, "a bound that cannot be met ends with an empty file"


def test_a_batch_is_stored_whole_or_not_at_all(file: UsageFile) -> None:
    with pytest.raises(sqlite3.IntegrityError):
        file.add([row(), row()._replace(key=None)])  # type: ignore[arg-type]
    assert file.sums([], 0, 2e9) == []
    file.add([row()])
    assert file.spent("2026-11")["ann"].tokens == 110


def test_counts_of_any_size_in_an_answer_can_be_stored(file: UsageFile) -> None:
    """SQLite has integers of 64 bits."""
    record = Record("r", AT, "/v1/chat/completions", key="ann")
    record.note_usage(b'{"prompt_tokens": %d, "completion_tokens": %d, "cached_tokens": %d}' % (2**63, 2**64, 10**300))
    file.add([row(), usage_row(record, "cloud", {})])
    assert file.spent("2026-11")["ann"].tokens < 2 * 10**15 + 110


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("PRAGMA user_version = 99")
    with pytest.raises(HeadgateError, match=r"newer version of Headgate \(format 99"):
        UsageFile(tmp_path)


def test_a_file_of_an_older_version_gets_the_tables_that_it_lacks(tmp_path: Path) -> None:
    file = UsageFile(tmp_path)
    file.add([row()])
    file.close()
    with sqlite3.connect(tmp_path / NAME) as db:
        db.execute("DROP TABLE captures")
        db.execute("PRAGMA user_version = 1")
    db.close()
    file = UsageFile(tmp_path)
    assert file.drop_before(AT) == 0
    file.add([row()])
    assert file.sums([], 0, 2e9)[0]["requests"] == 2
    file.close()


def test_file_is_readable_by_its_owner_only(tmp_path: Path, file: UsageFile) -> None:
    assert (tmp_path / NAME).stat().st_mode & 0o777 == 0o600


def test_keys_are_replaced_and_revoked_by_name(file: UsageFile, tmp_path: Path) -> None:
    other = UsageFile(tmp_path)
    before = file.revision()
    other.put_key("ann", {"hash": "1"}, 1.0)
    other.put_key("ann", {"hash": "2"}, 2.0)
    assert file.revision() != before
    assert file.stored_keys() == [StoredKey("ann", {"hash": "2"}, 2.0, None)]
    assert other.revoke_key("ann", 3.0)
    assert not other.revoke_key("ann", 4.0)
    assert not other.revoke_key("bob", 4.0)
    assert file.stored_keys()[0].revoked == 3.0
    other.close()


class _Writer:
    """A writer that the test flushes."""

    def __init__(self, directory: Path) -> None:
        self.keys: list[Sequence[StoredKey]] = []
        self.retention = Retention(1e9, 2**30)
        self.writer = UsageWriter(directory, lambda: self.retention, self.keys.append, lambda: AT + 100)


def _requests(directory: Path) -> int:
    file = UsageFile(directory)
    try:
        return sum(found["requests"] for found in file.sums([], 0, 2e9))
    finally:
        file.close()


def test_rows_are_kept_until_the_file_can_be_used_and_the_log_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(usage_writer, "MAX_WAITING", 3)
    (tmp_path / NAME).write_bytes(b"not a database" * 100)
    rig = _Writer(tmp_path)
    caplog.set_level(logging.INFO, "gateway.usage")
    for number in range(5):
        rig.writer.put(row(AT + number))
        rig.writer.flush()
    (tmp_path / NAME).unlink()
    rig.writer.flush()
    assert _requests(tmp_path) == 3
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        f"usage cannot be stored in {tmp_path}", "usage is stored again; the usage of 2 requests was lost",
    ]  # fmt: skip


def test_a_file_that_is_removed_or_replaced_while_it_is_open_is_opened_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rig = _Writer(tmp_path)
    rig.writer.put(row())
    rig.writer.flush()
    (tmp_path / NAME).unlink()
    for companion in tmp_path.glob(f"{NAME}-*"):
        companion.unlink()
    other = UsageFile(tmp_path)
    other.put_key("ann", {}, 1.0)
    other.close()
    rig.writer.put(row(AT + 1))
    rig.writer.flush()
    assert _requests(tmp_path) == 1
    assert [key.name for key in rig.keys[-1]] == ["ann"]
    assert [record.getMessage() for record in caplog.records] == [
        f"the usage file in {tmp_path} was removed or replaced; it is opened again"
    ]


def test_an_error_of_a_damaged_file_says_what_to_do(tmp_path: Path, file: UsageFile) -> None:
    other = tmp_path / "damaged"
    other.mkdir()
    (other / NAME).write_bytes(b"not a database" * 100)
    with pytest.raises(sqlite3.DatabaseError) as damaged:
        UsageFile(other)
    assert advice(damaged.value) == f"file is not a database; move {NAME} away, then a new one is created"
    assert advice(sqlite3.OperationalError("database is locked")) == "database is locked"
    assert advice(TimeoutError()) == "TimeoutError"


def test_changed_keys_are_reported_and_old_rows_removed(tmp_path: Path) -> None:
    rig = _Writer(tmp_path)
    rig.retention = Retention(50, 2**30)
    rig.writer.put(row(AT))
    rig.writer.put(row(AT + 60))
    rig.writer.flush()
    assert _requests(tmp_path) == 1
    assert rig.keys == [[]]
    file = UsageFile(tmp_path)
    file.put_key("ann", {}, 1.0)
    file.close()
    rig.writer.flush()
    rig.writer.flush()
    assert [len(keys) for keys in rig.keys] == [0, 1]


def test_closing_stores_what_is_queued(tmp_path: Path) -> None:
    rig = _Writer(tmp_path)
    rig.writer.start()
    wait_until("the file exists", lambda: rig.keys, seconds=5)
    rig.writer.put(row())
    rig.writer.close()
    assert _requests(tmp_path) == 1


def test_bodies_that_cannot_be_redacted_are_dropped_and_rows_stored(tmp_path: Path) -> None:
    def redact(text: str) -> str:
        if text == "bad":
            raise RecursionError("too deep")
        return text.upper()

    writer = UsageWriter(tmp_path, lambda: Retention(1e9, 2**30), lambda _: None, lambda: AT + 100, redact)
    writer.put(row())
    writer.put_bodies(Captured(AT, "one", "ann", "demo", "bad", "x"))
    writer.put_bodies(Captured(AT, "two", "ann", "demo", "good", "x"))
    writer.flush()
    writer.flush()
    assert _requests(tmp_path) == 1
    file = UsageFile(tmp_path)
    assert file.captured("one") is None
    assert file.captured("two") == Captured(AT, "two", "ann", "demo", "GOOD", "X")
    file.close()


def test_bodies_that_arrive_during_a_write_are_stored(tmp_path: Path) -> None:
    """Also when they fill the queue."""

    def redact(text: str) -> str:
        if text == "first":
            for number in range(MAX_CAPTURES):
                writer.put_bodies(Captured(AT, f"later {number}", "ann", "demo", "q", "a"))
        return text

    writer = UsageWriter(tmp_path, lambda: Retention(1e9, 2**30), lambda _: None, lambda: AT + 100, redact)
    writer.put_bodies(Captured(AT, "early", "ann", "demo", "first", "a"))
    writer.flush()
    writer.flush()
    file = UsageFile(tmp_path)
    stored = [name for name in ("early", "later 0", f"later {MAX_CAPTURES - 1}") if file.captured(name) is not None]
    assert len(stored) == 3
    file.close()
