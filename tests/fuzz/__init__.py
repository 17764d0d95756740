"""Generated bad input: damaged model files and odd requests must end in a clear error.

The normal test run uses a limited selection, `make fuzz` all of it (FUZZ_EXAMPLES).
"""

from __future__ import annotations

import os

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))
"""Requests per operation and kind; 0: the limited selection."""
