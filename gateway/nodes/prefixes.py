"""The prefixes of prompts that the nodes have computed: hashes for requests, and the index of the nodes' caches."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from itertools import chain
from typing import Any

from gateway.apis.openai.generation_request import AnyRequest
from gateway.nodes.prefix_blocks import PrefixBlocks, prefix_blocks, prefix_salt
from gateway.nodes.prefix_index import PrefixIndex

MAX_SENT = 32
"""Hashes that a node gets with a request: those of the last blocks of the prompt."""
_SALTS = 4096


class Prefixes:
    """One index of all nodes. Gateways with the same `secret` give the same prompts the same hashes."""

    def __init__(self, secret: str) -> None:
        key = secret.encode()
        self._salt = functools.lru_cache(maxsize=_SALTS)(lambda tenant, model: prefix_salt(key, tenant, model))
        self.index = PrefixIndex()

    def blocks(self, tenant: str, model: str, body: AnyRequest) -> PrefixBlocks | None:
        """The blocks of a request's prompt; None where it has none."""
        return prefix_blocks(self._salt(tenant, model), body)

    def note(self, node: str, blocks: PrefixBlocks) -> str:
        """A request is sent to `node`; returns the value of its header H_PREFIX."""
        self.index.note(node, blocks.hashes)
        return ",".join(blocks.hashes[-MAX_SENT:])

    def apply(self, node: str, kind: str, data: Mapping[str, Any]) -> None:
        """Applies an event of a node; raises KeyError, TypeError or AttributeError for a malformed one."""
        if kind == "kv":
            self.index.removed(node, data["removed"])
            self.index.stored(node, data["added"])
        elif kind == "snapshot" and "kv" in data:  # older versions do not report it
            self.index.replace(node, chain.from_iterable(data["kv"].values()))
