"""Compares predicted with allocated bytes, and measures how long a refusal takes.

    python -m benchmarks.estimates      every combination; QUICK=1 for some of them (at most five minutes)

Real workers load random-weight models of six families (dense, GQA, experts, sliding window, hybrid, recurrent) on the
CPU and on simulated devices: several contexts, KV types, layers on the accelerator, parallel sequences, experts in host
memory, and splits over two devices. Refusals are timed at the service: cached (the model was measured before) and not.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from benchmarks.figures import Bar, Middle, is_quick
from tests.rigs.estimate_rig import MIB, Case, EstimateRig
from tests.rigs.stack import Stack, chat_body
from tests.rigs.tiny_families import FAMILIES, Form, path

QUICK_CASES = 30
DEVICE_BYTES = 3000 * MIB
CACHED_SECONDS, UNCACHED_SECONDS = 0.050, 2.0
RAW = Path("benchmarks/results/estimates.json")


def cases() -> Iterator[Case]:
    """All combinations."""
    contexts, kinds, layers = (2048, 8192, 32768), ("f16", "q8_0", "q4_0"), (0, 3, -1)
    for family, context, kv_type, gpu_layers, parallel in itertools.product(FAMILIES, contexts, kinds, layers, (1, 4)):
        form = Form(family, layers=8, width=512, feed=1536, heads_kv=4)
        yield Case(form, context // parallel, parallel, kv_type, gpu_layers)
        if gpu_layers < 0:
            yield Case(form, context // parallel, parallel, kv_type, gpu_layers, (4, 5))
        if gpu_layers < 0 and family == "moe":
            for experts in ("host", 3):
                for counts in ((), (4, 5)):
                    yield Case(form, context // parallel, parallel, kv_type, gpu_layers, counts, experts=experts)


async def sizes(wanted: list[Case], root: Path) -> dict[str, float]:
    """The largest error of each case, relative to the allowed one (1 % or 16 MiB)."""
    found = {}
    async with EstimateRig(root, [DEVICE_BYTES] * 2) as rig:
        for number, case in enumerate(wanted, 1):
            outcome = await rig.load(case)
            found[case.name] = outcome.worst
            off = ", ".join(f"{device} {count / MIB:+.2f} MiB" for device, count, _share in outcome.errors())
            print(f"{number}/{len(wanted)} {case.name}: {outcome.worst:.2f} of what is allowed ({off})", flush=True)
    return found


def refusals(root: Path, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each cached and each uncached refusal, measured by a client."""
    entry = {"path": str(path(Form("dense"))), "context_length": 131072, "parallel": 1}
    stack = Stack(
        root, models=json.dumps({"models": {"large": entry}}), inference_env={"INFERENCE_DEVICES": "sim:2x80MiB"}
    )
    cached, uncached = [], []
    try:
        stack.inference.start(wait_for="/readyz")
        for number in range(rounds):
            began = time.perf_counter()
            plan = stack.ask("/memory/plan", {"model": "large", "context_length": 65536 + 256 * number}, direct=True)
            uncached.append(time.perf_counter() - began)
            assert plan["result"] == "CANT_ACCOMMODATE", plan
        _refused(stack)
        for _ in range(rounds * 5):
            began = time.perf_counter()
            _refused(stack)
            cached.append(time.perf_counter() - began)
    finally:
        stack.kill()
    return cached, uncached


def _refused(stack: Stack) -> None:
    try:
        stack.ask("/v1/chat/completions", chat_body("hello", "large"), direct=True)
    except urllib.error.HTTPError as error:
        assert error.code == 503
        error.read()
        return
    raise AssertionError("the request was not refused")


def main() -> int:
    """Runs the benchmark, prints the results and writes the raw figures."""
    quick = is_quick(os.environ)
    wanted = list(cases())
    if quick:
        wanted = random.Random(1).sample(wanted, QUICK_CASES)
    with tempfile.TemporaryDirectory(prefix="headgate-estimates-") as root:
        cached, uncached = refusals(Path(root) / "refusals", 10 if quick else 30)
        found = asyncio.run(sizes(wanted, Path(root)))
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps({"errors": found, "cached": cached, "uncached": uncached}))
    print(f"\nerror over what is allowed, {len(found)} cases: {Middle.of(list(found.values())).text(3)}")
    print(f"refusals: cached {Middle.of(cached).text(1, 1e3)} ms, uncached {Middle.of(uncached).text(0, 1e3)} ms\n")
    for bar in (
        Bar("estimate_worst_error_over_allowed", max(found.values()), "ratio", "<=", 1.0),
        Bar("refusal_cached", median(cached) * 1e3, "ms", "<", CACHED_SECONDS * 1e3),
        Bar("refusal_uncached", median(uncached), "s", "<", UNCACHED_SECONDS),
    ):
        print(bar.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
