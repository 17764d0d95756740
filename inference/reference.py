"""Draws the table of model states into docs/architecture.md, between two marks; says nothing that it does not say."""

from __future__ import annotations

import sys
from pathlib import Path

from inference.core.lifecycle import TABLE, Event
from inference.protocol import ModelState

BEGIN, END = "<!-- lifecycle: begin, written by `make reference` -->", "<!-- lifecycle: end -->"
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "architecture.md"
WARM_POOL = (ModelState.OFFLOADING, ModelState.WARM, ModelState.RESTORING)


def diagram() -> str:
    """The transition table as a Mermaid state diagram; the way every state has to `failed` is one sentence."""
    lines = [f"    [*] --> {ModelState.COLD}"]
    lines += [f"    {at} --> {to}: {event}" for (at, event), to in TABLE.items() if event is not Event.FAIL]
    warm_pool = ", ".join(f"`{state}`" for state in WARM_POOL)
    failing = [at for at, event in TABLE if event is Event.FAIL]
    rest = ", ".join(state for state in ModelState if state not in failing)
    return "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            *lines,
            "```",
            "",
            f"`{Event.FAIL}` leads from every state but `{rest}` to `{ModelState.FAILED}`.",
            f"{warm_pool} belong to the warm pool, where a model holds no device memory.",
        ]
    )


def rewritten(document: str) -> str:
    """`document` with what stands between the marks replaced."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{diagram()}\n\n{END}{after}"


def main() -> int:
    """Rewrites docs/architecture.md."""
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write(f"wrote {DOCUMENT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
