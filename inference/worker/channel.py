"""The worker's end of its link to the authority. Messages are sent from any thread and read on one."""

from __future__ import annotations

import contextlib
import os
import queue
import socket
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

from inference import worker_link
from inference.worker_link import Forget, Grant, Hold, KvBudget, Limit, Offload, Stop, Threads

MAX_LINE_BYTES = 1 << 20

Order = Grant | Stop | Offload | Limit | Forget | KvBudget | Threads
"""Orders for `on_order`. `Channel.order` and `Channel.grant` return grants as well."""


class Channel:
    """The inherited socketpair. Its end of file, or an invalid message, ends this process at once."""

    def __init__(self, handle: int, on_order: Callable[[Order], None]) -> None:
        self._socket = socket.socket(fileno=handle)
        self._socket.setblocking(True)
        self._lock = threading.Lock()
        self._loads: queue.SimpleQueue[Grant | Hold] = queue.SimpleQueue()
        self._on_order = on_order

    def start(self) -> None:
        """Starts reading."""
        threading.Thread(target=self._read, name="link", daemon=True).start()

    def send(self, message: worker_link.Message) -> None:
        """Sends one message. Errors are ignored: the reader ends the process when the link is closed."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(worker_link.encode(message))

    def order(self) -> Grant | Hold:
        """Waits for the order to load or to hold, without a limit: a warm worker may wait for hours."""
        return self._loads.get()

    def grant(self) -> Grant:
        """Waits for the order to load, where a hold is not valid: it ends the process."""
        order = self._loads.get()
        if isinstance(order, Hold):
            self._leave("the authority sent hold to a worker that already holds a file or a model")
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
            case Grant():
                self._on_order(message)
                self._loads.put(message)
            case Hold():
                self._loads.put(message)
            case Stop() | Offload() | Limit() | Forget() | KvBudget() | Threads():
                self._on_order(message)
            case _:
                self._leave(f"the authority sent {message.tag}, which only workers send")

    def _leave(self, reason: str) -> NoReturn:
        sys.stderr.write(f"worker: {reason}\n")
        sys.stderr.flush()
        os._exit(1)
