"""Measures the time of one decision of the planner, from models and ledger to placement or refusal.

    python -m benchmarks.planner      100 models on 8 devices and 1,000 on 64, random states; QUICK=1 for fewer of them

Each random state has devices of different sizes with foreign use; idle, young, busy, loading, leaving and pinned
models; demand of one to three times the memory; sometimes a limit on memory or models. The request is for one device,
several devices (by layer or tensor), or a whole device, of a dense or MoE model, with any of the changes that `fit`
allows. The time is CPU time of `plan` with garbage collection; the state is made before.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import Bar, Middle, is_quick
from inference.authority.placement.ledger import Account, Ledger
from inference.authority.placement.plan import EvictionState, Held, Option, Policy, Request, plan
from inference.authority.placement.smaller_settings import Fit, FitStep
from inference.authority.placement.spread import Spread
from inference.estimate.header_formula import Parameters
from inference.estimate.layers import Layers, Sizes

GIB, MIB = 2**30, 2**20
NOW = 10_000.0
BOUNDS = {(100, 8): 5.0, (1000, 64): 100.0}
"""Target for the 99th percentile of a decision in milliseconds, by numbers of models and devices."""
STATE_WEIGHTS = {
    EvictionState.IDLE: 12,
    EvictionState.YOUNG: 2,
    EvictionState.BUSY: 4,
    EvictionState.LOADING: 1,
    EvictionState.LEAVING: 1,
    EvictionState.FIXED: 1,
}
"""How often a model of a random state has each eviction state."""
RAW = Path("benchmarks/results/planner.json")


@dataclass(frozen=True, slots=True)
class State:
    """One input of the planner."""

    request: Request
    ledger: Ledger
    held: list[Held]
    policy: Policy


def states(models: int, devices: int, count: int, seed: int = 1) -> Iterator[State]:
    """Random states, the same for the same seed."""
    chance = random.Random(f"{seed} {models} {devices}")
    for _ in range(count):
        yield _state(chance, models, devices)


def _state(chance: random.Random, models: int, devices: int) -> State:
    names = [f"gpu-{number}" for number in range(devices)]
    ledger = Ledger(limit_bytes=chance.choice([None, None, None, devices * 20 * GIB]))
    ledger = ledger.open(Account("cpu", 1024 * GIB, 512 * GIB))
    for name in names:
        size = chance.choice([8, 16, 24, 48, 80]) * GIB
        ledger = ledger.open(Account(name, size, size * 9 // 10, chance.choice([0, 0, size // 8])))
    held: list[Held] = []
    scale = devices * 30 * GIB / models
    for number in range(models):
        need = {chance.choice(names): int(scale * chance.uniform(0.2, 2.0)), "cpu": 300 * MIB}
        if chance.random() < 0.05:
            need[chance.choice(names)] = int(scale)
        id = f"m{number}"
        if ledger.lacks(need):
            continue
        ledger = ledger.reserve(id, id, need).commit(id, need)
        eviction_state = chance.choices(list(STATE_WEIGHTS), weights=list(STATE_WEIGHTS.values()))[0]
        held.append(Held(id, id, eviction_state, need, NOW - chance.uniform(0, 3600), chance.uniform(0.5, 60)))
    return State(_request(chance, ledger, names), ledger, held, _policy(chance, len(held)))


def _request(chance: random.Random, ledger: Ledger, names: list[str]) -> Request:
    sizes = sorted(ledger.accounts[name].budget_bytes for name in names)
    wanted = chance.choice([sizes[0] // 2, sizes[len(sizes) // 2], sizes[-1], sizes[-1] * 2, sizes[-1] * 6])
    layers = chance.choice([24, 32, 80])
    weights = wanted * 8 // 10 // layers
    expert_bytes, apart = chance.choice([(0, 0), (weights * 9 // 10, 0), (weights * 9 // 10, layers // 4)])
    each = Sizes(weights, wanted // 10 // layers, expert_bytes=expert_bytes)
    made = Layers(
        Parameters(8192, 4, gpu_layers=-1, host_expert_layers=apart),
        (each,) * layers,
        wanted // 20,
        wanted // 20,
        wanted // 40,
        wanted // 100,
        by_tensor=chance.random() < 0.2,
    )
    overhead = dict.fromkeys(names, 400 * MIB) | {"cpu": 64 * MIB}
    spread = Spread(made, tuple(names), overhead)
    options = tuple(Option(name, spread.need({name: made.places})) for name in names)
    fit = Fit(chance.choice([(), *((step,) for step in FitStep), tuple(FitStep)]), min_context=2048)
    return Request("new", options, chance.random() < 0.1, spread, fit)


def _policy(chance: random.Random, held: int) -> Policy:
    return Policy(NOW, chance.choice([None, None, None, max(1, held - 1)]), chance.choice([None, None, None, 40]))


def measure(models: int, devices: int, count: int) -> tuple[list[float], Counter[str]]:
    """Milliseconds of each decision, and the frequency of each result."""
    times, results = [], Counter[str]()
    for state in states(models, devices, count):
        began = time.thread_time()
        decision = plan(state.request, state.ledger, state.held, state.policy)
        times.append((time.thread_time() - began) * 1e3)
        results[f"{decision.result}{' split' if len(getattr(decision, 'devices', ())) > 1 else ''}"] += 1
    return times, results


def main() -> int:
    """Runs the benchmark, prints the results and writes the raw figures."""
    quick = is_quick(os.environ)
    raw: dict[str, list[float]] = {}
    bars: list[Bar] = []
    for (models, devices), bound in BOUNDS.items():
        count = (200 if quick else 1000) if devices < 16 else (40 if quick else 200)
        times, results = measure(models, devices, count)
        raw[f"{models} models, {devices} devices"] = times
        ordered = sorted(times)
        p99 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.99))]
        shown = ", ".join(f"{number} {name}" for name, number in results.most_common())
        print(f"{models} models on {devices} devices: {Middle.of(times).text(2)} ms, p99 {p99:.2f} ms ({shown})")
        bars.append(Bar(f"plan_p99_{models}_models_{devices}_devices", p99, "ms", "<", bound))
    RAW.parent.mkdir(parents=True, exist_ok=True)
    RAW.write_text(json.dumps(raw))
    print()
    for bar in bars:
        print(bar.line())
    return 0


if __name__ == "__main__":
    sys.exit(main())
