"""Keeps others out while a suspect has a model to itself, each time for SHUT_SECONDS at most; suspects nobody itself.

While the door is shut, those who ask wait in the model's queue. Who was alone for longer has company from then
on, and so has who waited longer than that for others to end: nobody waits for ever for somebody else's trial.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from inference.model import Lease, Model, Running

if TYPE_CHECKING:
    from inference.authority.shell import Authority

SHUT_SECONDS = 30.0


class Door:
    """Who may enter a model that is ready; used by its queue alone."""

    def __init__(self, authority: Authority) -> None:
        self._authority = authority

    def is_open(self, model: Model, *, alone: bool) -> bool:
        """Whether a request may be sent now that has nobody before it in the queue."""
        running = model.running
        assert running is not None
        return running.solo is None and not (alone and running.leases)

    def entered(self, lease: Lease, *, alone: bool) -> None:
        """A request got its lease."""
        running = lease.running
        self._unlock(running)
        if alone and running.leases == {lease}:
            running.solo = lease
            self.lock(lease.model)

    def left(self, lease: Lease) -> None:
        """A request ended."""
        if lease.running.solo is lease:
            lease.running.solo = None
            self._unlock(lease.running)

    def lock(self, model: Model) -> None:
        """Somebody is alone or waits to be: from now on the time runs in which that may keep others out."""
        running = model.running
        assert running is not None
        if running.shut is None:
            running.shut = self._authority.loop.call_later(SHUT_SECONDS, self._open, model, running)

    @staticmethod
    def _unlock(running: Running) -> None:
        if running.shut is not None:
            running.shut.cancel()
            running.shut = None

    def _open(self, model: Model, running: Running) -> None:
        running.shut = None
        if model.running is not running:
            return
        if running.solo is not None:
            running.solo = None
        elif model.queue.waiters and model.queue.waiters[0].alone:
            model.queue = model.queue.join(model.queue.waiters[0].id)
        self._authority.waiting.serve(model)
