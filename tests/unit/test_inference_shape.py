"""What a crash record tells of a request: how large it was and what it asked for, never what it said."""

from __future__ import annotations

import json

from inference.api.request_shape import envelope_of, shape_of


def test_a_shape_counts_and_never_quotes() -> None:
    body = {
        "messages": [{"role": "user", "content": "a secret"}],
        "tools": [{}, {}],
        "max_tokens": 7,
        "n": True,
        "stream": True,
        "regex": "secret",
    }
    shape = shape_of("/v1/chat/completions", 99, envelope_of(json.dumps(body).encode()))
    assert shape == {
        "path": "/v1/chat/completions", "body_bytes": 99, "stream": True, "messages": 1, "tools": 2, "max_tokens": 7,
        "constrained": True,
    }  # fmt: skip
    assert shape_of("/tokenize", 2, envelope_of(b'{"messages":"text"}')) == {
        "path": "/tokenize",
        "body_bytes": 2,
        "stream": False,
    }
