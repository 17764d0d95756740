"""Conversations that lose their slot come back from host memory and disk, and sequences of a pool give way."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from headgate.shared.kv_hint import KvHint
from headgate.shared.parameters import Sampling
from inference.worker.assembly import limits_of
from inference.worker.steps import Checkpoint, Row, StoredSequence
from inference.worker_link import KvTiers
from tests.rigs import tiny_families
from tests.rigs.engine_rig import EngineRig, engine_rig
from tests.rigs.worker_rig import grant_for

GREEDY = Sampling(temperature=0.0, ignore_eos=True)
FAMILIES = ("gqa", "window", "hybrid", "recurrent")
ANSWER = 16
RAM = KvTiers(ram_bytes=2**28)
TOKEN_BYTES = 2 * 3 * 128 * 2
"""Keys and values of three layers of width 128 in f16, the most that a token of these models takes."""


def family(name: str) -> Path:
    return tiny_families.path(tiny_families.Form(name, layers=3, width=128, heads=4, feed=128))


def prompt(seed: int, count: int = 300) -> list[int]:
    chosen = random.Random(seed)
    return [chosen.randrange(10, 200) for _ in range(count)]


def ask(rig: EngineRig, tokens: list[int], **changes: object) -> tuple[str, int]:
    """The text of the answer, and the number of prompt tokens that were computed."""
    before = rig.engine.counters.prompt_tokens
    outputs = rig.answer(tokens, sampling=GREEDY, max_tokens=ANSWER, **changes)
    assert outputs[-1].error is None, outputs[-1].error
    return "".join(output.text for output in outputs), rig.engine.counters.prompt_tokens - before


def until(rig: EngineRig, condition: Callable[[], bool]) -> None:
    """Runs the idle engine until `condition` holds."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        rig.engine._iterate()
        time.sleep(0.01)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4_0"])
def test_conversation_that_lost_its_slot_is_restored(name: str, kv_type: str) -> None:
    """Five conversations on two slots: each prompt is computed once, and the answers stay the same."""
    with engine_rig(family(name), parallel=2, checkpoint_bytes=2**26, kv_type=kv_type, kv=RAM) as rig:
        first = [ask(rig, prompt(seed)) for seed in range(5)]
        assert [computed for _text, computed in first] == [300] * 5
        hot = ask(rig, prompt(4))
        again = [ask(rig, prompt(seed)) for seed in range(5)]
        assert [text for text, _computed in again] == [text for text, _computed in first]
        assert all(computed <= max(1, hot[1]) for _text, computed in again)


@pytest.mark.parametrize("name", FAMILIES)
def test_conversation_comes_back_from_disk(name: str, tmp_path: Path) -> None:
    """Without host memory for it, and after the model was opened again."""
    tiers = KvTiers(ram_bytes=0, disk_bytes=2**28, directory=str(tmp_path))
    with engine_rig(family(name), parallel=1, checkpoint_bytes=2**26, kv=tiers) as rig:
        first = [ask(rig, prompt(seed)) for seed in range(3)]
        assert rig.store is not None
        store = rig.store
        until(rig, lambda: store.counts().disk_sequences >= 3)
        assert ask(rig, prompt(0))[0] == first[0][0]
    with engine_rig(family(name), parallel=1, checkpoint_bytes=2**26, kv=tiers) as rig:
        store = rig.store
        assert store is not None
        until(rig, lambda: store.counts().disk_sequences >= 3)
        for seed in range(3):
            text, computed = ask(rig, prompt(seed))
            assert text == first[seed][0]
            assert computed <= 1 + ANSWER, "it was read from disk"


def test_settings_of_the_tiers_are_limits_of_the_engine() -> None:
    """`test_worker_sequence_transfers.py` and `test_worker_slots.py` show what these limits do."""
    with engine_rig(family("gqa")) as rig:
        chosen, usual = (
            limits_of(rig.loaded, grant_for(family("gqa"), kv=tiers))
            for tiers in (KvTiers(threshold=0.25, prefetch=False), KvTiers())
        )
    assert (chosen.threshold, chosen.prefetched) == (0.25, 0)
    assert (usual.threshold, usual.prefetched) == (0.9, 8)


def test_sequences_of_another_tenant_are_not_restored() -> None:
    with engine_rig(family("gqa"), parallel=1, kv=RAM) as rig:
        ask(rig, prompt(1), tenant="alice")
        ask(rig, prompt(2), tenant="alice")
        assert ask(rig, prompt(1), tenant="bob")[1] == 300
        assert ask(rig, prompt(1), tenant="alice")[1] == 1


def test_hints_decide_what_stays() -> None:
    """`drop` leaves nothing; pinned sequences stay when the memory is full."""
    with engine_rig(family("gqa"), parallel=1, kv=RAM) as rig:
        assert rig.store is not None
        ask(rig, prompt(1), kv=KvHint("drop"))
        assert ask(rig, prompt(1), kv=KvHint("pin", 60.0))[1] == 300
        ask(rig, prompt(2))
        size = rig.store.counts().ram_bytes
        rig.store.limit(2 * size + size // 2)
        for seed in range(2, 7):
            ask(rig, prompt(seed))
        assert ask(rig, prompt(1))[1] == 1
        assert ask(rig, prompt(2))[1] == 300


@pytest.mark.parametrize("name", ["gqa", "window", "hybrid"])
def test_pool_serves_more_requests_than_it_has_cells_for(name: str) -> None:
    """Four answers of 400 tokens in a pool for 600 cells: all of them end, as they do alone."""
    prompts = [prompt(seed, 40) for seed in range(4)]
    with engine_rig(family(name), parallel=4, context_length=600, kv_cells=600, kv=RAM, checkpoint_bytes=2**26) as rig:
        tickets = [rig.ask(tokens, sampling=GREEDY, max_tokens=400) for tokens in prompts]
        rig.run()
        texts = []
        for ticket in tickets:
            outputs = rig.outputs(ticket)
            assert outputs[-1].error is None
            assert outputs[-1].finish == "length"
            texts.append("".join(output.text for output in outputs))
        assert rig.store is not None
        assert rig.store.counts().loads > 0, "a sequence gave way and came back"
        assert rig.engine.counters.prompt_tokens <= 4 * 40 + 8
    with engine_rig(family(name), parallel=1, context_length=600) as alone:
        for tokens, text in zip(prompts, texts, strict=True):
            outputs = alone.answer(tokens, sampling=GREEDY, max_tokens=400)
            assert "".join(output.text for output in outputs)[:40] == text[:40]


def test_streams_wait_for_one_transfer_at_most_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """However the reasons for transfers meet: scarce slots, new prompts, and a pool without free cells.

    A transfer copies one sequence: its state, its tokens, and nothing else.
    """
    luck, now = random.Random(0), [0.0]
    changes = {"parallel": 6, "context_length": 400, "kv_cells": 500, "batch": 32, "ubatch": 32}
    tiers = KvTiers(ram_bytes=2**28, threshold=0.3)
    with engine_rig(family("gqa"), clock=lambda: now[0], kv=tiers, **changes) as rig:
        store = rig.store
        assert store is not None
        state_bytes = [store.slot_bytes(slot) for slot in range(6)]
        gaps: list[list[int]] = [[]]

        def watched(transfer: Callable[..., bool], moved: Callable[[], int]) -> Callable[..., bool]:
            def run(slot: int, sequence: StoredSequence, checkpoints: Sequence[Checkpoint]) -> bool:
                before = moved()
                done = transfer(slot, sequence, checkpoints)
                cells = len(sequence.tokens)
                assert moved() - before <= state_bytes[slot] + cells * (TOKEN_BYTES + 4) + 2**12
                gaps[-1].append(cells)
                return done

            return run

        def decode(rows: Sequence[Row]) -> Any:
            gaps.append([])
            return compute(rows)

        compute = rig.context.decode
        monkeypatch.setattr(rig.context, "decode", decode)
        monkeypatch.setattr(store, "add", watched(store.add, lambda: store.counts().saved_bytes))
        monkeypatch.setattr(store, "load", watched(store.load, lambda: store.counts().loaded_bytes))
        for turn in range(600):
            if turn % 150 == 0:
                rig.ask(prompt(turn, 20), sampling=GREEDY, max_tokens=250)  # so that a stream runs all the time
            if luck.random() < 0.12:
                seed = luck.randrange(12)
                rig.ask(prompt(seed, 18 if seed < 9 else 200), sampling=GREEDY, max_tokens=luck.randrange(2, 8))
            now[0] += luck.choice((0.0, 0.01, 1.0))
            rig.engine._iterate()
        assert max(map(len, gaps)) == 1
        assert store.counts().saves > 20
        assert store.counts().loads > 20
