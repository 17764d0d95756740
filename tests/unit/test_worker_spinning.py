"""Threads that wait for each other spin, unless others want their cores; what somebody chose stays."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from inference.worker import cpu_cores
from inference.worker.cores import openmp_spinning
from inference.worker.cores.openmp_spinning import SPINS, Watch, choose, openmp_brake
from inference.worker.cores.spin_policy import CALM, LONGEST_LOOK, LOOK_SECONDS, LOST, Spinning
from inference.worker.cores.thread_names import Namesakes, name_thread
from inference.worker.cores.thread_placement import Companions

takes_openmp = pytest.mark.skipif(
    openmp_brake({}) is None, reason="takes Linux, GNU OpenMP, and from 2 to 32 cores: elsewhere nothing brakes"
)


class Team:
    """Threads whose steps of 10 ms wait for `lost` cores on average, and a brake that notes what it is told."""

    def __init__(self, count: int = 2) -> None:
        self.said: list[str] = []
        self.looks = 0
        self.now = 1000.0
        self.waits = dict.fromkeys(range(count), 50.0)
        self.watch = Watch(self, self.waited)
        self.said.clear()

    def hold(self) -> None:
        self.said.append("hold")

    def release(self) -> None:
        self.said.append("release")

    def waited(self) -> Mapping[int, float]:
        self.looks += 1
        return dict(self.waits)

    def computes(self, seconds: float, lost: float = 0.0, rest: float = 0.0) -> None:
        """With so much `rest` behind each step."""
        for _step in range(round(seconds / 0.01)):
            for thread in self.waits:
                self.waits[thread] += 0.01 * lost / len(self.waits)
            self.now += 0.01
            self.watch.computed(0.01, self.now)
            self.now += rest


def test_quiet_cores_are_spun_on() -> None:
    """Looked at a few times a second, not at each step."""
    team = Team()
    team.computes(10.0, lost=LOST / 2)
    assert team.said == []
    assert team.looks <= 10.0 / LOOK_SECONDS + 2


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


def test_others_are_noticed_within_the_first_look() -> None:
    """What is there before the first step is what it is compared with."""
    team = Team()
    team.computes(LOOK_SECONDS + 0.03, lost=2 * LOST)
    assert team.said == ["hold"]


def test_what_a_thread_waited_before_it_was_known_is_not_counted() -> None:
    team = Team()
    team.computes(1.0)
    team.waits |= {7: 1000.0}
    team.computes(1.0)
    del team.waits[0]
    team.computes(1.0)
    assert team.said == []


def test_what_was_waited_during_a_long_rest_says_nothing() -> None:
    """Of steps that are far apart nothing is known; those behind a rest are judged again."""
    team = Team()
    team.computes(1.0)
    team.waits[0] += 10.0
    team.now += LONGEST_LOOK * LOOK_SECONDS + 1.0
    team.computes(2.0)
    assert team.said == []
    team.computes(5.0, lost=2 * LOST, rest=2 * LONGEST_LOOK * 0.01)
    assert team.said == []
    team.computes(1.0, lost=2 * LOST)
    assert team.said == ["hold"]


def test_nobody_asks_the_kernel_where_nothing_can_be_changed() -> None:
    team = Team()
    team.watch = Watch(None, team.waited)
    team.computes(5.0, lost=1.0)
    assert team.looks == 0


def test_every_step_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the time between its beginning and its end, and not what lies between two steps."""
    found: list[tuple[float, float]] = []

    monkeypatch.setattr(Watch, "computed", lambda _watch, seconds, now: found.append((seconds, now)))
    together = Companions()
    together.begin(10.0)
    together.end(10.5)
    together.begin(20.0)
    together.end(20.25)
    assert found == [(0.5, 10.5), (0.25, 20.25)]


def test_the_first_look_is_at_once_and_judges_nothing() -> None:
    spins = Spinning()
    assert spins.is_due(0.001)
    spins.look(10.0, {1: 1e6})
    assert not spins.is_braked
    assert not spins.is_due(LOOK_SECONDS / 2)
    assert spins.is_due(LOOK_SECONDS)


@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY"])
def test_what_somebody_chose_stays(name: str) -> None:
    environ = {name: "passive"}
    assert choose(on_cpu=True, environ=environ) is None
    assert environ == {name: "passive"}


@pytest.mark.parametrize("cores", [1, openmp_spinning.MOST_CORES + 1])
def test_one_core_and_very_many_have_no_brake(cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits on one; on many the team that brakes would be as many threads."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(cores)), raising=False)
    assert openmp_brake({}) is None


@takes_openmp
def test_a_model_on_a_gpu_has_nobody_who_watches() -> None:
    on_gpu: dict[str, str] = {}
    on_cpu: dict[str, str] = {}
    assert choose(on_cpu=False, environ=on_gpu) is None
    assert choose(on_cpu=True, environ=on_cpu) is not None
    assert (on_gpu, on_cpu) == ({"GOMP_SPINCOUNT": SPINS}, {})


@takes_openmp
def test_without_that_library_or_figures_of_the_kernel_threads_spin_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    assert openmp_brake({}, "libno-such-thing.so.1") is None
    assert openmp_brake({}, "libc.so.6") is None, "llama.cpp is linked with it, and it is no OpenMP"
    monkeypatch.setattr(openmp_spinning, "waited_seconds", lambda: None)
    environ: dict[str, str] = {}
    assert choose(on_cpu=True, environ=environ) is None
    assert environ == {"GOMP_SPINCOUNT": SPINS}


def test_a_limit_on_threads_ends_nothing(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """OpenMP would end the process; so as many threads are tried before, and those that began have ended."""
    before = threading.active_count()
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if threading.active_count() >= before + 3:
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    assert not openmp_spinning._is_room_for(10)
    assert threading.active_count() == before
    assert "no room for 10 threads" in caplog.text
    assert openmp_spinning._is_room_for(2)


CHILD = """
import os, sys, threading, time, ctypes
from pathlib import Path
from inference.worker.cores.openmp_spinning import Watch, openmp_brake
from inference.worker.cores.thread_names import Namesakes, name_thread

brake = openmp_brake(dict(os.environ))
nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)
idle = len(os.listdir("/proc/self/task"))

def ran():  # of the one that computes with this thread, in nanoseconds
    (companion,) = Namesakes().ids()
    return int(Path(f"/proc/self/task/{companion}/schedstat").read_text().split()[0])

def spun():
    began = ran()
    for _ in range(50):
        brake._parallel(nothing, None, 2, 0)
        time.sleep(0.02)
    return ran() - began

def wait_for(count):
    until = time.monotonic() + 20
    while len(os.listdir("/proc/self/task")) != count and time.monotonic() < until:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))

def run():
    name_thread("engine")
    brake._parallel(nothing, None, 2, 0)
    before = len(os.listdir("/proc/self/task"))
    long = spun()
    brake.hold()
    brake.hold()
    held = wait_for(before + 1 + len(os.sched_getaffinity(0)))
    short = spun()
    Watch(brake, dict)  # the engine's next life begins released
    after = wait_for(before)
    print(before, held, after, long, short, spun())

thread = threading.Thread(target=run)
thread.start()
thread.join()
"""


@takes_openmp
def test_gnu_openmp_spins_less_while_the_brake_holds() -> None:
    """In processor time of the thread that waits, by the real library, in a process of its own."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("GOMP_", "OMP_"))}
    said = subprocess.run([sys.executable, "-c", CHILD], env=environ, capture_output=True, text=True, timeout=60)
    assert said.returncode == 0, said.stderr
    before, held, after, long, short, again = map(int, said.stdout.split())
    assert held == before + 1 + len(os.sched_getaffinity(0))
    assert after == before
    assert short < long / 3, "it spun as before"
    assert again > 3 * short, "it never spun again"


@takes_openmp
@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("prlimit") is None, reason="takes another user with a limit")
def test_a_process_with_no_room_for_threads_lives_on() -> None:
    """The kernel's own limit, of a user that no other process has."""
    script = """
import os, time
from inference.worker.cores.openmp_spinning import openmp_brake
brake = openmp_brake({})
os.setgid(54321); os.setuid(54321)
brake.hold()
time.sleep(0.5)
print("alive", len(os.listdir("/proc/self/task")))
"""
    argv = ["prlimit", "--nproc=2", sys.executable, "-c", script]
    said = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert said.stdout.split() == ["alive", "2"], said.stderr


@takes_openmp
def test_namesakes_are_those_of_now() -> None:
    """Found once, and again when threads came, ended, or took the place of each other."""
    said: list[tuple[int, int]] = []

    def compute() -> None:
        name_thread("computing")
        others = Namesakes()

        def sleeping() -> tuple[threading.Thread, threading.Event]:
            leave = threading.Event()
            thread = threading.Thread(target=leave.wait)
            thread.start()
            return thread, leave

        def settled(expected: int) -> tuple[int, int]:
            """How many there are, and of how many the kernel tells; one that was joined is there for a moment."""
            until = time.monotonic() + 10
            while True:
                count = len(others.ids()), len(others.waited())
                if count == (expected, expected + 1) or time.monotonic() > until:
                    return count
                time.sleep(0.01)

        said.append(settled(0))
        first, leave_first = sleeping()
        said.append(settled(1))
        leave_first.set()
        first.join()
        second, leave_second = sleeping()
        said.append(settled(1))
        said.append((others.ids() == [second.native_id], 0))
        leave_second.set()
        second.join()
        said.append(settled(0))

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    assert said == [(0, 1), (1, 2), (1, 2), (True, 0), (0, 1)]


def test_the_kernel_tells_of_each_thread() -> None:
    if cpu_cores.waited_seconds() is None:
        pytest.skip("the kernel tells of none")
    assert cpu_cores.waited_seconds(threading.get_native_id()) is not None
    assert not Path("/proc/self/task/0").exists()
    assert cpu_cores.waited_seconds(0) is None
