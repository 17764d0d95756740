"""Reads from llama.cpp's log how large the cache of each layer is; never opens anything.

`layer   3: dev = ...` stands for each layer that a cache has, then `size =    1.00 MiB (  2048 cells,   4 layers, ...`.
"""

from __future__ import annotations

import re

from inference.estimate.header_formula import Facts

_LAYER_OF_CACHE = re.compile(r"llama_(?:kv_cache|memory_recurrent)[^:]*?[:,]\s+layer\s+(\d+): dev = ")
_SIZE_OF_CACHE = re.compile(
    r"llama_(?P<what>kv_cache|memory_recurrent): size =\s+(?P<size>[\d.]+) MiB \(\s*(?P<cells>\d+) cells"
)


class LayerTrace:
    """What the log of one load said."""

    def __init__(self) -> None:
        self._waiting: list[int] = []
        self._found: dict[int, tuple[float, int]] = {}
        self._text = ""

    def feed(self, text: str) -> None:
        """A piece of the log."""
        *lines, self._text = (self._text + text).split("\n")
        for line in lines:
            if match := _LAYER_OF_CACHE.match(line):
                self._waiting.append(int(match[1]))
            elif match := _SIZE_OF_CACHE.match(line):
                cells = int(match["cells"]) if match["what"] == "kv_cache" else 0  # a state does not follow the context
                for layer in self._waiting:
                    self._found[layer] = (float(match["size"]) * 2**20 / len(self._waiting), cells)
                self._waiting = []

    def layers(self, facts: Facts, kv_bytes: int) -> list[tuple[int, int, bool]]:
        """(weights, cache, whether the cache grows with the context) of each layer; bytes.

        What the log says if it explains `kv_bytes`, else what the header says.
        """
        said = sum(size for size, _cells in self._found.values())
        if not self._found or abs(said - kv_bytes) > 0.05 * kv_bytes + 0.02 * 2**20 * len(self._found):
            return [(weights, values, True) for weights, values in facts.by_layer]
        most = max(cells for _size, cells in self._found.values())
        found = []
        for layer, (weights, _values) in enumerate(facts.by_layer):
            size, cells = self._found.get(layer, (0.0, 0))
            found.append((weights, round(size), cells == most > 0))
        return found
