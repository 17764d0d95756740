"""The usage file: one SQLite database in the state directory with requests, sums per month, and keys.

SQLite in WAL mode, so that `headgate usage` and `headgate key` work while the gateway runs. All methods block.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from gateway.access.budgets import Spent, month_of
from gateway.usage.capture import Captured
from gateway.usage.usage_query import GROUPS
from headgate.shared.errors import HeadgateError

NAME = "usage.sqlite3"
VERSION = 2
"""Of the tables. 2 added `captures`."""
BUSY_SECONDS = 5.0
_DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS requests (
    at REAL NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, endpoint TEXT NOT NULL, route TEXT NOT NULL,
    tier TEXT NOT NULL, model TEXT NOT NULL, requested TEXT NOT NULL, prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL, completion_tokens INTEGER NOT NULL, ttft_seconds REAL, seconds REAL NOT NULL,
    outcome TEXT NOT NULL, reason TEXT NOT NULL, dollars REAL
);
CREATE INDEX IF NOT EXISTS requests_at ON requests (at);
CREATE TABLE IF NOT EXISTS months (
    month TEXT NOT NULL, key TEXT NOT NULL, requests INTEGER NOT NULL, tokens INTEGER NOT NULL, dollars REAL NOT NULL,
    PRIMARY KEY (month, key)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS captures (
    at REAL NOT NULL, id TEXT NOT NULL, key TEXT NOT NULL, route TEXT NOT NULL, request TEXT NOT NULL,
    answer TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS captures_at ON captures (at);
CREATE INDEX IF NOT EXISTS captures_id ON captures (id);
CREATE TABLE IF NOT EXISTS keys (
    name TEXT PRIMARY KEY, settings TEXT NOT NULL, created REAL NOT NULL, revoked REAL
) WITHOUT ROWID;
"""


class UsageRow(NamedTuple):
    """One request. `at` is Unix time, `model` PROVIDER/MODEL that answered; `dollars` None if the price is unknown."""

    at: float
    id: str
    key: str
    endpoint: str
    route: str
    tier: str
    model: str
    requested: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft_seconds: float | None
    seconds: float
    outcome: str
    reason: str
    dollars: float | None


class StoredKey(NamedTuple):
    """A key that was created at run time; `settings` are those of an entry of `keys` in gateway.yaml."""

    name: str
    settings: Mapping[str, Any]
    created: float
    revoked: float | None


_INSERT = f"INSERT INTO requests VALUES ({', '.join('?' * len(UsageRow._fields))})"  # noqa: S608
_ADD_MONTH = """INSERT INTO months VALUES (?, ?, ?, ?, ?) ON CONFLICT (month, key) DO UPDATE
SET requests = requests + excluded.requests, tokens = tokens + excluded.tokens, dollars = dollars + excluded.dollars"""
_GROUP_SQL = {name: name for name in GROUPS} | {"day": "strftime('%Y-%m-%d', at, 'unixepoch')"}


def _sums_by_month(rows: Sequence[UsageRow]) -> list[tuple[str, str, int, int, float]]:
    """Month, key, number of requests, tokens and dollars of `rows`."""
    found: dict[tuple[str, str], tuple[int, int, float]] = {}
    for row in rows:
        key = month_of(row.at), row.key
        requests, tokens, dollars = found.get(key, (0, 0, 0.0))
        tokens += row.prompt_tokens + row.completion_tokens
        found[key] = requests + 1, tokens, dollars + (row.dollars or 0.0)
    return [(*key, *sums) for key, sums in found.items()]


def advice(error: Exception) -> str:
    """What happened to the usage file, and what to do about a damaged one."""
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(code, int) and code & 0xFF in _DAMAGED:
        return f"{error}; move {NAME} away, then a new one is created"
    return str(error) or type(error).__name__


class UsageFile:
    """An open usage file, created if it is missing. Raises sqlite3.Error, and HeadgateError for a newer format."""

    def __init__(self, directory: Path) -> None:
        path = directory / NAME
        path.touch(mode=0o600, exist_ok=True)
        self._path, self._identity = path, _identity(path)
        # Statements run one after the other, but not always in the thread that opened the file.
        self._db = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
        try:
            self._prepare(path)
        except BaseException:
            self._db.close()
            raise

    def _prepare(self, path: Path) -> None:
        self._db.execute("PRAGMA auto_vacuum = INCREMENTAL")
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = NORMAL")
        with self._transaction():
            version = self._db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise HeadgateError(
                    f"{path} was written by a newer version of Headgate (format {version}, this one reads {VERSION}); "
                    "move the file away or install the newer version"
                )
            if version < VERSION:
                for statement in filter(str.strip, _SCHEMA.split(";")):
                    self._db.execute(statement)
                self._db.execute(f"PRAGMA user_version = {VERSION}")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """Commits at its end, or rolls back after an error."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def close(self) -> None:
        """Closes the file."""
        self._db.close()

    def is_in_place(self) -> bool:
        """Whether the file is still the one in the directory, and not removed or replaced."""
        return _identity(self._path) == self._identity

    def revision(self) -> int:
        """Changes whenever another connection has changed the file."""
        return int(self._db.execute("PRAGMA data_version").fetchone()[0])

    # --- requests ----------------------------------------------------------------------------------------------------
    def add(self, rows: Sequence[UsageRow], captures: Sequence[Captured] = ()) -> None:
        """Stores requests, adds them to the sums of their month, and stores bodies, all or none."""
        with self._transaction():
            self._db.executemany("INSERT INTO captures VALUES (?, ?, ?, ?, ?, ?)", captures)
            self._db.executemany(_INSERT, rows)
            self._db.executemany(_ADD_MONTH, _sums_by_month(rows))

    def spent(self, month: str) -> dict[str, Spent]:
        """What each key used in `month`."""
        rows = self._db.execute("SELECT key, dollars, tokens FROM months WHERE month = ?", (month,))
        return {key: Spent(dollars, tokens) for key, dollars, tokens in rows}

    def sums(self, by: Sequence[str], since: float, until: float) -> list[dict[str, Any]]:
        """Sums of the requests in [since, until), grouped by GROUPS in `by`; the largest cost first, or in order of
        days if these are the first group.

        `errors`: without a complete answer. `unpriced`: answers of models without a known price.
        """
        columns = "".join(f'{_GROUP_SQL[name]} AS "{name}", ' for name in by)
        positions = ", ".join(str(index + 1) for index in range(len(by)))
        order = "1" if by[:1] == ["day"] else "dollars DESC, requests DESC"
        statement = f"""SELECT {columns}COUNT(*) AS requests, SUM(outcome <> 'success') AS errors,
            SUM(prompt_tokens) AS prompt_tokens, SUM(cached_tokens) AS cached_tokens,
            SUM(completion_tokens) AS completion_tokens, ROUND(AVG(ttft_seconds), 4) AS ttft_seconds,
            ROUND(AVG(seconds), 4) AS seconds, ROUND(TOTAL(dollars), 6) AS dollars,
            SUM(dollars IS NULL) AS unpriced
            FROM requests WHERE at >= ? AND at < ?{f" GROUP BY {positions}" if by else ""} ORDER BY {order}"""  # noqa: S608
        found = self._db.execute(statement, (since, until))
        names = [column[0] for column in found.description]
        rows = [dict(zip(names, row, strict=True)) for row in found]
        return [row for row in rows if row["requests"]]

    def captured(self, id: str) -> Captured | None:
        """The bodies of the last request with this id; None if they are not stored."""
        row = self._db.execute("SELECT * FROM captures WHERE id = ? ORDER BY at DESC LIMIT 1", (id,)).fetchone()
        return None if row is None else Captured(*row)

    def drop_before(self, at: float) -> int:
        """Removes the requests and bodies before a Unix time; the number of requests. Sums of months stay."""
        self._db.execute("DELETE FROM captures WHERE at < ?", (at,))
        return self._db.execute("DELETE FROM requests WHERE at < ?", (at,)).rowcount

    def shrink_to(self, max_bytes: int) -> int:
        """Removes the oldest bodies, then the oldest requests until the data fit into `max_bytes`; the number of
        requests.
        """
        self._shrink("captures", max_bytes)
        return self._shrink("requests", max_bytes)

    def _shrink(self, table: str, max_bytes: int) -> int:
        removed = 0
        while (excess := self.data_bytes() - max_bytes) > 0:
            total = self._db.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0]  # noqa: S608
            if not total:
                break
            share = min(1.0, excess / max(1, self.data_bytes()))
            count = max(1, int(total * share))
            removed += self._db.execute(
                f"DELETE FROM {table} WHERE rowid IN (SELECT rowid FROM {table} ORDER BY at LIMIT ?)",  # noqa: S608
                (count,),
            ).rowcount
        if removed:
            self._db.execute("PRAGMA incremental_vacuum").fetchall()
        return removed

    def data_bytes(self) -> int:
        """Bytes of the pages in use."""
        pages, free, size = (
            self._db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("page_count", "freelist_count", "page_size")
        )
        return int((pages - free) * size)

    # --- keys --------------------------------------------------------------------------------------------------------
    def stored_keys(self) -> list[StoredKey]:
        """All keys, revoked ones too, the oldest first."""
        rows = self._db.execute("SELECT name, settings, created, revoked FROM keys ORDER BY created, name")
        return [StoredKey(name, json.loads(settings), created, revoked) for name, settings, created, revoked in rows]

    def put_key(self, name: str, settings: Mapping[str, Any], now: float) -> None:
        """Stores a key; one with the same name is replaced, so that its old secret is no longer accepted."""
        self._db.execute("INSERT OR REPLACE INTO keys VALUES (?, ?, ?, NULL)", (name, json.dumps(settings), now))

    def revoke_key(self, name: str, now: float) -> bool:
        """Revokes a key; False if none with this name is accepted."""
        done = self._db.execute("UPDATE keys SET revoked = ? WHERE name = ? AND revoked IS NULL", (now, name))
        return done.rowcount > 0


def _identity(path: Path) -> tuple[int, int] | None:
    """Device and inode; None without a file."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino
