"""What INFERENCE_DEVICES and a simulator's commands may say, and what is answered to everything else."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest

from inference.devices.simgpu.faults import COMMANDS, Order, parse
from inference.environment_settings import parse_choice

MIB = 2**20


@pytest.mark.parametrize(
    ("text", "sizes"),
    [
        ("auto", None),
        (" cpu ", None),
        ("sim:2x600MiB", (600 * MIB, 600 * MIB)),
        ("sim:600MiB,1GiB", (600 * MIB, 1024 * MIB)),
        ("SIM: 2 x 1.5GiB , 600mib", (1536 * MIB, 1536 * MIB, 600 * MIB)),
        ("sim:16x1MiB", (MIB,) * 16),
    ],
)
def test_choices_of_devices(text: str, sizes: tuple[int, ...] | None) -> None:
    assert parse_choice(text) == sizes


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu", "(did you mean cpu?)"),
        ("Auto", "(did you mean auto?)"),
        ("simm:2x600MiB", "(did you mean sim:2x600MiB?)"),
        ("sim", "(did you mean sim:2x600MiB?)"),
        ("2x600MiB", "such as sim:2x600MiB"),
        ("sim:", "need a size"),
        ("sim:1GiB,,", "need a size"),
        ("sim:0x5MiB", "write cpu"),
        ("sim:2x600", "did you mean 600MiB?"),
        ("sim:1KiB", "too small"),
        ("sim:abc", "'abc' is not a size"),
        ("sim:17x1GiB", "there can be 16"),
    ],
)
def test_other_choices_are_answered_with_what_was_meant(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse_choice(text)


@pytest.mark.parametrize(
    ("said", "order"),
    [
        ({"do": "status"}, Order("status")),
        ({"do": "cut", "device": "gpu-1"}, Order("cut", "gpu-1")),
        ({"do": "refuse"}, Order("refuse", None, math.inf)),
        ({"do": "refuse", "count": 2}, Order("refuse", None, 2)),
        ({"do": "refuse_after", "count": 1}, Order("refuse_after", None, 1)),
        ({"do": "slow", "device": None, "seconds": 0.5}, Order("slow", None, 0.5)),
        ({"do": "shrink", "bytes": 0}, Order("shrink", None, 0)),
        ({"do": "suspend", "device": "gpu-0", "pid": 7}, Order("suspend", "gpu-0", 7)),
    ],
)
def test_commands(said: Any, order: Order) -> None:
    assert parse(said, ["gpu-0", "gpu-1"]) == order


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ([], "an object"),
        ({}, "None is no command"),
        ({"do": "stal"}, "did you mean stall?"),
        ({"do": "cut", "bytes": 1}, "cut takes no bytes"),
        ({"do": "cut", "device": "gpu-2"}, "there are gpu-0, gpu-1"),
        ({"do": "shrink"}, "shrink needs bytes"),
        ({"do": "refuse_after"}, "refuse_after needs count"),
        ({"do": "suspend", "pid": 7}, "suspend needs device"),
        ({"do": "resume", "device": "gpu-0"}, "resume needs pid"),
        ({"do": "shrink", "bytes": 1.5}, "bytes must be a number"),
        ({"do": "slow", "seconds": -1}, "seconds must be a number"),
        ({"do": "slow", "seconds": math.nan}, "seconds must be a number"),
        ({"do": "foreign", "bytes": True}, "bytes must be a number"),
    ],
)
def test_other_commands_are_answered_with_what_is_wrong(said: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        parse(said, ["gpu-0", "gpu-1"])


def test_every_command_is_explained_in_the_documentation() -> None:
    """In the words of the code, so that neither forgets the other."""
    page = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    for name, (parameter, what) in COMMANDS.items():
        assert f"| `{name}` | {f'`{parameter}`' if parameter else ''} | {what} |" in page
