"""Tables and bars from the samples of the gateway benchmark.

`python -m benchmarks.gateway_report FILE` prints the report of an earlier run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

from benchmarks.figures import Bar, Middle, ratios
from benchmarks.gateway_peers import LITELLM, PORTKEY
from benchmarks.gateway_samples import (
    CLOUD_STREAM,
    CLOUD_STREAMS,
    CLOUD_WHOLE,
    FIRST_TOKEN_SECONDS,
    STREAMED,
    WHOLE,
    Alone,
    Failed,
    Results,
)
from benchmarks.gateways import DIRECT, GATEWAY, PASS_THROUGH
from benchmarks.upstream import PACE_SECONDS
from headgate.cli.bench import percentile

ADDED_P50_MS, ADDED_P99_MS, ADDED_TTFT_P99_MS = 0.6, 2.0, 2.0
ADDED_OF_PASS_THROUGH = 1.0
"""Added latency relative to the bare proxy in the same round. Independent of the machine's speed; our own target."""
OF_PASS_THROUGH, OVER_LITELLM, OVER_PORTKEY = 0.65, 20.0, 3.0
CLOUD_OF_PASS_THROUGH = 0.5
MAX_PACES = 10
IDLE_MB, GROWTH_PERCENT = 120.0, 5.0
FAILOVER_P50_MS = 10.0
"""Added latency of a failed tier, without the time it kept the request waiting; our own target."""
SKIPPED_P50_MS = 2.0
"""Added latency of a tier with an open breaker; our own target."""
GONE_MS = 100.0


def tables(found: Results) -> Iterator[str]:
    """Tables of medians over rounds, with the smallest and the largest value."""
    versions = ", ".join(f"{name} {version}" for name, version in found.versions.items())
    yield f"{versions}; load average {' and '.join(f'{load:.1f}' for load in found.load)} at start and end"
    yield from _alone(found)
    yield from _crowds(found)
    yield from _paced(found)
    yield from _failed(found)
    yield from _held(found)
    yield from gone_lines(found)


def gone_lines(found: Results) -> Iterator[str]:
    """One line per kind of disconnect."""
    for gone in found.gone:
        times = Middle.of(gone.seconds).text(1, 1e3)
        step = f"; a decode step takes {gone.step * 1e3:.1f} ms" if gone.step else ""
        yield f"client gone, {gone.kind}: {len(gone.seconds)} times, ms {times}, p99 {_p99(gone.seconds):.1f}{step}"


def _alone(found: Results) -> Iterator[str]:
    for kind in (WHOLE, STREAMED, CLOUD_WHOLE, CLOUD_STREAM):
        rounds = len(found.alone_of(GATEWAY, kind))
        if not rounds:
            continue
        yield ""
        yield f"one connection, {kind} answers, ms, {rounds} rounds: median [least .. most]"
        columns: Sequence[tuple[str, Callable[[Alone], float]]] = (
            ("first p50", lambda one: one.first_at(0.5)),
            ("first p99", lambda one: one.first_at(0.99)),
            ("whole p50", lambda one: one.whole_at(0.5)),
            ("whole p99", lambda one: one.whole_at(0.99)),
        )
        yield f"  {'':<14}" + "".join(name.rjust(24) for name, _ in columns)
        for system in dict.fromkeys(one.system for one in found.alone):
            if mine := found.alone_of(system, kind):
                cells = (Middle.of([value(one) for one in mine]).text(3, 1e3) for _, value in columns)
                yield f"  {system:<14}" + "".join(cell.rjust(24) for cell in cells)


def _crowds(found: Results) -> Iterator[str]:
    for kind in (WHOLE, STREAMED, CLOUD_WHOLE, *CLOUD_STREAMS):
        systems = dict.fromkeys(one.system for one in found.crowds if one.kind == kind)
        if not systems:
            continue
        some = next(one for one in found.crowds if one.kind == kind)
        yield ""
        yield f"{some.connections} connections, {kind} answers: median [least .. most]"
        heads = ("requests/s", "per s of its core", "p50 ms", "p99 ms", "its core's share", "generator's")
        yield f"  {'':<14}" + "".join(head.rjust(26) for head in heads)
        for system in systems:
            mine = found.crowds_of(system, kind)
            cells = (
                Middle.of([one.per_second for one in mine]).text(0),
                Middle.of([one.per_core_second for one in mine]).text(0),
                Middle.of([one.p50 for one in mine]).text(1, 1e3),
                Middle.of([one.p99 for one in mine]).text(1, 1e3),
                Middle.of([one.system_share for one in mine]).text(2),
                Middle.of([one.generator_share for one in mine]).text(2),
            )
            held = f"   {found.memory[system] / 1e6:.0f} MB" if system in found.memory else ""
            yield f"  {system:<14}" + "".join(cell.rjust(26) for cell in cells) + held


def _paced(found: Results) -> Iterator[str]:
    for system in dict.fromkeys(one.system for one in found.paced):
        mine = found.paced_of(system)
        yield ""
        yield f"{mine[0].streams} streams of {mine[0].tokens} tokens, {PACE_SECONDS * 1e3:g} ms apart, {system}:"
        longest = Middle.of([max(one.longest) for one in mine]).text(0, 1e3)
        middle, most = Middle.of([one.gap_p50 for one in mine]), Middle.of([one.gap_p99 for one in mine])
        share = Middle.of([one.system_share for one in mine]).text(2)
        yield (f"  gaps p50 {middle.text(1, 1e3)}, p99 {most.text(1, 1e3)}, longest {longest} ms; {share} of its core")


def _failed(found: Results) -> Iterator[str]:
    if found.failed:
        yield ""
        yield "what a first tier that does not answer adds, ms: median [least .. most]"
    for one in found.failed:
        how = "its breaker is open" if one.is_open else "it gets the request"
        added = [seconds - median(one.without) for seconds in one.seconds]
        yield f"  {one.kind:<10} {how:<22} {Middle.of(added).text(2, 1e3)} ({len(added)} requests)"


def _held(found: Results) -> Iterator[str]:
    if found.held.after:
        yield ""
        shown = ", ".join(f"{size / 1e6:.1f} after {count:,}" for count, size in found.held.after)
        yield f"memory of the gateway, MB: {found.held.idle_bytes / 1e6:.1f} idle, {shown} requests"


def bars(found: Results) -> list[Bar]:
    """The bars that these samples allow."""
    return [
        *_bars_alone(found), *_bars_crowds(found), *_bars_paced(found), *_bars_failed(found), *_bars_held(found),
        *bars_gone(found),
    ]  # fmt: skip


def _bars_alone(found: Results) -> Iterator[Bar]:
    judged: Sequence[tuple[str, str, Callable[[Alone], float], float]] = (
        ("added_p50", WHOLE, lambda one: one.whole_at(0.5), ADDED_P50_MS),
        ("added_p99", WHOLE, lambda one: one.whole_at(0.99), ADDED_P99_MS),
        ("added_ttft_p99", STREAMED, lambda one: one.first_at(0.99), ADDED_TTFT_P99_MS),
        ("added_p50_cloud", CLOUD_WHOLE, lambda one: one.whole_at(0.5), ADDED_P50_MS),
        ("added_ttft_p50_cloud", CLOUD_STREAM, lambda one: one.first_at(0.5), ADDED_P50_MS),
    )
    for name, kind, value, target in judged:
        added, hop = (_added(found, system, kind, value) for system in (GATEWAY, PASS_THROUGH))
        if added:
            yield Bar(name, median(added) * 1e3, "ms", "<=", target)
        if added and hop and kind in (WHOLE, STREAMED):
            yield Bar(f"{name}_of_{PASS_THROUGH}", median(ratios(added, hop)), "ratio", "<=", ADDED_OF_PASS_THROUGH)


def _added(found: Results, system: str, kind: str, value: Callable[[Alone], float]) -> list[float]:
    """Seconds that a hop adds to a direct request to the upstream, by round."""
    hop, direct = found.alone_of(system, kind), found.alone_of(DIRECT, kind)
    return [value(one) - value(bare) for one, bare in zip(hop, direct, strict=True)] if hop and direct else []


def _bars_crowds(found: Results) -> Iterator[Bar]:
    for system, target in ((PASS_THROUGH, OF_PASS_THROUGH), (LITELLM, OVER_LITELLM), (PORTKEY, OVER_PORTKEY)):
        for kind in (WHOLE, STREAMED):
            ours = [one.per_core_second for one in found.crowds_of(GATEWAY, kind)]
            theirs = [one.per_core_second for one in found.crowds_of(system, kind)]
            if ours and theirs:
                name = f"throughput_per_core_over_{system}_{kind}"
                yield Bar(name, median(ratios(ours, theirs)), "ratio", ">=", target)
    for kind in (CLOUD_WHOLE, *CLOUD_STREAMS):
        ours = [one.per_core_second for one in found.crowds_of(GATEWAY, kind)]
        theirs = [one.per_core_second for one in found.crowds_of(PASS_THROUGH, kind)]
        if ours and theirs:
            name = f"throughput_per_core_over_{PASS_THROUGH}_{kind.replace(', ', '_').replace(' ', '_')}"
            yield Bar(name, median(ratios(ours, theirs)), "ratio", ">=", CLOUD_OF_PASS_THROUGH)


def _bars_paced(found: Results) -> Iterator[Bar]:
    if mine := found.paced_of(GATEWAY):
        longest = max(max(one.longest) for one in mine)
        name = f"longest_gap_of_{mine[0].streams}_streams"
        yield Bar(name, longest / PACE_SECONDS, "paces", "<=", MAX_PACES)


def _bars_failed(found: Results) -> Iterator[Bar]:
    for one in found.failed:
        added = median(one.seconds) - median(one.without) - _waited(one)
        if one.is_open:
            yield Bar(f"failover_{one.kind}_open", added * 1e3, "ms", "<=", SKIPPED_P50_MS)
        else:
            yield Bar(f"failover_{one.kind}", added * 1e3, "ms", "<=", FAILOVER_P50_MS)


def _waited(one: Failed) -> float:
    """The deadline of a silent tier, which does not count as a cost of the gateway."""
    return FIRST_TOKEN_SECONDS if one.kind == "silent" and not one.is_open else 0.0


def _bars_held(found: Results) -> Iterator[Bar]:
    if after := found.held.after:
        (_, begun), (count, ended) = after[0], after[-1]
        yield Bar("rss_idle", found.held.idle_bytes / 1e6, "MB", "<", IDLE_MB)
        yield Bar(f"rss_growth_after_{count}", 100 * (ended / begun - 1), "percent", "<=", GROWTH_PERCENT)


def bars_gone(found: Results) -> Iterator[Bar]:
    """Bars of disconnects: 100 ms and one decode step."""
    for gone in found.gone:
        name = "gone_" + gone.kind.replace(" ", "_").replace(",", "") + "_p99_beyond_step"
        yield Bar(name, _p99(gone.seconds) - gone.step * 1e3, "ms", "<=", GONE_MS)


def _p99(seconds: Sequence[float]) -> float:
    """The 99th percentile in milliseconds."""
    return percentile(seconds, 0.99) * 1e3


def show(found: Results) -> None:
    """Tables, then one line per bar."""
    for line in tables(found):
        print(line)
    print()
    for bar in bars(found):
        print(bar.line())
    for name in (LITELLM, PORTKEY):
        if found.crowds and all(one.system != name for one in found.crowds):
            print(f"{name} is not installed and was not measured; `python -m benchmarks.gateway_peers` installs it")


if __name__ == "__main__":
    show(Results.read(Path(sys.argv[1])))
