"""Limits on the cost of the schemas of one form, and the error for schemas that cannot be enforced."""

from __future__ import annotations

import math
from decimal import Decimal

MAX_NODES = 10_000
"""Schemas within a schema, each target of a reference counted once."""
MAX_DEPTH = 48
"""Schemas inside schemas, references not followed: llguidance reads JSON 128 levels deep."""
MAX_PROPERTIES = 1000
"""Named properties of one object: llguidance's cost grows with their square."""
MAX_MULTIPLE = 20_000
"""Least common multiple of all `multipleOf`, in units of their last decimal: an automaton has as many states."""
MAX_COUNT = 100_000
"""Limit of `minItems`, `maxLength` and similar keywords."""
MAX_HOPS = 256
"""The length of a chain of references to schemas of the same value: llguidance merges them by recursion."""
MAX_MERGED = 10_000
"""The number of references that are merged into one schema: llguidance copies each target."""
MAX_VISITS = 200_000
"""Visits of schemas to find references without an end; takes half a second. Without cycles each is visited twice."""
EXACT = 2**53
"""Largest number that compares exactly."""
MAX_PATTERNS = 64
"""Limit of `patternProperties` in all schemas of a form: those of an object are compared with each other."""
MAX_COMPARISONS = 500_000
"""Steps to tell the options of `oneOf` apart, in all schemas of a form; at most some 0.8 s."""


class SchemaError(ValueError):
    """The schema cannot be enforced; the message names the keyword and its place."""

    def __init__(self, at: str, problem: str) -> None:
        super().__init__(f"{problem} (at {at or '/'})"[:500])


class Allowance:
    """The remaining allowance of one form; each `take` raises SchemaError with the place when it is spent."""

    def __init__(self) -> None:
        self._patterns = MAX_PATTERNS
        self._comparisons = MAX_COMPARISONS

    def take_patterns(self, count: int, at: str) -> None:
        """Counts names of `patternProperties`."""
        self._patterns -= count
        if self._patterns < 0:
            raise SchemaError(at, f"more than {MAX_PATTERNS} patternProperties in all schemas of one request")

    def take_comparisons(self, count: int, at: str) -> None:
        """Counts steps of comparing options."""
        self._comparisons -= count
        if self._comparisons < 0:
            raise SchemaError(at, "oneOf has too many options to check that they exclude each other; use anyOf")


class Multiples:
    """All `multipleOf` of one schema: together they cost their least common multiple."""

    def __init__(self) -> None:
        self._multiple = Decimal(1)

    def take(self, value: float, at: str) -> None:
        """Counts one more; raises SchemaError."""
        found = Decimal(str(value))
        unit = min(int(found.as_tuple().exponent), int(self._multiple.as_tuple().exponent), 0)
        scale = Decimal(10) ** -unit
        if found * scale > MAX_MULTIPLE or self._multiple * scale > MAX_MULTIPLE:
            raise SchemaError(at, "multipleOf is too small or too large to be enforced")
        multiple = math.lcm(int(found * scale), int(self._multiple * scale))
        if multiple > MAX_MULTIPLE:
            raise SchemaError(at, "multipleOf is too small or too large to be enforced together with the others")
        self._multiple = Decimal(multiple) / scale
