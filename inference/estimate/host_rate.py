"""Measures how fast the cores of this machine copy host memory, for the expected speed of experts in host memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

COPIED_BYTES = 128 * 2**20
"""Copied by all cores together; more than their caches hold, on most machines."""
ROUNDS = 3


def host_bytes_per_second(cores: int) -> float:
    """Bytes read and written per second by `cores` threads that copy their own memory; the best of some rounds."""
    import numpy as np

    blocks = [np.ones(COPIED_BYTES // cores, dtype=np.uint8) for _ in range(cores)]
    copies = [np.zeros_like(block) for block in blocks]
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(ROUNDS):
            began = time.perf_counter()
            list(pool.map(np.copyto, copies, blocks))
            best = max(best, 2 * COPIED_BYTES / (time.perf_counter() - began))
    return best
