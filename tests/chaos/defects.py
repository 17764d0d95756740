"""Defects that the suite must find. Each replaces one function of a service."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from tests.chaos.judge import OWN_TOKENS, SAME_ANSWER


def replace(owner: Any, name: str, value: Any) -> None:
    """Sets an attribute that exists."""
    assert hasattr(owner, name), f"{owner} has no {name} any more"
    setattr(owner, name, value)


def leaked_reservation(service: str) -> None:
    """Every second worker that leaves a device keeps its bytes in the ledger."""
    if service != "inference":
        return
    from inference.authority.handlers.running import endings

    turns = itertools.count()
    release = endings.release

    def forgetful(*arguments: Any) -> None:
        if next(turns) % 2:
            release(*arguments)

    replace(endings, "release", forgetful)


def done_on_a_cut(service: str) -> None:
    """A broken stream ends as if it was complete, and is not resumed."""
    if service != "gateway":
        return
    from gateway.apis.openai.openai_api import OpenAIWriter
    from gateway.routing import resume_policy
    from inference.protocol import DONE

    replace(OpenAIWriter, "end_with_error", lambda *_: DONE)
    replace(resume_policy, "MAX_RESUMES", 0)


def no_death_signal(service: str) -> None:
    """Workers do not end with the service: no kernel signal, and no reaction to the end of the link."""
    if service != "inference":
        return
    import sys

    from inference.workers import worker_process

    launch = worker_process.launch

    def untied(name: str, path: Any, _command: Any, environment: Mapping[str, str], keep: int | None) -> Any:
        command = (sys.executable, "-c", _UNTIED, "-m", "inference.worker")  # the last two identify a worker
        return launch(name, path, command, environment, keep)

    replace(worker_process, "launch", untied)


_UNTIED = """
from headgate.shared import child_process
child_process.die_with_parent = lambda environ: None
import types
from inference.worker import channel
channel.os = types.SimpleNamespace(_exit=lambda status: channel.threading.Event().wait())
import runpy
runpy.run_module("inference.worker", run_name="__main__")
"""


def double_probe(service: str) -> None:
    """A half-open breaker admits all requests."""
    if service != "gateway":
        return

    from gateway.breaker.permits import Permits

    replace(Permits, "is_probing", lambda *_: False)


def skipped_release(service: str) -> None:
    """Every fifth request stays counted as in flight after its end."""
    if service != "inference":
        return
    from inference.authority.leases import Lease

    turns = itertools.count(1)
    begin, release = Lease.__init__, Lease.release
    lost: set[int] = set()

    def numbered(self: Lease, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **more)
        if not next(turns) % 5:
            lost.add(id(self))

    def forgetful(self: Lease, *, completed: bool = False) -> None:
        if id(self) not in lost:
            release(self, completed=completed)

    replace(Lease, "__init__", numbered)
    replace(Lease, "release", forgetful)


def shared_tenant(service: str) -> None:
    """Stored sequences of all keys belong to one tenant."""
    if service != "gateway":
        return
    from gateway.access.authentication import Keys

    begin = Keys.__init__

    def one(self: Keys, *arguments: Any, **more: Any) -> None:
        begin(self, *arguments, **{**more, "one_tenant": True})

    replace(Keys, "__init__", one)


def unverified_states(service: str) -> None:
    """Workers do not verify the checksum of what they read from disk."""
    if service != "inference":
        return
    import sys

    from inference.workers import worker_process

    launch = worker_process.launch

    def trusting(name: str, path: Any, _command: Any, environment: Mapping[str, str], keep: int | None) -> Any:
        command = (sys.executable, "-c", _TRUSTING, "-m", "inference.worker")
        return launch(name, path, command, environment, keep)

    replace(worker_process, "launch", trusting)


_TRUSTING = """
import runpy
from inference.worker.kv import disk_tier
class Unsummed:
    def __init__(self): pass
    def update(self, data): pass
    def intdigest(self): return 0
assert hasattr(disk_tier, "StatesSum")
disk_tier.StatesSum = Unsummed
runpy.run_module("inference.worker", run_name="__main__")
"""


PLANTS: Mapping[str, Callable[[str], None]] = {
    "leaked_reservation": leaked_reservation,
    "done_on_a_cut": done_on_a_cut,
    "no_death_signal": no_death_signal,
    "double_probe": double_probe,
    "skipped_release": skipped_release,
    "shared_tenant": shared_tenant,
    "unverified_states": unverified_states,
}
"""By name; each is called with the name of the service in which it will run."""

PROMISES: Mapping[str, str] = {
    "leaked_reservation": "no byte is leaked in any ledger",
    "done_on_a_cut": "no stream without a finish reason ends in [DONE]",
    "no_death_signal": "nothing outlives the service that started it",
    "double_probe": "a half-open breaker admits one probe",
    "skipped_release": "no model, queue or breaker stays stuck",
    "shared_tenant": OWN_TOKENS,
    "unverified_states": SAME_ANSWER,
}
"""The promise whose violation the suite must report for each defect."""
