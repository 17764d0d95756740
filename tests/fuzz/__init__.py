"""Bad input made by machines: damaged model files, requests nobody would write; everything here ends in a clear error.

A bounded choice of it runs with all other tests, everything with `make fuzz`, which sets FUZZ_EXAMPLES.
"""

from __future__ import annotations

import os

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Requests per operation and kind; 0: the bounded choice."""
