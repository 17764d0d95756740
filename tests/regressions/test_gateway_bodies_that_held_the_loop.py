"""Bodies once held the gateway's loop for seconds: escaped quotes without an end, or commas by the million."""

from __future__ import annotations

import pytest

from gateway.apis.body_parser import MAX_NESTING
from gateway.apis.openai.frames import Endpoint
from gateway.apis.openai.generation_request import parse
from gateway.errors import RequestError

SOME = b"[]" * MAX_NESTING


@pytest.mark.parametrize(
    "raw",
    [
        b'{"a":' + SOME + b'"' + b'\\"' * 4_000_000,
        b'{"a":' + SOME + b'"' + b"\\" * 8_000_000,
        b'{"a":[' + b"[]," * 2_000_000 + b"1]}",
        b"{" + b'"a":1,' * 1_500_000 + b'"a":1}',
        b"[" * 8_000_000,
        b'{"a":' + b"NaN," * 2_000_000,
    ],
    ids=["quotes", "backslashes", "empty arrays", "names", "depth", "not a number"],
)
def test_they_are_refused_at_once(raw: bytes) -> None:
    """A quadratic look at any of them would take hours, and parsing some of them many seconds."""
    with pytest.raises(RequestError) as caught:
        parse(Endpoint.CHAT, raw)
    assert caught.value.status == 400
