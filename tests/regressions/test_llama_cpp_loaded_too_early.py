"""Modules that start before a model is loaded do not load llama.cpp.

After the packages moved, a module that counts cores was in the package that loads the library.
"""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["inference.app", "inference.worker.service"])
def test_start_does_not_load_llama_cpp(module: str) -> None:
    code = f"import sys, {module}; print('llama_cpp' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
