"""Values in the place of a JSON schema that was not checked yet."""

from __future__ import annotations

from hypothesis import strategies as st

_KEYS = [
    "type", "properties", "items", "anyOf", "enum", "const", "$ref", "$defs", "required", "format", "description", "a",
]  # fmt: skip
ODD_SCHEMAS = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(["object", "array", "string", "date", "#/$defs/a"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=3),
    max_leaves=12,
)
