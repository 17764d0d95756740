"""A worker that could not start for want of descriptors left its reservation on the books, and its waiters alone."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from inference.authority.lifecycle.departures import Action, Reason
from inference.errors import ModelFailed
from inference.protocol import ModelState
from tests.rigs.authority_rig import FakeAccelerator, empty, services


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many more (those below the highest that is open are used up first)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("count", [0, 2, 4])
async def test_a_load_without_descriptors_fails_and_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    """Wherever on the way the last one is used up; and the next load works."""
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}})
        authority, model = service.authority, service.authority.resolve("a")
        await authority.measure(model)
        before = len(os.listdir("/dev/fd"))
        with descriptors_left(count), pytest.raises(ModelFailed, match="cannot start a worker"):
            await authority.load(model)
        assert len(os.listdir("/dev/fd")) == before
        assert empty(service)
        await model.becomes(ModelState.COLD)
        await authority.load(model)


async def test_a_model_that_cannot_be_kept_for_want_of_descriptors_is_unloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its way out does not end half-way."""
    async with services(tmp_path, monkeypatch) as start:
        service = await start({"a": {}}, accelerator=FakeAccelerator())
        authority, model = service.authority, service.authority.resolve("a")
        await authority.load(model)
        with descriptors_left(1):
            authority.leave(model, Reason.IDLE, Action.OFFLOAD)
        await authority.reached(lambda: model.state is ModelState.COLD and empty(service))
