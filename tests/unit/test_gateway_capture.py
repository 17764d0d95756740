"""Captured bodies: what is left out, and how much is kept."""

from __future__ import annotations

import re

import pytest

from gateway.apis.openai.frames import Data, DeltaKind
from gateway.apis.openai.openai_api import OpenAIWriter
from gateway.usage.capture import MOST_BYTES, CapturingWriter, KeptAnswer, redacted


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("my key is sk-proj-abcdefghijklmnop1234 ok", "my key is [redacted] ok"),
        ("hg-QmGjZZhNcoAml5ENGK5WtJ-V3I6HgmR55eboOJtCFGo", "[redacted]"),
        ("Authorization: Bearer abc.def-0123456789xyz==", "Authorization: Bearer [redacted]"),
        ("AKIAIOSFODNN7EXAMPLE", "[redacted]"),
        ("data:image/png;base64,aGVsbG8gd29ybGQh", "data:image/png;base64,[12 bytes]"),
        ("-----BEGIN RSA PRIVATE KEY-----MIIE\\nabc-----END RSA PRIVATE KEY----- x", "[redacted] x"),
        ("ask-me-anything about sk-short", "ask-me-anything about sk-short"),
        ("write to ann@example.org", "write to [redacted]"),
    ],
)
def test_secrets_and_files_are_left_out(text: str, shown: str) -> None:
    assert redacted(text, [re.compile(r"[\w.]+@[\w.]+")]) == shown


def test_writer_keeps_the_beginning_of_what_it_writes() -> None:
    kept = KeptAnswer()
    writer = CapturingWriter(OpenAIWriter(include_usage=False), kept)
    assert writer.media_type == OpenAIWriter(include_usage=False).media_type
    written = writer.write([Data(b'{"choices":[]}', DeltaKind.CONTENT)]) + writer.end()
    written += writer.end_with_error("model_failed", "no")
    assert kept.text() == written.decode()
    for _ in range(3):
        kept.add(b"x" * MOST_BYTES)
    assert len(kept.text()) == MOST_BYTES
