"""Checks the numbers in a GGUF header against the limits of llama.cpp.

llama.cpp checks many of them with GGML_ASSERT, which aborts the process. The limits here are those of
`llama_model_base::load_hparams` (llama.cpp 0c1e57098), so that a damaged file gives an error message.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

MOST_LAYERS = 512
"""LLAMA_MAX_LAYERS."""
MOST_EXPERTS = 1024
"""LLAMA_MAX_EXPERTS."""
MOST_CONTEXT = 2**27
"""Tokens. The longest contexts of published models are about 10 million tokens; the field allows 4,294,967,295."""
ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_REAL = (
    "attention.layer_norm_epsilon", "attention.layer_norm_rms_epsilon", "attention.group_norm_epsilon",
    "rope.freq_base", "rope.scaling.factor",
)  # fmt: skip
"""Negative values and NaN abort a step or make all probabilities NaN."""

Header = Mapping[str, object]
"""Values by key without the architecture (`block_count`); a list for one value per layer."""


def header_problem(architecture: str, header: Header) -> str | None:
    """The first invalid value as a message for the user, or None."""
    found = (
        _range(header, "block_count", 1, MOST_LAYERS)
        or _range(header, "context_length", 1, MOST_CONTEXT)
        or _range(header, "embedding_length", 1, 2**32 - 1)
        or _predicted_layers(header)
        or _experts(architecture, header)
        or _real_numbers(header)
        or _rope_scaling(header)
    )
    return None if found is None else f"{architecture}.{found}"


def _range(header: Header, key: str, least: int, most: int) -> str | None:
    if key not in header:
        return f"{key} is missing in its header"
    value = header[key]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        return f"{key} is {_shown(value)}, but must be a whole number from {least} to {most}"
    return None


def _predicted_layers(header: Header) -> str | None:
    count, layers = _most(header, "nextn_predict_layers"), _most(header, "block_count")
    return None if count <= layers else f"nextn_predict_layers is {count}, but there are {layers} layers"


def _experts(architecture: str, header: Header) -> str | None:
    """llama.cpp aborts unless 0 < used <= experts, or both are 0; and the groups divide the experts."""
    experts, used = _most(header, "expert_count"), _most(header, "expert_used_count")
    groups, groups_used = _most(header, "expert_group_count"), _most(header, "expert_group_used_count")
    if architecture.startswith("hunyuan") and experts <= 1:  # llama.cpp treats these as models without experts
        experts = used = 0
    if experts > MOST_EXPERTS:
        return f"expert_count is {experts}; the limit is {MOST_EXPERTS}"
    if used > experts or (experts and not used):
        return f"expert_used_count is {used}, but there are {experts} experts"
    if groups and groups >= experts:
        return f"expert_group_count is {groups}, but there are {experts} experts"
    if groups > 1 and (experts % groups or not 0 < groups_used < groups):
        return f"expert_group_count is {groups}, of which {groups_used} are used, but there are {experts} experts"
    return None


def _real_numbers(header: Header) -> str | None:
    for key in _REAL:
        value = header.get(key)
        if isinstance(value, float) and not (math.isfinite(value) and value >= 0):
            return f"{key} is {value}, but must be 0 or more"
    return None


def _rope_scaling(header: Header) -> str | None:
    value = header.get("rope.scaling.type")
    if not isinstance(value, str) or value in ROPE_SCALINGS:
        return None
    return f"rope.scaling.type is {_shown(value)}; supported values: {', '.join(ROPE_SCALINGS)}"


def _most(header: Header, key: str) -> int:
    """The value, or the largest value of all layers; 0 when it is missing or not a number."""
    value = header.get(key)
    values = value if isinstance(value, list) else [value]
    return max((item for item in values if isinstance(item, int)), default=0)


def _shown(value: object) -> str:
    return ascii(value)[:80]
