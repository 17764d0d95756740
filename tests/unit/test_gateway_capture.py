"""Captured bodies: what is left out, and how much is kept."""

from __future__ import annotations

import json
import re
import time

import pytest

from gateway.apis.openai.frames import Data, DeltaKind
from gateway.apis.openai.openai_api import OpenAIWriter
from gateway.usage.capture import MAX_BYTES, MAX_SECRET_BYTES, CapturingWriter, kept_text, redacted


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
        (r"my keys:\nsk-abcdefghijklmnop1234\r\nghp_abcdefghijklmnop", r"my keys:\n[redacted]\r\n[redacted]"),
        (r"{\"k\": \"x\\nAKIAIOSFODNN7EXAMPLE\"}", r"{\"k\": \"x\\n[redacted]\"}"),
        ("KEY_sk-abcdefghijklmnop1234, \u5bc6\u94a5sk-abcdefghijklmnop1234", "KEY_[redacted], \u5bc6\u94a5[redacted]"),
        (r"a\neyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc_def", r"a\n[redacted]"),
        (r"curl:\nBEARER abcdefghijklmnop0123456789", r"curl:\nBEARER [redacted]"),
        (r"\"Authorization\": \"Basic dXNlcjpwYXNz\"", r"\"Authorization\": \"Basic [redacted]\""),
        ("https://ann:secret@example.com/x", "https://ann:[redacted]@example.com/x"),
        ("write to ann@example.org", "write to [redacted]"),
    ],
)
def test_secrets_and_files_are_redacted(text: str, shown: str) -> None:
    assert redacted(text, [re.compile(r"[\w.]+@[\w.]+")]) == shown


def _chunk(text: str) -> Data:
    return Data(json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}).encode(), DeltaKind.CONTENT)


def test_stream_is_kept_in_one_piece_so_that_a_divided_secret_is_found() -> None:
    writer = CapturingWriter(OpenAIWriter(include_usage=False))
    assert writer.media_type == OpenAIWriter(include_usage=False).media_type
    chunks = [_chunk("the key is sk-proj-abcdef"), _chunk("ghijklmnop1234, "), _chunk("keep it")]
    written = writer.write([chunks[0], Data(b"{}", DeltaKind.CONTENT)]) + writer.write(chunks[1:]) + writer.end()
    assert b"sk-proj-abcdef" in written
    kept = json.loads(redacted(writer.answer().decode()))
    assert kept["choices"][0]["message"]["content"] == "the key is [redacted], keep it"
    assert "error" not in kept


def test_failed_answer_is_kept_with_its_error() -> None:
    writer = CapturingWriter(OpenAIWriter(include_usage=False))
    assert b"model_failed" in writer.end_with_error("model_failed", "no")
    assert json.loads(writer.answer()) == {"error": {"code": "model_failed", "message": "no"}}


def test_beginning_of_a_long_answer_is_kept() -> None:
    writer = CapturingWriter(OpenAIWriter(include_usage=False))
    piece = _chunk("x" * MAX_BYTES)
    for _ in range(20):
        writer.write([piece])
    assert MAX_BYTES < len(writer.answer()) < 17 * MAX_BYTES
    assert MAX_BYTES - MAX_SECRET_BYTES <= len(kept_text(writer.answer())) <= MAX_BYTES


@pytest.mark.parametrize("before", [" the key is ", '","content":"', r"\n", ",", "\u5bc6\u94a5"])
def test_secret_at_the_cut_is_not_kept_in_part(before: str) -> None:
    start = "x" * (MAX_BYTES - len(before) - 12)
    kept = kept_text(f"{start}{before}sk-proj-abcdefghijklmnopqrstuvwxyz".encode())
    assert len(kept) > MAX_BYTES - 40
    assert "sk-" not in kept


@pytest.mark.parametrize(
    "piece",
    ["-eyJ", "eyJabcdefghijkl.", "sk-", "data:a/", "data:a/b;a", ";a", "-----BEGIN ", "-----BEGIN A PRIVATE KEY-----",
     "Bearer ", "Authorization: basic ", "://a:", "AIza", "a,"],
)  # fmt: skip
def test_redaction_takes_linear_time(piece: str) -> None:
    began = time.process_time()
    kept_text(redacted(piece * (MAX_BYTES // len(piece))).encode() * 2)
    assert time.process_time() - began < 1
