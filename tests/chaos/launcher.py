"""Runs `headgate` on the machine of the suite, with planted defects if requested.

`python -m tests.chaos.launcher PLANTS up ...`: PLANTS is a comma-separated list (or `none`); the services that `up`
starts are started in the same way. The product does not know this module.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from headgate.shared import child_process
from tests.chaos.defects import PLANTS
from tests.chaos.machine import LISTING_ENV, Found


def main(argv: list[str]) -> int:
    names, *words = argv
    plants = [name for name in names.split(",") if name != "none"]
    if words[0] == "up":
        child_process.die_with_parent(os.environ)  # ends with the suite
        _pass_on(names)
    if words[0] == "inference":
        _find(Path(os.environ[LISTING_ENV]))
    for name in plants:
        PLANTS[name](words[0])
    from headgate.cli.main import main as headgate

    return headgate(words)


def _pass_on(names: str) -> None:
    """Services of `up` are started by this module as well."""
    from headgate.cli import up

    up.headgate_argv = lambda *words: [sys.executable, "-m", "tests.chaos.launcher", names, *words]  # type: ignore[assignment]


def _find(path: Path) -> None:
    """The service finds the devices that are listed in `path`."""
    from inference.devices.host import CpuProbe
    from inference.devices.inventory import Inventory

    Inventory.of = classmethod(lambda cls, *_: cls([Found(path), CpuProbe()]))  # type: ignore[assignment, method-assign]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
