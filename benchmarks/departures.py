"""Measures how soon computing ends after a client has disconnected: at a worker and in a call to a cloud.

    python -m benchmarks.departures      DEPARTURES=100; QUICK=1: 20 of each kind

A worker has stopped when its process uses no more CPU time, as read from /proc. The cloud is the upstream of the
gateway benchmark, which sees the end of its connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks import gateway_report, upstream
from benchmarks.asking import Connection, close, request
from benchmarks.figures import is_quick
from benchmarks.gateway_samples import STREAMED, WHOLE, Gone, Results
from benchmarks.upstream import Upstream
from tests.rigs.stack import Stack

TIMES, QUICK_TIMES = 100, 20
MODEL, CLOUD = "demo", "cloud"
ANSWER_TOKENS = 1800
"""More tokens than a client reads before it disconnects."""
STAY_SECONDS = (0.03, 0.15)
"""Range of the time before a client disconnects: after the first token of a stream, or after a request."""
WATCH_SECONDS = 0.4
"""Time in which the worker is observed after a disconnect."""
LOOK_SECONDS = 0.001
WINDOW_SECONDS = 0.01
BUSY_SHARE = 0.3
"""CPU share of a window above which a worker computes. Its heartbeat uses 1 %, but up to a millisecond at once with
cold caches, so a single sample is not enough."""
COMPUTED_SECONDS = 0.005
"""CPU time that the worker must have used before the disconnect for the sample to count."""
REST_SECONDS = 0.05

Gateway = tuple[Stack, Upstream]


@contextlib.asynccontextmanager
async def running(root: Path) -> AsyncIterator[Gateway]:
    """Gateway, inference service and worker on the demo model, and a cloud."""
    async with Upstream() as cloud:
        config = {
            "providers": {CLOUD: {"kind": "openai", "api_key": "key", "base_url": f"{cloud.url}/v1"}},
            "routes": {MODEL: {"chain": [f"local/{MODEL}"]}, CLOUD: {"chain": [f"{CLOUD}/{upstream.ENDLESS}"]}},
        }
        stack = Stack(root, gateway=json.dumps(config))
        try:
            await asyncio.to_thread(stack.start)
            await asyncio.to_thread(stack.ask, f"/models/{MODEL}/load", {}, direct=True)
            yield stack, cloud
        finally:
            stack.kill()


def long_request(stack: Stack, model: str, kind: str) -> bytes:
    """A request for a very long answer."""
    body: dict[str, Any] = {
        "model": model, "messages": [{"role": "user", "content": "Tell a story without an end."}],
        "max_tokens": ANSWER_TOKENS, "stream": kind == STREAMED, "temperature": 0,
    }  # fmt: skip
    if model == MODEL:
        body["ignore_eos"] = True
    return request(stack.front.port, body, {"authorization": f"Bearer {stack.key}"})


async def leave(stack: Stack, model: str, kind: str) -> float:
    """Sends a request, waits a while and disconnects. Returns the time of the disconnect on `time.perf_counter`."""
    connection = await Connection.open(stack.front.port)
    if kind == STREAMED:
        await connection.begin(long_request(stack, model, kind))
    else:
        connection.ask(long_request(stack, model, kind), lambda _: None)
    await asyncio.sleep(random.uniform(*STAY_SECONDS))
    at = time.perf_counter()
    connection.forget()
    return at


async def local(stack: Stack, kind: str, times: int) -> Gone:
    """Disconnects during answers of the worker."""
    pid = stack.worker_pid(MODEL)
    step = await step_seconds(stack)
    seconds = []
    for _ in range(times):
        before = _cpu_seconds(pid)
        at = await leave(stack, MODEL, kind)
        if _cpu_seconds(pid) - before < COMPUTED_SECONDS:
            raise SystemExit(f"the worker computed nothing for a client that requested a {kind} answer")
        stopped = await asyncio.to_thread(last_busy, watched(pid, at + WATCH_SECONDS))
        seconds.append(max(0.0, stopped - at))
        await asyncio.sleep(REST_SECONDS)
    return Gone(f"worker, {kind}", seconds, step)


def last_busy(looks: Iterable[tuple[float, float]]) -> float:
    """Returns when a process last computed, 0 for never.

    Args:
        looks: time of each sample and the CPU time used until then, in seconds.
    """
    window: deque[tuple[float, float]] = deque()
    found = last = 0.0
    for now, used in looks:
        while len(window) > 1 and now - window[1][0] >= WINDOW_SECONDS:
            window.popleft()
        if window:
            (since, used_then), (before, used_before) = window[0], window[-1]
            if used - used_before > BUSY_SHARE * (now - before):
                last = now
            if used - used_then > BUSY_SHARE * max(now - since, WINDOW_SECONDS):
                found = last
        window.append((now, used))
    return found


def watched(pid: int, until: float) -> Iterator[tuple[float, float]]:
    """Samples a process until then: time and CPU time in seconds."""
    while (now := time.perf_counter()) < until:
        yield now, _cpu_seconds(pid)
        time.sleep(LOOK_SECONDS)


def _cpu_seconds(pid: int) -> float:
    """CPU time of all threads, to the nanosecond (Linux)."""
    used = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            used += int((task / "schedstat").read_text().split()[0])
    return used / 1e9


async def step_seconds(stack: Stack) -> float:
    """Median time between two tokens of one stream."""
    body = json.loads(long_request(stack, MODEL, STREAMED).partition(b"\r\n\r\n")[2]) | {"max_tokens": 200}
    sent = request(stack.front.port, body, {"authorization": f"Bearer {stack.key}"})
    connection = await Connection.open(stack.front.port, keeps_times=True)
    try:
        pieces = (await connection.answer(sent)).pieces
    finally:
        await close(connection)
    return median(after - before for before, after in itertools.pairwise(pieces))


async def cloud(stack: Stack, service: Upstream, kind: str, times: int) -> Gone:
    """Disconnects during answers of the cloud."""
    seconds = []
    for _ in range(times):
        left = asyncio.get_running_loop().create_future()
        service.on_left = lambda left=left: None if left.done() else left.set_result(time.perf_counter())  # type: ignore[misc]
        at = await leave(stack, CLOUD, kind)
        async with asyncio.timeout(10):
            seconds.append(max(0.0, await left - at))
    return Gone(f"cloud, {kind}", seconds)


async def measure(root: Path, times: int) -> list[Gone]:
    """Measures all kinds of disconnects."""
    async with running(root) as (stack, service):
        found = []
        for kind in (STREAMED, WHOLE):
            found += [await local(stack, kind, times), await cloud(stack, service, kind, times)]
        return found


def main(environ: Mapping[str, str] = os.environ) -> int:
    """Runs this part of the gateway benchmark alone."""
    quick = is_quick(environ)
    times = int(environ.get("DEPARTURES") or (QUICK_TIMES if quick else TIMES))
    with tempfile.TemporaryDirectory(prefix="headgate-bench-") as root:
        found = uvloop.run(measure(Path(root), times))
    results = Results(gone=found)
    for line in gateway_report.gone_lines(results):
        print(line)
    for bar in gateway_report.bars_gone(results):
        print(bar.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
