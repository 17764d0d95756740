"""How property tests draw: the same examples in every run, so that a red suite is red again; `explore` draws anew.

HYPOTHESIS_PROFILE=explore make test ARGS="tests/property"
"""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", max_examples=1000, deadline=None)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))
