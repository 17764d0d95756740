"""The planted defects of the chaos suites replace functions of the product that exist."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

APPLY = """
from tests.chaos.defects import PLANTS
for plant in PLANTS.values():
    for service in ("gateway", "inference"):
        plant(service)
"""
APPLY_TO_FLEET = """
from tests.fleet.defects import PLANTS
for plant in PLANTS.values():
    plant()
"""


@pytest.mark.parametrize("apply", [APPLY, APPLY_TO_FLEET])
def test_every_planted_defect_can_be_applied(apply: str) -> None:
    """In a process of its own, because a planted defect cannot be undone."""
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", apply], cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
