"""An answer that has begun is written as its family would have written it, and read on from there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from inference.worker.dialects import detect
from inference.worker.dialects.answer_parts import Content, Reasoning
from inference.worker.dialects.forms import Marker

THINKS = '{{ tools }}<tool_call> "name": <think></think>'
HARMONY = "<|start|><|channel|><|message|>"
SILENT = "{{ messages }}"


def written(template: str, opened: str, message: Mapping[str, Any], rest: str) -> tuple[str, str, str]:
    """What stands behind the prompt, with markers in braces, and what thought and content the rest is read as."""
    dialect = detect(template, ())
    begun = dialect.opening_of(message, opened=opened)
    parser = dialect.parser(tools=(), opened=begun.opened)
    parts = [*parser.push(rest), *parser.flush()]
    return (
        "".join("{" + part.text + "}" if isinstance(part, Marker) else part.text for part in begun.parts),
        "".join(part.text for part in parts if isinstance(part, Reasoning)),
        "".join(part.text for part in parts if isinstance(part, Content)),
    )


@pytest.mark.parametrize(
    ("opened", "message", "rest", "expected"),
    [
        ("", {"content": "ab"}, "c", ("ab", "", "c")),
        ("", {"content": "ab", "reasoning_content": "t"}, "c", ("{<think>}\nt\n{</think>}\n\nab", "", "c")),
        ("", {"content": "", "reasoning_content": "t"}, "u</think>c", ("{<think>}\nt", "u", "c")),
        ("<think>\n", {"content": "ab"}, "c", ("\n{</think>}\n\nab", "", "c")),
        ("<think>\n", {"content": "", "reasoning_content": "t"}, "u</think>c", ("t", "u", "c")),
        ("<think>\n", {"content": ""}, "u</think>c", ("", "u", "c")),
        ("", {"content": ""}, "<think> u</think> c", ("", "u", "c")),
        ("", {"content": "ab"}, " <think>", ("ab", "", " <think>")),
        ("", {"content": "", "reasoning_content": "t"}, " u </think> c", ("{<think>}\nt", " u", "c")),
        ("<think>\n", {"content": "", "reasoning_content": "t"}, " u", ("t", " u", "")),
        ("<think>\n", {"content": "ab"}, "\nc", ("\n{</think>}\n\nab", "", "\nc")),
        ("<think></think>", {"content": "ab"}, " c", ("ab", "", " c")),
        ("<think></think>", {"content": "", "reasoning_content": "t"}, " c", ("", "", "c")),
        ("<think>\n\n</think>\n\n", {"content": "ab", "reasoning_content": "t"}, "c", ("ab", "", "c")),
    ],
)
def test_tags_are_closed_before_content(
    opened: str, message: Mapping[str, Any], rest: str, expected: tuple[str, str, str]
) -> None:
    assert written(THINKS, "assistant\n" + opened, message, rest) == expected


@pytest.mark.parametrize(
    ("message", "rest", "expected"),
    [
        ({"content": "ab"}, "c", ("{<|channel|>}final{<|message|>}ab", "", "c")),
        (
            {"content": "ab", "reasoning_content": "t"},
            "c",
            (
                "{<|channel|>}analysis{<|message|>}t{<|end|>}{<|start|>}assistant{<|channel|>}final{<|message|>}ab",
                "",
                "c",
            ),
        ),
        (
            {"content": "", "reasoning_content": "t"},
            "u<|end|><|start|>assistant<|channel|>final<|message|>c",
            ("{<|channel|>}analysis{<|message|>}t", "u", "c"),
        ),
        ({"content": ""}, "<|channel|>final<|message|>c", ("", "", "c")),
    ],
)
def test_channels_are_opened_before_content(
    message: Mapping[str, Any], rest: str, expected: tuple[str, str, str]
) -> None:
    assert written(HARMONY, "<|end|><|start|>assistant", message, rest) == expected


def test_a_family_that_does_not_reason_goes_on_with_the_text() -> None:
    assert written(SILENT, "assistant: ", {"content": "ab", "reasoning_content": "t"}, "c") == ("ab", "", "c")
    assert written("", "assistant: ", {"content": "ab"}, "c") == ("ab", "", "c")
