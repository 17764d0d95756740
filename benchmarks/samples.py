"""The raw samples of an engine benchmark, and one number per round from them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.figures import limit_seconds
from headgate.cli.bench import percentile

WORKER, CHAIN, LLAMA_SERVER, LLAMA_CPP_SERVER = "worker", "chain", "llama-server", "llama_cpp.server"
MODELS = ("15m", "135m", "1b")
PROMPT_TOKENS, ANSWER_TOKENS = 80, 64
"""Tokens of the prompt and of the answer of each stream."""
PREFIX_TOKENS, QUESTION_TOKENS = 2000, 40
"""Tokens of the prefix that two prompts share, and of the question after it."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One system under one load in one round; times in seconds. `ttft`: one value per stream. `gaps`: times between
    consecutive pieces of text. Shares are of one core.
    """

    model: str
    system: str
    streams: int
    round: int
    tokens_per_second: float
    ttft: Sequence[float]
    gaps: Sequence[float]
    client_share: float
    system_share: float

    @property
    def ttft_p50(self) -> float:
        """Median time to first token."""
        return percentile(self.ttft, 0.5)

    @property
    def ttft_p99(self) -> float:
        """99th percentile of the time to first token."""
        return percentile(self.ttft, 0.99)

    @property
    def gap_p50(self) -> float:
        """Median time between tokens."""
        return percentile(self.gaps, 0.5)

    @property
    def gap_p99(self) -> float:
        """99th percentile of the time between tokens."""
        return percentile(self.gaps, 0.99)


@dataclass(frozen=True, slots=True)
class Limit:
    """llama-batched-bench in one round: tokens per second of all sequences together."""

    model: str
    streams: int
    round: int
    prefill_rate: float
    decode_rate: float

    @property
    def tokens_per_second(self) -> float:
        """Answer tokens per second of the whole load at these rates."""
        seconds = limit_seconds(self.streams, PROMPT_TOKENS, ANSWER_TOKENS, self.prefill_rate, self.decode_rate)
        return self.streams * ANSWER_TOKENS / seconds


@dataclass(frozen=True, slots=True)
class Prefix:
    """Two questions with one prefix: seconds to their first tokens, and tokens prefilled for the second."""

    model: str
    system: str
    round: int
    first_ttft: float
    ttft: float
    prefilled: int


@dataclass(slots=True)
class Results:
    """All raw samples of a run. `idle`: memory of the idle worker in bytes (pss, weights, kv, compute)."""

    samples: list[Sample] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)
    prefixes: list[Prefix] = field(default_factory=list)
    idle: dict[str, int] = field(default_factory=dict)

    @property
    def points(self) -> list[tuple[str, int]]:
        """Measured models and stream counts, in ascending order."""
        found = {(sample.model, sample.streams) for sample in self.samples}
        return sorted(found, key=lambda point: (MODELS.index(point[0]), point[1]))

    def systems(self, model: str, streams: int) -> list[str]:
        """Systems measured at a point, in the order of the first round."""
        found = (one.system for one in self.samples if (one.model, one.streams) == (model, streams))
        return list(dict.fromkeys(found))

    def values(self, model: str, streams: int, system: str, value: Callable[[Sample], float]) -> list[float]:
        """One number per round, in the order of rounds."""
        point = (model, streams, system)
        return [value(one) for one in self.samples if (one.model, one.streams, one.system) == point]

    def limits_of(self, model: str, streams: int) -> list[Limit]:
        """The limit in every round."""
        return [one for one in self.limits if (one.model, one.streams) == (model, streams)]

    def write(self, path: Path) -> None:
        """Writes JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Results:
        """Reads a file of `write`."""
        raw = json.loads(path.read_text())
        return cls(
            [Sample(**one) for one in raw["samples"]],
            [Limit(**one) for one in raw["limits"]],
            [Prefix(**one) for one in raw["prefixes"]],
            raw["idle"],
        )
