"""The choice of a node for one request: filter, score, pick.

    score = predicted time to first token = time to load + queue + uncached prompt tokens / prefill rate

A part that a node does not report counts as the median of what the other nodes report, or as the constant below. The
pick is a power of two choices: two nodes are drawn among those whose score is within a margin of the best, and the one
with fewer requests is chosen. A node with cached tokens of the prompt has a better score, so affinity needs no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from statistics import median
from typing import NamedTuple

from gateway.providers.local.candidate_facts import UNKNOWN, LikelyFailure, Speed, queue_seconds
from inference.protocol import ModelStatus

MARGIN_SECONDS = 0.02
MARGIN_SHARE = 0.1
"""Scores within MARGIN_SECONDS plus MARGIN_SHARE of the best one count as equally good."""

LOAD_BOUND = 1.2
LOAD_SLACK = 3.0
"""The most load of a node, as a multiple of the mean and in requests above it, while another one has a free slot
(consistent hashing with bounded loads, https://arxiv.org/abs/1608.01350)."""

ASSUMED_TOKENS_PER_SECOND = 2000.0
ASSUMED_LOAD_SECONDS = 10.0
"""The prefill rate and the time to load while no node has measured one: cached tokens and loaded models count from the
first request."""


RETRIED_SHARE = 1 / 16
"""The share of choices in which a prefill rate below the median counts as the median: a node that measured a low rate
once, for example while its machine was busy, would otherwise get no requests that measure it again."""


class NodeFacts(NamedTuple):
    """The facts about one node for a request and its model; None means unknown and is never a reason to exclude.

    `excluded`: why this request must not use the node (policy, an attempt there failed). `listed`: whether the node has
    the model. `breaker_open_for` and `queue_full_for`: seconds until that is over. `fit_in`: seconds until the model
    may fit. `likely_failure`: a reason to use the node only if no other is left. `in_flight`: requests for the model
    there, by the last report and by what this gateway has sent; `parallel`: its slots. `node_load`:
    requests for all models there, per device. `cached_tokens`: tokens of the prompt that are expected in a KV cache of
    the node.
    """

    name: str
    excluded: str | None = None
    listed: bool = True
    breaker_open_for: float | None = None
    queue_full_for: float | None = None
    capabilities: Collection[str] | None = None
    context_length: int | None = None
    fits: bool | None = None
    fit_reason: str | None = None
    fit_in: float | None = None
    likely_failure: LikelyFailure | None = None
    speed: Speed = UNKNOWN
    in_flight: int = 0
    parallel: int = 1
    node_load: float = 0.0
    cached_tokens: int = 0

    @classmethod
    def of(
        cls,
        name: str,
        status: ModelStatus,
        in_flight: int,
        node_load: float,
        cached_tokens: int,
        *,
        first: bool = False,
    ) -> NodeFacts:
        """The facts in the status of a model on a node. `first`: the request has the highest priority."""
        queue = queue_seconds(status.queue_seconds, in_flight, status.parallel, status.answer_seconds, first=first)
        return cls(
            name, None, True, None, None, status.capabilities or None, status.context_length or None, status.fits,
            status.reason, status.retry_after_seconds, None,
            Speed(status.load_seconds, queue, status.prefill_tokens_per_second),
            in_flight, status.parallel, node_load, cached_tokens,
        )  # fmt: skip

    @property
    def load(self) -> float:
        """Requests per slot."""
        return self.in_flight / max(1, self.parallel)

    @property
    def rank(self) -> tuple[float, float, float]:
        """Smaller is better among equal scores: the requests per slot if above one, the load of all models, then again
        the requests per slot."""
        return max(1.0, self.load), self.node_load, self.load

    @property
    def is_loaded(self) -> bool:
        """Whether the model is known to take requests without being loaded first."""
        return self.speed.load_seconds == 0


class NodeNeeds(NamedTuple):
    """What a request needs of a node. `prompt_tokens` is an estimate."""

    prompt_tokens: int = 0
    capabilities: frozenset[str] = frozenset()
    fit_check: bool = True


class ChosenNode(NamedTuple):
    """The chosen node, its predicted time to first token, and the other nodes that could take the request."""

    name: str
    ttft_seconds: float
    others: tuple[str, ...] = ()


class NoNode(NamedTuple):
    """No node takes the request now: the reason of each, and in how many seconds one may (None when unknown)."""

    reasons: Mapping[str, str]
    retry_in: float | None = None


def choose(nodes: Sequence[NodeFacts], needs: NodeNeeds, draw: Callable[[], float]) -> ChosenNode | NoNode:
    """The node for a request; `draw` returns random numbers from 0 to 1."""
    reasons: dict[str, str] = {}
    waits: list[float] = []
    usable: list[NodeFacts] = []
    for node in nodes:
        if (why := _obstacle(node, needs)) is None:
            usable.append(node)
        else:
            reasons[node.name], retry_in = why
            if retry_in is not None:
                waits.append(retry_in)
    if not usable:
        return NoNode(reasons, min(waits, default=None))
    preferred = _bounded(_preferred(usable, needs))
    scores = _scores(preferred, needs, trusts_rates=draw() >= RETRIED_SHARE)
    picked = min((_pick(scores, draw), _pick(scores, draw)), key=lambda index: preferred[index].rank)
    chosen = preferred[picked]
    return ChosenNode(chosen.name, scores[picked], tuple(node.name for node in usable if node is not chosen))


# --- filter -----------------------------------------------------------------------------------------------------------
def _obstacle(node: NodeFacts, needs: NodeNeeds) -> tuple[str, float | None] | None:
    """Why `node` cannot take the request, and for how many seconds."""
    if node.excluded is not None:
        return node.excluded, None
    if not node.listed:
        return "does not have the model", None
    if node.capabilities is not None and (lacks := needs.capabilities.difference(node.capabilities)):
        return f"cannot do {', '.join(sorted(lacks))}", None
    if node.breaker_open_for is not None:
        return f"its breaker is open; retry in {_seconds(node.breaker_open_for)}", node.breaker_open_for
    if node.queue_full_for is not None:
        return f"its queue is full; retry in {_seconds(node.queue_full_for)}", node.queue_full_for
    if needs.fit_check and node.fits is False:
        return f"cannot fit now: {node.fit_reason or 'not enough memory'}", node.fit_in
    return None


def _seconds(amount: float) -> str:
    return f"{amount:.0f} s" if amount >= 1 else "a moment"


def _preferred(usable: list[NodeFacts], needs: NodeNeeds) -> list[NodeFacts]:
    """The nodes whose context holds the prompt and that are sound; the others only if there are none of these."""
    wide = [node for node in usable if node.context_length is None or node.context_length > needs.prompt_tokens]
    sound = [node for node in wide or usable if node.likely_failure is None]
    return sound or wide or usable


def load_bound(mean: float) -> float:
    """The load from which a node is busy, where the nodes have `mean` requests per device."""
    return max(LOAD_BOUND * mean, mean + LOAD_SLACK)


def _bounded(nodes: list[NodeFacts]) -> list[NodeFacts]:
    """`nodes` without those with much more load than the mean, while one with the model loaded has a free slot.

    Left out are nodes without a free slot that have many requests for the model per slot, and nodes with many requests
    for all models; each is compared with the mean of the nodes that have the model loaded.
    """
    loaded = [node for node in nodes if node.is_loaded]
    if all(node.load >= 1 for node in loaded):
        return nodes
    most = LOAD_BOUND * (sum(node.in_flight for node in loaded) + 1) / sum(max(1, node.parallel) for node in loaded)
    mean = sum(node.node_load for node in loaded) / len(loaded)
    found = [node for node in nodes if (node.load < 1 or node.load <= most) and node.node_load <= load_bound(mean)]
    return found if any(node.load < 1 and node.is_loaded for node in found) else nodes


# --- score and pick ---------------------------------------------------------------------------------------------------
def _scores(nodes: Sequence[NodeFacts], needs: NodeNeeds, *, trusts_rates: bool) -> list[float]:
    """Predicted seconds to the first token on each node. A free slot means no queue, unless the node reports one."""
    speeds = [node.speed for node in nodes]
    load = _median([speed.load_seconds for speed in speeds if speed.load_seconds], ASSUMED_LOAD_SECONDS)
    queue = _median([speed.queue_seconds for speed in speeds if speed.queue_seconds is not None], 0.0)
    rates = [speed.prefill_tokens_per_second for speed in speeds if speed.prefill_tokens_per_second]
    rate = _median(rates, ASSUMED_TOKENS_PER_SECOND)
    return [
        (load if speed.load_seconds is None else speed.load_seconds)
        + ((queue if node.load >= 1 else 0.0) if speed.queue_seconds is None else speed.queue_seconds)
        + max(0, needs.prompt_tokens - node.cached_tokens)
        / max(speed.prefill_tokens_per_second or rate, 0.0 if trusts_rates else rate)
        for node, speed in zip(nodes, speeds, strict=True)
    ]


def _median(known: Sequence[float], otherwise: float) -> float:
    return median(known) if known else otherwise


def _pick(scores: Sequence[float], draw: Callable[[], float]) -> int:
    """The index of a random score among those within the margin of the best; a better score is more likely.

    Each score gets a random part of the margin, which depends on this score only, so that a node whose score improves
    is never picked less often.
    """
    drawn = [score + draw() * (MARGIN_SECONDS + MARGIN_SHARE * score) for score in scores]
    return drawn.index(min(drawn))
