"""A dying worker whose last message had the wrong types was never counted as ended: its model stayed as it was."""

from __future__ import annotations

import json

import pytest

from inference import worker_link


@pytest.mark.parametrize(
    "said",
    [
        {"tag": "ready", "buffers": 7},
        {"tag": "ready", "buffers": [7]},
        {"tag": "grant", "devices": [{"id": "gpu-0", "unknown": 1}]},
        {"tag": ["ready"]},
        {"tag": "beat", "unknown": 1},
        ["ready"],
    ],
    ids=["buffers", "buffer", "device", "tag", "field", "array"],
)
def test_whatever_is_no_message_is_told_by_one_error(said: object) -> None:
    """The one that everybody who listens to a worker expects."""
    with pytest.raises(ValueError, match="not a "):
        worker_link.decode(json.dumps(said).encode())
