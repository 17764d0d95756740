"""Sets up logging for a service process: one line per event to stderr, plain or JSON; decides nothing else."""

from __future__ import annotations

import json
import logging
import sys
import time
from collections.abc import Mapping

from headgate.shared.lines import Lines, left_out

FLUSH_SECONDS = 1.0
"""How long the end of a process waits for the last lines to be taken."""


class _Line(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%H:%M:%S", time.localtime(record.created))
        said = on_one_line(record.getMessage())
        line = f"{stamp}.{int(record.msecs):03d} {record.levelname.lower():7} {record.name} {said}"
        return line + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class _Apart(logging.Handler):
    """Hands lines to a thread: a reader of stderr that stands still must not hold up who serves requests."""

    def __init__(self) -> None:
        super().__init__()
        self._lines = Lines(tell=self._tell)

    def emit(self, record: logging.LogRecord) -> None:
        """Never waits."""
        try:
            self._lines.put(self.format(record))
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits for what is not written yet, though not for long."""
        self._lines.flush(FLUSH_SECONDS)

    def _tell(self, count: int) -> str:
        said = {"name": __name__, "levelname": "WARNING", "levelno": logging.WARNING, "msg": left_out(count)}
        return self.format(logging.makeLogRecord(said))


def on_one_line(said: str) -> str:
    """`said` without what begins a line or drives a terminal: names that callers chose stand in messages."""
    if said.isprintable():
        return said
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in said)


def set_up(environ: Mapping[str, str], *, apart: bool = False) -> None:
    """Configures the root logger once per process; `apart`, nobody who logs waits for who reads stderr.

    HEADGATE_LOG_LEVEL (default info) and HEADGATE_LOG_FORMAT (text or json, default text) are honored; libraries'
    own request lines are silenced because each service logs one line per decision itself.
    """
    handler = _Apart() if apart else logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if environ.get("HEADGATE_LOG_FORMAT") == "json" else _Line())
    level = environ.get("HEADGATE_LOG_LEVEL", "info").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.INFO), handlers=[handler], force=True)
    quiet()


def quiet() -> None:
    """Silences what libraries tell below a warning: their lines hold addresses, headers and bodies of requests."""
    for name in _NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)


_NOISY = (
    "uvicorn", "uvicorn.access", "httpx", "httpx2", "httpcore", "httpcore2", "openai", "anthropic", "aiohttp",
    "aiohttp.access", "asyncio",
)  # fmt: skip
