"""A port whose backlog is full: clients wait for a connection without an answer."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

_WAITING = 4
"""More connections than the kernel queues for a backlog of 0."""


@contextlib.contextmanager
def full_backlog() -> Iterator[str]:
    """The address as HOST:PORT."""
    with contextlib.ExitStack() as sockets:
        full = sockets.enter_context(socket.socket())
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        for _ in range(_WAITING):
            client = sockets.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        yield "{}:{}".format(*full.getsockname())
