"""A small HTTP service with canned answers and a record of its requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote


@dataclass
class Canned:
    """One answer: a JSON `body`, or `frames` of a stream, which are sent in order before it closes.

    `gate` is called before each frame; `left` is set when the client disconnects before the last one.
    """

    body: Any = None
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    frames: Sequence[bytes] | None = None
    gate: Callable[[int], object] | None = None
    left: threading.Event = field(default_factory=threading.Event)


@dataclass
class Received:
    """One received request."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class CannedService:
    """`answers` maps "METHOD /path" to an answer; other requests get a 404 with the envelope."""

    answers: dict[str, Canned]
    url: str = ""
    requests: list[Received] = field(default_factory=list)


@contextmanager
def canned_service(answers: Mapping[str, Canned]) -> Iterator[CannedService]:
    """The service on a free port of loopback until the block ends."""
    service = CannedService(dict(answers))

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            """Logs nothing."""

        def _answer(self) -> None:
            raw = self.rfile.read(int(self.headers.get("content-length") or 0))
            path = unquote(self.path)
            headers = {name.lower(): value for name, value in self.headers.items()}
            service.requests.append(Received(self.command, path, headers, json.loads(raw) if raw else None))
            answer = service.answers.get(f"{self.command} {path}") or Canned(
                {
                    "error": {
                        "message": f"no {path}",
                        "type": "invalid_request_error",
                        "param": None,
                        "code": "not_found",
                    }
                },
                404,
            )
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Connection", "close")
            if answer.frames is None:
                payload = json.dumps(answer.body).encode()
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)
                return
            self.end_headers()
            for at, frame in enumerate(answer.frames):
                if answer.gate is not None:
                    answer.gate(at)
                try:
                    self.wfile.write(frame)
                    self.wfile.flush()
                except OSError:
                    answer.left.set()
                    return

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815  # the names that http.server looks for

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    service.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
