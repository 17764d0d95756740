"""A port whose queue of connections is full: whoever connects waits and is never answered; it reads nothing."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

_WAITING = 4
"""More than the kernel queues where a backlog of 0 was asked for."""


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
