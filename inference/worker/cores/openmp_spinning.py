"""Keeps threads that wait for each other from spinning when it is told to; decides neither when nor how many compute.

A thread that sleeps has to be woken at each of some sixty operations of a step, in a virtual machine by its host; one
that spins goes on at once. But on a core that others want too, whoever spins keeps the one that is waited for from
running: beside two busy processes a token took up to ten times as long. GNU OpenMP reads how long to spin when it is
loaded, and never again; but it hardly spins while it has more threads than there are cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import mmap
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Protocol

from inference.worker.cores.spin_policy import Spinning
from inference.worker.cores.thread_names import name_thread
from inference.worker.cpu_cores import waited_seconds

log = logging.getLogger("headgate.worker.spinning")

SPINS = "4000"
"""How often a thread looks whether the others have finished before it sleeps, where that cannot be changed: about a
tenth of a millisecond. GNU OpenMP's own default is 75 times as much."""

CHOSEN_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which somebody has chosen already."""

MOST_CORES = 32
"""With more of them the team of the brake would be too many threads."""

LIBRARY = "libgomp.so.1"


class Brake(Protocol):
    """Makes threads that wait for each other sleep at once."""

    def hold(self) -> None:
        """From now on."""
        ...

    def release(self) -> None:
        """No more."""
        ...


class OpenMPBrake:
    """A thread that keeps a sleeping team of one more than there are cores: GNU OpenMP then spins 100 times instead of
    300,000 (libgomp's `env.c` and `config/linux/wait.h`: `gomp_throttled_spin_count_var` where `gomp_managed_threads`
    exceeds `gomp_available_cpus`).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        self._leave: threading.Event | None = None

    def hold(self) -> None:
        """Takes hold a moment later; not where a limit on threads leaves no room, which would end the process."""
        if self._leave is None:
            leave = threading.Event()
            with contextlib.suppress(RuntimeError):  # no more threads
                threading.Thread(target=self._keep, args=(leave,), daemon=True).start()
                self._leave = leave

    def release(self) -> None:
        """The team ends with its thread."""
        if self._leave is not None:
            self._leave.set()
            self._leave = None

    def _keep(self, leave: threading.Event) -> None:
        name_thread("brake")  # else it has the name of those that compute
        team = len(os.sched_getaffinity(0)) + 1
        if _is_room_for(team):
            nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of a null pointer, by each of the team
            self._parallel(nothing, None, team, 0)
        leave.wait()


def _is_room_for(count: int) -> bool:
    """Whether so many threads can be started: OpenMP ends the process where they cannot."""
    leave = threading.Event()
    started = []
    try:
        for _ in range(count):
            thread = threading.Thread(target=leave.wait, daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:
        log.warning("threads spin beside others: there is no room for %d threads that would keep them from it", count)
        return False
    finally:
        leave.set()
        for thread in started:
            thread.join()
    return True


def choose(*, on_cpu: bool, environ: MutableMapping[str, str] = os.environ) -> Brake | None:
    """Before llama.cpp's libraries are loaded, how long threads spin: as GNU OpenMP has it where the model is `on_cpu`
    and there is a brake, else `SPINS`, unless somebody chose.
    """
    brake = openmp_brake(environ) if on_cpu else None
    if brake is None and "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", SPINS)
    return brake


def openmp_brake(environ: Mapping[str, str] = os.environ, library: str = LIBRARY) -> OpenMPBrake | None:
    """What changes how this process's threads wait. None where somebody chose how, where nobody waits for another one,
    where the kernel does not tell who wants a core, and where llama.cpp is not linked with `library`, which is loaded
    here: it reads the environment then.
    """
    if sys.platform != "linux" or any(name in environ for name in CHOSEN_BY) or waited_seconds() is None:
        return None
    if not 2 <= len(os.sched_getaffinity(0)) <= MOST_CORES:
        return None
    try:
        return OpenMPBrake(ctypes.CDLL(library)) if _computes_with(library) else None
    except (OSError, AttributeError):
        return None


def _computes_with(library: str) -> bool:
    """Whether llama.cpp's CPU libraries name that one; looked up without loading them."""
    found = importlib.util.find_spec("llama_cpp")
    if found is None or found.origin is None:
        return False
    files = [path for path in Path(found.origin).parent.rglob("libggml-cpu*.so*") if path.stat().st_size]
    return bool(files) and all(_names(path, library.encode()) for path in files)


def _names(path: Path, name: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.find(b"\0" + name + b"\0") >= 0


class Watch:
    """Brakes the threads that compute with the calling one while others want their cores. Nothing is read without a
    brake, which begins released.
    """

    def __init__(self, brake: Brake | None, read: Callable[[], Mapping[int, float]]) -> None:
        """`read` gives the seconds that each of them has been ready to run without a core, by its id."""
        self._brake = brake
        self._read = read
        self._spinning = Spinning()
        if brake is not None:
            brake.release()

    def computed(self, seconds: float, now: float) -> None:
        """A step took so long and ended now, in seconds."""
        if self._brake is None or not self._spinning.is_due(seconds):
            return
        was_braked = self._spinning.is_braked
        self._spinning.look(now, self._read())
        if self._spinning.is_braked and not was_braked:
            log.info("others want the cores: threads do not spin (they wait for %.2f cores)", self._spinning.lost)
            self._brake.hold()
        elif was_braked and not self._spinning.is_braked:
            log.info("nobody wants the cores: threads spin (they wait for %.2f cores)", self._spinning.lost)
            self._brake.release()
