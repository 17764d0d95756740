"""Configures uvicorn for the worker's app on an inherited socket."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import uvicorn

from headgate.shared.wire import WiredHttp
from inference.worker.api.worker_app import App


class Server(uvicorn.Server):
    """Without uvicorn's signal handlers: the process decides itself when it ends."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def make_server(app: App) -> Server:
    """A server for `serve(sockets=[...])`. Connections are kept: the only client owns the socket."""
    config = uvicorn.Config(
        app,
        http=WiredHttp,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=3600,
        timeout_graceful_shutdown=5,
    )
    return Server(config)
