"""The worker's end of its link to the authority. Messages are sent from any thread and read on one."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable

from inference import worker_link

MAX_LINE_BYTES = 1 << 20


class Channel:
    """The inherited socketpair. Its end of file ends this process at once."""

    def __init__(
        self,
        handle: int,
        on_drain: Callable[[], None],
        on_stop: Callable[[], None],
        on_offload: Callable[[worker_link.Offload], None],
        on_throttle: Callable[[worker_link.Limit | worker_link.Forget | worker_link.Threads], None],
    ) -> None:
        self._socket = socket.socket(fileno=handle)
        self._socket.setblocking(True)
        self._lock = threading.Lock()
        self._orders: queue.SimpleQueue[worker_link.Grant | worker_link.Hold] = queue.SimpleQueue()
        self._on_drain = on_drain
        self._on_stop = on_stop
        self._on_offload = on_offload
        self._on_throttle = on_throttle

    def start(self) -> None:
        """Starts reading."""
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, message: worker_link.Message) -> None:
        """Sends one message. Errors are ignored: the reader ends the process when the link is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(worker_link.encode(message))

    def order(self) -> worker_link.Grant | worker_link.Hold:
        """Waits for the order to load or to hold, without a limit: a warm worker may wait for hours."""
        return self._orders.get()

    def grant(self) -> worker_link.Grant:
        """Waits for the order to load, where no other order is valid."""
        order = self._orders.get()
        if isinstance(order, worker_link.Hold):
            self._leave("the authority sent hold to a worker that already has a model")
        assert isinstance(order, worker_link.Grant)
        return order

    def _read(self) -> None:
        pending = b""
        while True:
            try:
                data = self._socket.recv(65536)
            except OSError:
                data = b""
            if not data:
                os._exit(1)
            *lines, pending = (pending + data).split(b"\n")
            if len(pending) > MAX_LINE_BYTES:
                self._leave("the authority sent a line that is too long")
            for line in lines:
                try:
                    message = worker_link.decode(line)
                except ValueError as error:
                    self._leave(f"the authority sent an invalid message: {error}")
                self._handle(message)

    def _handle(self, message: worker_link.Message) -> None:
        match message:
            case worker_link.Grant() | worker_link.Hold():
                self._orders.put(message)
            case worker_link.Offload():
                self._on_offload(message)
            case worker_link.Limit() | worker_link.Forget() | worker_link.Threads():
                self._on_throttle(message)
            case worker_link.Drain():
                self._on_drain()
            case worker_link.Stop():
                self._on_stop()
            case _:
                self._leave(f"the authority sent {message.tag}, which only workers send")

    def _leave(self, reason: str) -> None:
        sys.stderr.write(f"worker: {reason}\n")
        sys.stderr.flush()
        os._exit(1)
