"""Tables and bars from the samples of the engine benchmark.

`python -m benchmarks.report FILE` prints the report of an earlier run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from operator import attrgetter
from pathlib import Path
from statistics import median

from benchmarks.figures import Bar, Middle, geometric_mean, ratios
from benchmarks.samples import (
    ANSWER_TOKENS,
    CHAIN,
    LLAMA_CPP_SERVER,
    LLAMA_SERVER,
    PREFIX_TOKENS,
    PROMPT_TOKENS,
    QUESTION_TOKENS,
    WORKER,
    Results,
    Sample,
)

OF_LIMIT = {"15m": 0.80, "135m": 0.92, "1b": 0.92}
SERVICES_COST_PERCENT = {"15m": 10.0, "135m": 3.0}
AT_EVERY_POINT, OVERALL = 0.97, 1.0
OVER_LLAMA_CPP_SERVER = 2.5
IDLE_MB = 120.0

_COLUMNS: tuple[tuple[str, str, int, float], ...] = (
    ("tokens/s", "tokens_per_second", 1, 1.0),
    ("TTFT p50 ms", "ttft_p50", 0, 1e3),
    ("TTFT p99 ms", "ttft_p99", 0, 1e3),
    ("between p50 ms", "gap_p50", 1, 1e3),
    ("between p99 ms", "gap_p99", 1, 1e3),
    ("cores", "system_share", 2, 1.0),
    ("client's", "client_share", 3, 1.0),
)
"""Heading, attribute of a sample, digits, factor."""


def tables(found: Results) -> Iterator[str]:
    """Tables of medians over rounds, with the smallest and the largest value."""
    for model, streams in found.points:
        yield ""
        yield (
            f"{model}, {streams} streams, {PROMPT_TOKENS}-token prompts, {ANSWER_TOKENS}-token answers, "
            f"{len(found.limits_of(model, streams))} rounds: median [least .. most]"
        )
        yield f"  {'':<17}" + "".join(heading.rjust(25) for heading, *_rest in _COLUMNS)
        for system in found.systems(model, streams):
            cells = (
                Middle.of(found.values(model, streams, system, attrgetter(name))).text(digits, factor)
                for _heading, name, digits, factor in _COLUMNS
            )
            yield f"  {system:<17}" + "".join(cell.rjust(25) for cell in cells)
        limits = found.limits_of(model, streams)
        shown = Middle.of([one.tokens_per_second for one in limits]).text()
        prefill = Middle.of([one.prefill_rate for one in limits]).text(0)
        decode = Middle.of([one.decode_rate for one in limits]).text(0)
        yield f"  {'limit':<17}{shown:>25}   prefill {prefill}, decode {decode} tokens/s"
    for system in (WORKER, LLAMA_SERVER):
        if mine := [one for one in found.prefixes if one.system == system]:
            first, second = Middle.of([one.first_ttft for one in mine]), Middle.of([one.ttft for one in mine])
            yield ""
            yield (
                f"{mine[0].model}, second question after {PREFIX_TOKENS} shared tokens, {system}: "
                f"{max(one.prefilled for one in mine)} tokens prefilled, TTFT {second.text(1, 1e3)} ms "
                f"(the first question's {first.text(0, 1e3)} ms)"
            )
    if found.idle:
        yield ""
        yield "idle worker: " + ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in found.idle.items())


def bars(found: Results) -> list[Bar]:
    """The bars that these samples allow."""
    made: list[Bar] = []
    rate: Callable[[Sample], float] = attrgetter("tokens_per_second")
    for model, streams in found.points:
        ours = found.values(model, streams, WORKER, rate)
        limit = [one.tokens_per_second for one in found.limits_of(model, streams)]
        if ours and limit and streams >= 8:
            made.append(Bar(f"of_limit_{model}_{streams}", median(ratios(ours, limit)), "ratio", ">=", OF_LIMIT[model]))
        python = found.values(model, streams, LLAMA_CPP_SERVER, rate)
        if ours and python and streams == 8:
            better = median(ratios(ours, python))
            name = f"throughput_over_llama_cpp_server_{model}_{streams}"
            made.append(Bar(name, better, "ratio", ">=", OVER_LLAMA_CPP_SERVER))
        behind = found.values(model, streams, CHAIN, rate)
        if ours and behind and model in SERVICES_COST_PERCENT:
            cost = 100 * (1 - median(ratios(behind, ours)))
            made.append(Bar(f"services_cost_{model}_{streams}", cost, "percent", "<=", SERVICES_COST_PERCENT[model]))
    return [*made, *_beside_llama_server(found), *_prefix(found), *_idle(found)]


def _beside_llama_server(found: Results) -> Iterator[Bar]:
    for what, name, smaller in (
        ("throughput", "tokens_per_second", False),
        ("ttft_p50", "ttft_p50", True),
        ("inter_token_p99", "gap_p99", True),
    ):
        points: list[float] = []
        for model, streams in found.points:
            ours, theirs = (found.values(model, streams, system, attrgetter(name)) for system in (WORKER, LLAMA_SERVER))
            if ours and theirs:
                better = median(ratios(ours, theirs, smaller_is_better=smaller))
                points.append(better)
                yield Bar(f"{what}_vs_llama_server_{model}_{streams}", better, "ratio", ">=", AT_EVERY_POINT)
        if points:
            yield Bar(f"{what}_vs_llama_server_overall", geometric_mean(points), "ratio", ">", OVERALL)


def _prefix(found: Results) -> Iterator[Bar]:
    ours, theirs = ([one for one in found.prefixes if one.system == system] for system in (WORKER, LLAMA_SERVER))
    if ours:
        most = max(one.prefilled for one in ours)
        yield Bar("shared_prefix_prefilled", most, "tokens", "<=", QUESTION_TOKENS)
    if ours and theirs:
        better = ratios([one.ttft for one in ours], [one.ttft for one in theirs], smaller_is_better=True)
        yield Bar("shared_prefix_ttft_vs_llama_server", median(better), "ratio", ">=", AT_EVERY_POINT)


def _idle(found: Results) -> Iterator[Bar]:
    """Memory of the idle worker without the booked bytes of its model: weights, KV cells and compute buffers."""
    if found.idle:
        beyond = found.idle["pss"] - sum(found.idle.get(kind, 0) for kind in ("weights", "kv", "compute"))
        yield Bar("idle_worker_pss_beyond_model", beyond / 1e6, "MB", "<", IDLE_MB)


def show(found: Results) -> None:
    """Tables, then one line per bar."""
    for line in tables(found):
        print(line)
    print()
    for bar in bars(found):
        print(bar.line())


if __name__ == "__main__":
    show(Results.read(Path(sys.argv[1])))
