"""Prints what an image installs before the engine: the project's dependencies without llama-cpp-python, traces, and the
client of the shared state.
"""

import re
import sys
import tomllib
from pathlib import Path

project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
extras = project["optional-dependencies"]
for requirement in (*project["dependencies"], *extras["otel"], *extras["redis"]):
    if re.split(r"[^A-Za-z0-9_-]", requirement)[0] != "llama-cpp-python":
        sys.stdout.write(requirement + "\n")
