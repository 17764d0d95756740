"""Writes the diagrams of model and device states into docs/architecture.md, between marks."""

from __future__ import annotations

import sys
from pathlib import Path

from inference.authority import device_health
from inference.authority.lifecycle import TABLE, ModelEvent
from inference.protocol import DeviceState, ModelState

BEGIN, END = "<!-- lifecycle: begin, written by `make reference` -->", "<!-- lifecycle: end -->"
HEALTH_BEGIN, HEALTH_END = "<!-- health: begin, written by `make reference` -->", "<!-- health: end -->"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "architecture.md"
WARM_POOL = (ModelState.OFFLOADING, ModelState.WARM, ModelState.RESTORING)


def diagram() -> str:
    """The transition table as a Mermaid state diagram; the transitions to `failed` are one sentence."""
    lines = [f"    [*] --> {ModelState.COLD}"]
    lines += [f"    {at} --> {to}: {event}" for (at, event), to in TABLE.items() if event is not ModelEvent.FAIL]
    warm_pool = ", ".join(f"`{state}`" for state in WARM_POOL)
    failing = [at for at, event in TABLE if event is ModelEvent.FAIL]
    rest = ", ".join(state for state in ModelState if state not in failing)
    return "\n".join(
        [
            "```mermaid",
            "stateDiagram-v2",
            *lines,
            "```",
            "",
            f"`{ModelEvent.FAIL}` leads from every state but `{rest}` to `{ModelState.FAILED}`.",
            f"{warm_pool} belong to the warm pool, where a model holds no device memory.",
        ]
    )


def health_diagram() -> str:
    """The table of device health as a Mermaid state diagram, with the effects of each transition."""
    ways = [
        f"    {at} --> {to}: {event}" + (f" ({', '.join(effects)})" if effects else "")
        for (at, event), (to, effects) in device_health.TABLE.items()
    ]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {DeviceState.HEALTHY}", *ways, "```"])


def rewritten(document: str) -> str:
    """`document` with new text between the marks."""
    for begin, end, drawn in ((BEGIN, END, diagram()), (HEALTH_BEGIN, HEALTH_END, health_diagram())):
        before, _, rest = document.partition(begin)
        _, _, after = rest.partition(end)
        document = f"{before}{begin}\n\n{drawn}\n\n{end}{after}"
    return document


def main() -> int:
    """Rewrites docs/architecture.md."""
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write(f"wrote {DOCUMENT}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
