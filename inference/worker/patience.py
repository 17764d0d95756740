"""Decides how long threads that compute a step spin while they wait for each other: long, unless others want cores.

A thread that sleeps has to be woken at each of some sixty operations of a step, in a virtual machine by its host; one
that spins goes on at once. But on a core that others want too, whoever spins keeps the one that is waited for from
running: beside two busy processes a token took up to ten times as long. GNU OpenMP reads how long to spin when it is
loaded, and never again; but it hardly spins while it has more threads than there are cores.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping
from typing import Protocol

from inference.worker.hardware import waited_seconds
from inference.worker.threads import name_thread

LOOK_SECONDS = 0.2
"""Of computing between two looks at what the kernel says."""

LOST = 0.25
"""Cores that the threads of a step waited for on average, from which others want them. On two quiet cores 0.03 with
steps of 10 ms and 0.1 with steps of 1 ms, which share them with our own event loops; 0.6 beside two busy processes."""

CALM = 3
"""Looks in a row without others after which it is spun for long again."""

SPINS = "4000"
"""How often a thread looks whether the others have finished before it sleeps, where that cannot be changed: about a
tenth of a millisecond. GNU OpenMP's own default is 75 times as much."""

CHOSEN_BY = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
"""Variables by which somebody has chosen already."""

MOST_CORES = 32
"""With more of them the team that throttles would be too many threads: a limit on their number ends the process."""

_LIBRARY = "libgomp.so.1"
_HOLD_SECONDS = 5.0


class Throttle(Protocol):
    """Makes all threads that wait sleep at once."""

    def hold(self) -> None:
        """From now on."""
        ...

    def release(self) -> None:
        """No more."""
        ...


class OpenMPThrottle:
    """A thread that keeps a sleeping team as large as there are cores: GNU OpenMP then spins 100 times instead of
    300,000 (libgomp's `env.c` and `config/linux/wait.h`: `gomp_throttled_spin_count_var` where `gomp_managed_threads`
    exceeds `gomp_available_cpus`).
    """

    def __init__(self, library: ctypes.CDLL) -> None:
        self._parallel = library.GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None
        self._leave: threading.Event | None = None

    def hold(self) -> None:
        """Returns when it spins no more."""
        if self._leave is None:
            self._leave, ready = threading.Event(), threading.Event()
            keeper = threading.Thread(target=self._keep, args=(self._leave, ready), name="throttle", daemon=True)
            with contextlib.suppress(RuntimeError):  # no more threads: it spins as before
                keeper.start()
                ready.wait(_HOLD_SECONDS)

    def release(self) -> None:
        """The team ends with its thread."""
        if self._leave is not None:
            self._leave.set()
            self._leave = None

    def _keep(self, leave: threading.Event, ready: threading.Event) -> None:
        name_thread("throttle")  # those of the one that started it compute
        nothing = ctypes.cast(ctypes.CDLL(None).free, ctypes.c_void_p)  # of a null pointer: what each of the team does
        self._parallel(nothing, None, len(os.sched_getaffinity(0)) + 1, 0)
        ready.set()
        leave.wait()


def openmp_throttle(environ: Mapping[str, str] = os.environ, library: str = _LIBRARY) -> OpenMPThrottle | None:
    """What changes how this process's threads wait; None where somebody chose how, the kernel does not tell whether
    others want their cores, or there is no GNU OpenMP. Loads that library, which reads the environment.
    """
    if sys.platform != "linux" or any(name in environ for name in CHOSEN_BY) or waited_seconds() is None:
        return None
    if len(os.sched_getaffinity(0)) > MOST_CORES:
        return None
    try:
        return OpenMPThrottle(ctypes.CDLL(library))
    except (OSError, AttributeError):
        return None


def choose(*, on_cpu: bool, environ: MutableMapping[str, str] = os.environ) -> None:
    """Before llama.cpp's libraries are loaded, how long threads spin: as GNU OpenMP has it where the model is `on_cpu`
    and a `Patience` will keep them from it, else `SPINS`, unless somebody chose.
    """
    if "OMP_WAIT_POLICY" not in environ and not (on_cpu and openmp_throttle(environ)):
        environ.setdefault("GOMP_SPINCOUNT", SPINS)


class Patience:
    """For the threads of one kind of step; asked on the first of them. `waited` gives the seconds that each was ready
    to run and had no core; it is not asked where there is no `throttle`.
    """

    def __init__(self, throttle: Throttle | None, waited: Callable[[], Mapping[int, float]]) -> None:
        self._throttle = throttle
        self._waited = waited
        self._before: Mapping[int, float] = {}
        self._computed = 0.0
        self._is_held = False
        self._calm = 0

    def computed(self, seconds: float) -> None:
        """A step took so long."""
        self._computed += seconds
        if self._throttle is None or self._computed < LOOK_SECONDS:
            return
        now, before = self._waited(), self._before
        lost = sum(now[thread] - before[thread] for thread in now.keys() & before.keys()) / self._computed
        self._before, self._computed = now, 0.0
        self._calm = 0 if lost >= LOST else self._calm + 1
        if lost >= LOST and not self._is_held:
            self._is_held = True
            self._throttle.hold()
        elif self._is_held and self._calm >= CALM:
            self._is_held = False
            self._throttle.release()
