"""Arenas: memory of stored sequences that outlives processes, and is freed when it is dropped."""

from __future__ import annotations

import fcntl
import os
import sys

import pytest

from inference.workers.arenas import Arenas

PAGES = 1 << 16
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="anonymous memory files")


@pytest.fixture
def arenas() -> Arenas:
    return Arenas()


def filled(arenas: Arenas, model: str) -> int:
    """The arena of a model with some pages, as a worker opens it."""
    file = arenas.open(model)
    assert file is not None
    own = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    os.pwrite(own, b"x" * PAGES, 0)
    return own


def test_a_model_has_one_arena_and_its_use_is_measured(arenas: Arenas) -> None:
    """A sparse file takes only the pages that were written."""
    own = filled(arenas, "a")
    os.pwrite(own, b"x" * PAGES, 1 << 30)
    assert arenas.open("a") == arenas.open("a") != arenas.open("b")
    assert arenas.used_bytes() == {"a": 2 * PAGES, "b": 0}
    os.close(own)
    assert arenas.used_bytes()["a"] == 2 * PAGES
    arenas.close()
    assert arenas.used_bytes() == {}


def test_dropped_arena_is_freed_at_once_also_for_a_process_that_inherited_it(arenas: Arenas) -> None:
    """That process may use it later; the service keeps it until the process has ended."""
    own = filled(arenas, "a")
    arenas.drop("a", has_process=True)
    assert arenas.used_bytes() == {"a": 0}
    assert os.fstat(own).st_size == 0
    arenas.process_ended("a")
    assert arenas.used_bytes() == {}
    arenas.drop("a", has_process=False)
    arenas.process_ended("a")
    os.close(own)


def test_memory_that_a_worker_uses_stays_until_it_ends(arenas: Arenas) -> None:
    """The worker has a lock; its pages must stay."""
    own = filled(arenas, "a")
    fcntl.flock(own, fcntl.LOCK_EX)
    arenas.drop("a", has_process=True)
    assert arenas.used_bytes() == {"a": PAGES}
    arenas.drop("a", has_process=False)
    assert arenas.used_bytes() == {}
    assert os.fstat(own).st_size == PAGES
    os.close(own)


def test_dropped_arena_is_kept_for_a_new_worker_and_for_one_that_is_restored(arenas: Arenas) -> None:
    own = filled(arenas, "a")
    file = arenas.open("a")
    arenas.drop("a", has_process=True)
    assert arenas.open("a") == file
    arenas.process_ended("a")
    assert "a" in arenas.used_bytes()
    arenas.drop("a", has_process=True)
    arenas.keep("a")
    arenas.process_ended("a")
    assert "a" in arenas.used_bytes()
    os.close(own)
    arenas.close()
