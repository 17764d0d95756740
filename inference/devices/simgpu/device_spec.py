"""Parses simulated devices in INFERENCE_DEVICES.

`sim:2x600MiB` is two devices of 600 MiB, `sim:600MiB,1GiB` one of each.
"""

from __future__ import annotations

import difflib
import re

from headgate.shared.amounts import MIB, format_bytes, parse_bytes

PREFIX = "sim:"
EXAMPLE = "sim:2x600MiB"
MOST_DEVICES = 16
"""The number of servers that ggml's RPC backend supports in one process."""
LEAST_BYTES = MIB
CHOICES = ("auto", "cpu")
_ITEM = re.compile(r"(?:(\d{1,4})\s*[x*×]\s*)?(.+)", re.IGNORECASE)  # noqa: RUF001 - people write it


def parse_choice(text: str) -> tuple[int, ...] | None:
    """Sizes in bytes of the simulated devices in `text`, None for `auto` and `cpu`.

    Raises ValueError with the choices and a suggestion.
    """
    choice = text.strip()
    if choice in CHOICES:
        return None
    if choice.lower().startswith(PREFIX):
        return sizes(choice[len(PREFIX) :])
    known = {choice: choice for choice in CHOICES} | {"sim": EXAMPLE}
    near = difflib.get_close_matches(choice.lower().partition(":")[0], known, n=1, cutoff=0.5)
    meant = f" (did you mean {known[near[0]]}?)" if near else ""
    raise ValueError(
        f"{text!r} is not a choice of devices; write auto, cpu, or simulated devices such as {EXAMPLE}{meant}"
    )


def sizes(text: str) -> tuple[int, ...]:
    """Bytes of each device in a list such as `2x600MiB,1GiB`. Raises ValueError with the wrong part."""
    found: list[int] = []
    for item in (part.strip() for part in text.split(",")):
        match = _ITEM.fullmatch(item)
        if match is None:
            raise ValueError(f"simulated devices need a size; write for example {EXAMPLE}")
        try:
            size = parse_bytes(match[2])
        except ValueError as error:
            raise ValueError(f"simulated devices: {error}") from None
        if size < LEAST_BYTES:
            bare = match[2].strip()
            meant = f"; did you mean {bare}MiB?" if bare.isdigit() else ""
            raise ValueError(f"a simulated device of {format_bytes(size)} is too small for anything{meant}")
        count = int(match[1] or 1)
        if count == 0:
            raise ValueError(f"no simulated device is cpu; write cpu, or for example {EXAMPLE}")
        found += [size] * count
    if len(found) > MOST_DEVICES:
        raise ValueError(f"there can be {MOST_DEVICES} simulated devices, not {len(found)}")
    return tuple(found)
