"""The arithmetic of benchmarks: medians with spread, the limit of a load, bars; measures nothing."""

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


@dataclass(frozen=True, slots=True)
class Middle:
    """A median with the least and the largest value it stands for."""

    value: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Middle:
        """Of the values that are numbers; NaN when there are none."""
        known = [value for value in values if not math.isnan(value)]
        return cls(median(known), min(known), max(known)) if known else cls(math.nan, math.nan, math.nan)

    def text(self, digits: int = 1, factor: float = 1.0) -> str:
        """`median [least .. most]`, each times `factor`."""
        shown = (f"{value * factor:.{digits}f}" for value in (self.value, self.least, self.most))
        return "{} [{} .. {}]".format(*shown)


def limit_seconds(
    streams: int, prompt_tokens: int, answer_tokens: int, prefill_rate: float, decode_rate: float
) -> float:
    """How long a load takes when nothing but llama.cpp's own batched loop works: rates in tokens per second, all
    sequences together.
    """
    return streams * prompt_tokens / prefill_rate + streams * answer_tokens / decode_rate


def ratios(ours: Sequence[float], theirs: Sequence[float], *, smaller_is_better: bool = False) -> list[float]:
    """How much better we were in each round, 1 for equal; paired by round, because the machine changes between them."""
    pairs = zip(ours, theirs, strict=True)
    return [(their / our) if smaller_is_better else (our / their) for our, their in pairs]


def geometric_mean(values: Sequence[float]) -> float:
    """The mean for ratios; NaN of nothing."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


@dataclass(frozen=True, slots=True)
class Bar:
    """A value held against a target; `op` is one of >=, >, <=, <. A value that is NaN is short of everything."""

    name: str
    value: float
    unit: str
    op: str
    target: float

    @property
    def reached(self) -> bool:
        """Whether the value is where it should be."""
        return _COMPARE[self.op](self.value, self.target)

    def line(self) -> str:
        """`BAR <name> <value> <unit> <op> <target> ok|short`."""
        verdict = "ok" if self.reached else "short"
        return f"BAR {self.name} {self.value:.4g} {self.unit} {self.op} {self.target:g} {verdict}"
