"""Runs `headgate` with a defect planted, so that the suite can be seen to find it; plants nothing by itself.

`python -m tests.chaos.launcher PLANTS up ...`: PLANTS is a comma-separated list (or `none`); the services that `up`
starts are started the same way. No line of the product knows of this.
"""

from __future__ import annotations

import sys

from tests.chaos.defects import PLANTS


def main(argv: list[str]) -> int:
    names, *words = argv
    plants = [name for name in names.split(",") if name != "none"]
    if words[0] == "up":
        _pass_on(names)
    for name in plants:
        PLANTS[name](words[0])
    from headgate.cli.main import main as headgate

    return headgate(words)


def _pass_on(names: str) -> None:
    """What `up` starts is started by this module as well."""
    from headgate.cli import up

    up.headgate_argv = lambda *words: [sys.executable, "-m", "tests.chaos.launcher", names, *words]  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
