"""Which node has the KV cache of which prefix blocks.

A request that is sent to a node adds its blocks. That is an estimate: the node may have dropped its cache, and other
gateways send requests too. The `kv` events of a node correct it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gateway.nodes.prefix_blocks import PrefixBlocks

BLOCKS_PER_NODE = 8192
"""Blocks that are remembered of one node."""
MAX_BLOCKS = 500_000
"""Blocks that are remembered of all nodes together, about 300 bytes of memory each."""
LAST_BLOCKS = 8
"""Remembered of a prompt: its last blocks, where the next turn continues, and of the earlier ones the first, second,
fourth, eighth and so on. Another prompt with the same beginning thus finds at least half of it."""
MAX_NODES = 8
"""Up to this number of nodes, `best` adds others to those of `among`."""


class PrefixIndex:
    """The blocks of each node, in the order of their last use, and the nodes of each block."""

    def __init__(self, blocks_per_node: int = BLOCKS_PER_NODE, max_blocks: int = MAX_BLOCKS) -> None:
        self._blocks_per_node = blocks_per_node
        self._max_blocks = max_blocks
        self._blocks: dict[str, dict[str, None]] = {}
        self._holders: dict[str, tuple[str, ...]] = {}
        self._alone: dict[str, tuple[str, ...]] = {}
        """The value of `_holders` for the blocks that only one node has."""

    # --- updates -----------------------------------------------------------------------------------------------------
    def note(self, node: str, hashes: Sequence[str]) -> None:
        """A prompt with these blocks is sent to `node`. Its last block is the first one to be forgotten again."""
        self._add(node, [hashes[place] for place in _remembered(len(hashes))])

    def stored(self, node: str, hashes: Iterable[str]) -> None:
        """`node` reports that it has stored sequences with these labels."""
        self._add(node, hashes)

    def removed(self, node: str, hashes: Iterable[str]) -> None:
        """`node` reports that no stored sequence has these labels any more."""
        blocks = self._blocks.get(node, {})
        for hash in hashes:
            if hash in blocks:
                del blocks[hash]
                self._release(node, hash)

    def replace(self, node: str, hashes: Iterable[str]) -> None:
        """`node` reports all of its labels."""
        self.forget(node)
        self._add(node, hashes)

    def forget(self, node: str) -> None:
        """`node` has left or lost its cache."""
        for hash in self._blocks.pop(node, ()):
            self._release(node, hash)
        self._alone.pop(node, None)

    def _add(self, node: str, hashes: Iterable[str]) -> None:
        blocks, holders = self._blocks.setdefault(node, {}), self._holders
        alone = self._alone.setdefault(node, (node,))
        for hash in hashes:
            if hash in blocks:
                del blocks[hash]  # moves to the end
            else:
                others = holders.get(hash)
                holders[hash] = alone if others is None else others + alone
            blocks[hash] = None
        most = min(self._blocks_per_node, max(1, self._max_blocks // len(self._blocks)))
        while len(blocks) > most:
            oldest = next(iter(blocks))
            del blocks[oldest]
            self._release(node, oldest)

    def _release(self, node: str, hash: str) -> None:
        others = tuple(other for other in self._holders[hash] if other != node)
        if others:
            self._holders[hash] = others
        else:
            del self._holders[hash]

    # --- queries -----------------------------------------------------------------------------------------------------
    def best(self, blocks: PrefixBlocks, among: Iterable[str] = ()) -> dict[str, int]:
        """The nodes with the longest beginnings of a prompt, and the bytes of these; the longest first.

        Nodes of `among` are included also where MAX_NODES others have the same beginning.
        """
        found: dict[str, int] = {}
        missing = {node: self._blocks[node] for node in among if node in self._blocks}
        for hash, end in zip(reversed(blocks.hashes), reversed(blocks.end_bytes), strict=True):
            if (nodes := self._holders.get(hash)) is None:
                continue
            for node in [node for node, known in missing.items() if hash in known]:
                del missing[node]
                found.setdefault(node, end)
            for node in reversed(nodes):
                if len(found) >= MAX_NODES:
                    break
                found.setdefault(node, end)
        return found


def _remembered(count: int) -> list[int]:
    """The places of the blocks of a prompt that are remembered, of `count` blocks, the last first."""
    places = list(range(count - 1, max(-1, count - 1 - LAST_BLOCKS), -1))
    place = 1 << max(0, count - LAST_BLOCKS).bit_length()
    while place := place >> 1:
        places.append(place - 1)
    return places
