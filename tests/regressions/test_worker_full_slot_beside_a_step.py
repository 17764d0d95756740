"""A slot with an image holds more cells than positions. Full, it has none for a token that is computed along with its
neighbours, and a step that had room itself put its youngest request back.
"""

from __future__ import annotations

import numpy as np

from inference.worker.backend import Decode
from inference.worker.llama.binding import lib
from inference.worker.steps import Row
from tests.rigs import tiny_gguf
from tests.rigs.engine_rig import engine_rig

CONTEXT = 256
PROMPT = [3 + number % 50 for number in range(40)]


def test_a_step_has_room_whatever_its_neighbours_hold() -> None:
    with engine_rig(tiny_gguf.generative(), parallel=3, context_length=CONTEXT, batch=CONTEXT) as rig:
        context = rig.context
        for slot, tokens in ((0, PROMPT), (1, (PROMPT * 7)[:CONTEXT]), (2, PROMPT)):
            assert context.decode([Row(slot, slot, 0, tokens, True)])[0] is Decode.OK
        lib.llama_memory_seq_add(context.memory, 1, 1, -1, -1)  # two cells at one position, as an image has them
        status, last = context.decode([Row(slot, slot, len(PROMPT), [9], True) for slot in (0, 2)])
        assert status is Decode.OK
        np.testing.assert_allclose(context.logits(last[0]), context.logits(last[1]), atol=1e-3)
        assert [lib.llama_memory_seq_pos_max(context.memory, slot) for slot in range(3)] == [40, CONTEXT - 2, 40]
