"""Invalid requests to any route get an error envelope and never an internal error."""

from __future__ import annotations

import itertools

from tests.rigs.asgi import ask, operations
from tests.rigs.authority_rig import Start

BODIES = (
    b"", b"{", b"[]", b"null", b'"x"', b"1e999", b"{}", b"\xff\xfe", b"[" * 5000, b'{"model": null}', b'{"models": []}',
    b'{"models": ["nope"]}', b'{"device": ""}', b'{"device": "gpu-9"}', b'{"model": "a", "context_length": 1e400}',
    b'{"model": "a", "parallel": -1}', b'{"large_objects": 1e30}', b'{"before": "\\u0000", "after": "\\ud800"}',
)  # fmt: skip
NAMES = ("a", "nope", "%00", "%ED%A0%80", "..%2f..%2fetc", "%F0%9F%92%A9", "x" * 3000)
QUERIES = ("", "?seconds=-1", "?seconds=nan", "?now=maybe", "?minutes=1e999", "?limit=1.5", "?action=")


async def test_invalid_requests_get_the_error_envelope(start: Start) -> None:
    service = await start({"a": {}})
    for method, path in operations(service.app):
        if path in ("/events", "/memory/gc", "/memory/defragment"):  # endless, or slow and without parameters
            continue
        targets = [path.replace("{model_id}", name) for name in NAMES] if "{" in path else [path]
        bodies = BODIES if method == "POST" and path.startswith("/memory") else BODIES[:3]
        cases = [*itertools.product(targets[:1], bodies, [""]), *itertools.product(targets, [b"{}"], QUERIES)]
        for target, body, query in cases:
            answer = await ask(service.app, method, target + query, raw=body)
            assert answer.status < 500 or answer.status == 503, (method, target[:50], body[:50], query, answer.body)
            if answer.status >= 400:
                assert set(answer.body["error"]) >= {"message", "type", "param", "code"}
                assert len(answer.body["error"]["message"]) < 2000
