"""Models in use at the same time share the cores; who is alone has them all again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from inference.demo import bundled_path
from inference.worker.cores.openmp_spinning import openmp_brake
from inference.workers import worker_link
from tests.rigs.authority_rig import Start, services
from tests.rigs.instant_workers import InstantSupervisor
from tests.rigs.tiny_gguf import generative
from tests.rigs.worker_rig import WorkerRig, grant_for


@pytest.fixture
async def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Start]:
    async with services(tmp_path, monkeypatch) as make:
        yield make


async def test_threads_follow_who_is_busy(start: Start) -> None:
    service = await start(
        {"a": {}, "b": {}, "fixed": {"threads": 3}}, parts={"supervisor": InstantSupervisor(), "cores": 8}
    )
    authority = service.authority
    a, b, fixed = (authority.resolve(name) for name in ("a", "b", "fixed"))
    leases = [await authority.ask(a).wait(10)]
    assert a.running.worker.threads is None, "alone it has them all, as it began"
    leases.append(await authority.ask(b).wait(10))
    assert (a.running.worker.threads, b.running.worker.threads) == (4, 4)
    leases.append(await authority.ask(fixed).wait(10))
    assert fixed.running.worker.threads is None
    assert (a.running.worker.threads, b.running.worker.threads) == (3, 2)
    for lease in leases[1:]:
        lease.release()
    assert a.running.worker.threads == 3, "a neighbor that pauses for a moment changes nothing"
    await authority.reached(lambda: a.running.worker.threads == 8)
    again = await authority.ask(b).wait(10)
    assert (a.running.worker.threads, b.running.worker.threads) == (4, 4)
    again.release()
    leases[0].release()
    alone = await authority.ask(b).wait(10)
    assert b.running.worker.threads == 8, "who becomes busy alone need not wait for his cores"
    alone.release()


def test_a_worker_changes_its_threads_and_says_the_same(tmp_path: Path) -> None:
    ask = {"prompt": "once upon", "max_tokens": 8, "temperature": 0}
    with WorkerRig(tmp_path, grant_for(generative())) as rig:
        rig.ready()
        texts = []
        for count in (1, 2, 1):
            rig.send(worker_link.Threads(count))
            rig.fresh_beat()
            status, answer = rig.post("/v1/completions", {"model": "tiny", **ask})
            assert status == 200
            texts.append(answer["choices"][0]["text"])
        assert len(set(texts)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of threads")
def test_threads_that_compute_have_the_name_of_the_engine(tmp_path: Path) -> None:
    """By which it finds them; the process has another one, and so have those that answer."""
    with WorkerRig(tmp_path, grant_for(generative(), threads=2)) as rig:
        rig.ready()
        assert rig.post("/v1/completions", {"model": "tiny", "prompt": "once upon", "max_tokens": 4})[0] == 200
        tasks = Path(f"/proc/{rig.process.pid}/task")
        names = {task.name: (task / "comm").read_text().strip() for task in tasks.iterdir()}
        cores = {os.sched_getaffinity(int(task)) == os.sched_getaffinity(0) for task in names}
        assert list(names.values()).count("engine") == 2, names
        assert names[str(rig.process.pid)] != "engine"
        assert cores == {True}, "nobody is kept off a core between steps"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute."""
    neighbors = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbor in neighbors:
            neighbor.kill()
            neighbor.wait()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells who waits for a core")
def test_threads_stop_spinning_beside_others(tmp_path: Path) -> None:
    """Beside as many busy processes as make every thread wait: the worker holds its brake and goes on answering."""
    if openmp_brake({}) is None:
        pytest.skip("takes GNU OpenMP and from 2 to 32 cores")
    cores = len(os.sched_getaffinity(0))
    with WorkerRig(tmp_path, grant_for(bundled_path("demo"), context_length=512, threads=2)) as rig:
        rig.ready()

        def names() -> list[str]:
            return [(task / "comm").read_text().strip() for task in Path(f"/proc/{rig.process.pid}/task").iterdir()]

        with busy(2 * cores):
            until = time.monotonic() + 60
            while "brake" not in names() and time.monotonic() < until:
                body = {"model": "demo", "prompt": "once upon", "max_tokens": 200}
                assert rig.post("/v1/completions", body)[0] == 200
            assert names().count("brake") == cores + 1
