"""What the benchmarks share: medians with spread, the limit of a load, bars, and the choice of a short run."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

_COMPARE: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    ">": operator.gt,
    "<=": operator.le,
    "<": operator.lt,
}


def is_quick(environ: Mapping[str, str]) -> bool:
    """Whether QUICK asks for a short run: it is set, and not to 0."""
    return environ.get("QUICK", "") not in ("", "0")


@dataclass(frozen=True, slots=True)
class Middle:
    """A median with the smallest and the largest value."""

    value: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        """The median of all values that are not NaN; NaN without values."""
        known = [value for value in values if not math.isnan(value)]
        return cls(median(known), min(known), max(known)) if known else cls(math.nan, math.nan, math.nan)

    def text(self, digits: int = 1, factor: float = 1.0) -> str:
        """`median [smallest .. largest]`, each multiplied by `factor`."""
        shown = (f"{value * factor:.{digits}f}" for value in (self.value, self.least, self.most))
        return "{} [{} .. {}]".format(*shown)


def limit_seconds(
    streams: int, prompt_tokens: int, answer_tokens: int, prefill_rate: float, decode_rate: float
) -> float:
    """Seconds of a load in llama.cpp's own batched loop; rates in tokens per second of all sequences together."""
    return streams * prompt_tokens / prefill_rate + streams * answer_tokens / decode_rate


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """A streamed answer; times are of `time.perf_counter`."""

    text: str
    tokens: int
    first_at: float
    ended_at: float

    def tokens_until(self, now: float) -> float:
        """The tokens that had arrived at this time, at a constant rate."""
        return self.tokens * min(1.0, max(0.0, now - self.first_at) / max(1e-9, self.ended_at - self.first_at))


def ratios(ours: Sequence[float], theirs: Sequence[float], *, smaller_is_better: bool = False) -> list[float]:
    """Ratios of two systems by round, above 1 if the first is better. Paired, because the machine's speed varies."""
    pairs = zip(ours, theirs, strict=True)
    return [(their / our) if smaller_is_better else (our / their) for our, their in pairs]


def geometric_mean(values: Sequence[float]) -> float:
    """The geometric mean; NaN without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Bar:
    """A value and its target. `op` is one of >=, >, <=, <. NaN never meets a target."""

    name: str
    value: float
    unit: str
    op: str
    target: float

    @property
    def reached(self) -> bool:
        """Whether the value meets the target."""
        return _COMPARE[self.op](self.value, self.target)

    def line(self) -> str:
        """`BAR <name> <value> <unit> <op> <target> ok|short`."""
        verdict = "ok" if self.reached else "short"
        return f"BAR {self.name} {self.value:.4g} {self.unit} {self.op} {self.target:g} {verdict}"
