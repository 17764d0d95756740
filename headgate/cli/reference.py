"""Writes into docs/cli.md, between BEGIN and END, the help of all verbs that `headgate --help` lists."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from headgate.cli.main import GROUPS, PROGRAM, top_parser, verb_parser

BEGIN, END = "<!-- help: begin, written by `make reference` -->", "<!-- help: end -->"
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


COMMON = ("-h, --help", "--config-dir", "--json", "--node NODE", "MODEL             a model's name or alias")
"""Arguments of most verbs, which the document explains once."""
_COMMON_USAGE = re.compile(r"\s*\[(?:-h|--config-dir DIR|--json|--node NODE)\]")
_LIST = re.compile(r"^(?:options|positional arguments):", re.MULTILINE)
_EMPTY_LIST = re.compile(rf"{_LIST.pattern}\n*(?=^\S|\Z)", re.MULTILINE)


def reference() -> str:
    """The help texts as Markdown without COMMON arguments, in the order of the overview.

    A verb with arguments of its own has a section. Verbs with only COMMON arguments are one list.
    """
    simple, sections = [], []
    for group in GROUPS.values():
        for verb in group:
            parser = verb_parser(verb)
            texts = [_without_common(each.format_help()) for each in (parser, *_actions(parser))]
            if _LIST.search("".join(texts)):
                sections += [f"## {PROGRAM} {verb.name}", _block("\n\n".join(text.strip() for text in texts))]
            else:
                simple.append(texts[0].partition("\n")[0].removeprefix("usage: "))
    return "\n\n".join(
        [
            _block(_without_common(top_parser().format_help())),
            "Verbs without options of their own:",
            _block("\n".join(simple)),
            *sections,
        ]
    )


def _block(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```"


def _without_common(text: str) -> str:
    """`text` without the COMMON arguments, and without headings that have no other arguments."""
    kept: list[str] = []
    dropping = False
    for line in text.splitlines():
        if line.startswith("  ") and not line.startswith("   "):
            dropping = line[2:].startswith(COMMON)
        elif not line.startswith(" "):
            dropping = False
        if not dropping:
            kept.append(line)
    return _EMPTY_LIST.sub("", _COMMON_USAGE.sub("", "\n".join(kept)))


def _actions(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    found = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [inner for action in found for inner in action.choices.values()]


def rewritten(document: str) -> str:
    """`document` with the new help between BEGIN and END."""
    before, _, rest = document.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{reference()}\n\n{END}{after}"


def main() -> int:
    """Rewrites docs/cli.md."""
    DOCUMENT.write_text(rewritten(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {DOCUMENT}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
