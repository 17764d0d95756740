"""The nodes for one request: collects the facts, chooses one, and keeps what happened at those that were tried."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from gateway.apis.openai.generation_request import InferenceRequest
from gateway.breaker.breakers import Breakers
from gateway.breaker.outcome import Failure, Scope, Verdict
from gateway.breaker.permits import Refused
from gateway.nodes.cold_placement import ColdPlacement
from gateway.nodes.fleet_view import FleetView
from gateway.nodes.node import Node
from gateway.nodes.node_choice import ChosenNode, NodeFacts, NodeNeeds, NoNode, choose
from gateway.nodes.node_table import PRESENT
from gateway.nodes.prefix_blocks import PrefixBlocks
from gateway.nodes.prefixes import Prefixes
from gateway.providers.local.candidate_facts import LikelyFailure
from inference.protocol import H_PREFIX, Priority

MAX_UNLISTED = 16
"""Nodes that are considered for a model that no node lists: each of them gives the right answer (404)."""

_AVOIDED = LikelyFailure("it is used only if no other node is left")


class ClientFacts(NamedTuple):
    """The client of a request, as far as the choice of a node depends on it."""

    tenant: str
    priority: Priority


class NodeSelection:
    """The choice of nodes for one request. `nodes` are those that existed when it began."""

    def __init__(
        self,
        nodes: Mapping[str, Node],
        view: FleetView,
        breakers: Breakers,
        prefixes: Prefixes,
        placement: ColdPlacement,
        request: InferenceRequest,
        client: ClientFacts,
        *,
        fit_check: bool,
    ) -> None:
        self._nodes = nodes
        self._view = view
        self._breakers = breakers
        self._prefixes = prefixes
        self._placement = placement
        self._request = request
        self._client = client
        self._fit_check = fit_check
        self._excluded: dict[tuple[str, str], str] = {}
        """Why a node is not used for a model; with an empty model for all."""
        self._avoided: set[str] = set()
        """Nodes that are used only if no other is left."""
        self._blocks: dict[str, PrefixBlocks | None] = {}
        self.has_other = False
        """Whether a node other than the last chosen one could take the request too, avoided nodes not counted."""

    def failed(self, node: str, model: str, verdict: Verdict, why: str) -> None:
        """An attempt on `node` failed: it is not used again for `model`, or at all if the service itself failed."""
        is_service = isinstance(verdict, Failure) and verdict.scope is Scope.PROVIDER
        self.exclude(node, "" if is_service else model, why)

    def refused(self, node: str, model: str, refusal: Refused) -> None:
        """A breaker of `node` refused an attempt, and there is another node.

        If the node is recovering, it is tried once more when no other node is left. Otherwise it is excluded.
        """
        if refusal.recovering and node not in self._avoided:
            self._avoided.add(node)
        else:
            self.exclude(node, model, f"breaker {refusal.by} {'is recovering' if refusal.recovering else 'is open'}")

    def exclude(self, node: str, model: str, why: str) -> None:
        """Do not use `node` for `model` (empty: for any) again."""
        self._excluded[node, model] = why

    def avoid(self, node: str) -> None:
        """Use `node` only if no other is left."""
        self._avoided.add(node)

    async def choose(self, model: str, prompt_tokens: int, seconds: float) -> str | NoNode:
        """The node for `model`, or the reasons why there is none. `prompt_tokens` is an estimate.

        Where the model has to be loaded, the nodes are asked for their plans, for at most `seconds`.
        """
        found = self._best_node(model, prompt_tokens)
        if isinstance(found, NoNode):
            return found
        self.has_other = any(name not in self._avoided for name in found.others)
        cold = [self._nodes[name] for name in (found.name, *found.others) if self._is_cold(name, model)]
        if len(cold) < 2 or cold[0].name != found.name:
            return found.name
        return await self._placement.node_for(model, cold, self._view, seconds) or found.name

    def _is_cold(self, node: str, model: str) -> bool:
        """Whether the model has to be loaded on `node`, as far as known."""
        status = self._view.table.status(node, model)
        return status is not None and status.state not in PRESENT

    def _best_node(self, model: str, prompt_tokens: int) -> ChosenNode | NoNode:
        table = self._view.table
        needs = NodeNeeds(prompt_tokens, self._request.needs, self._fit_check)
        names = table.nodes_for(model, random.random)
        blocks = self._blocks_for(model)
        cached = {} if blocks is None else self._prefixes.index.best(blocks, names)
        if names:
            names += [name for name in cached if name not in names and table.status(name, model) is not None]
        else:
            names = list(self._nodes)[:MAX_UNLISTED]
        size_bytes = 1 if blocks is None else blocks.size_bytes
        cached_tokens = {name: prompt_tokens * prefix_bytes // size_bytes for name, prefix_bytes in cached.items()}
        found = self._choose_among(names, model, needs, cached_tokens)
        if isinstance(found, NoNode) and len(others := [name for name in table.listed(model) if name not in names]):
            found = self._choose_among(others, model, needs, cached_tokens)  # none of the sample can take it
        return found

    def headers(self, node: str, model: str) -> dict[str, str]:
        """The headers of a request for `model` that is sent to `node` now; its prefix is then expected there."""
        blocks = self._blocks_for(model)
        return {} if blocks is None else {H_PREFIX: self._prefixes.note(node, blocks)}

    def _choose_among(
        self, names: Iterable[str], model: str, needs: NodeNeeds, cached_tokens: Mapping[str, int]
    ) -> ChosenNode | NoNode:
        nodes = [self._nodes[name] for name in names if name in self._nodes]  # nodes that were added later are left out
        facts = [self._facts(node, model, cached_tokens.get(node.name, 0)) for node in nodes]
        found = choose(facts, needs, random.random)
        return self._probed(found, facts, model) if isinstance(found, ChosenNode) and found.others else found

    def _probed(self, found: ChosenNode, facts: Iterable[NodeFacts], model: str) -> ChosenNode:
        """`found`, or a node whose open breaker waits for an attempt: perhaps no request would choose it otherwise.

        The model must be loaded there. If the attempt fails, another node answers.
        """
        for node in facts:
            is_usable = node.name in found.others and node.is_loaded and node.likely_failure is None
            if is_usable and self._breakers.awaits_probe(self._nodes[node.name].key, model):
                others = tuple(found.name if name == node.name else name for name in found.others)
                return found._replace(name=node.name, others=others)
        return found

    def _blocks_for(self, model: str) -> PrefixBlocks | None:
        if model not in self._blocks:
            self._blocks[model] = self._prefixes.blocks(self._client.tenant, model, self._request.body)
        return self._blocks[model]

    def _facts(self, node: Node, model: str, cached_tokens: int) -> NodeFacts:
        breakers, table, priority = self._breakers, self._view.table, self._client.priority
        status = table.status(node.name, model)
        if status is None:
            found = NodeFacts(node.name, in_flight=breakers.outstanding(node.key, model))
        else:
            # the report also has the requests of other gateways, `outstanding` also those of this one since then
            in_flight = max(table.in_flight(node.name, model), breakers.outstanding(node.key, model))
            load = table.node_load(node.name)
            found = NodeFacts.of(node.name, status, in_flight, load, cached_tokens, first=priority is Priority.HIGH)
        failure = _AVOIDED if node.name in self._avoided else node.view.likely_failure(model)
        return found._replace(
            excluded=self._excluded.get((node.name, model)) or self._excluded.get((node.name, "")),
            breaker_open_for=breakers.open_for(node.key, model),
            queue_full_for=breakers.skipped_for(node.key, model, priority),
            likely_failure=failure,
        )


def reasons_of(found: NoNode) -> str:
    """Why no node takes a request, as words for a message."""
    if not found.reasons:
        return "no node of inference.nodes is known yet"
    return "; ".join(f"{name}: {why}" for name, why in sorted(found.reasons.items()))
