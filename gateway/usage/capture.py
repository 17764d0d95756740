"""Bodies of requests and answers that a route keeps, without secrets and without the bytes of files."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import NamedTuple

from gateway.apis.lenient_json import dumps
from gateway.apis.openai.assemble import Assembly
from gateway.apis.openai.frames import Data, Frame
from gateway.apis.public_api import Writer

MAX_BYTES = 2**18
"""Bytes that are kept of a request, and of an answer."""
MAX_STREAM_BYTES = 16 * MAX_BYTES
"""Bytes of the chunks of a stream that are put together: the text of an answer is a small part of its chunks."""
REDACTED = "[redacted]"
MAX_SECRET_BYTES = 8192
"""The longest secret of which no part is kept where a body is cut."""

# These patterns read JSON, where a line end is written as `\n` and is not a word boundary. Each takes linear time.
_ESCAPED = r"(?<=\\[bfnrt])|(?<=\\u[0-9a-fA-F]{4})"
_START = rf"(?:(?<![A-Za-z0-9])|{_ESCAPED})"
_DATA = re.compile(r"data:([\w.+-]+/[\w.+-]+)?(?:;[\w=-]+)*;base64,([A-Za-z0-9+/_-]+)=*")
_SECRETS = re.compile(
    rf"{_START}(?:(?:sk|pk|rk|hg|gsk|xai|hf|ghp|gho|ghu|ghs|ghr|github_pat|glpat|xox[abeoprs])[-_][A-Za-z0-9_-]{{16,}}"
    r"|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,})"
    rf"|(?:(?<![A-Za-z0-9_-])|{_ESCAPED})eyJ[A-Za-z0-9_-]{{10,}}\.[A-Za-z0-9_-]{{10,}}\.[A-Za-z0-9_-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|$)"
)
_TOKEN = re.compile(
    rf"({_START}(?i:bearer)\s+(?=[A-Za-z0-9._~+/-]{{16}})|(?i:authorization)[\\\": ]{{1,8}}(?i:basic)\s+)"
    r"[A-Za-z0-9._~+/-]{8,}=*"
)
_PASSWORD = re.compile(r"(://[^\s/:@\"\\]{1,128}:)[^\s/@\"\\]{1,256}@")
_END = re.compile(rb"[^A-Za-z0-9_.~+/-](?=[A-Za-z0-9_.~+/-]*$)")
"""The last byte that is not part of a secret."""


class Captured(NamedTuple):
    """A request and its answer as text; each is cut at MAX_BYTES."""

    at: float
    id: str
    key: str
    route: str
    request: str
    answer: str


def redacted(text: str, patterns: Sequence[re.Pattern[str]] = ()) -> str:
    """`text` without keys, tokens, passwords in URLs, the content of data: URLs, and what `patterns` find."""
    text = _DATA.sub(lambda found: f"data:{found[1] or ''};base64,[{len(found[2]) * 3 // 4} bytes]", text)
    text = _TOKEN.sub(rf"\1{REDACTED}", _SECRETS.sub(REDACTED, text))
    text = _PASSWORD.sub(rf"\1{REDACTED}@", text)
    for pattern in patterns:
        text = pattern.sub(REDACTED, text)
    return text


def kept_text(body: bytes) -> str:
    """The beginning of `body` as text. It is not cut within a secret, half of which `redacted` does not recognize."""
    if len(body) <= MAX_BYTES:
        return body.decode("utf-8", "replace")
    kept = body[: MAX_BYTES - MAX_SECRET_BYTES]
    tail = body[len(kept) : MAX_BYTES]
    last = _END.search(tail)
    return (kept + tail[: last.end()] if last else kept).decode("utf-8", "replace")


class CapturingWriter:
    """A writer that keeps the answer which it writes, in one piece: a secret may be divided over several chunks."""

    def __init__(self, writer: Writer) -> None:
        self._writer = writer
        self._answer = Assembly()
        self._bytes = 0
        self._error: dict[str, str] | None = None

    @property
    def media_type(self) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        return self._writer.media_type

    def write(self, frames: Sequence[Frame]) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        for frame in frames:
            if isinstance(frame, Data) and self._bytes < MAX_STREAM_BYTES:
                self._bytes += len(frame.payload)
                with contextlib.suppress(ValueError):  # an invalid chunk is the client's to handle
                    self._answer.add(frame.parsed())
        return self._writer.write(frames)

    def end(self) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        return self._writer.end()

    def end_with_error(self, code: str, message: str) -> bytes:
        """See `gateway.apis.public_api.Writer`."""
        self._error = {"code": code, "message": message}
        return self._writer.end_with_error(code, message)

    def answer(self) -> bytes:
        """The answer as one OpenAI object, with `error` if it ended in an error."""
        try:
            found = self._answer.result()
        except ValueError:  # no chunk was written
            found = {}
        return dumps(found if self._error is None else {**found, "error": self._error})
