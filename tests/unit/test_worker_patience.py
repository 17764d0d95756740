"""Threads that wait for each other spin for long, unless others want their cores; what somebody chose stays."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from inference.worker import companions, patience
from inference.worker.companions import Companions
from inference.worker.hardware import waited_seconds
from inference.worker.patience import CALM, LOOK_SECONDS, LOST, SPINS, Patience, choose, openmp_throttle


def _has_gnu_openmp() -> bool:
    try:
        return hasattr(ctypes.CDLL("libgomp.so.1"), "GOMP_parallel")
    except OSError:
        return False


takes_openmp = pytest.mark.skipif(
    sys.platform != "linux" or not _has_gnu_openmp() or waited_seconds() is None, reason="takes Linux and GNU OpenMP"
)


class Team:
    """Threads whose steps of 10 ms wait for `lost` cores on average, and a throttle that notes what it is told."""

    def __init__(self, count: int = 2) -> None:
        self.said: list[str] = []
        self.looks = 0
        self.waits = dict.fromkeys(range(count), 0.0)
        self.patience = Patience(self, self.waited)

    def hold(self) -> None:
        self.said.append("hold")

    def release(self) -> None:
        self.said.append("release")

    def waited(self) -> Mapping[int, float]:
        self.looks += 1
        return dict(self.waits)

    def computes(self, seconds: float, lost: float = 0.0) -> None:
        for _step in range(round(seconds / 0.01)):
            for thread in self.waits:
                self.waits[thread] += 0.01 * lost / len(self.waits)
            self.patience.computed(0.01)


def test_quiet_cores_are_spun_on() -> None:
    """Looked at a few times a second, not at each step."""
    team = Team()
    team.computes(10.0, lost=LOST / 2)
    assert team.said == []
    assert team.looks <= 10.0 / LOOK_SECONDS + 1


def test_cores_that_others_want_are_not_and_are_again_when_they_have_left() -> None:
    team = Team()
    team.computes(1.0)
    team.computes(1.0, lost=2 * LOST)
    assert team.said == ["hold"]
    team.computes((CALM - 1) * LOOK_SECONDS)
    assert team.said == ["hold"], "a moment without others is no end"
    team.computes(1.0, lost=2 * LOST)
    team.computes((CALM - 1) * LOOK_SECONDS)
    assert team.said == ["hold"], "two moments are none either"
    team.computes(5.0)
    assert team.said == ["hold", "release"]
    team.computes(1.0, lost=2 * LOST)
    assert team.said == ["hold", "release", "hold"]


def test_what_a_thread_waited_before_it_was_known_is_not_counted() -> None:
    team = Team()
    team.computes(1.0)
    team.waits |= {7: 1000.0}
    team.computes(1.0)
    del team.waits[0]
    team.computes(1.0)
    assert team.said == []


def test_nobody_asks_the_kernel_where_nothing_can_be_changed() -> None:
    team = Team()
    team.patience = Patience(None, team.waited)
    team.computes(5.0, lost=1.0)
    assert team.looks == 0


def test_every_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time between its beginning and its end, and not what lies between two steps."""
    monkeypatch.setattr(companions, "REST_SECONDS", 1e9)
    found: list[float] = []

    class Noted(Patience):
        def computed(self, seconds: float) -> None:
            found.append(seconds)

    together = Companions(Noted(None, dict))
    together.begin(10.0)
    together.end(10.5)
    together.begin(20.0)
    together.end(20.25)
    assert found == [0.5, 0.25]


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_somebody_chose_stays(name: str) -> None:
    environ = {name: "passive"}
    assert openmp_throttle(environ) is None
    choose(on_cpu=True, environ=environ)
    assert environ == {name: "passive"}


def test_a_machine_of_many_cores_is_not_asked_for_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(patience.MOST_CORES + 1)), raising=False)
    assert openmp_throttle({}) is None


@takes_openmp
def test_a_model_on_a_gpu_has_nobody_who_watches() -> None:
    on_gpu: dict[str, str] = {}
    on_cpu: dict[str, str] = {}
    choose(on_cpu=False, environ=on_gpu)
    choose(on_cpu=True, environ=on_cpu)
    assert (on_gpu, on_cpu) == ({"GOMP_SPINCOUNT": SPINS}, {})


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_without_gnu_openmp_or_figures_of_the_kernel_threads_spin_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert openmp_throttle({}, "libno-such-thing.so.1") is None
    assert openmp_throttle({}, "libc.so.6") is None
    monkeypatch.setattr(patience, "waited_seconds", lambda: None)
    environ: dict[str, str] = {}
    choose(on_cpu=True, environ=environ)
    assert environ == {"GOMP_SPINCOUNT": SPINS}


CHILD = """
import ctypes, os, threading, time
from inference.worker.patience import openmp_throttle
from inference.worker.threads import name_thread, namesakes
throttle = openmp_throttle(dict(os.environ))
free = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
cores = min(2, len(os.sched_getaffinity(0)))

def spun():
    began = time.process_time()
    for _ in range(100):
        throttle._parallel(free, None, cores, 0)
        time.sleep(0.005)
    return time.process_time() - began

def threads():
    return len(os.listdir("/proc/self/task"))

def run():
    name_thread("engine")
    spun()
    long = spun()
    before = threads()
    throttle.hold()
    throttle.hold()
    held, alike, short = threads(), len(namesakes()), spun()
    throttle.release()
    throttle.release()
    until = time.monotonic() + 20
    while threads() > before and time.monotonic() < until:
        time.sleep(0.01)
    print(before, held, threads(), alike, long, short, spun())

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@takes_openmp
@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="nobody spins on one core"
)
def test_gnu_openmp_spins_less_while_it_is_throttled() -> None:
    """In processor time, which no neighbor changes by much; by the real library, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    said = subprocess.run([sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    before, held, after, alike, *seconds = said.stdout.split()
    long, short, again = map(float, seconds)
    assert int(held) == int(before) + 1 + len(os.sched_getaffinity(0))
    assert int(after) == int(before)
    assert int(alike) == 1, "threads of the throttle are taken for those that compute"
    assert short < long / 3, "it spun as before"
    assert again > 3 * short, "it never spun again"
