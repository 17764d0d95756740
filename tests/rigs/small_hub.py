"""A small hub: the two endpoints that a download uses, with ranges, redirects and faults."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class SmallHub:
    """Repositories with their files. `cut_after` ends the next answers after that number of bytes.

    While `flows` is not set, files stop after 1,000 bytes.
    """

    repositories: Mapping[str, Mapping[str, bytes]]
    url: str = ""
    cut_after: list[int] = field(default_factory=list)
    flows: threading.Event = field(default_factory=threading.Event)
    wrong_sums: bool = False
    lists_sizes: bool = True
    ignores_ranges: bool = False
    gated: frozenset[str] = frozenset()
    tokens: list[str] = field(default_factory=list)
    ranges: list[str] = field(default_factory=list)

    def describe(self, repository: str) -> dict[str, Any]:
        """The answer of `/api/models/REPOSITORY?blobs=true`."""
        files: list[dict[str, Any]] = [
            {"rfilename": name}
            if not self.lists_sizes
            else {
                "rfilename": name,
                "size": len(data),
                "lfs": {"sha256": "0" * 64 if self.wrong_sums else hashlib.sha256(data).hexdigest(), "size": len(data)},
            }
            for name, data in self.repositories[repository].items()
        ]
        return {"id": repository, "sha": "c0ffee", "siblings": [*files, {"rfilename": "README.md", "size": 3}]}


@contextmanager
def small_hub(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[SmallHub]:
    """The hub on a free port of loopback until the block ends."""
    hub = SmallHub(repositories)
    hub.flows.set()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Connection", "close")
            self.end_headers()
            if hub.cut_after and status in (200, 206) and self.path.startswith("/cdn/"):
                body = body[: hub.cut_after.pop(0)]
            if self.path.startswith("/cdn/") and not hub.flows.is_set():
                self.wfile.write(body[:1000])
                hub.flows.wait(30)
                body = body[1000:]
            with contextlib.suppress(ConnectionError):
                self.wfile.write(body)

        def do_GET(self) -> None:
            path = unquote(self.path.partition("?")[0])
            hub.tokens.append(self.headers.get("authorization", ""))
            if path.startswith("/api/models/"):
                name = path.removeprefix("/api/models/")
                if name in hub.gated and not self.headers.get("authorization"):
                    self._send(401, b"{}")
                elif name in hub.repositories:
                    self._send(200, json.dumps(hub.describe(name)).encode())
                else:
                    self._send(401, b'{"error": "Invalid username or password."}')
            elif "/resolve/c0ffee/" in path and not path.startswith("/cdn/"):
                self._send(302, b"", {"Location": f"/cdn{self.path}"})
            else:
                repository, _, name = path.removeprefix("/cdn/").partition("/resolve/c0ffee/")
                self._file(hub.repositories[repository][name])

        def _file(self, data: bytes) -> None:
            asked = self.headers.get("range")
            if asked and not hub.ignores_ranges:
                hub.ranges.append(asked)
                begin = int(asked.removeprefix("bytes=").rstrip("-"))
                total = len(data)
                self._send(206, data[begin:], {"Content-Range": f"bytes {begin}-{total - 1}/{total}"})
            else:
                self._send(200, data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
